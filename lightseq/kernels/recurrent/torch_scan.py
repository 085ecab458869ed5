"""Linear recurrences from matrix products of torch, on any device and in float32 or float64.

A chunk of neighbouring tokens is a few matrix products (arXiv 2406.06484), and the state goes from chunk to chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightseq.kernels.recurrent.base import CHUNK, ScanInputs, Summary

CHANNEL_CHUNK = 16  # with a decay for each channel, whose chunk takes CHANNEL_CHUNK^2 K numbers


class TorchScan:
    """Kernel that works segment by segment, with gradients by `torch.func.vjp`."""

    def forward(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> "_Forward":
        return _Forward(x, scale, edges)

    def backward(
        self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor
    ) -> "_Backward":
        return _Backward(x, scale, edges, states, dout)


@dataclass(frozen=True)
class _Forward:
    x: ScanInputs
    scale: float
    edges: Sequence[int]

    def summarize(self) -> Summary:
        found = [_summary(part) for part in _segments(self.x, self.edges)]
        return Summary(torch.stack([m for m, _ in found], 1), torch.stack([b for _, b in found], 1))

    def run(self, states: Tensor | None) -> Tensor:
        outs = []
        for n, part in enumerate(_segments(self.x, self.edges)):
            outs.append(scan(part, self.scale, _state_of(part, states, n))[0])
        return torch.cat(outs, 1).contiguous()


@dataclass(frozen=True)
class _Backward:
    x: ScanInputs
    scale: float
    edges: Sequence[int]
    states: Tensor | None
    dout: Tensor

    def initial_gradients(self) -> Tensor:
        found = []
        for n, (part, dout) in enumerate(self._parts()):
            vjp = torch.func.vjp(partial(_outputs_from, part, self.scale), _state_of(part, self.states, n))[1]
            found.append(vjp(dout)[0])
        return torch.stack(found, 1)

    def run(self, dfinal: Tensor | None) -> ScanInputs:
        found = []
        for n, (part, dout) in enumerate(self._parts()):
            state = _state_of(part, self.states, n)
            given = {name: value for name, value in part._asdict().items() if value is not None}
            vjp = torch.func.vjp(partial(_results_of, self.scale, state), given)[1]
            (gradients,) = vjp((dout, torch.zeros_like(state) if dfinal is None else dfinal[:, n]))
            found.append(gradients)
        joined: dict[str, Any] = {name: torch.cat([each[name] for each in found], 1).contiguous() for name in found[0]}
        return ScanInputs(**joined)

    def _parts(self) -> Iterator[tuple[ScanInputs, Tensor]]:
        bounds = pairwise(self.edges)
        for part, (first, end) in zip(_segments(self.x, self.edges), bounds, strict=True):
            yield part, self.dout[:, first:end]


def _outputs_from(x: ScanInputs, scale: float, state: Tensor) -> Tensor:
    return scan(x, scale, state)[0]


def _results_of(scale: float, state: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return scan(ScanInputs(**given), scale, state)


def _segments(x: ScanInputs, edges: Sequence[int]) -> Iterator[ScanInputs]:
    for first, end in pairwise(edges):
        yield ScanInputs(*(None if part is None else part[:, first:end] for part in x))  # type: ignore[arg-type]


def _state_of(x: ScanInputs, states: Tensor | None, n: int) -> Tensor:
    return _zero_state(x) if states is None else states[:, n]


def _zero_state(x: ScanInputs, columns: int | None = None) -> Tensor:
    (batch, _, heads, values), dtype = x.v.shape, torch.promote_types(x.v.dtype, torch.float32)
    return x.v.new_zeros(batch, heads, x.k.shape[-1], columns or values, dtype=dtype)


def _summary(x: ScanInputs) -> tuple[Tensor, Tensor]:
    """Returns M and b of one segment."""
    zero = _zero_state(x)
    _, state = scan(x._replace(q=x.k), 1.0, zero)
    if x.beta is None:
        total = x.g.to(zero.dtype).sum(1).exp()  # (B, H) or (B, H, K)
        return total.unflatten(-1, (-1, 1)) if x.g.ndim == 4 else total[..., None, None], state
    size = x.k.shape[-1]
    identity = torch.eye(size, dtype=zero.dtype, device=zero.device).expand_as(_zero_state(x, size))
    none = x.v.new_zeros(*x.v.shape[:3], size)
    return scan(x._replace(q=x.k, v=none), 1.0, identity)[1], state


def scan(x: ScanInputs, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """Runs one segment from a state (B, H, K, V). Returns its outputs (B, S, H, V) and its final state."""
    dtype, tokens = state.dtype, x.v.shape[1]
    per_channel = x.g.ndim == 4
    size = CHANNEL_CHUNK if per_channel else CHUNK

    def chunks(part: Tensor) -> Tensor:
        """Cuts (B, S, heads, ...) into (B, H, chunks, size, ...), padded with tokens that change nothing."""
        part = part.to(dtype).repeat_interleave(x.v.shape[2] // part.shape[2], 2).transpose(1, 2)
        part = F.pad(part, (*[0] * (2 * part.ndim - 6), 0, -tokens % size))
        return part.unflatten(2, (-1, size))

    q, k, v = chunks(x.q) * scale, chunks(x.k), chunks(x.v)
    g = chunks(x.g if per_channel else x.g.unsqueeze(-1))  # (..., size, K or 1)
    decay, between = g.cumsum(3).exp(), _decay_between(g)
    q_decayed, k_decayed, k_ahead = q * decay, k * decay, k * between[..., -1, :, :]
    over_chunk = decay[..., -1, :, None]
    within = _pairs(q, k, between)
    if x.beta is not None:
        beta = chunks(x.beta.unsqueeze(-1))
        system = beta * _pairs(k, k, between)  # its diagonal is not read
        v = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
        k_decayed = torch.linalg.solve_triangular(system, beta * k_decayed, upper=False, unitriangular=True)
    outs = []
    for c in range(v.shape[2]):
        new = v[:, :, c] if x.beta is None else v[:, :, c] - k_decayed[:, :, c] @ state
        outs.append(q_decayed[:, :, c] @ state + within[:, :, c] @ new)
        state = over_chunk[:, :, c] * state + k_ahead[:, :, c].mT @ new
    out = torch.cat(outs, 2)[:, :, :tokens]
    return out.transpose(1, 2).to(x.v.dtype), state


def _decay_between(g: Tensor) -> Tensor:
    """Returns the decay from token j to token i, zero for j after i: (..., i, j, K or 1).

    It adds the logarithms between the tokens. A difference of sums from the chunk's start would round by their size.
    """
    size = g.shape[-2]
    i, j = torch.arange(size, device=g.device)[:, None, None], torch.arange(size, device=g.device)[:, None]
    steps = g.unsqueeze(-2).expand(*g.shape[:-1], size, g.shape[-1]).masked_fill(i <= j, 0.0)
    return steps.cumsum(-3).masked_fill(i < j, float("-inf")).exp()


def _pairs(rows: Tensor, columns: Tensor, between: Tensor) -> Tensor:
    """Returns row_i · column_j times the decay from token j to token i: (..., size, size)."""
    if between.shape[-1] == 1:
        return (rows @ columns.mT) * between[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, columns, between)
