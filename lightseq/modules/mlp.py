"""The gated MLP of a layer over tiles of tokens: what it makes in between exists for one tile at a time, or is kept.

Shape suffixes: N tokens, H hidden, I intermediate, R an adapter's rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from lightseq.kernels.checkpoint_context import is_recomputing, stored_or_computed
from lightseq.kernels.launches import fused_kernels
from lightseq.kernels.products import add_product
from lightseq.modules.low_rank import Linear, gradient_of_input, is_linear, linear_of

TILE_TOKENS = 8192  # three buffers of 14336 wide in bfloat16 are 0.7 GiB; smaller ones leave a GPU's last wave empty
LINEARS = ("gate_proj", "up_proj", "down_proj")
LEAST_TOKENS = 64  # of a tile in a short run that stands for a longer one


def tile_mlps(
    layers: Iterable[nn.Module],
    first_tile_only: bool = False,
    shrink: float = 1.0,
    keep: bool = False,
    ends_layer: bool = False,
) -> None:
    """Replaces the forward of every MLP that is `down(silu(gate(x)) * up(x))` of linears, with low-rank adapters
    beside them or without; others stay.

    The backward pass makes gate and up again from the input, tile by tile. What fits one tile keeps the module's own
    forward. With `keep` gate and up stay for the backward pass, of short sequences too, and a checkpoint may keep them;
    then a layer whose MLP is another raises ValueError. With `keep` or `ends_layer` no backward pass may need what the
    MLP gives (`Architecture.mlp_is_last`): where a checkpoint runs the layer again it is not made.
    `first_tile_only` is for rehearsals: all memory is taken, and what lies past the first tile is left as it was.
    A run that stands for one `shrink` times as long has tiles so many times smaller.
    """
    for layer in layers:
        mlp: Any = getattr(layer, "mlp", None)
        if mlp is not None and is_gated(mlp):
            mlp.tile_tokens, mlp.first_tile_only = shrunk(TILE_TOKENS, shrink), first_tile_only
            mlp.keeps_products, mlp.ends_layer = keep, ends_layer
            mlp.__class__ = _tiled(type(mlp))  # type: ignore[arg-type]
        elif keep:
            raise ValueError(f"{type(layer).__name__} has no gated MLP of plain linears, of which to keep gate and up")


def is_gated(mlp: Any) -> bool:
    """Whether it is one that `tile_mlps` replaces."""
    linears = [getattr(mlp, name, None) for name in LINEARS]
    return all(map(is_linear, linears)) and isinstance(getattr(mlp, "act_fn", None), nn.SiLU | SiLUActivation)


@cache
def _tiled(kind: type[nn.Module]) -> type[nn.Module]:
    """A class with another forward. To replace that of every module would have the compiler tell each layer from the
    others by it, compile all of them, and give up after eight."""

    def forward(self: Any, x: Tensor) -> Tensor:
        keep = self.keeps_products and torch.is_grad_enabled()
        if x.numel() <= self.tile_tokens * x.shape[-1] and not keep:
            return kind.forward(self, x)
        linears = [linear_of(getattr(self, name), x.dtype) for name in LINEARS]
        return gated_mlp(x, linears, self.tile_tokens, self.first_tile_only, keep, self.ends_layer)

    return type(f"Tiled{kind.__name__}", (kind,), {"forward": forward})


def shrunk(tokens: int, shrink: float) -> int:
    """A tile's size where a run stands for one that is `shrink` times as long."""
    return max(min(tokens, LEAST_TOKENS), int(tokens / shrink))


def gated_mlp(
    x: Tensor,
    linears: Sequence[Linear],
    tile_tokens: int,
    first_tile_only: bool = False,
    keep: bool = False,
    ends_layer: bool = False,
) -> Tensor:
    """down(silu(gate(x)) * up(x)) for x (..., H) (arXiv 2002.05202).

    For the backward pass it keeps x, and with `keep` gate(x) and up(x), which are made again otherwise.
    Of what `ends_layer` memory alone is given where a checkpoint runs the layer again.
    `linears` are gate (I, H), up (I, H) and down (H, I). The product is rounded once, and gradients of weights and of
    adapters add up over the tiles in float32 or wider; weights that do not train get none.
    """
    flat, tensors = x.reshape(-1, x.shape[-1]), [tensor for linear in linears for tensor in linear.tensors]
    scales = [0.0 if linear.a is None else linear.scale for linear in linears]
    if keep:
        return _keeping_gated_mlp(flat, tensors, scales, tile_tokens, first_tile_only)[0].view(x.shape)
    return _gated_mlp(flat, tensors, scales, tile_tokens, first_tile_only, ends_layer).view(x.shape)


def _taken_apart(tensors: Sequence[Tensor], scales: Sequence[float]) -> list[Linear]:
    """As `gated_mlp` put them together; a scale of 0 stands for no adapter."""
    left = iter(tensors)
    return [Linear(next(left), next(left), next(left), scale) if scale else Linear(next(left)) for scale in scales]


@torch.library.custom_op("lightseq::gated_mlp", mutates_args=())
def _gated_mlp(
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    scales: Sequence[float],
    tile_tokens: int,
    first_tile_only: bool,
    ends_layer: bool,
) -> Tensor:
    gate_IH, up_IH, down_HI = _taken_apart(tensors, scales)
    out = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    if ends_layer and is_recomputing():
        return out
    for rows in tiles(len(x_NH), tile_tokens, first_tile_only):
        gate, up = gate_IH.forward(x_NH[rows]), up_IH.forward(x_NH[rows])
        _silu_mul(gate, up, gate)
        down_HI.forward(gate, out=out[rows])
        del gate, up  # or they stay while the next tile's are made
    return out


@_gated_mlp.register_fake
def _(
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    scales: Sequence[float],
    tile_tokens: int,
    first_tile_only: bool,
    ends_layer: bool,
) -> Tensor:
    return x_NH.new_empty(x_NH.shape)


@torch.library.custom_op("lightseq::keeping_gated_mlp", mutates_args=())
def _keeping_gated_mlp(
    x_NH: Tensor, tensors: Sequence[Tensor], scales: Sequence[float], tile_tokens: int, first_tile_only: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What the MLP gives, gate and up. Where a checkpoint kept the latter, the first is left as memory is."""
    gate_IH, up_IH, down_HI = _taken_apart(tensors, scales)
    out = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)

    def compute() -> tuple[Tensor, Tensor]:
        gate, up = (out.new_empty(len(x_NH), len(linear.weight)) for linear in (gate_IH, up_IH))
        for rows in tiles(len(x_NH), tile_tokens, first_tile_only):
            gate_IH.forward(x_NH[rows], out=gate[rows])
            up_IH.forward(x_NH[rows], out=up[rows])
            act = torch.empty_like(gate[rows])
            _silu_mul(gate[rows], up[rows], act)
            down_HI.forward(act, out=out[rows])
            del act
        return gate, up

    gate, up = stored_or_computed(compute)
    return out, gate, up


@_keeping_gated_mlp.register_fake
def _(
    x_NH: Tensor, tensors: Sequence[Tensor], scales: Sequence[float], tile_tokens: int, first_tile_only: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gate_IH, up_IH, _ = _taken_apart(tensors, scales)
    gate, up = (x_NH.new_empty(len(x_NH), len(linear.weight)) for linear in (gate_IH, up_IH))
    return x_NH.new_empty(x_NH.shape), gate, up


@torch.library.custom_op("lightseq::gated_mlp_backward", mutates_args=())
def _gated_mlp_backward(
    dout_NH: Tensor,
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    scales: Sequence[float],
    trains: Sequence[bool],
    tile_tokens: int,
    first_tile_only: bool,
) -> list[Tensor]:
    """The gradient of x, and those of the tensors that train, in order. `kept` are gate and up, or none."""
    linears = _taken_apart(tensors, scales)
    gate_IH, up_IH, down_HI = linears
    dx = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    wanted = iter([_Sum(x, len(x_NH) <= tile_tokens) if t else None for x, t in zip(tensors, trains, strict=True)])
    sums = [_Sums(linear, *(next(wanted) for _ in linear.tensors)) for linear in linears]
    for rows in tiles(len(x_NH), tile_tokens, first_tile_only):
        x, dout = x_NH[rows], dout_NH[rows]
        gate, up = (y[rows] for y in kept) if kept else (gate_IH.forward(x), up_IH.forward(x))
        dgate, dup = (torch.empty_like(gate), torch.empty_like(up)) if kept else (gate, up)
        act = gradient_of_input([down_HI], [dout], torch.empty_like(gate))
        _silu_mul_backward(gate, up, act, dgate, dup)  # act becomes the product itself
        for total, dy, y_from in zip(sums, (dgate, dup, dout), (x, x, act), strict=True):
            total.add(dy, y_from)
        gradient_of_input([gate_IH, up_IH], [dgate, dup], dx[rows])
        del gate, up, dgate, dup, act, dy, y_from
    return [dx, *(done for total in sums for done in total.finish())]


@_gated_mlp_backward.register_fake
def _(
    dout_NH: Tensor,
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    scales: Sequence[float],
    trains: Sequence[bool],
    tile_tokens: int,
    first_tile_only: bool,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, t in zip((x_NH, *tensors), (True, *trains), strict=True) if t]


class _Sums(NamedTuple):
    """What the gradients of a linear's tensors come to over the tiles; None for one that does not train."""

    linear: Linear
    weight: "_Sum | None"
    a: "_Sum | None" = None
    b: "_Sum | None" = None

    def add(self, dy: Tensor, x: Tensor) -> None:
        if self.weight is not None:
            self.weight.add(dy.T, x)
        if self.a is not None and self.linear.b is not None:
            self.a.add(self.linear.low_gradient(dy).T, x)
        if self.b is not None and self.linear.a is not None:
            self.b.add(dy.T, self.linear.low(x))

    def finish(self) -> list[Tensor]:
        return [total.finish() for total in (self.weight, self.a, self.b) if total is not None]


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


def tiles(tokens: int, size: int, first_only: bool) -> Iterator[slice]:
    """Rows of each tile, of the first alone for a rehearsal; the last may reach past the end."""
    return (slice(start, start + size) for start in range(0, size if first_only else tokens, size))


def _silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    if fused := fused_kernels(gate, "fused_swiglu"):
        fused.silu_mul(gate, up, out)
        return
    g, u = _wide(gate), _wide(up)
    out.copy_(g * torch.sigmoid(g) * u)


def _silu_mul_backward(gate: Tensor, up: Tensor, dact: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """The gradients may go where gate and up are; dact becomes the product."""
    if fused := fused_kernels(gate, "fused_swiglu"):
        fused.silu_mul_backward(gate, up, dact, dgate, dup)
        return
    g, u, d = _wide(gate), _wide(up), _wide(dact)
    s = torch.sigmoid(g)
    for x, value in ((dgate, d * u * s * (1 + g * (1 - s))), (dup, d * g * s), (dact, g * s * u)):
        x.copy_(value)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, tensors, *ctx.others = inputs  # scales, tile_tokens, first_tile_only, and what may follow
    kept = output[1:] if isinstance(output, tuple) else ()
    ctx.set_materialize_grads(False)  # nothing comes back through what is kept
    ctx.save_for_backward(x, *kept, *tensors)


def _backward(ctx, dout: Tensor, *_of_kept: None):  # type: ignore[no-untyped-def]
    trains = list(ctx.needs_input_grad[1])
    x, *saved = ctx.saved_tensors
    kept, tensors = saved[: -len(trains)], saved[-len(trains) :]
    scales, *sizes = ctx.others[:3]
    dx, *found = _gated_mlp_backward(dout.contiguous(), x, tensors, kept, scales, trains, *sizes)
    gradients = iter(found)
    return dx, [next(gradients) if t else None for t in trains], *(None for _ in ctx.others)


for _operator in (_gated_mlp, _keeping_gated_mlp):
    _operator.register_autograd(_backward, setup_context=_setup_context)

KEEPING_MLP_OP = torch.ops.lightseq.keeping_gated_mlp.default  # what a checkpointing policy names
