"""Runs a test's function on several processes joined by gloo (or nccl), and brings failures and results back."""

import faulthandler
import gc
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import forkserver
import many_chunks  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 120
"""Seconds that a rank waits for the others."""

GPU_WORLDS = [pytest.param(world, marks=pytest.mark.gpu(1)) for world in (2, 4)]
NCCL_WORLDS = [pytest.param(world, marks=pytest.mark.gpu(world)) for world in (2, 4)]


def spawn(world: int, fn: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """`fn(rank, *args)` on `world` processes in one process group; returns what every rank returned, in rank order.

    `fn` is a module-level function; results must pickle. A failure on any rank fails the test with its traceback. On
    "cuda" every rank has a GPU (`gpu_of`), or several share one: joined by gloo, for NCCL refuses that, they map each
    other's memory as any.
    """
    context = mp.get_context("spawn") if device == "cuda" else forkserver.context()
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    # Held here, as a launcher would: a rank that came before the one with the store would try again a second later.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_enter, args=(rank, world, store.port, device, writer, fn, args), daemon=True)
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()  # so that the end of a rank ends its pipe
    readers = {reader: rank for rank, (reader, _) in enumerate(pipes)}
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            for reader in connection.wait(list(readers)):
                rank = readers.pop(reader)
                try:
                    error, results[rank] = reader.recv()
                except EOFError:
                    error = "ended without a result; `-n 0 -s` shows what it printed"
                assert error is None, f"rank {rank} of {world}:\n{error}"
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(world)]


@contextmanager
def one_process() -> Iterator[None]:
    """Joins a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def freeze_imports() -> None:
    """Keeps collections from looking at all that the server has imported, which would copy its memory.

    What a run freezes at its start stays frozen too.
    """
    gc.freeze()
    gc.unfreeze = lambda: None


def _enter(rank: int, world: int, port: int, device: str, writer: Any, fn: Callable[..., Any], args: tuple) -> None:
    freeze_imports()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT - 10)  # the others soon give up and say only that they waited
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(gpu_of(rank))
            share = torch.cuda.device_count() < world
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = str(int(share))
            backend = "cpu:gloo,cuda:gloo" if share else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT))
        value = fn(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        writer.send((None, value))
    except BaseException:  # whatever it was, the parent must hear of it
        writer.send((traceback.format_exc(), None))
        os._exit(1)


def gpu_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
