"""Gradients of the operators that scan or convolve a rank's part of a sequence, and shapes of what they return."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _like_values(_q: Tensor, _k: Tensor, v: Tensor, *_others: Any) -> Tensor:
    return v.new_empty(v.shape)


def register_scan(
    scan: torch.library.CustomOpDef, backward: torch.library.CustomOpDef, fake: Callable[..., Any] = _like_values
) -> None:
    """Gives the operator of a scan its gradients.

    `scan` takes q, k, v, g, beta, scale, group name and boundaries. It returns outputs, and perhaps tensors for the
    backward pass. `backward` takes the gradient of the outputs, a list of q, k, v, g and, if it is given, beta, then
    those tensors, scale, group name and boundaries. It returns the gradients of the list.
    """

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.scale, ctx.group_name, boundaries = inputs
        saved = output[1:] if isinstance(output, tuple) else ()
        ctx.saved_count = len(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(boundaries, *saved, *(x for x in tensors if x is not None))

    def gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 8
        boundaries, *tensors = ctx.saved_tensors
        saved, inputs = tensors[: ctx.saved_count], tensors[ctx.saved_count :]
        found = backward(dout.contiguous(), inputs, *saved, ctx.scale, ctx.group_name, boundaries)
        return (*found, *([None] * (8 - len(found))))

    scan.register_fake(fake)
    backward.register_fake(lambda _dout, inputs, *_: [x.new_empty(x.shape) for x in inputs])
    scan.register_autograd(gradients, setup_context=setup_context)


def register_convolution(convolution: torch.library.CustomOpDef, backward: torch.library.CustomOpDef) -> None:
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
