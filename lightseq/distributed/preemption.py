"""Requests to stop a run: SIGTERM, SIGUSR1 or Ctrl-C on any rank ends all ranks after the same step."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from lightseq.distributed.environment import is_main_process

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP_MESSAGE = "ends after this step, with a checkpoint if this run saves any; {} Ctrl-C ends it at once"
CTRL_C_SECONDS = 1.0  # within which a terminal and a launcher may deliver the same Ctrl-C twice


class StopRequest:
    """Signal handlers that record a request to stop, and a vote of all ranks on it. `__exit__` restores the old ones.

    A step can take hours, so a second Ctrl-C ends the process at once. Other signals may arrive twice, from a scheduler
    and from a launcher that forwards its own.
    """

    def __init__(self) -> None:
        self._signal, self._first = 0, 0.0
        self._poll: tuple[torch.Tensor, dist.Work] | None = None
        self._previous = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def begin_poll(self, failed: bool) -> None:
        """Starts asking all ranks for signals and failures so far. Called once in every step."""
        state = torch.tensor([self._signal, failed], dtype=torch.int32)
        self._poll = state, dist.all_reduce(state, op=dist.ReduceOp.MAX, async_op=True)

    def poll_result(self) -> tuple[str | None, bool]:
        """Returns the name of a signal that any rank got, and whether any rank failed; the same on all ranks.

        The answer is as of each rank's `begin_poll`. Waits for the other ranks' hosts, not for the GPU.
        """
        assert self._poll is not None, "call begin_poll first"
        (state, work), self._poll = self._poll, None
        work.wait()
        number, any_failed = state.tolist()
        return signal.Signals(number).name if number else None, bool(any_failed)

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._signal and time.monotonic() - self._first > CTRL_C_SECONDS and self._is_ctrl_c(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._signal:
            return
        self._signal, self._first = number, time.monotonic()
        if is_main_process():
            answer = STOP_MESSAGE.format("another" if number == signal.SIGINT else "a")
            line = f"\n{signal.Signals(number).name}: {answer}\n"
            os.write(2, line.encode())  # Python's own streams are not reentrant

    def _is_ctrl_c(self, number: int) -> bool:
        """Returns whether a signal is a Ctrl-C; torch's launcher forwards the second one as SIGTERM."""
        return number == signal.SIGINT or (number == signal.SIGTERM and self._signal == signal.SIGINT)
