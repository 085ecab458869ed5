"""Errors of an attention layer's output and gradients against float64, over all ranks.

Shapes: B batch, S sequence, H heads, D head dim.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Case, Layer, clear, gathered, together
from lightseq.kernels.attention.base import Saved
from lightseq.kernels.attention.reference import ReferenceKernel

RESULTS = ("out", "dq", "dk", "dv")


def check_layer(layer: Layer, case: Case) -> dict[str, float]:
    """Returns relative L2 errors of output and gradients. All ranks use the same inputs."""
    clear(case.device)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(s, generator=generator).to(case.device, case.dtype) for s in case.shapes(case.length)]
    missing = len(layer.positions) * layer.ranks - case.length  # padding
    parts = [F.pad(x, (0, 0, 0, 0, 0, missing))[:, layer.positions.to(x.device)] for x in whole]

    def attend() -> list[Tensor]:
        q, k, v, dout = (reorder(x, layer).contiguous() for x in parts)
        for x in (q, k, v):
            x.requires_grad_()
        out = layer.attend(q, k, v)
        return [reorder(x, layer).cpu() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]

    everyone = gathered(case, (together(case, attend, fatal_if_split=True), layer.positions))[: layer.ranks]
    order = torch.cat([positions for _, positions in everyone]).argsort()[: case.length]
    got = [torch.cat(tensors, 1)[:, order] for tensors in zip(*(local for local, _ in everyone), strict=True)]
    edges = pairwise(case.boundaries or (0, case.length))
    want = [torch.cat(x, 1) for x in zip(*(oracle([x[:, a:b] for x in whole]) for a, b in edges), strict=True)]
    return {
        f"relative_error_{name}": ((g.to(w) - w).norm() / w.norm()).item()
        for name, g, w in zip(RESULTS, got, want, strict=True)
    }


def oracle(whole: list[Tensor]) -> list[Tensor]:
    """Returns out, dq, dk, dv in float64. Computes one key/value head at a time, because memory is quadratic."""
    q, k, v, dout = (x.double() for x in whole)
    kernel, scale, group = ReferenceKernel(), q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    rows = []
    for i in range(k.shape[2]):
        mine, theirs = slice(i * group, (i + 1) * group), slice(i, i + 1)
        args = q[:, :, mine], k[:, :, theirs], v[:, :, theirs]
        out, lse = kernel.forward(*args, True, scale)
        rows.append((out, *kernel.backward(dout[:, :, mine], Saved(*args, out, lse), True, scale)))
    return [torch.cat(heads, 2) for heads in zip(*rows, strict=True)]


def reorder(x: Tensor, layer: Layer) -> Tensor:
    """Converts (B, S, H, D) to the layer's order, or back."""
    return x.transpose(1, 2) if layer.heads_first else x
