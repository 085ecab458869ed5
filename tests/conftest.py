"""Knows what the whole test suite shares: threads per process, and where a GPU test can run."""

import os

import pytest

# Tests start worlds of several processes on few cores; one thread each is fastest, and makes sums repeat exactly.
# Set before torch is imported, and inherited by every process a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    wanted = marker.args[0] if marker.args else 1
    found = torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} GPU(s), {found} here")
    from lightseq.mesh import keep_compiled_kernels

    keep_compiled_kernels()
