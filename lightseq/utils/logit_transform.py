"""Scale and soft cap of logits, in a language model's head and in the scores of attention."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """Logits of a product x: x * scale, then softly capped, cap * tanh(x * scale / cap) (Gemma 2, arXiv 2408.00118).

    Multiplying capped logits by f equals multiplying `scale` and `cap` by f.
    """

    scale: float = 1.0
    cap: float | None = None

    def with_temperature(self, temperature: float) -> "LogitTransform":
        """Returns the transform whose logits are divided by a temperature."""
        return LogitTransform(self.scale / temperature, None if self.cap is None else self.cap / temperature)

    def logits(self, product: Tensor) -> Tensor:
        """Returns the logits: a new tensor, unless nothing changes."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Returns the derivative of the logits with respect to the product, given the logits."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


UNCHANGED: Final = LogitTransform()
