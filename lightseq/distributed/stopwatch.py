"""Device timings that are measured without waiting for the device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

import torch


class DeviceTimestamp:
    """Timestamp in a GPU's stream of work, or of the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    @property
    def has_passed(self) -> bool:
        return self._event is None or self._event.query()

    def seconds_until(self, later: "DeviceTimestamp") -> float:
        """Waits for `later`, and returns the seconds from this timestamp to it."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1e3


class Stopwatch:
    """Timer of work that is the same on all ranks and waits for none of them, so that a slow rank shows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Times the work in the block."""
        begin = DeviceTimestamp(self._device)
        yield
        self._laps.append((begin, DeviceTimestamp(self._device)))

    def seconds(self) -> float:
        """Returns the mean of the laps that ended since the last call; 0 if none did."""
        over = list(takewhile(lambda lap: lap[1].has_passed, self._laps))
        self._laps = self._laps[len(over) :]
        return sum(begin.seconds_until(end) for begin, end in over) / len(over) if over else 0.0
