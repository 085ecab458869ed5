"""A language model in plain PyTorch, trained with sequences split over all ranks; lightseq's lines are marked.

python3 examples/plain_torch.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/plain_torch.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from lightseq import sequence_parallel
from lightseq.attention.context import SequenceContext
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World

STEPS, BATCH, LENGTH, VOCABULARY = 5, 2, 250, 256
HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Applies rotary embeddings (arXiv 2104.09864) to queries or keys (batch, tokens, heads, dim)."""
    frequencies = 10_000 ** -(torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = positions[..., None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, positions: Tensor, group: SequenceContext) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        out = sequence_parallel.attention(rotate(q, positions), rotate(k, positions), v, group)  # lightseq 3
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, group: SequenceContext) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions, group)
        return self.head(self.norm(x))


def train(world: World) -> list[float]:
    """Returns the loss of every step. All ranks have the same seed, so the same weights and the same batch."""
    torch.manual_seed(0)
    model = Model().to(world.device)
    dtype = next(model.parameters()).dtype
    group = sequence_parallel.make_group(  # lightseq 1: the ranks that share a sequence
        heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, length=LENGTH, dtype=dtype, device=world.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    input_ids = torch.randint(VOCABULARY, (BATCH, LENGTH), device=world.device)
    labels = F.pad(input_ids[:, 1:], (0, 1), value=-100)  # shifted once, on the whole sequence
    ids = sequence_parallel.shard(group, input_ids)  # lightseq 2: this rank's tokens
    targets = sequence_parallel.shard(group, labels, fill=-100)
    positions = sequence_parallel.positions(group, LENGTH, device=world.device)
    losses = []
    for step in range(STEPS):
        logits = model(ids, positions, group)
        share = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        loss = share / (labels != -100).sum()
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
