"""Products of linears with adapters whose inputs leave room for the adapters' part, so that nothing is copied.

y = [x, scale · x Aᵀ] [W, B]ᵀ is one product (`low_rank.LinearWeights`). Here x lies in the first columns of a buffer,
and the adapter's part is written into the columns behind it. The joined weights serve all tiles of tokens, over which
the gradients of weights and adapters are summed.

Shape suffixes: N tokens, I inputs, O outputs, R an adapter's rank.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightseq.kernels.fused.products import add_product, write_product
from lightseq.parts.low_rank import LinearWeights


class Outputs:
    """Products of linears that share an input."""

    def __init__(self, linears: Sequence[LinearWeights]) -> None:
        self._linears, self._width = linears, linears[0].weight.shape[1]
        ends = list(accumulate((0 if linear.a is None else len(linear.a) for linear in linears), initial=0))
        self._places = [slice(self._width + a, self._width + b) for a, b in pairwise(ends)]
        self._room = _room(self._width, ends[-1])
        self._a = torch.cat([linear.a for linear in linears if linear.a is not None]) if ends[-1] else None

    @cached_property
    def _weights(self) -> list[Tensor]:
        """Returns [W, B, 0] of each linear (O, I + room)."""
        return [self._joined(linear, place) for linear, place in zip(self._linears, self._places, strict=True)]

    def buffer(self, like: Tensor) -> Tensor:
        """Returns uninitialized rows for the tokens of `like`, and room for the adapters' part, whose padding is 0."""
        out = like.new_empty(len(like), self._width + self._room)
        out[:, self._places[-1].stop :] = 0
        return out

    def inputs(self, buffer: Tensor) -> Tensor:
        """Returns the columns of a buffer where the input lies."""
        return buffer[:, : self._width]

    def joined(self, x_NI: Tensor) -> Tensor:
        """Returns an input with the adapters' part: a buffer, or x itself without adapters."""
        if self._a is None:
            return x_NI
        buffer = self.buffer(x_NI)
        self.inputs(buffer).copy_(x_NI)
        return self.fill(buffer)

    def fill(self, buffer: Tensor) -> Tensor:
        """Writes the adapters' part behind the input of a buffer. Returns the buffer."""
        if self._a is not None:
            torch.mm(self.inputs(buffer), self._a.T, out=buffer[:, self._width : self._places[-1].stop])
            for linear, place in zip(self._linears, self._places, strict=True):
                if linear.a is not None:
                    buffer[:, place].mul_(linear.scale)
        return buffer

    def adapter_output(self, buffer: Tensor, which: int) -> Tensor:
        """Returns scale · x Aᵀ (N, R) of a filled buffer, for one of the linears."""
        return buffer[:, self._places[which]]

    def product(self, buffer: Tensor, which: int, out: Tensor | None = None) -> Tensor:
        """Returns the output of one of the linears for a filled buffer, written to `out` if given."""
        return torch.mm(buffer, self._weights[which].T, out=out)

    def _joined(self, linear: LinearWeights, place: slice) -> Tensor:
        if not self._room:
            return linear.weight
        joined = linear.weight.new_zeros(len(linear.weight), self._width + self._room)
        joined[:, : self._width] = linear.weight
        if linear.b is not None:
            joined[:, place] = linear.b
        return joined


class InputGradient:
    """Gradient of a linear's input, for gradients of its output that leave room for the adapter's part."""

    def __init__(self, linear: LinearWeights) -> None:
        self._linear, self._width = linear, len(linear.weight)
        self._rank = 0 if linear.a is None else len(linear.a)
        self._room, self._weight = _room(self._width, self._rank), linear.weight
        if linear.a is not None:
            padding = linear.a.new_zeros(self._room - self._rank, linear.weight.shape[1])
            self._weight = torch.cat([linear.weight, linear.a, padding])  # (O + room, I)

    def buffer(self, tokens: int) -> Tensor:
        """Returns uninitialized rows for a gradient, and room for the adapter's part, whose padding is 0."""
        out = self._linear.weight.new_empty(tokens, self._width + self._room)
        out[:, self._width + self._rank :] = 0
        return out

    def outputs(self, buffer: Tensor) -> Tensor:
        """Returns the columns of a buffer where the output's gradient lies."""
        return buffer[:, : self._width]

    def joined(self, dy_NO: Tensor) -> Tensor:
        """Returns a gradient with the adapter's part: a buffer, or dy itself without an adapter."""
        if not self._room:
            return dy_NO
        buffer = self.buffer(len(dy_NO))
        self.outputs(buffer).copy_(dy_NO)
        return self.fill(buffer)

    def fill(self, buffer: Tensor) -> Tensor:
        """Writes the adapter's part behind the gradient of a buffer. Returns the buffer."""
        if self._linear.b is not None:
            part = buffer[:, self._width : self._width + self._rank]
            torch.mm(self.outputs(buffer), self._linear.b, out=part).mul_(self._linear.scale)
        return buffer

    def adapter_output_gradient(self, buffer: Tensor) -> Tensor:
        """Returns the gradient of x Aᵀ (N, R), of a filled buffer."""
        return buffer[:, self._width : self._width + self._rank]

    def write(self, buffer: Tensor, into: Tensor) -> Tensor:
        """Writes the gradient of the input."""
        return torch.mm(buffer, self._weight, out=into)

    def add(self, buffer: Tensor, into: Tensor) -> Tensor:
        """Adds the gradient of the input."""
        return into.addmm_(buffer, self._weight)


class LinearGradients(NamedTuple):
    """Gradients of a linear's tensors, summed over the tiles; None for one that does not train."""

    weight: "GradientSum | None"
    a: "GradientSum | None" = None
    b: "GradientSum | None" = None

    def add(self, dy_NO: Tensor, x_NI: Tensor, dxa_NR: Tensor, xa_NR: Tensor) -> None:
        """Adds a tile's gradients, of the output, its input, and both of the adapter in between."""
        if self.weight is not None:
            self.weight.add(dy_NO.T, x_NI)
        if self.a is not None:
            self.a.add(dxa_NR.T, x_NI)
        if self.b is not None:
            self.b.add(dy_NO.T, xa_NR)

    def finish(self) -> list[Tensor]:
        return [total.finish() for total in (self.weight, self.a, self.b) if total is not None]


class GradientSum:
    """Gradient of a weight: one product, or several added in float32 or wider."""

    def __init__(self, weight: Tensor, one_tile: bool) -> None:
        dtype = weight.dtype if one_tile else torch.promote_types(weight.dtype, torch.float32)
        self._dtype, self._total = weight.dtype, torch.empty(weight.shape, dtype=dtype, device=weight.device)
        self._is_empty = True

    def add(self, a: Tensor, b: Tensor) -> None:
        if self._is_empty:
            write_product(self._total, a, b)
        else:
            add_product(self._total, a, b)
        self._is_empty = False

    def finish(self) -> Tensor:
        return self._total.to(self._dtype)


def _room(width: int, rank: int) -> int:
    """Returns columns for adapters that make rows a multiple of 8: fast GPU products need rows of whole 16 bytes."""
    return rank + -(width + rank) % 8 if rank else 0
