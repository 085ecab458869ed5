"""Activation placement: for every layer, whether its activations stay on the GPU, are offloaded or are recomputed.

The choice depends only on the bytes and seconds of a layer under each action, two budgets, and the number of layers.
Offloaded layers are spread among layers that stay if one layer's copy takes longer than one layer's compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD = "keep", "offload", "recompute", "recompute_offload"
OFFLOADED, RECOMPUTED = (OFFLOAD, RECOMPUTE_OFFLOAD), (RECOMPUTE, RECOMPUTE_OFFLOAD)
ACTIONS = (OFFLOAD, RECOMPUTE_OFFLOAD, RECOMPUTE, KEEP)  # from first to last layer: the first are needed last
MAX_SPANS = 4  # runs of layers with one action that a line of text lists


@dataclass(frozen=True)
class LayerCost:
    """Cost of one of ACTIONS for one layer's activations."""

    device_bytes: float  # on the GPU between forward and backward pass
    host_bytes: float
    seconds: float  # of recomputation, per step
    copy_seconds: float = 0.0  # to or from the host; compute may hide it


@dataclass(frozen=True)
class Placement:
    """Action of every layer, one of ACTIONS. The last is never offloaded, because the backward pass begins with it."""

    layers: tuple[str, ...]

    def count(self, action: str) -> int:
        return self.layers.count(action)

    @property
    def offloads(self) -> bool:
        return not set(self.layers).isdisjoint(OFFLOADED)

    @property
    def recomputed_share(self) -> float:
        """Returns the share of layers that are recomputed in full."""
        return sum(action in RECOMPUTED for action in self.layers) / len(self.layers)

    @property
    def text(self) -> str:
        """Returns a text such as `layers 0-11 offload, 12-31 keep` or `12 of 32 layers offload`."""
        spans, first = [], 0
        for action, run in groupby(self.layers):
            last = first + len(list(run)) - 1
            spans.append(f"{f'{first}-{last}' if last > first else first} {_in_words(action)}")
            first = last + 1
        if len(spans) <= MAX_SPANS:
            return f"layer{'s' * (len(self.layers) > 1)} {', '.join(spans)}"
        counts = [(self.count(action), action) for action in ACTIONS if action != KEEP]
        (most, main), *others = [(n, _in_words(action)) for n, action in counts if n]
        return ", ".join([f"{most} of {len(self.layers)} layers {main}", *(f"{n} {action}" for n, action in others)])


def _in_words(action: str) -> str:
    return action.replace("_", " and ")


def place(
    layers: int,
    costs: Mapping[str, LayerCost],
    device_bytes: float,
    host_bytes: float,
    in_flight: int = 2,
    layer_seconds: Sequence[float] = (0.0, 0.0),
) -> Placement | None:
    """Returns the fastest placement within both budgets, or None if no placement fits.

    Ties go to the least host memory, then the least GPU memory. `device_bytes` is the budget for saved activations
    only, with up to `in_flight` offloaded layers on the GPU at a time. If offloaded layers are spread among others, the
    peak may exceed the budget a little, so callers check it. `layer_seconds` are those of a layer's compute, forward
    and backward, which hide copies if two layers are in flight.
    """
    counts = _candidates(layers, costs, device_bytes, in_flight)
    device = _device_bytes(counts, costs, in_flight)
    host = sum(counts[name] * costs[name].host_bytes for name in ACTIONS)
    hidden_by = layer_seconds if in_flight > 1 else (0.0, 0.0)
    strides = _strides(layers, counts, costs, hidden_by)
    seconds = sum(
        counts[name] * (costs[name].seconds + _exposed_seconds(costs[name].copy_seconds, strides, hidden_by))
        for name in ACTIONS
    )
    fitting = np.flatnonzero((device <= device_bytes) & (host <= host_bytes))
    if not len(fitting):
        return None
    keys = (seconds, host, device, *(counts[name] for name in ACTIONS))
    best = fitting[np.lexsort([key[fitting] for key in reversed(keys)])[0]]  # lexsort sorts by its last key first
    return in_order({name: int(counts[name][best]) for name in ACTIONS}, float(strides[best]))


def in_order(counts: Mapping[str, int], stride: float = 1.0) -> Placement:
    """Returns the placement with `counts` layers per action; offloaded ones are `stride` layers apart on average."""
    ordered = [action for action in ACTIONS for _ in range(counts.get(action, 0))]
    offloaded = [action for action in ordered if action in OFFLOADED]
    staying = iter(ordered[len(offloaded) :])
    at = {int(k * stride): action for k, action in enumerate(offloaded)}
    return Placement(tuple(at[i] if i in at else next(staying) for i in range(len(ordered))))


def _strides(
    layers: int, counts: Mapping[str, NDArray[Any]], costs: Mapping[str, LayerCost], layer_seconds: Sequence[float]
) -> NDArray[Any]:
    """Returns each candidate's mean distance between offloaded layers, in layers.

    It is the distance at which compute hides the copies, or the largest that the model's depth allows. As many layers,
    and the model's last one, follow the last offloaded layer, so that no offloaded layer is on the GPU during the loss.
    """
    needed = 1.0
    for name in OFFLOADED:
        ratio = max((costs[name].copy_seconds / seconds for seconds in layer_seconds if seconds), default=1.0)
        needed = np.maximum(needed, np.where(counts[name] > 0, np.ceil(ratio), 1.0))
    offloaded = counts[OFFLOAD] + counts[RECOMPUTE_OFFLOAD]
    return np.maximum(1.0, np.minimum(needed, (layers - 2) / np.maximum(offloaded, 1)))


def _exposed_seconds(copy: float, strides: NDArray[Any], layer_seconds: Sequence[float]) -> Any:
    """Returns the seconds of an offloaded layer's copies, in both directions, that no compute hides.

    Distances are whole numbers: where a stride lies between two of them, it is the mean of these.
    """
    short = np.floor(strides)
    return sum(
        (1 + short - strides) * np.maximum(0.0, copy - short * seconds)
        + (strides - short) * np.maximum(0.0, copy - (short + 1) * seconds)
        for seconds in layer_seconds
    )


def _candidates(
    layers: int, costs: Mapping[str, LayerCost], device_bytes: float, in_flight: int
) -> dict[str, NDArray[Any]]:
    """Returns counts by action: every number of offloaded layers, with as few recomputed layers as memory allows.

    Each array has one element per candidate.
    """
    offloaded, recomputed_offloaded = (axis.ravel() for axis in np.indices((layers, layers)))
    stays = offloaded + recomputed_offloaded < layers  # the last layer
    offloaded, recomputed_offloaded = offloaded[stays], recomputed_offloaded[stays]
    resident = layers - offloaded - recomputed_offloaded
    counts = {OFFLOAD: offloaded, RECOMPUTE_OFFLOAD: recomputed_offloaded, RECOMPUTE: 0 * resident, KEEP: resident}
    over = _device_bytes(counts, costs, in_flight) - device_bytes
    saved = costs[KEEP].device_bytes - costs[RECOMPUTE].device_bytes
    needed = np.ceil(over / saved) if saved > 0 else np.where(over > 0, resident, 0)
    recomputed = np.clip(needed, 0, resident).astype(int)
    return counts | {RECOMPUTE: recomputed, KEEP: resident - recomputed}


def _device_bytes(counts: Mapping[str, NDArray[Any]], costs: Mapping[str, LayerCost], in_flight: int) -> Any:
    """Returns the bytes on the GPU at the peak over the backward pass."""
    whole, layer_input = costs[KEEP].device_bytes, costs[RECOMPUTE].device_bytes
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
