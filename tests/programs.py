"""One of the training programs, run inside a test's process group as a command line would run it."""

import contextlib
import gc
import io
import shlex
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from worlds import one_process

import llama2
import llama3
from lightseq.cli import BOTH
from lightseq.distributed.world import World
from lightseq.training import command, loop, train

FAMILIES = {"llama2": llama2.FAMILY, "llama3": llama3.FAMILY}
ENTRIES = {**FAMILIES, "any": BOTH}


class Ended(NamedTuple):
    """The end of a program on one rank."""

    status: int
    out: str
    err: str


def program(rank: int, family: str, words: str, restarts: int = 0, launch: str = "one") -> Ended:
    """One training program on this rank, in the process group that the test has joined already."""
    size = dist.get_world_size()
    return run_in(World(rank, size, rank, size, torch.device("cpu"), restarts, launch), family, words)


def programs(rank: int, family: str, runs: list[str]) -> list[Ended]:
    """Runs programs one after the other on this rank."""
    return [program(rank, family, words) for words in runs]


def described_programs(
    rank: int, runs: list[str], describe: Callable[[torch.nn.Parameter], str]
) -> list[tuple[Ended, dict[str, str]]]:
    """Runs programs, and describes the parameters of each model before it trains."""
    ends, seen = [], dict[str, str]()
    run = loop.TrainingLoop.run

    def looked(self: loop.TrainingLoop) -> None:
        seen.update({name: describe(p) for name, p in self.trainer.model.named_parameters()})
        run(self)

    loop.TrainingLoop.run = looked  # type: ignore[method-assign]
    for words in runs:
        seen.clear()
        ends.append((program(rank, "any", words), dict(seen)))
    loop.TrainingLoop.run = run  # type: ignore[method-assign]
    return ends


def alone(words: str, family: str = "llama3") -> Ended:
    """Runs a program on a process group of this process alone."""
    with one_process():
        return program(0, family, words)


def run_in(world: World, family: str, words: str) -> Ended:
    """The same in a world of its own making."""
    train.init_distributed = lambda timeout_seconds: contextlib.nullcontext(world)  # type: ignore[assignment]
    gc.freeze()  # a run unfreezes at its end, and the collection of the next would look at every module again
    end = captured(lambda: command.main(ENTRIES[family], shlex.split(words)))
    dist.barrier()
    return end


def captured(main: Callable[[], int | None]) -> Ended:
    """Returns the output of a call, and the status that it returns or exits with."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main()
        except SystemExit as end:
            status = end.code  # type: ignore[assignment]
    return Ended(int(status or 0), out.getvalue(), err.getvalue())


def refusal(main: Callable[[list[str]], int | None], *words: object) -> str:
    """Returns the one line with which a command refuses its words."""
    end = captured(lambda: main([str(word) for word in words]))
    assert end.status == 2 and not end.out and "error: " in end.err and end.err.count("\n") == 1, end
    return end.err


def shown(main: Callable[[list[str]], int | None], *words: object) -> str:
    """Returns what a command prints that succeeds."""
    end = captured(lambda: main([str(word) for word in words]))
    assert end.status == 0, end
    return end.out
