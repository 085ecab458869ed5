"""Whether somebody asked the run to stop: SIGTERM or SIGUSR1 at any rank ends all of them after the same step."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Ranks agree one step late, in a collective between CPUs that nobody waits for."""

    def __init__(self) -> None:
        self._asked = False
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def agreed(self) -> bool:
        """Whether all ranks shall stop after the step that begins now. Every rank asks once a step."""
        stop = False
        if self._work is not None:
            self._work.wait()
            stop = bool(self._flag)
        self._flag = torch.tensor([int(self._asked)], dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def close(self) -> None:
        """Signals do again what they did before."""
        if self._work is not None:
            self._work.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
