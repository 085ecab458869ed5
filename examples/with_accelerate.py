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

from lightseq.integrations.accelerate import prepare

EPOCHS, BATCH = 2, 2


def train() -> list[float]:
    """Returns the loss of every step."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(documents(), BATCH, collate_fn=collate)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)  # lightseq: not accelerator.prepare
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            loss = model(**batch).loss  # of the whole batch, the same on every rank
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.print(f"step {len(losses)}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    train()
