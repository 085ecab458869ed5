"""Plain PyTorch loop over answers to one prompt, which is computed once; lightseq's lines are marked.

python3 examples/shared_prefix.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/shared_prefix.py
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
from train_loop import CONFIG
from transformers import LlamaForCausalLM  # after lightseq, which silences its import

STEPS, PROMPT, ANSWERS, LENGTH = 5, 200, 8, 40


def train(world: World) -> list[float]:
    """Returns the loss of every step: answers with positive advantages become likelier, the others less likely."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(world.device)
    context = hf.enable(model, packed=True)  # lightseq 1: attention spans the ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompt = torch.randint(CONFIG.vocab_size, (PROMPT,)).tolist()
    rows = [prompt + torch.randint(CONFIG.vocab_size, (LENGTH,)).tolist() for _ in range(ANSWERS)]
    advantages = torch.linspace(-1, 1, ANSWERS).tolist()
    weights = [[0.0] * PROMPT + [advantage] * LENGTH for advantage in advantages]
    losses = []
    for step in range(STEPS):
        batch = hf.shard_rows(context, rows, weights)  # lightseq 2: this rank's tokens of the tree
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
