"""Plain PyTorch loop over text and images, with sequences split over all ranks.

python3 examples/images.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/images.py
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
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration  # after lightseq, which silences its import

STEPS, LENGTH, IMAGE, PATCH = 5, 250, 255, 4
CONFIG = Qwen3VLConfig(
    text_config={
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    },
    vision_config={
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": PATCH,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
    image_token_id=IMAGE,
)


def processed() -> dict[str, torch.Tensor]:
    """Returns what a processor makes of a row of text with images of 8 x 8 and 8 x 12 patches."""
    grid = torch.tensor([[1, 8, 8], [1, 8, 12]])
    input_ids = torch.randint(IMAGE, (1, LENGTH))
    input_ids[0, 20:36] = IMAGE  # one token for 4 patches
    input_ids[0, 110:134] = IMAGE
    pixel_values = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * PATCH**2)
    return {"input_ids": input_ids, "pixel_values": pixel_values, "image_grid_thw": grid}


def train(world: World) -> list[float]:
    """Returns the loss of every step. All ranks have the same seed, so the same weights and the same batch."""
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(CONFIG).to(world.device)
    context = hf.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = {name: x.to(world.device) for name, x in processed().items()}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)
    losses = []
    for step in range(STEPS):
        batch = hf.shard_batch(context, labels=labels, **inputs)  # this rank's tokens, and the images that they show
        loss = model(**batch).loss  # this rank's share of the loss
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
