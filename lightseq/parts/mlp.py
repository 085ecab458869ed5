"""Gated MLPs over tiles of tokens: intermediates exist for one tile at a time, or are stored for backward.

Shape suffixes: N tokens, H hidden, I intermediate, R an adapter's rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from lightseq.kernels.fused.launches import fused_kernels
from lightseq.parts.changes import Changes
from lightseq.parts.experts import experts_modules
from lightseq.parts.identity import is_unchanged
from lightseq.parts.low_rank import LinearWeights, linear_weights
from lightseq.parts.part import Choices, Part, Ranks
from lightseq.parts.probes import MLP_LINEARS, is_gated_mlp
from lightseq.parts.side_by_side import GradientSum, InputGradient, LinearGradients, Outputs
from lightseq.utils.checkpoint_context import is_recomputing, reuse_or_compute

TILE_TOKENS = 8192  # three bfloat16 buffers 14336 wide take 0.7 GiB; smaller tiles do not fill a GPU's last wave

NO_ADAPTER = math.inf  # scale of a linear without adapter, as an operator takes it
GATE, UP = 0, 1  # among the linears that share the MLP's input


class Activation(NamedTuple):
    """An activation of the gate."""

    value: Callable[[Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]  # takes the gradient of the value, and the input


SILU, TANH_GELU = "silu", "gelu_tanh"
ACTIVATIONS: Final[Mapping[str, Activation]] = {
    SILU: Activation(torch.ops.aten.silu, torch.ops.aten.silu_backward),
    TANH_GELU: Activation(
        partial(torch.ops.aten.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")
    ),
}


def _fit(layers: Sequence[nn.Module], choices: Choices, _ranks: Ranks, changes: Changes) -> None:
    """Runs the gated MLPs of decoder layers over tiles of tokens."""
    if choices.tiles_mlp:
        tile_mlps(layers, changes, choices.stores_products, choices.ends_with_mlp)


def tile_mlps(layers: Iterable[nn.Module], changes: Changes, store: bool = False, ends_layer: bool = False) -> None:
    """Replaces the forward of every MLP that computes `down(act(gate(x)) * up(x))` with plain linears; others stay.

    The activation is SiLU, or GELU by tanh. An MLP, an activation or a linear with a hook or another forward than its
    class's stays too. The linears may have low-rank adapters. The backward pass recomputes gate and up from the input,
    tile by tile. An input that fits in one tile takes the module's own forward. Layers with experts stay. With `store`,
    gate and up are saved for the backward pass at any length, a checkpoint may store them, and a layer with any other
    MLP raises ValueError. `ends_layer` says that no backward pass needs the MLP's output (`Layer.mlp_is_last`). It is
    then neither stored nor computed when a checkpoint recomputes the layer, if the layer is transformers' own.
    """
    for layer in layers:
        mlp: Any = getattr(layer, "mlp", None)
        if next(experts_modules(layer), None) is not None:
            continue
        if mlp is not None and (activation := gate_activation(mlp)) is not None:
            settings = {"tile_tokens": TILE_TOKENS, "stores_products": store, "activation_name": activation}
            settings |= {"ends_layer": ends_layer and is_unchanged(layer)}
            for name, value in settings.items():
                changes.set_attribute(mlp, name, value)
            changes.set_attribute(mlp, "__class__", _tiled_class(type(mlp)))  # type: ignore[arg-type]
        elif store:
            raise ValueError(f"{type(layer).__name__} has no gated MLP of plain linears whose gate and up to store")


def gate_activation(mlp: Any) -> str | None:
    """Returns the name of the gate's activation if `tile_mlps` replaces a module, else None."""
    return next((name for name, activation in ACTIVATIONS.items() if is_gated_mlp(mlp, activation.value)), None)


@cache
def _tiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass with a tiled forward.

    If the forward of each module were replaced instead, the compiler would treat every layer as different, compile each
    of them, and give up after eight.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        store = self.stores_products and torch.is_grad_enabled()
        if x.numel() <= self.tile_tokens * x.shape[-1] and not store:
            return kind.forward(self, x)
        linears = [linear_weights(getattr(self, name), x.dtype) for name in MLP_LINEARS]
        return gated_mlp(x, linears, self.activation_name, self.tile_tokens, store, self.ends_layer)

    return type(f"Tiled{kind.__name__}", (kind,), {"forward": forward})


def gated_mlp(
    x: Tensor,
    linears: Sequence[LinearWeights],
    activation: str,
    tile_tokens: int,
    store: bool = False,
    ends_layer: bool = False,
) -> Tensor:
    """Returns down(act(gate(x)) * up(x)) for x (..., H) (arXiv 2002.05202).

    `linears` are gate (I, H), up (I, H) and down (H, I); `activation` is one of ACTIVATIONS. The backward pass uses x,
    and gate(x) and up(x), which it recomputes unless they are saved by `store`. With `ends_layer` the result is
    uninitialized memory while a checkpoint recomputes the layer. act(gate) * up is rounded once; gradients of weights
    and adapters accumulate over the tiles in float32 or wider, and frozen weights get none.
    """
    flat, tensors = x.reshape(-1, x.shape[-1]), [tensor for linear in linears for tensor in linear.tensors]
    scales = [NO_ADAPTER if linear.a is None else linear.scale for linear in linears]
    given = flat, tensors, scales, activation, tile_tokens, ends_layer
    out = _gated_mlp_stored(*given)[0] if store else _gated_mlp(*given)
    return out.view(x.shape)


def _unflatten_linears(tensors: Sequence[Tensor], scales: Sequence[float]) -> list[LinearWeights]:
    """Rebuilds the linears that `gated_mlp` flattened."""
    left = iter(tensors)
    return [
        LinearWeights(next(left)) if scale == NO_ADAPTER else LinearWeights(next(left), next(left), next(left), scale)
        for scale in scales
    ]


@torch.library.custom_op("lightseq::gated_mlp", mutates_args=())
def _gated_mlp(
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    scales: Sequence[float],
    activation: str,
    tile_tokens: int,
    ends_layer: bool,
) -> Tensor:
    """Computes a gated MLP in tiles. A checkpoint stores the output if it is needed."""

    def compute() -> tuple[Tensor]:
        out = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
        if ends_layer and is_recomputing():
            return (out,)
        *gate_and_up, down_HI = _unflatten_linears(tensors, scales)
        first, second = Outputs(gate_and_up), Outputs([down_HI])
        for rows in tiles(len(x_NH), tile_tokens):
            x = first.joined(x_NH[rows])
            act = second.buffer(x)
            gate, up = second.inputs(act), first.product(x, UP)
            first.product(x, GATE, out=gate)
            _act_mul(gate, up, gate, activation)
            second.product(second.fill(act), 0, out=out[rows])
            del x, act, gate, up  # before the next tile's are allocated
        return (out,)

    (out,) = compute() if ends_layer else reuse_or_compute(compute)
    return out


@_gated_mlp.register_fake
def _(x_NH: Tensor, *_others: Any) -> Tensor:
    return x_NH.new_empty(x_NH.shape)


@torch.library.custom_op("lightseq::gated_mlp_stored", mutates_args=())
def _gated_mlp_stored(
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    scales: Sequence[float],
    activation: str,
    tile_tokens: int,
    ends_layer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a gated MLP in tiles. Also returns gate and up, which a checkpoint stores.

    With `ends_layer` it stores no output, which is uninitialized memory in the recomputation.
    """
    out = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)

    def compute() -> tuple[Tensor, ...]:
        *gate_and_up, down_HI = _unflatten_linears(tensors, scales)
        first, second = Outputs(gate_and_up), Outputs([down_HI])
        gate, up = (out.new_empty(len(x_NH), len(linear.weight)) for linear in gate_and_up)
        for rows in tiles(len(x_NH), tile_tokens):
            x = first.joined(x_NH[rows])
            first.product(x, GATE, out=gate[rows])
            first.product(x, UP, out=up[rows])
            act = second.buffer(x)
            _act_mul(gate[rows], up[rows], second.inputs(act), activation)
            second.product(second.fill(act), 0, out=out[rows])
            del x, act
        return (gate, up) if ends_layer else (gate, up, out)

    gate, up, *stored = reuse_or_compute(compute)
    return stored[0] if stored else out, gate, up


@_gated_mlp_stored.register_fake
def _(x_NH: Tensor, tensors: Sequence[Tensor], scales: Sequence[float], *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    gate_IH, up_IH, _ = _unflatten_linears(tensors, scales)
    gate, up = (x_NH.new_empty(len(x_NH), len(linear.weight)) for linear in (gate_IH, up_IH))
    return x_NH.new_empty(x_NH.shape), gate, up


@torch.library.custom_op("lightseq::gated_mlp_backward", mutates_args=())
def _gated_mlp_backward(
    dout_NH: Tensor,
    x_NH: Tensor,
    tensors: Sequence[Tensor],
    stored: Sequence[Tensor],
    scales: Sequence[float],
    activation: str,
    trains: Sequence[bool],
    tile_tokens: int,
) -> list[Tensor]:
    """Returns the gradients of x and of the tensors that train, in order. `stored` is gate and up, or empty."""
    linears = _unflatten_linears(tensors, scales)
    first, second = Outputs(linears[:2]), Outputs(linears[2:])
    of_gate, of_up, of_down = map(InputGradient, linears)
    dx = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    wanted = iter(
        [GradientSum(x, len(x_NH) <= tile_tokens) if t else None for x, t in zip(tensors, trains, strict=True)]
    )
    sums = [LinearGradients(*(next(wanted) for _ in linear.tensors)) for linear in linears]
    for_gate, for_up, for_down = sums
    for rows in tiles(len(x_NH), tile_tokens):
        x, dout = first.joined(x_NH[rows]), of_down.joined(dout_NH[rows])
        dgate_buffer, dup_buffer = of_gate.buffer(len(x)), of_up.buffer(len(x))
        dgate, dup = of_gate.outputs(dgate_buffer), of_up.outputs(dup_buffer)
        if stored:
            gate, up = (y[rows] for y in stored)
        else:
            gate, up = first.product(x, GATE, out=dgate), first.product(x, UP, out=dup)
        act_buffer = second.buffer(x)
        act = of_down.write(dout, second.inputs(act_buffer))
        _act_mul_backward(gate, up, act, dgate, dup, activation)  # overwrites act with act(gate) * up
        act = second.inputs(second.fill(act_buffer))
        dgate_adapter = of_gate.adapter_output_gradient(of_gate.fill(dgate_buffer))
        dup_adapter = of_up.adapter_output_gradient(of_up.fill(dup_buffer))
        for_gate.add(dgate, first.inputs(x), dgate_adapter, first.adapter_output(x, GATE))
        for_up.add(dup, first.inputs(x), dup_adapter, first.adapter_output(x, UP))
        ddown_adapter = of_down.adapter_output_gradient(dout)
        for_down.add(of_down.outputs(dout), act, ddown_adapter, second.adapter_output(act_buffer, 0))
        of_gate.write(dgate_buffer, dx[rows])
        of_up.add(dup_buffer, dx[rows])
        del x, dout, gate, up, act, act_buffer, ddown_adapter  # before the next tile's are allocated
        del dgate, dgate_buffer, dgate_adapter, dup, dup_buffer, dup_adapter
    return [dx, *(done for total in sums for done in total.finish())]


@_gated_mlp_backward.register_fake
def _(_dout: Tensor, x_NH: Tensor, tensors: Sequence[Tensor], *others: Any) -> list[Tensor]:
    _stored, _scales, _activation, trains, _tile_tokens = others
    return [x.new_empty(x.shape) for x, t in zip((x_NH, *tensors), (True, *trains), strict=True) if t]


def tiles(tokens: int, size: int) -> Iterator[slice]:
    """Yields the rows of each tile; the last may reach past the end."""
    return (slice(start, start + size) for start in range(0, tokens, size))


def _act_mul(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    if fused := fused_kernels(gate, "gated_activation"):
        fused.act_mul(gate, up, out, activation == TANH_GELU)
        return
    out.copy_(ACTIVATIONS[activation].value(_wide(gate)) * _wide(up))


def _act_mul_backward(gate: Tensor, up: Tensor, dact: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    """Writes the gradients of gate and up, which may overwrite them, and overwrites dact with the product."""
    if fused := fused_kernels(gate, "gated_activation"):
        fused.act_mul_backward(gate, up, dact, dgate, dup, activation == TANH_GELU)
        return
    g, u, d = _wide(gate), _wide(up), _wide(dact)
    value, input_gradient_of = ACTIVATIONS[activation]
    act = value(g)
    for x, found in ((dgate, input_gradient_of(d * u, g)), (dup, d * act), (dact, act * u)):
        x.copy_(found)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, tensors, *ctx.others = inputs  # scales, activation, tile_tokens, ends_layer
    stored = output[1:] if isinstance(output, tuple) else ()
    ctx.set_materialize_grads(False)  # no gradients arrive for gate and up
    ctx.save_for_backward(x, *stored, *tensors)


def _backward(ctx, dout: Tensor, *_stored: None):  # type: ignore[no-untyped-def]
    trains = list(ctx.needs_input_grad[1])
    x, *saved = ctx.saved_tensors
    stored, tensors = saved[: -len(trains)], saved[-len(trains) :]
    scales, activation, tile_tokens, _ = ctx.others
    dx, *found = _gated_mlp_backward(dout.contiguous(), x, tensors, stored, scales, activation, trains, tile_tokens)
    gradients = iter(found)
    return dx, [next(gradients) if t else None for t in trains], *(None for _ in ctx.others)


for _operator in (_gated_mlp, _gated_mlp_stored):
    _operator.register_autograd(_backward, setup_context=_setup_context)

# For checkpointing policies.
MLP_OP, STORED_MLP_OP = (op.default for op in (torch.ops.lightseq.gated_mlp, torch.ops.lightseq.gated_mlp_stored))

PART = Part(
    name="MLP",
    fit=_fit,
    stored=(MLP_OP, STORED_MLP_OP),
    backward=torch.ops.lightseq.gated_mlp_backward.default,
)
