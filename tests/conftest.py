"""Settings of the whole test suite: threads per process, where a test can run, and common fixtures."""

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

# Tests start worlds of several processes on few cores; one thread each is fastest, and makes sums repeat exactly.
# Set before torch is imported, and inherited by every process a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with Ctrl-C ignored, and tests send one to the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import many_chunks  # noqa: F401  # as in the processes of worlds.py

# Collecting tests imports torch and transformers, and nothing of them is garbage.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        from forkserver import share

        share()


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
