"""The gated MLP of a layer over tiles of tokens: what it makes in between exists for one tile at a time.

Shape suffixes: N tokens, H hidden, I intermediate.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from lightseq.kernels.launches import fused_kernels
from lightseq.kernels.products import add_product

TILE_TOKENS = 8192  # three buffers of 14336 wide in bfloat16 are 0.7 GiB; smaller ones leave a GPU's last wave empty
LEAST_TOKENS = 64  # of a tile in a short run that stands for a longer one


def tile_mlps(layers: Iterable[nn.Module], first_tile_only: bool = False, shrink: float = 1.0) -> None:
    """Replaces the forward of every MLP that is `down(silu(gate(x)) * up(x))` of plain linears; others stay.

    The backward pass makes gate and up again from the input, tile by tile. What fits one tile keeps the module's own
    forward. Outside of torch.compile a checkpoint around the layer runs the whole MLP once more before that.
    `first_tile_only` is for rehearsals: all memory is taken, and what lies past the first tile is left as it was.
    A run that stands for one `shrink` times as long has tiles so many times smaller.
    """
    for layer in layers:
        mlp: Any = getattr(layer, "mlp", None)
        if mlp is not None and _is_gated(mlp):
            mlp.tile_tokens, mlp.first_tile_only = shrunk(TILE_TOKENS, shrink), first_tile_only
            mlp.__class__ = _tiled(type(mlp))  # type: ignore[arg-type]


def _is_gated(mlp: Any) -> bool:
    linears = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    return plain and isinstance(getattr(mlp, "act_fn", None), nn.SiLU | SiLUActivation)


@cache
def _tiled(kind: type[nn.Module]) -> type[nn.Module]:
    """A class with another forward. To replace that of every module would have the compiler tell each layer from the
    others by it, compile all of them, and give up after eight."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.numel() <= self.tile_tokens * x.shape[-1]:
            return kind.forward(self, x)
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return gated_mlp(x, *weights, self.tile_tokens, self.first_tile_only)

    return type(f"Tiled{kind.__name__}", (kind,), {"forward": forward})


def shrunk(tokens: int, shrink: float) -> int:
    """A tile's size where a run stands for one that is `shrink` times as long."""
    return max(min(tokens, LEAST_TOKENS), int(tokens / shrink))


def gated_mlp(
    x: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, tile_tokens: int, first_tile_only: bool = False
) -> Tensor:
    """down(silu(gate(x)) * up(x)) for x (..., H) (arXiv 2002.05202); keeps nothing but x for the backward pass.

    The product is rounded once, and the weights' gradients add up over the tiles in float32 or wider.
    """
    return _gated_mlp(x.reshape(-1, x.shape[-1]), gate_IH, up_IH, down_HI, tile_tokens, first_tile_only).view(x.shape)


@torch.library.custom_op("lightseq::gated_mlp", mutates_args=())
def _gated_mlp(
    x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, tile_tokens: int, first_tile_only: bool
) -> Tensor:
    out = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    for rows in _tiles(len(x_NH), tile_tokens, first_tile_only):
        gate, up = x_NH[rows] @ gate_IH.T, x_NH[rows] @ up_IH.T
        _silu_mul_(gate, up)
        torch.mm(gate, down_HI.T, out=out[rows])
    return out


@_gated_mlp.register_fake
def _(x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, tile_tokens: int, first_tile_only: bool) -> Tensor:
    return x_NH.new_empty(x_NH.shape)


@torch.library.custom_op("lightseq::gated_mlp_backward", mutates_args=())
def _gated_mlp_backward(
    dout_NH: Tensor,
    x_NH: Tensor,
    gate_IH: Tensor,
    up_IH: Tensor,
    down_HI: Tensor,
    tile_tokens: int,
    first_tile_only: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    sums = [_Sum(weight, len(x_NH) <= tile_tokens) for weight in (gate_IH, up_IH, down_HI)]
    for rows in _tiles(len(x_NH), tile_tokens, first_tile_only):
        x, dout = x_NH[rows], dout_NH[rows]
        gate, up, act = x @ gate_IH.T, x @ up_IH.T, dout @ down_HI
        _silu_mul_backward_(gate, up, act)  # dgate, dup and the product itself
        for total, a, b in zip(sums, (gate, up, dout), (x, x, act), strict=True):
            total.add(a.T, b)
        torch.mm(gate, gate_IH, out=dx[rows])
        dx[rows].addmm_(up, up_IH)
    dgate, dup, ddown = (total.finish() for total in sums)
    return dx, dgate, dup, ddown


@_gated_mlp_backward.register_fake
def _(
    dout_NH: Tensor,
    x_NH: Tensor,
    gate_IH: Tensor,
    up_IH: Tensor,
    down_HI: Tensor,
    tile_tokens: int,
    first_tile_only: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (x_NH, gate_IH, up_IH, down_HI))  # type: ignore[return-value]


class _Sum:
    """The gradient of a weight: one product, or several added in float32 or wider."""

    def __init__(self, weight: Tensor, one_tile: bool) -> None:
        dtype = weight.dtype if one_tile else torch.promote_types(weight.dtype, torch.float32)
        self._dtype, self._total = weight.dtype, torch.empty(weight.shape, dtype=dtype, device=weight.device)
        self._fresh = True

    def add(self, a: Tensor, b: Tensor) -> None:
        if self._total.dtype == a.dtype and self._fresh:
            torch.mm(a, b, out=self._total)
        else:
            add_product(self._total.zero_() if self._fresh else self._total, a, b)
        self._fresh = False

    def finish(self) -> Tensor:
        return self._total.to(self._dtype)


def _tiles(tokens: int, size: int, first_only: bool) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, size if first_only else tokens, size))


def _silu_mul_(gate: Tensor, up: Tensor) -> None:
    if fused := fused_kernels(gate, "fused_swiglu"):
        fused.silu_mul_(gate, up)
        return
    g, u = _wide(gate), _wide(up)
    gate.copy_(g * torch.sigmoid(g) * u)


def _silu_mul_backward_(gate: Tensor, up: Tensor, dact: Tensor) -> None:
    if fused := fused_kernels(gate, "fused_swiglu"):
        fused.silu_mul_backward_(gate, up, dact)
        return
    g, u, d = _wide(gate), _wide(up), _wide(dact)
    s = torch.sigmoid(g)
    for x, value in ((gate, d * u * s * (1 + g * (1 - s))), (up, d * g * s), (dact, g * s * u)):
        x.copy_(value)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.tile_tokens, ctx.first_tile_only = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    return (
        *_gated_mlp_backward(dout.contiguous(), *ctx.saved_tensors, ctx.tile_tokens, ctx.first_tile_only),
        None,
        None,
    )


_gated_mlp.register_autograd(_backward, setup_context=_setup_context)
