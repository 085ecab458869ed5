"""Decides for every layer whether what it keeps stays on the device, waits in host memory or is computed again.

Pure data in and out: bytes and seconds of one layer in each state, two budgets, and how many layers there are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD = "keep", "offload", "recompute", "recompute_offload"
AWAY, AGAIN = (OFFLOAD, RECOMPUTE_OFFLOAD), (RECOMPUTE, RECOMPUTE_OFFLOAD)
AS_IF = {OFFLOAD: KEEP, RECOMPUTE_OFFLOAD: RECOMPUTE}  # what a layer on its way still takes on the device
STATES = (OFFLOAD, RECOMPUTE_OFFLOAD, RECOMPUTE, KEEP)  # in the order of layers: what is needed last leaves first


@dataclass(frozen=True)
class State:
    """What a layer costs in a state: bytes on the device and on the host from forward to backward, seconds a step."""

    device_bytes: float
    host_bytes: float
    seconds: float


@dataclass(frozen=True)
class Placement:
    """The state of every layer. The last one never leaves: the backward pass begins with it."""

    layers: tuple[str, ...]

    def count(self, state: str) -> int:
        return self.layers.count(state)

    @property
    def again(self) -> float:
        """The share of layers that compute all of it again."""
        return sum(state in AGAIN for state in self.layers) / len(self.layers)

    @property
    def words(self) -> str:
        """`layers 0-11 offload, 12-31 keep`."""
        runs: list[list[int]] = []
        for i, state in enumerate(self.layers):
            if runs and self.layers[runs[-1][0]] == state:
                runs[-1][1] = i
            else:
                runs.append([i, i])
        shown = [f"{a}-{b}" if b > a else str(a) for a, b in runs]
        named = [f"{span} {self.layers[a].replace('_', ' and ')}" for span, (a, _) in zip(shown, runs, strict=True)]
        return f"layer{'s' * (len(self.layers) > 1)} {', '.join(named)}"


def place(
    layers: int, states: Mapping[str, State], device_bytes: float, host_bytes: float, in_flight: int = 2
) -> Placement | None:
    """The fastest placement within both budgets; of equals, the one that leaves most memory free. None if none fits.

    `device_bytes` is for what is kept alone. Of layers that leave, what `in_flight` of them keep is there, one less for
    each that stays.
    """
    best: tuple[float, float, float, tuple[int, ...]] | None = None
    for counts in _splits(layers, states, device_bytes, in_flight):
        found = _cost(dict(zip(STATES, counts, strict=True)), states, in_flight)
        if found.device_bytes > device_bytes or found.host_bytes > host_bytes:
            continue
        key = (found.seconds, found.host_bytes, found.device_bytes, counts)
        best = key if best is None or key < best else best
    return None if best is None else in_order(dict(zip(STATES, best[-1], strict=True)))


def in_order(counts: Mapping[str, int]) -> Placement:
    return Placement(tuple(state for state in STATES for _ in range(counts.get(state, 0))))


def _cost(counts: Mapping[str, int], states: Mapping[str, State], in_flight: int) -> State:
    host, seconds = (
        sum(number * getattr(states[name], what) for name, number in counts.items() if number)
        for what in ("host_bytes", "seconds")
    )
    away = [states[here].device_bytes for left, here in AS_IF.items() for _ in range(counts.get(left, 0))]
    here = [states[name].device_bytes for name in (RECOMPUTE, KEEP) for _ in range(counts.get(name, 0))]
    moments = [sum(here), sum(away[:in_flight])]
    for first in range(1, in_flight):  # of those that stay, beside the last that leave
        moments.append(sum(here[:first]) + sum(away[max(0, len(away) - in_flight + first) :]))
    return State(max(moments), host, seconds)


def _splits(layers: int, states: Mapping[str, State], device_bytes: float, in_flight: int) -> Iterator[tuple[int, ...]]:
    """How many layers are in each state. The last one is on the device; no more compute again than have to."""
    saved = states[KEEP].device_bytes - states[RECOMPUTE].device_bytes
    for away in range(layers):
        for half_away in range(layers - away):
            here = layers - away - half_away
            counts = {OFFLOAD: away, RECOMPUTE_OFFLOAD: half_away, KEEP: here}
            over = _cost(counts, states, in_flight).device_bytes - device_bytes
            again = 0 if over <= 0 else min(here, ceil(over / saved)) if saved > 0 else here
            yield away, half_away, again, here - again
