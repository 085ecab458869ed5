"""Knows what the whole test suite shares: threads per process, where a GPU test can run, and what begins first."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "train_cli", "parity", "sweep", "hf", "goldens", "fallback", "benchmark_step", "deepspeed", "verify",
    "evaluate", "faults", "plan", "refusals", "streams", "packaging", "checkpoint", "schedule", "rendezvous",
    "tiled", "examples", "saving", "attention", "watchdog", "plan_training", "log_probs", "packing", "input_checks",
    "search", "rehearsal", "analysis_report", "integrations_trainer", "integrations_trl", "windows", "optim_8bit",
    "buckets", "benchmark_attention", "weights", "token_cache", "documents", "quiet",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in LONGEST if not Path(__file__).with_name(f"test_{name}.py").is_file()]
    assert not missing, f"LONGEST names files that are not here: {missing}"
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(Path(item.fspath).stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
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
def alone() -> Iterator[None]:
    """Joins a process group of this process alone."""
    from worlds import one_process

    with one_process():
        yield
