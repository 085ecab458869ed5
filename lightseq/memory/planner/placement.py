"""Activation placement: for every layer, whether its activations stay on the GPU, are offloaded or are recomputed.

The choice depends only on the bytes and seconds of a layer in each state, two budgets, and the number of layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import ceil

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD = "keep", "offload", "recompute", "recompute_offload"
OFFLOADED, RECOMPUTED = (OFFLOAD, RECOMPUTE_OFFLOAD), (RECOMPUTE, RECOMPUTE_OFFLOAD)
STATES = (OFFLOAD, RECOMPUTE_OFFLOAD, RECOMPUTE, KEEP)  # from first to last layer: the first are needed last


@dataclass(frozen=True)
class State:
    """Cost of a layer in a state: bytes on GPU and host between forward and backward, and seconds per step."""

    device_bytes: float
    host_bytes: float
    seconds: float


@dataclass(frozen=True)
class Placement:
    """State of every layer. The last layer is never offloaded, because the backward pass begins with it."""

    layers: tuple[str, ...]

    def count(self, state: str) -> int:
        return self.layers.count(state)

    @property
    def offloads(self) -> bool:
        return not set(self.layers).isdisjoint(OFFLOADED)

    @property
    def recomputed_share(self) -> float:
        """Returns the share of layers that are recomputed in full."""
        return sum(state in RECOMPUTED for state in self.layers) / len(self.layers)

    @property
    def words(self) -> str:
        """Returns a text such as `layers 0-11 offload, 12-31 keep`."""
        spans, first = [], 0
        for state, run in groupby(self.layers):
            last = first + len(list(run)) - 1
            spans.append(f"{f'{first}-{last}' if last > first else first} {state.replace('_', ' and ')}")
            first = last + 1
        return f"layer{'s' * (len(self.layers) > 1)} {', '.join(spans)}"


def place(
    layers: int, states: Mapping[str, State], device_bytes: float, host_bytes: float, in_flight: int = 2
) -> Placement | None:
    """Returns the fastest placement within both budgets, or None if no placement fits.

    Ties go to the least host memory, then the least GPU memory. `device_bytes` is the budget for saved activations
    only. Up to `in_flight` offloaded layers are on the GPU at a time, one fewer per layer that stays.
    """
    best: tuple[float, float, float, tuple[int, ...]] | None = None
    for counts in _candidates(layers, states, device_bytes, in_flight):
        cost = _cost(dict(zip(STATES, counts, strict=True)), states, in_flight)
        if cost.device_bytes > device_bytes or cost.host_bytes > host_bytes:
            continue
        key = (cost.seconds, cost.host_bytes, cost.device_bytes, counts)
        best = key if best is None or key < best else best
    return None if best is None else in_order(dict(zip(STATES, best[-1], strict=True)))


def in_order(counts: Mapping[str, int]) -> Placement:
    return Placement(tuple(state for state in STATES for _ in range(counts.get(state, 0))))


def _cost(counts: Mapping[str, int], states: Mapping[str, State], in_flight: int) -> State:
    """Returns the cost of all layers; the bytes on the GPU are the peak over the backward pass."""
    host = sum(number * states[name].host_bytes for name, number in counts.items() if number)
    seconds = sum(number * states[name].seconds for name, number in counts.items() if number)

    def sizes(*names: tuple[str, str]) -> list[float]:
        return [states[size_of].device_bytes for name, size_of in names for _ in range(counts.get(name, 0))]

    offloaded = sizes((OFFLOAD, KEEP), (RECOMPUTE_OFFLOAD, RECOMPUTE))  # in flight, a layer takes its size on the GPU
    resident = sizes((RECOMPUTE, RECOMPUTE), (KEEP, KEEP))
    moments = [sum(resident), sum(offloaded[:in_flight])]
    for first in range(1, in_flight):  # the first layers that stay, beside the last offloaded ones
        moments.append(sum(resident[:first]) + sum(offloaded[max(0, len(offloaded) - in_flight + first) :]))
    return State(max(moments), host, seconds)


def _candidates(
    layers: int, states: Mapping[str, State], device_bytes: float, in_flight: int
) -> Iterator[tuple[int, ...]]:
    """Yields counts by state: every number of offloaded layers, with as few recomputed layers as memory allows."""
    saved = states[KEEP].device_bytes - states[RECOMPUTE].device_bytes
    for offloaded in range(layers):
        for recomputed_offloaded in range(layers - offloaded):
            resident = layers - offloaded - recomputed_offloaded
            counts = {OFFLOAD: offloaded, RECOMPUTE_OFFLOAD: recomputed_offloaded, KEEP: resident}
            over = _cost(counts, states, in_flight).device_bytes - device_bytes
            recomputed = 0 if over <= 0 else min(resident, ceil(over / saved)) if saved > 0 else resident
            yield offloaded, recomputed_offloaded, recomputed, resident - recomputed
