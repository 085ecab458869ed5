"""Router loss and balance of experts, which every objective takes in the same way."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightseq.parts.routers import Routers


class RouterLoss:
    """Router loss of a run, added to each share of its objective. Without routers to observe it adds nothing."""

    def __init__(self, routers: Routers | None, device: torch.device) -> None:
        self._routers, self._device = routers, device
        self._total = self._zero()

    @property
    def is_trained(self) -> bool:
        """Returns whether the loss is added, and not only biases are balanced."""
        return self._routers is not None and self._routers.coefficient > 0

    def begin(self, counted: Callable[[], Tensor | None]) -> None:
        """Begins a forward pass. `counted` returns the tokens that count, (batch, local), or None for all."""
        if self._routers is not None:
            self._routers.begin(counted())

    def add(self, share: Tensor, passes: int) -> Tensor:
        """Adds a share of the mean router loss of `passes` passes to a share of the loss."""
        if self._routers is None:
            return share
        share, added = self._routers.add_loss(share, passes)
        self._total += added
        return share

    def finish(self, nonfinite: Tensor) -> Tensor:
        """Ends a step: moves biases unless it was skipped. Returns this rank's share of its router loss."""
        total, self._total = self._total, self._zero()
        if self._routers is not None:
            self._routers.finish()
            self._routers.update_biases(nonfinite)
        return total

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=self._device)
