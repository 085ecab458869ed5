"""Activation placement: for every layer, whether its activations stay on the GPU, are offloaded or are recomputed.

The choice depends only on the bytes and seconds of each layer under each action, and on two budgets.
Offloaded layers are spread among layers that stay if one layer's copy takes longer than one layer's compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD = "keep", "offload", "recompute", "recompute_offload"
OFFLOADED, RECOMPUTED = (OFFLOAD, RECOMPUTE_OFFLOAD), (RECOMPUTE, RECOMPUTE_OFFLOAD)
ACTIONS = (OFFLOAD, RECOMPUTE_OFFLOAD, RECOMPUTE, KEEP)  # in order of layers; backward reaches the first ones last
MAX_SPANS = 4  # most runs of layers that a line of text lists


@dataclass(frozen=True)
class ActionCost:
    """Cost of one of ACTIONS for one layer's activations."""

    device_bytes: float  # on the GPU between forward and backward pass
    host_bytes: float
    seconds: float  # spent on recomputation in a step
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


Costs = Sequence[Mapping[str, ActionCost]]  # each layer's costs by action


def place(
    costs: Costs,
    device_bytes: float,
    host_bytes: float,
    in_flight: int = 2,
    layer_seconds: Sequence[float] = (0.0, 0.0),
) -> Placement | None:
    """Returns the fastest placement within both budgets, or None if no placement fits.

    Ties go to the least host memory, then the least GPU memory. `device_bytes` is the budget for saved activations
    only, with up to `in_flight` offloaded layers on the GPU at a time. If offloaded layers are spread among others, the
    peak may exceed the budget a little, so callers check it. `layer_seconds` are the mean layer's seconds of compute,
    forward and backward, which hide copies if two layers are in flight.
    """
    sums = _Sums(costs)
    candidates = _candidates(sums, device_bytes, in_flight)
    device = _device_bytes(sums, candidates, in_flight)
    spans = candidates.spans(len(costs))
    hidden_by = layer_seconds if in_flight > 1 else (0.0, 0.0)
    strides = _strides(costs, candidates, hidden_by)
    host, seconds = np.zeros_like(device), np.zeros_like(device)
    for (cost, action), before in sums.kinds.items():  # number of layers with this cost before each layer
        count = before[spans[action][1]] - before[spans[action][0]]
        host += count * cost.host_bytes
        seconds += count * (cost.seconds + _exposed_seconds(cost.copy_seconds, strides, hidden_by))
    fitting = np.flatnonzero((device <= device_bytes) & (host <= host_bytes))
    if not len(fitting):
        return None
    counts = {action: end - start for action, (start, end) in spans.items()}
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


class _Sums:
    """Sums of costs over the layers before each layer, and over all layers."""

    def __init__(self, costs: Costs) -> None:
        self.whole = np.cumsum([0.0, *(cost[KEEP].device_bytes for cost in costs)])  # all that layers save
        self.inputs = np.cumsum([0.0, *(cost[RECOMPUTE].device_bytes for cost in costs)])
        self.kinds = {
            (kind, action): np.cumsum([0, *(cost[action] == kind for cost in costs)])
            for action in ACTIONS
            for kind in {cost[action] for cost in costs}
        }


@dataclass(frozen=True)
class _Candidates:
    """Numbers of layers by action: offloaded ones come first, kept ones last. One element per candidate."""

    offloaded: NDArray[Any]
    recomputed_offloaded: NDArray[Any]
    recomputed: NDArray[Any]

    @property
    def away(self) -> NDArray[Any]:
        """Returns the number of layers with activations on the host."""
        return self.offloaded + self.recomputed_offloaded

    def spans(self, layers: int) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        """Returns the first layer of each action, and the one after its last."""
        kept = self.away + self.recomputed
        return {
            OFFLOAD: (0 * kept, self.offloaded),
            RECOMPUTE_OFFLOAD: (self.offloaded, self.away),
            RECOMPUTE: (self.away, kept),
            KEEP: (kept, np.full_like(kept, layers)),
        }


def _strides(costs: Costs, candidates: _Candidates, layer_seconds: Sequence[float]) -> NDArray[Any]:
    """Returns each candidate's mean distance between offloaded layers, in layers.

    It is the distance at which compute hides the copies, or the largest that the model's depth allows. As many layers,
    and the model's last one, follow the last offloaded layer, so that no offloaded layer is on the GPU during the loss.
    """
    needed = 1.0
    for name, count in ((OFFLOAD, candidates.offloaded), (RECOMPUTE_OFFLOAD, candidates.recomputed_offloaded)):
        copy = max(cost[name].copy_seconds for cost in costs)
        ratio = max((copy / seconds for seconds in layer_seconds if seconds), default=1.0)
        needed = np.maximum(needed, np.where(count > 0, np.ceil(ratio), 1.0))
    return np.maximum(1.0, np.minimum(needed, (len(costs) - 2) / np.maximum(candidates.away, 1)))


def _exposed_seconds(copy: float, strides: NDArray[Any], layer_seconds: Sequence[float]) -> Any:
    """Returns the seconds of an offloaded layer's copies, in both directions, that no compute hides.

    Distances between offloaded layers are whole numbers. A stride is their mean, so it may lie between two of them.
    """
    short = np.floor(strides)
    return sum(
        (1 + short - strides) * np.maximum(0.0, copy - short * seconds)
        + (strides - short) * np.maximum(0.0, copy - (short + 1) * seconds)
        for seconds in layer_seconds
    )


def _candidates(sums: _Sums, device_bytes: float, in_flight: int) -> _Candidates:
    """Returns every number of offloaded layers, with as few recomputed layers as memory allows."""
    layers = len(sums.whole) - 1
    offloaded, recomputed_offloaded = (axis.ravel() for axis in np.indices((layers, layers)))
    stays = offloaded + recomputed_offloaded < layers  # the last layer
    found = _Candidates(offloaded[stays], recomputed_offloaded[stays], 0 * offloaded[stays])
    over = _device_bytes(sums, found, in_flight) - device_bytes
    gained = sums.whole - sums.inputs  # by recomputing the layers before each layer
    needed = np.searchsorted(gained, gained[found.away] + np.maximum(over, 0.0)) - found.away
    return replace(found, recomputed=np.where(over > 0, np.clip(needed, 0, layers - found.away), 0))


def _device_bytes(sums: _Sums, candidates: _Candidates, in_flight: int) -> NDArray[Any]:
    """Returns the bytes on the GPU at the peak over the backward pass."""
    whole, inputs, layers = sums.whole, sums.inputs, len(sums.whole) - 1
    offloaded, away = candidates.offloaded, candidates.away
    kept = away + candidates.recomputed  # the first layer that keeps everything

    def resident(end: Any) -> Any:
        """Returns the bytes of layers from the first that stays up to `end`."""
        end = np.minimum(end, layers)
        middle = np.minimum(kept, end)
        return inputs[middle] - inputs[away] + whole[end] - whole[middle]

    def fetched(start: Any, end: Any) -> Any:
        """Returns the bytes of a span of offloaded layers."""
        start = np.maximum(start, 0)
        middle = np.clip(offloaded, start, end)
        return whole[middle] - whole[start] + inputs[end] - inputs[middle]

    spans = [float(whole[min(end, layers)] - whole[max(0, end - in_flight)]) for end in range(layers + 1)]
    widest = np.maximum.accumulate(spans)[offloaded]  # offloaded layers in flight save everything
    moments = [resident(layers), np.maximum(widest, fetched(0 * away, np.minimum(in_flight, away)))]
    # The first layers that stay are on the GPU beside the last offloaded ones.
    moments += [resident(away + n) + fetched(away - (in_flight - n), away) for n in range(1, in_flight)]
    return np.maximum.reduce(moments)
