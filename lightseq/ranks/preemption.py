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
        self._answer: tuple[torch.Tensor, dist.Work] | None = None
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def ask(self, failed: bool) -> None:
        """Begins to ask all ranks whether one got a signal so far, or something failed there; once in every step."""
        said = torch.tensor([self._asked, failed], dtype=torch.int32)
        self._answer = said, dist.all_reduce(said, op=dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> tuple[str | None, bool]:
        """The name of the signal that any rank got, and whether anything failed on any; the same on every rank.

        What it was when each rank asked. Waits for the other hosts, for no GPU.
        """
        assert self._answer is not None, "who did not ask would wait for nobody, and the others for it"
        (said, work), self._answer = self._answer, None
        work.wait()
        number, any_failed = said.tolist()
        return signal.Signals(number).name if number else None, bool(any_failed)

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
