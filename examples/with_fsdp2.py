"""PyTorch loop with FSDP2 and data parallelism, in which two ranks share a sequence; lightseq's lines are marked.

python3 -m torch.distributed.run --nproc_per_node=2 examples/with_fsdp2.py
python3 -m torch.distributed.run --nproc_per_node=4 examples/with_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from train_loop import BATCH, CONFIG, LENGTH, STEPS
from transformers import LlamaForCausalLM

from lightseq import hf
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World

SEQUENCE_RANKS, LEARNING_RATE = 2, 0.3
TARGETS = BATCH * (LENGTH - 1)  # in the rows of all groups


def train(world: World) -> list[float]:
    """Returns the loss of every step. Each group of `SEQUENCE_RANKS` ranks trains on its rows of the batch."""
    sequence_ranks = min(SEQUENCE_RANKS, world.size)
    shape = (world.size // sequence_ranks, sequence_ranks)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("data", "sequence"))
    torch.manual_seed(0)  # the same weights and the same batch on every rank
    model = LlamaForCausalLM(CONFIG).to(world.device)
    context = hf.enable(model, mesh["sequence"], length=LENGTH)  # lightseq 1: attention spans the group
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["data", "sequence"]._flatten())
    for module in model.modules():
        if isinstance(module, FSDPModule):  # lightseq 2: add up shares of the gradient instead of averaging them
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    input_ids = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), device=world.device)
    rows = input_ids[mesh["data"].get_local_rank() :: mesh["data"].size()]
    losses = []
    for step in range(STEPS):
        batch = hf.shard_batch(context, rows, labels=rows)  # lightseq 3: this rank's tokens
        batch["num_items_in_batch"] = torch.tensor(TARGETS, device=world.device)
        loss = model(**batch).loss  # lightseq 4: this rank's share of the loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        if world.is_main:
            print(f"step {step + 1}  loss {losses[-1]:.6f}", flush=True)
    return losses


if __name__ == "__main__":
    with init_distributed(timeout_seconds=600) as world:
        train(world)
