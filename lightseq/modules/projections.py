"""Attention's projections, whose products stay for the backward pass or are kept by a checkpoint around the layer."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightseq.kernels.checkpoint_context import stored_or_computed
from lightseq.modules.low_rank import Linear, is_linear, linear_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def keep_projections(layers: Iterable[nn.Module]) -> None:
    """Has a checkpoint around each layer keep what the projections before and after attention give.

    Raises ValueError for a layer that has others than four plain linears, with low-rank adapters or without.
    """
    for layer in layers:
        if not has_projections(layer):
            raise ValueError(f"{type(layer).__name__} has no four plain linears around its attention, to keep")
        for name in PROJECTIONS:
            linear: Any = getattr(layer.self_attn, name)
            linear.__class__ = _keeping(type(linear))  # type: ignore[arg-type]


def has_projections(layer: nn.Module) -> bool:
    """Whether it is a layer that `keep_projections` takes."""
    return all(is_linear(getattr(getattr(layer, "self_attn", None), name, None)) for name in PROJECTIONS)


@cache
def _keeping(kind: type[nn.Module]) -> type[nn.Module]:
    """A class with another forward, as for tiled MLPs: the compiler tells no layer from the others by it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return kind.forward(self, x)
        linear = linear_of(self, x.dtype)
        y = _keeping_linear(x.reshape(-1, x.shape[-1]), linear.tensors, linear.scale)
        return y.view(*x.shape[:-1], -1)

    return type(f"Keeping{kind.__name__}", (kind,), {"forward": forward})


@torch.library.custom_op("lightseq::keeping_linear", mutates_args=())
def _keeping_linear(x_NI: Tensor, tensors: Sequence[Tensor], scale: float) -> Tensor:
    """`tensors` are a Linear's."""
    (y_NO,) = stored_or_computed(lambda: (Linear.of(tensors, scale).forward(x_NI),))
    return y_NO


@_keeping_linear.register_fake
def _(x_NI: Tensor, tensors: Sequence[Tensor], scale: float) -> Tensor:
    return x_NI.new_empty(len(x_NI), len(tensors[0]))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, tensors, ctx.scale = inputs
    ctx.save_for_backward(x, *tensors)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, *tensors = ctx.saved_tensors
    of_x, of_tensors, _ = ctx.needs_input_grad
    return *Linear.of(tensors, ctx.scale).gradients(dy.contiguous(), x, of_x, of_tensors), None


_keeping_linear.register_autograd(_backward, setup_context=_setup_context)

KEEPING_LINEAR_OP = torch.ops.lightseq.keeping_linear.default  # what a checkpointing policy names
