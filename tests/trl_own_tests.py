"""TRL's own tests of its trainers, run with this project's trainers on several ranks.

python tests/trl_own_tests.py --trl PATH

PATH is a checkout of TRL's repository, best at the installed version. Each test runs unmodified in one process, and, if
it passes and makes a trainer, with `SequenceParallelSFTTrainer` and its siblings on each number of ranks (gloo, CPU).
There it passes only if it passes on every rank. Each run is forked from a process that has imported the tests. Models
and data sets are the stand-ins of trl_hub.py. The exit status is 1 if a test fails
on several ranks, unless this project refuses its model or an option with a ValueError.
"""

import argparse
import ast
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from worlds import free_port, freeze_imports

HERE = Path(__file__).resolve().parent
TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer", "DistillationTrainer")
FILES = tuple(f"tests/test_{name.removesuffix('Trainer').lower()}_trainer.py" for name in TRAINERS)
HELPERS = ("tests/conftest.py", "tests/testing_utils.py")
TRAINS, MAKES = "tests that train", "tests that only make a trainer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, metavar="PATH", help="checkout of TRL's repository")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], help="ranks that share each sequence, in turn (default: 2)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run of a test (default: 120)")
    parser.add_argument("--steps", type=int, help="train for so many steps at most (default: as the tests do)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only tests that match, as pytest's -k")
    options = parser.parse_args()
    if find_spec("trl") is None:
        parser.error("TRL is not installed; pip install trl")
    checkout = options.trl.resolve()
    files = [name for name in FILES if (checkout / name).is_file()]
    if not files:
        parser.error(f"--trl {options.trl}: no {FILES[0]} there; give a checkout of TRL's repository")
    for missing in sorted({*FILES} - {*files}):
        print(f"{missing} is missing: this checkout of TRL has no tests of that trainer")
    with tempfile.TemporaryDirectory() as folder:
        print("generating models and data sets", flush=True)
        this = {**os.environ, "PYTHONPATH": str(HERE.parent)}  # this repository before an installed one
        subprocess.run([sys.executable, HERE / "trl_hub.py", folder], check=True, capture_output=True, env=this)
        os.environ.update(
            HF_HOME=f"{folder}/home", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", DS_ACCELERATOR="cpu"
        )
        os.chdir(folder)
        sys.path.insert(0, str(HERE.parent))
        runner = Runner(checkout, files, options.ranks, options.timeout, options.steps, Path(folder))
        tests = [str(checkout / name) for name in files]
        pytest.main(["-q", "-s", "--import-mode=append", "-k", options.k, *tests], plugins=[runner])
    return report(runner.results, options.ranks)


# ---- one test --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result of a test in one process or on all ranks."""

    word: str  # passed, failed, skipped
    reason: str = ""
    refused: bool = False  # by a ValueError of this project
    used: str = ""  # TRAINS, MAKES, or nothing


@dataclass
class Result:
    test: str
    unmodified: Outcome
    ours: dict[int, Outcome]  # on so many ranks; empty if the unmodified test does not pass or makes no trainer


class Runner:
    """pytest plugin that runs each test in processes forked for it."""

    def __init__(
        self, checkout: Path, files: list[str], ranks: list[int], timeout: float, steps: int | None, folder: Path
    ) -> None:
        self.checkout, self.files, self.ranks = checkout, files, ranks
        self.timeout, self.steps, self.folder = timeout, steps, folder
        self.results: list[Result] = []
        self.directory = folder  # of the running test, for all ranks
        # Of the test in a forked process:
        self.world = 1
        self.used = ""
        self.failure: Outcome | None = None
        self.store: Any = None

    def pytest_configure(self) -> None:
        # Here once, not in every process. The installed trl comes before the checkout's folder is on the path.
        for name in ("trl", "lightseq.integrations.trl", "deepspeed"):
            if find_spec(name):
                import_module(name)
        import_module("tiny_processors").register_processors()
        add_missing_names(self.checkout / name for name in (*self.files, *HELPERS))
        self._watch_trainers()

    def _watch_trainers(self) -> None:
        from transformers import Trainer

        from lightseq.integrations import SequenceParallel

        make, train = Trainer.__init__, Trainer.train

        def watched_make(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.used = self.used or MAKES
            make(trainer, *args, **kwargs)
            assert isinstance(trainer, SequenceParallel) == (self.world > 1), type(trainer)

        def watched_train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self.used = TRAINS
            if self.steps is not None:
                trainer.args.max_steps = (
                    min(self.steps, trainer.args.max_steps) if trainer.args.max_steps > 0 else self.steps
                )
            return train(trainer, *args, **kwargs)

        Trainer.__init__, Trainer.train = watched_make, watched_train

    def pytest_collection_finish(self) -> None:
        freeze_imports()

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder for all ranks, as a shared file system would give."""
        return self.directory

    @pytest.fixture
    def lazy_shared_datadir(self) -> Path:
        """The folder that pytest-datadir would give."""
        return self.checkout / "tests" / "data"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        unmodified = self._run(item, ranks=1)
        is_ours = unmodified.word == "passed" and unmodified.used
        ours = {ranks: self._run(item, ranks) for ranks in self.ranks if is_ours}
        result = Result(item.nodeid.removeprefix("tests/"), unmodified, ours)
        self.results.append(result)
        print(describe(result)[:400], flush=True)
        return True

    def _run(self, item: pytest.Item, ranks: int) -> Outcome:
        """Runs a test on forked ranks, and returns the outcome of the first that does not pass."""
        context = multiprocessing.get_context("fork")
        port = free_port()
        with tempfile.TemporaryDirectory(dir=self.folder) as directory:
            self.directory = Path(directory)
            ends, processes = [], []
            for rank in range(ranks):
                end, child_end = context.Pipe(duplex=False)
                process = context.Process(target=self._enter, args=(item, rank, ranks, port, child_end))
                process.start()
                child_end.close()
                ends.append(end)
                processes.append(process)
            try:
                return self._collect(ends)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    def _collect(self, ends: list[Connection]) -> Outcome:
        """Receives outcomes until all ranks have sent theirs, one does not pass, or the time is over."""
        until, waiting = time.monotonic() + self.timeout, list(ends)
        while True:
            ready = wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                return Outcome("failed", f"no end in {self.timeout:.0f} s")
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    outcome = end.recv()
                except EOFError:
                    outcome = Outcome("failed", "a rank died")
                waiting.remove(end)
                if outcome.word != "passed" or not waiting:
                    return outcome

    def _enter(self, item: Any, rank: int, ranks: int, port: int, end: Connection) -> None:
        """Runs a test in a forked process as one rank, and sends its outcome."""
        import torch
        from _pytest.runner import runtestprotocol

        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        torch.set_num_threads(1)
        self.world = ranks
        if ranks > 1:
            from lightseq import integrations

            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
            for name in TRAINERS:
                if hasattr(item.module, name):
                    setattr(item.module, name, getattr(integrations, f"SequenceParallel{name}"))
        end.send(self._outcome(item, runtestprotocol(item, log=False)))
        time.sleep(self.timeout)  # the first rank keeps the store that others may need, until the parent ends them all
        os._exit(0)  # without the parent's cleanup

    def _outcome(self, item: pytest.Item, phases: Iterable[Any]) -> Outcome:
        for phase in phases:
            if phase.skipped and hasattr(phase, "wasxfail"):
                return Outcome("skipped", phase.wasxfail, used=self.used)
            if phase.skipped:
                return Outcome("skipped", phase.longrepr[2].removeprefix("Skipped: "), used=self.used)
            if phase.failed:
                return self.failure or Outcome("failed", str(phase.longrepr), used=self.used)
        return Outcome("passed", used=self.used)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: Any) -> None:
        """Notes the error and its origin, before TRL's hook clears the traceback."""
        if call.excinfo is None or self.failure is not None:
            return
        error = call.excinfo.value
        raised = call.excinfo.traceback[-1]
        refused = isinstance(error, ValueError) and HERE.parent / "lightseq" in Path(raised.path).parents
        first = (str(error).strip() or "no message").splitlines()[0]
        place = f"{Path(raised.path).name}:{raised.lineno + 1}"
        self.failure = Outcome("failed", f"{type(error).__name__}: {first} ({place})", refused, self.used)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Leaves the process group, which a fixture of TRL would take for one of vLLM's, and keeps its store."""
        from torch import distributed

        if distributed.is_initialized():
            self.store = distributed.distributed_c10d._get_default_store()
            distributed.destroy_process_group()


# ---- tests of another version of TRL ---------------------------------------------------------------------------------


def add_missing_names(paths: Iterable[Path]) -> None:
    """Adds names that these files import from TRL and the installed version lacks; a test that calls one is skipped."""
    import trl

    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                module = import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        setattr(module, alias.name, _skips(f"TRL {trl.__version__} has no {alias.name}"))


def _skips(reason: str) -> Any:
    def skip(*args: Any, **kwargs: Any) -> bool:
        if os.environ.get("PYTEST_CURRENT_TEST"):
            pytest.skip(reason)
        return False  # asked on import, as is_X_available() is

    return skip


# ---- report ----------------------------------------------------------------------------------------------------------


def describe(result: Result) -> str:
    if not result.ours:
        return f"{said(result.unmodified, result.test)} (unmodified)"
    words = ", ".join(f"{ranks}: {said(outcome)}" for ranks, outcome in result.ours.items())
    return f"{result.test}, ranks {words}"


def said(outcome: Outcome, test: str = "") -> str:
    parts = ("refused" if outcome.refused else outcome.word, test, outcome.reason)
    return ": ".join(part for part in parts if part)


def report(results: list[Result], numbers_of_ranks: list[int]) -> int:
    """Prints counts and all tests that do not pass, and returns the exit status."""
    left_out = Counter(r.unmodified.reason for r in results if r.unmodified.word == "skipped")
    print(f"\n{len(results)} tests, {left_out.total()} left out:")
    for reason, count in left_out.most_common():
        print(f"{count:6} {reason}")
    broken = [r for r in results if r.unmodified.word == "failed"]
    print(f"{len(broken)} fail unmodified in one process:")
    for result in broken:
        print(f"  {result.test}: {result.unmodified.reason}")
    print(f"{sum(r.unmodified.word == 'passed' and not r.ours for r in results)} make no trainer and pass unmodified")
    failed = 0
    for used, ranks in product((TRAINS, MAKES), numbers_of_ranks):
        ran = [(r.test, r.ours[ranks]) for r in results if r.ours and r.unmodified.used == used]
        others = [(test, ours) for test, ours in ran if ours.word != "passed"]
        print(f"{used}: {len(ran) - len(others)} of {len(ran)} pass on {ranks} ranks")
        for test, ours in others:
            print(f"  {said(ours, test)}")
            failed += not ours.refused
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
