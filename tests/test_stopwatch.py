"""The stopwatch counts every lap once, also those that end while it looks."""

import torch

from lightseq.distributed.stopwatch import DeviceTimestamp, Stopwatch


class Timestamp(DeviceTimestamp):
    """A timestamp of a GPU that passes when it is looked at for the `looks`-th time."""

    def __init__(self, seconds: float, looks: int = 0) -> None:
        self._seconds, self._looks, self._event = seconds, looks, None

    @property
    def has_passed(self) -> bool:
        self._looks -= 1
        return self._looks < 0


def test_a_lap_that_ends_after_it_was_looked_at_is_counted_later() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch._laps = [(Timestamp(0.0), Timestamp(end, looks)) for end, looks in ((1.0, 0), (10.0, 1), (0.4, 0))]
    assert watch.seconds() == 1.0
    assert watch.seconds() == (10.0 + 0.4) / 2
    assert watch.seconds() == 0.0
