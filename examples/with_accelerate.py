"""Loop with accelerate, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/with_accelerate.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from train_loop import CONFIG
from transformers import LlamaForCausalLM
from with_trainer import LEARNING_RATE, collate, documents

from lightseq import hf
from lightseq.distributed.mesh import World, init_distributed

EPOCHS, BATCH = 2, 2


def train(world: World) -> list[float]:
    """Returns the loss of every step."""
    accelerator = Accelerator(cpu=world.device.type == "cpu")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(accelerator.device)
    context = hf.enable(model)  # lightseq 1: attention spans the ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(
        documents(), BATCH, collate_fn=collate
    )  # lightseq 2: not prepared, so every rank reads all rows
    losses = []
    for _ in range(EPOCHS):
        for whole in loader:
            on_device = {name: x.to(accelerator.device) for name, x in whole.items()}
            batch = hf.shard_batch(context, **on_device)  # lightseq 3: this rank's tokens
            share = model(**batch).loss
            accelerator.backward(
                share * accelerator.num_processes
            )  # lightseq 4: accelerate averages, but shares are summed
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(share.detach(), "sum").item())
            accelerator.print(f"step {len(losses)}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    with init_distributed(timeout_seconds=600) as world:
        train(world)
