"""Plain PyTorch loop over a Hugging Face Llama, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/train_loop.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/train_loop.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from lightseq import hf
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World

# isort: split
from transformers import LlamaConfig, LlamaForCausalLM  # after lightseq, which silences its import

STEPS, BATCH, LENGTH = 5, 2, 250
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def train(world: World) -> list[float]:
    """Returns the loss of every step. All ranks have the same seed, so the same weights and the same batch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(world.device)
    context = hf.enable(model)  # lightseq 1: attention spans the ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    input_ids = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), device=world.device)
    losses = []
    for step in range(STEPS):
        batch = hf.shard_batch(context, input_ids, labels=input_ids)  # lightseq 2: this rank's tokens
        loss = model(**batch).loss  # lightseq 3: this rank's share of the loss
        loss.backward()
        for parameter in model.parameters():
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
