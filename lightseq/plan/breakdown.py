"""Memory of a training step by purpose."""

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from lightseq.plan.rates import GIB


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one GPU by purpose. `working` is a layer's temporaries, gathered weights and unreduced gradients."""

    parameters: int
    gradients: int
    optimizer: int
    stored_activations: int
    loss: int
    attention_buffers: int
    working: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def at_peak(self, peak: int) -> "Breakdown":
        """Fits the breakdown to a measured peak.

        Working memory is the rest of the peak. If they exceed the peak, the smaller of gradients and stored
        activations shrinks by the excess, because the two do not peak together.
        """
        excess = max(0, self.total - self.working - peak)
        smaller = "gradients" if self.gradients < self.stored_activations else "stored_activations"
        rest = replace(self, working=0, **{smaller: max(0, getattr(self, smaller) - excess)})
        return replace(rest, working=max(0, peak - rest.total))

    def lines(self) -> list[str]:
        """Returns the lines of a table, largest part first, with the total."""
        parts = sorted(asdict(self).items(), key=lambda part: -part[1])
        shown = [(name.replace("_", " "), size) for name, size in [*parts, ("total", self.total)]]
        return [f"{name:<18}{size / GIB:9.2f} GiB" for name, size in shown]


class State(NamedTuple):
    """Bytes of one rank's parameters, gradients and optimizer state, or shares of them."""

    parameters: float
    gradients: float
    optimizer: float
