"""Plain PyTorch loop that distills a teacher, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/distill.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/distill.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from train_loop import CONFIG

from lightseq import hf
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World

# isort: split
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # after lightseq, which silences its import

STEPS, BATCH, LENGTH = 5, 2, 250
TEACHER = Qwen3Config(  # another architecture with the same vocabulary
    vocab_size=CONFIG.vocab_size,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    initializer_range=0.1,
)


def train(world: World) -> list[float]:
    """Returns the loss of every step. All ranks have the same seed, so the same weights and the same batch."""
    torch.manual_seed(0)
    student, teacher = (
        model.to(world.device) for model in (LlamaForCausalLM(CONFIG), Qwen3ForCausalLM(TEACHER).eval())
    )
    context = hf.enable(student)  # lightseq 1: attention spans the ranks
    hf.enable_beside(teacher, context)  # lightseq 2: the teacher's too, in the same layout
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    input_ids = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), device=world.device)
    losses = []
    for step in range(STEPS):
        batch = hf.shard_batch(context, input_ids, labels=input_ids)  # lightseq 3: this rank's tokens
        values = hf.divergence(context, student, teacher, batch, kind="forward")  # lightseq 4: one for each token
        loss = values.sum() / batch["num_items_in_batch"]  # this rank's share of the mean
        loss.backward()
        for parameter in student.parameters():
            dist.all_reduce(parameter.grad)  # shares add up to the loss, and so do their gradients
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
