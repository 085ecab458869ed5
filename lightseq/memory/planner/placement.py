"""Activation placement: for every layer, whether its activations stay on the GPU, are offloaded or are recomputed.

The choice depends only on the bytes and seconds of a layer in each state, two budgets, and the number of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    counts = _candidates(layers, states, device_bytes, in_flight)
    device = _device_bytes(counts, states, in_flight)
    host = sum(counts[name] * states[name].host_bytes for name in STATES)
    seconds = sum(counts[name] * states[name].seconds for name in STATES)
    fitting = np.flatnonzero((device <= device_bytes) & (host <= host_bytes))
    if not len(fitting):
        return None
    keys = (seconds, host, device, *(counts[name] for name in STATES))
    best = fitting[np.lexsort([key[fitting] for key in reversed(keys)])[0]]  # lexsort sorts by its last key first
    return in_order({name: int(counts[name][best]) for name in STATES})


def in_order(counts: Mapping[str, int]) -> Placement:
    return Placement(tuple(state for state in STATES for _ in range(counts.get(state, 0))))


def _candidates(
    layers: int, states: Mapping[str, State], device_bytes: float, in_flight: int
) -> dict[str, NDArray[Any]]:
    """Returns counts by state: every number of offloaded layers, with as few recomputed layers as memory allows.

    Each array has one element per candidate.
    """
    offloaded, recomputed_offloaded = (axis.ravel() for axis in np.indices((layers, layers)))
    stays = offloaded + recomputed_offloaded < layers  # the last layer
    offloaded, recomputed_offloaded = offloaded[stays], recomputed_offloaded[stays]
    resident = layers - offloaded - recomputed_offloaded
    counts = {OFFLOAD: offloaded, RECOMPUTE_OFFLOAD: recomputed_offloaded, RECOMPUTE: 0 * resident, KEEP: resident}
    over = _device_bytes(counts, states, in_flight) - device_bytes
    saved = states[KEEP].device_bytes - states[RECOMPUTE].device_bytes
    needed = np.ceil(over / saved) if saved > 0 else np.where(over > 0, resident, 0)
    recomputed = np.clip(needed, 0, resident).astype(int)
    return counts | {RECOMPUTE: recomputed, KEEP: resident - recomputed}


def _device_bytes(counts: Mapping[str, NDArray[Any]], states: Mapping[str, State], in_flight: int) -> Any:
    """Returns the bytes on the GPU at the peak over the backward pass."""
    whole, layer_input = states[KEEP].device_bytes, states[RECOMPUTE].device_bytes
    resident = ((counts[RECOMPUTE], layer_input), (counts[KEEP], whole))
    offloaded = ((counts[OFFLOAD], whole), (counts[RECOMPUTE_OFFLOAD], layer_input))  # sizes while in flight

    def first(layers: int, kinds: Sequence[tuple[NDArray[Any], float]]) -> Any:
        """Returns the bytes of the first `layers` layers of these counts and sizes."""
        size: Any = 0.0
        left: Any = layers
        for count, each in kinds:
            taken = np.minimum(left, count)
            size, left = size + taken * each, left - taken
        return size

    moments = [sum(count * each for count, each in resident), first(in_flight, offloaded)]
    # The first layers that stay are on the GPU beside the last offloaded ones.
    moments += [first(n, resident) + first(in_flight - n, offloaded[::-1]) for n in range(1, in_flight)]
    return np.maximum.reduce(moments)
