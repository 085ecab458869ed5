"""Whether somebody asked the run to stop: SIGTERM or SIGUSR1 at any rank ends all of them after the same step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers a signal. What these signals did before, they do again after the `with`."""

    def __init__(self) -> None:
        self._asked = 0
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def agreed(self, failed: bool) -> tuple[str | None, bool]:
        """The name of the signal that any rank got, and whether anything failed on any; the same on every rank.

        Waits for the other hosts, for no GPU.
        """
        asked = torch.tensor([self._asked, failed], dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        number, any_failed = asked.tolist()
        return signal.Signals(number).name if number else None, bool(any_failed)

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
