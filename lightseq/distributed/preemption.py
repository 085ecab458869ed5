"""Whether somebody asked the run to stop: SIGTERM, SIGUSR1 or Ctrl-C at any rank ends all after the same step."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from lightseq.distributed.environment import is_main_process

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ANSWER = "ends after this step, with a checkpoint if this run saves any; {} Ctrl-C ends it at once"
ONE_CTRL_C = 1.0  # seconds in which a terminal and a launcher may both pass one on


class StopRequest:
    """Remembers a signal. What these signals did before, they do again after the `with`.

    A step can take hours: a second Ctrl-C ends the process at once. Of the others several may be one, from a scheduler
    and from a launcher that passes its own on.
    """

    def __init__(self) -> None:
        self._asked, self._first = 0, 0.0
        self._answer: tuple[torch.Tensor, dist.Work] | None = None
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def begin_poll(self, failed: bool) -> None:
        """Begins to ask all ranks whether one got a signal so far, or something failed there; once in every step."""
        said = torch.tensor([self._asked, failed], dtype=torch.int32)
        self._answer = said, dist.all_reduce(said, op=dist.ReduceOp.MAX, async_op=True)

    def poll_result(self) -> tuple[str | None, bool]:
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
        if self._asked and time.monotonic() - self._first > ONE_CTRL_C and self._is_ctrl_c(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._asked:
            return
        self._asked, self._first = number, time.monotonic()
        if is_main_process():
            answer = ANSWER.format("another" if number == signal.SIGINT else "a")
            line = f"\n{signal.Signals(number).name}: {answer}\n"
            os.write(2, line.encode())  # Python's own streams may be in the middle of something

    def _is_ctrl_c(self, number: int) -> bool:
        """Of a second one torch's launcher, which keeps its processes off the terminal, makes a SIGTERM."""
        return number == signal.SIGINT or (number == signal.SIGTERM and self._asked == signal.SIGINT)
