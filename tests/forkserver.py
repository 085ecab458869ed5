"""A server that has imported torch, transformers, TRL and DeepSpeed once, and forks the processes of tests."""

import multiprocessing
import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

MODULES = [
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "lightseq.training.train",
    "pytest",
    "einops._torch_specific",  # imported with the first tensor
    "transformers.optimization",  # imports peft, as every training does
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
]
ADDRESS = "LIGHTSEQ_TEST_FORKSERVER"  # of the server that pytest's workers share


def context() -> Any:
    """Returns the context of processes that the server forks. They may initialise CUDA."""
    found = multiprocessing.get_context("forkserver")
    modules = MODULES
    if _cuda_of_torch() is None:  # else each process tells DeepSpeed its device before the import
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Every engine and torch's compiler import it. `warm` runs a backward pass, after which builds for CUDA refuse
        # another one in a forked process.
        modules = [*modules, "deepspeed.runtime.zero.muon.original_muon", "warm"]
    found.set_forkserver_preload(modules)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = os.environ.get(ADDRESS)
    if address not in (None, server._forkserver_address):
        server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
        server.ensure_running = lambda: None
    else:
        with _modules_of_tests():
            server.ensure_running()
    return found


def share() -> None:
    """Starts a server for this process and those that it starts, which pytest's workers are.

    What its processes print is lost; one worker (`-n 0`) shows it where a test fails.
    """
    with _without_output():
        context()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if hasattr(server, "_forkserver_authkey"):  # Python 3.14, where each process has a server of its own
        return
    os.environ[ADDRESS] = server._forkserver_address


@contextmanager
def _modules_of_tests() -> Iterator[None]:
    """Lets the server import modules of this folder."""
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([given] if given else [])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if given:
            os.environ["PYTHONPATH"] = given


@contextmanager
def _without_output() -> Iterator[None]:
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
        for opened in (*kept, nowhere):
            os.close(opened)


def _cuda_of_torch() -> str | None:
    """Returns torch's version of CUDA, without importing torch."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return version
