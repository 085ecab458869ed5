"""Operators that scan or convolve a rank's part of a sequence: their arguments, shapes and gradients."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import CustomOpDef

from lightseq.kernels.recurrent.base import ScanInputs
from lightseq.sequence.group import SequenceGroup, find_group
from lightseq.utils.checkpoint_context import reuse_or_compute

_FIELDS: Final = (f"Tensor{'?' * (name in ScanInputs._field_defaults)} {name}" for name in ScanInputs._fields)
INPUTS: Final = ", ".join(_FIELDS)
OTHERS: Final = "float scale, str group_name, Tensor? boundaries"
NO_GRADIENTS: Final = (None, None, None)  # the arguments behind the inputs have no gradients


def scan_operator(
    name: str,
    compute: Callable[[ScanInputs, float, SequenceGroup, Tensor | None], tuple[Tensor, ...]],
    gradients: Callable[[Tensor, ScanInputs, Sequence[Tensor], float, SequenceGroup, Tensor | None], list[Tensor]],
    empty_saved: Callable[[ScanInputs, SequenceGroup, Tensor | None], tuple[Tensor, ...]] = lambda *_: (),
    saved_count: int = 0,
) -> Callable[..., Any]:
    """Registers the operators `lightseq::{name}` and `lightseq::{name}_backward`, and returns the first.

    It takes the fields of `ScanInputs`, a scale, the name of a group and boundaries of documents. `compute` returns the
    outputs (B, S, H, V), and `saved_count` tensors for the backward pass, like those of `empty_saved`. `gradients`
    returns those of the inputs that are given. A checkpoint that stores the results does not compute them again.
    """

    def forward(*given: Any) -> Any:
        *inputs, scale, group_name, boundaries = given
        x, group = ScanInputs(*inputs), find_group(group_name)
        found = reuse_or_compute(lambda: compute(x, scale, group, boundaries))
        return tuple(found) if saved_count else found[0]

    def fake(*given: Any) -> Any:
        *inputs, _scale, group_name, boundaries = given
        x = ScanInputs(*inputs)
        out = x.v.new_empty(x.v.shape)
        return (out, *empty_saved(x, find_group(group_name), boundaries)) if saved_count else out

    def backward(dout: Tensor, inputs: Sequence[Tensor], *given: Any) -> list[Tensor]:
        *saved, scale, group_name, boundaries = given
        return gradients(dout, ScanInputs(*inputs), saved, scale, find_group(group_name), boundaries)

    def fake_gradients(_dout: Tensor, inputs: Sequence[Tensor | None], *_given: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in inputs if x is not None]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.scale, ctx.group_name, boundaries = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(output[1:] if saved_count else ()), *tensors, boundaries)

    def autograd(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once, because a checkpoint frees them
        saved, inputs, boundaries = tensors[:saved_count], tensors[saved_count:-1], tensors[-1]
        if dout is None:
            return (*(None for _ in inputs), *NO_GRADIENTS)
        found = iter(backward_operator(dout.contiguous(), inputs, *saved, ctx.scale, ctx.group_name, boundaries))
        return (*(None if x is None else next(found) for x in inputs), *NO_GRADIENTS)

    results = ", ".join(["Tensor"] * (1 + saved_count))
    given_backward = ", ".join(["Tensor dout, Tensor?[] inputs", *(f"Tensor saved_{i}" for i in range(saved_count))])
    operator: CustomOpDef = torch.library.custom_op(
        f"lightseq::{name}", forward, mutates_args=(), schema=f"({INPUTS}, {OTHERS}) -> ({results})"
    )
    backward_operator: CustomOpDef = torch.library.custom_op(
        f"lightseq::{name}_backward", backward, mutates_args=(), schema=f"({given_backward}, {OTHERS}) -> Tensor[]"
    )
    operator.register_fake(fake)
    backward_operator.register_fake(fake_gradients)
    operator.register_autograd(autograd, setup_context=setup_context)
    return operator


def register_convolution(convolution: CustomOpDef, backward: CustomOpDef) -> None:
    """Gives the operator of a convolution its gradients.

    `convolution` takes x, perhaps a tensor without gradient, weight, bias, boundaries, group name and whether SiLU
    follows. `backward` takes the gradient of the result before them, and returns those of x, weight and, if it is
    given, bias.
    """

    def fake_gradients(_dout: Tensor, x: Tensor, *others: Any) -> list[Tensor]:
        *_, weight, bias, _boundaries, _group_name, _silu = others
        return [given.new_empty(given.shape) for given in (x, weight, bias) if given is not None]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.group_name, ctx.silu = inputs
        ctx.save_for_backward(*tensors)

    def gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once, because a checkpoint frees them
        _x, *before, _weight, _bias, _boundaries = tensors
        dx, dweight, *dbias = backward(dout, *tensors, ctx.group_name, ctx.silu)
        return dx, *(None for _ in before), dweight, dbias[0] if dbias else None, None, None, None

    convolution.register_fake(lambda x, *_: x.new_empty(x.shape))
    backward.register_fake(fake_gradients)
    convolution.register_autograd(gradients, setup_context=setup_context)
