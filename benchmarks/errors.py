"""How far an attention layer is from float64: output and gradients, joined from all ranks.

Shapes: B batch, S sequence, H heads, D head dim.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Case, Layer, clear, together
from lightseq.kernels import Saved
from lightseq.kernels.reference import ReferenceKernel

RESULTS = ("out", "dq", "dk", "dv")


def check_layer(layer: Layer, case: Case, seed: int) -> dict[str, float]:
    """Relative L2 error of the whole output and gradients against float64; every rank computes with the same inputs."""
    clear(case.device)
    padded = len(layer.positions) * layer.ranks
    whole = random_whole(case, seed)
    missing = padded - case.length
    parts = [F.pad(x, (0, 0, 0, 0, 0, missing))[:, layer.positions.to(x.device)] for x in whole]

    def attend() -> list[Tensor]:
        q, k, v, dout = (_reorder(x, layer).contiguous() for x in parts)
        for x in (q, k, v):
            x.requires_grad_()
        out = layer.attend(q, k, v)
        return [_reorder(x, layer) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]

    local = together(case, attend, fatal_if_split=True)
    got = [_join(x, layer, case)[:, : case.length] for x in local]
    edges = pairwise(case.boundaries or (0, case.length))
    want = [torch.cat(x, 1) for x in zip(*(oracle([x[:, a:b] for x in whole]) for a, b in edges), strict=True)]
    errors = [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]
    return {f"relative_error_{name}": error for name, error in zip(RESULTS, errors, strict=True)}


def random_whole(case: Case, seed: int) -> list[Tensor]:
    """q, k, v and the output's gradient of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(case.device, case.dtype) for s in case.shapes(case.length)]


def oracle(whole: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv in float64, one key/value head at a time to bound the quadratic memory."""
    q, k, v, dout = (x.double() for x in whole)
    kernel, scale, group = ReferenceKernel(), q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    rows = []
    for i in range(k.shape[2]):
        mine, theirs = slice(i * group, (i + 1) * group), slice(i, i + 1)
        args = q[:, :, mine], k[:, :, theirs], v[:, :, theirs]
        out, lse = kernel.forward(*args, True, scale)
        rows.append((out, *kernel.backward(dout[:, :, mine], Saved(*args, out, lse), True, scale)))
    return [torch.cat(heads, 2) for heads in zip(*rows, strict=True)]


def _reorder(x: Tensor, layer: Layer) -> Tensor:
    """(B, S, H, D) and the layer's own order into one another."""
    return x.transpose(1, 2) if layer.heads_first else x


def _join(local: Tensor, layer: Layer, case: Case) -> Tensor:
    """The whole tensor from every rank's part, by the positions of its tokens."""
    parts, places = [local], [layer.positions.to(local.device)]
    if layer.ranks > 1:
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(layer.ranks)]
        places = [torch.empty_like(places[0]) for _ in range(layer.ranks)]
        dist.all_gather(parts, local, group=case.group)
        dist.all_gather(places, layer.positions.to(local.device), group=case.group)
    return torch.cat(parts, 1).index_select(1, torch.cat(places).argsort())
