"""Linear layers with a low-rank adapter (LoRA, arXiv 2106.09685) whose joint output is rounded once.

Shape suffixes: N tokens, I inputs, O outputs, R an adapter's rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightseq.parts.identity import change_of, linear_change, plain_class


class LinearWeights(NamedTuple):
    """Weights of y = x Wᵀ + scale · (x Aᵀ) Bᵀ for W (O, I), A (R, I), B (O, R); without an adapter A and B are None.

    y is one product of [x, scale · x Aᵀ] and [W, B]. An adapter's small output, added to a rounded x Wᵀ, would be lost
    where it is less than half a rounding step; cuBLAS also rounds to bfloat16 before it adds.
    """

    weight: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    def select_outputs(self, rows: slice) -> "LinearWeights":
        """Returns the weights of some outputs."""
        return self._replace(weight=self.weight[rows], b=None if self.b is None else self.b[rows])

    def select_inputs(self, columns: slice) -> "LinearWeights":
        """Returns the weights of some inputs, which give those inputs' share of y."""
        return self._replace(weight=self.weight[:, columns], a=None if self.a is None else self.a[:, columns])

    def forward(self, x_NI: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns y for x, written to `out` if given."""
        if self.a is None or self.b is None:
            return torch.mm(x_NI, self.weight.T, out=out)
        return torch.mm(_joined(x_NI, self.adapter_output(x_NI), 1), _joined(self.weight, self.b, 1).T, out=out)

    def adapter_output(self, x_NI: Tensor) -> Tensor:
        """Returns scale · x Aᵀ (N, R)."""
        assert self.a is not None
        return (x_NI @ self.a.T).mul_(self.scale)

    def adapter_output_gradient(self, dy_NO: Tensor) -> Tensor:
        """Returns the gradient of x Aᵀ (N, R)."""
        assert self.b is not None
        return (dy_NO @ self.b).mul_(self.scale)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.weight, self.a, self.b) if x is not None]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], scale: float) -> "LinearWeights":
        """Builds the weights from their `tensors`."""
        weight, *adapter = tensors
        a, b = adapter or (None, None)
        return cls(weight, a, b, scale)

    def gradients(
        self, dy_NO: Tensor, x_NI: Tensor, needs_x: bool, needs_tensors: Sequence[bool]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Returns the gradients of the input and of `tensors` in order; None where no gradient is needed."""
        makers = (
            lambda: dy_NO.T @ x_NI,
            lambda: self.adapter_output_gradient(dy_NO).T @ x_NI,
            lambda: dy_NO.T @ self.adapter_output(x_NI),
        )
        found = [make() if needed else None for make, needed in zip(makers, needs_tensors, strict=False)]
        return input_gradient([self], [dy_NO]) if needs_x else None, found


def _joined(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Concatenates tensors, padded with zeros to a multiple of 8: fast GPU products need rows of whole 16 bytes."""
    shape = list(y.shape)
    shape[dim] = -(x.shape[dim] + y.shape[dim]) % 8
    return torch.cat([x, y, y.new_zeros(shape)] if shape[dim] else [x, y], dim)


def input_gradient(linears: Sequence[LinearWeights], dys: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """Returns the gradient of an input that several linears share, adapters included, written to `into` if given.

    Code that is compiled must not give `into`: Inductor multiplies what its memory holds by 0, which may give NaN.
    """
    for i, (linear, dy_NO) in enumerate(zip(linears, dys, strict=True)):
        left, right = dy_NO, linear.weight
        if linear.a is not None and linear.b is not None:
            left, right = _joined(left, linear.adapter_output_gradient(dy_NO), 1), _joined(right, linear.a, 0)
        into = left @ right if into is None else into.addmm_(left, right, beta=float(i > 0))
    assert into is not None, "there is a linear"
    return into


def concatenate_outputs(linears: Sequence[LinearWeights]) -> LinearWeights:
    """Joins linears of one input into one linear with all their outputs."""
    weight = torch.cat([linear.weight for linear in linears])
    adapted = [linear for linear in linears if linear.a is not None]
    if not adapted:
        return LinearWeights(weight)
    scale = next((x.scale for x in adapted if x.scale), 1.0)
    parts = [weight.new_empty(len(x.weight), 0) if x.b is None else x.b * (x.scale / scale) for x in linears]
    return LinearWeights(weight, torch.cat([x.a for x in adapted if x.a is not None]), torch.block_diag(*parts), scale)


def is_linear(module: Any) -> bool:
    """Returns whether a module is a linear without bias that `linear_weights` supports."""
    return has_linear_weights(module) and bias_of(module) is None


def has_linear_weights(module: Any) -> bool:
    """Returns whether `linear_weights` supports a module: at most one adapter, which is plain LoRA without dropout.

    Neither has a hook or another change, which code that reads the weights would skip.
    """
    if hasattr(module, "lora_A"):
        return has_plain_adapter(module) and adapter_in_use(module)
    return isinstance(module, nn.Module) and linear_change(module) is None


def has_plain_adapter(module: Any) -> bool:
    """Returns whether a linear of peft computes y as `LinearWeights` does while its adapter is in use.

    Variants such as DoRA, biases, dropout and several adapters are something else; so is a change to any part.
    """
    from peft.tuners.lora.layer import Linear

    kind = plain_class(module)
    if len(module.lora_A) != 1 or not (kind is Linear or issubclass(kind, RoundedOnce)) or change_of(module):
        return False
    (name,) = module.lora_A
    parts = (module.base_layer, module.lora_A[name], module.lora_B[name])
    if any(map(linear_change, parts)) or any(part.bias is not None for part in parts[1:]):
        return False
    dropout = module.lora_dropout[name]
    return type(dropout) is nn.Identity and not (change_of(dropout) or module.use_dora[name] or module.lora_variant)


def adapter_in_use(module: Any) -> bool:
    """Returns whether a linear of peft with one adapter adds its product, which is not in the base weights."""
    return not (module.disable_adapters or module.merged) and list(module.active_adapters) == list(module.lora_A)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disables adapters inside the block. Unlike peft's own context manager, it freezes no parameter."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off


class RoundedOnce:
    """Mark of a class of peft's linears whose forward is `lora_linear`."""


def bias_of(module: Any) -> Tensor | None:
    """Returns the bias of a module that `linear_weights` supports."""
    bias: Tensor | None = getattr(module, "base_layer", module).bias
    return bias


def linear_weights(module: Any, dtype: torch.dtype) -> LinearWeights:
    """Returns the weights of a plain linear, or of peft's with one adapter, which then computes in `dtype`."""
    if isinstance(module, nn.Linear):
        return LinearWeights(module.weight)
    (name,) = module.lora_A
    a, b = module.lora_A[name].weight.to(dtype), module.lora_B[name].weight.to(dtype)
    return LinearWeights(module.base_layer.weight, a, b, module.scaling[name])


def lora_linear(x_NI: Tensor, linear: LinearWeights) -> Tensor:
    """Applies `linear.forward` with gradients, except for a weight that does not train."""
    y_NO: Tensor = _LoraLinear.apply(x_NI, *linear)
    return y_NO


class _LoraLinear(torch.autograd.Function):
    """Linear with an adapter. Plain autograd would compute the gradient of the whole joined weight."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x_NI, weight, a, b)
        ctx.scale = scale
        return LinearWeights(weight, a, b, scale).forward(x_NI)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, a, b = ctx.saved_tensors
        needs_x, *needs_tensors, _ = ctx.needs_input_grad
        dx_NI, found = LinearWeights(weight, a, b, ctx.scale).gradients(dy_NO, x_NI, needs_x, needs_tensors)
        return dx_NI, *found, None
