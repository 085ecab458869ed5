"""Knows what the whole test suite shares: threads per process, where a GPU test can run, and what begins first."""

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

# Tests start worlds of several processes on few cores; one thread each is fastest, and makes sums repeat exactly.
# Set before torch is imported, and inherited by every process a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with Ctrl-C ignored, and tests send one to the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collecting tests imports torch and transformers, and nothing of them is garbage.
gc.disable()

# The files that take longest, in order: begun last, one would leave every worker but its own without work.
LONGEST = (
    "train_cli", "plan", "goldens", "terminals", "hf", "samples", "checkpoint", "families", "sweep", "verify", "images",
    "parity", "deepspeed", "checkpoints", "analysis_report",
    "evaluate", "roll_call", "schedule", "architecture", "hostile_files", "rank_launcher", "adapters", "saving",
    "windows", "integrations_trl", "benchmark_step", "refusals", "weights", "plan_steps", "tiled", "layer_costs",
    "faults", "token_cache", "analysis_curves", "documents", "slurm", "output_directory", "schedule_time",
    "attention", "happens_before", "loss", "halo", "merge", "content", "kernels", "errors", "packing",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        from forkserver import share

        share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in LONGEST if not Path(__file__).with_name(f"test_{name}.py").is_file()]
    assert not missing, f"LONGEST names files that are not here: {missing}"
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(Path(item.fspath).stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("compat"):
        if marker.args and Version(version("transformers")) < Version(marker.args[0]):
            pytest.skip(f"needs transformers {marker.args[0]}, {version('transformers')} here")
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    wanted = marker.args[0] if marker.args else 1
    found = torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} GPU(s), {found} here")
    from lightseq.distributed.environment import cache_compiled_kernels

    cache_compiled_kernels()


@pytest.fixture
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders chats in this process. The fork of a process as large as this one would take most of a test's time."""

    def limited_map(function: Callable[[Any], Any], batches: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        yield from (list(map(function, batch)) for batch in batches)

    monkeypatch.setattr("lightseq.data.token_cache.limited_map", limited_map)


@pytest.fixture
def alone() -> Iterator[None]:
    """Joins a process group of this process alone."""
    from worlds import one_process

    with one_process():
        yield
