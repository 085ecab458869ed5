"""Attention's projections with outputs that a checkpoint around the layer can store."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightseq.parts.changes import Changes
from lightseq.parts.low_rank import LinearWeights, is_linear, linear_weights
from lightseq.utils.checkpoint_context import reuse_or_compute

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def store_projections(layers: Iterable[nn.Module], changes: Changes) -> None:
    """Makes the checkpoint of each layer store the outputs of attention's projections.

    Raises ValueError for a layer whose projections are not four plain linears, with or without low-rank adapters.
    """
    layers = list(layers)
    for layer in layers:
        if not has_projections(layer):
            raise ValueError(f"{type(layer).__name__} has no four plain linears around its attention to store")
    for layer in layers:
        for name in PROJECTIONS:
            linear: Any = getattr(layer.self_attn, name)
            changes.set_attribute(linear, "__class__", _storing_class(type(linear)))  # type: ignore[arg-type]


def has_projections(layer: nn.Module) -> bool:
    """Returns whether `store_projections` supports a layer."""
    return all(is_linear(getattr(getattr(layer, "self_attn", None), name, None)) for name in PROJECTIONS)


@cache
def _storing_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass with a storing forward; as with tiled MLPs, the compiler then treats all layers alike."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return kind.forward(self, x)
        linear = linear_weights(self, x.dtype)
        y = _linear_stored(x.reshape(-1, x.shape[-1]), linear.tensors, linear.scale)
        return y.view(*x.shape[:-1], -1)

    return type(f"Storing{kind.__name__}", (kind,), {"forward": forward})


@torch.library.custom_op("lightseq::linear_stored", mutates_args=())
def _linear_stored(x_NI: Tensor, tensors: Sequence[Tensor], scale: float) -> Tensor:
    """Applies a linear; `tensors` are `LinearWeights.tensors`."""
    (y_NO,) = reuse_or_compute(lambda: (LinearWeights.from_tensors(tensors, scale).forward(x_NI),))
    return y_NO


@_linear_stored.register_fake
def _(x_NI: Tensor, tensors: Sequence[Tensor], scale: float) -> Tensor:
    return x_NI.new_empty(len(x_NI), len(tensors[0]))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, tensors, ctx.scale = inputs
    ctx.save_for_backward(x, *tensors)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, *tensors = ctx.saved_tensors
    needs_x, needs_tensors, _ = ctx.needs_input_grad
    return *LinearWeights.from_tensors(tensors, ctx.scale).gradients(dy.contiguous(), x, needs_x, needs_tensors), None


_linear_stored.register_autograd(_backward, setup_context=_setup_context)

STORED_LINEAR_OP = torch.ops.lightseq.linear_stored.default  # for checkpointing policies
