"""Start and end of a run's process group."""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightseq.distributed.compile_workers import end_compile_workers
from lightseq.distributed.environment import cache_compiled_kernels, refuse_variable, whole_number_in
from lightseq.distributed.start_over import (
    MOST_PORT,
    RESTARTS_PER_ATTEMPT,
    attempt,
    is_store_of_launcher,
    launch_id,
    memory_limit,
)
from lightseq.distributed.watchdog import RENDEZVOUS, Watchdog, own_connection
from lightseq.distributed.world import World, report_error
from lightseq.utils.formatting import first_line

GLOO_RELEASE_SECONDS = 0.1
WAIT_SECONDS = 20.0  # after which a rank says what it waits for


@contextmanager
def init_distributed(timeout_seconds: float) -> Iterator[World]:
    """Joins the processes that torchrun started; without a launcher the world is this process alone.

    The timeout applies to every later collective. Ranks that have not joined after half of it are named in an error.
    """
    cache_compiled_kernels()
    rank, size = whole_number_in("RANK", 0), whole_number_in("WORLD_SIZE", 1, least=1)
    local_rank, local_size = whole_number_in("LOCAL_RANK", 0), whole_number_in("LOCAL_WORLD_SIZE", 1, least=1)
    if "RANK" not in os.environ and size > 1:
        refuse_variable("WORLD_SIZE", "is set, but RANK is not")
    if rank >= size:
        refuse_variable("RANK", f"is not below WORLD_SIZE, {size:,}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    restarts = whole_number_in("TORCHELASTIC_RESTART_COUNT", 0) + RESTARTS_PER_ATTEMPT * attempt()
    timeout, launch = timedelta(seconds=timeout_seconds), launch_id() or uuid.uuid4().hex
    memory_limit()  # refuses an invalid limit before the ranks meet
    world = World(rank, size, local_rank, local_size, device, restarts)
    with Watchdog(world, timeout_seconds / 2, stacks=None, phase=RENDEZVOUS) as watchdog, _waiting(world, watchdog):
        store = _store(timeout)
        if size > 1:
            watchdog.connect(own_connection(store, world, RENDEZVOUS))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            store=dist.PrefixStore(f"start {restarts}", store),  # entries from before a restart hold dead addresses
            rank=rank,
            world_size=size,
        )
    try:
        # The launcher's own run id is "none" by default.
        yield replace(world, launch=store.compare_set("lightseq: launch", "", launch).decode())
    except Exception as error:  # Python prints the traceback
        report_error(f"rank {rank}: {type(error).__name__}: {first_line(error)}", prints=False)
        raise
    finally:
        # gloo's thread needs the interpreter's lock to release its last work, and aborts if the interpreter is gone.
        # torch's caches may keep the group, so nothing waits for that thread.
        time.sleep(GLOO_RELEASE_SECONDS)
        dist.destroy_process_group()
        end_compile_workers()


@contextmanager
def _waiting(world: World, watchdog: Watchdog) -> Iterator[None]:
    """Says after a while which ranks have not joined, and lets Ctrl-C end this process meanwhile.

    torch waits without running Python's signal handlers.
    """
    if world.size == 1:
        yield
        return

    def say() -> None:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        missing = watchdog.missing_ranks()
        if missing is None:
            line = f"rank {world.rank} waits for the rendezvous store at {place}, which rank 0 or the launcher hosts"
        elif world.is_main and missing:
            named = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            line = f"waiting for {len(missing)} of {world.size} ranks to join at {place}: {named}"
        else:
            return
        print(line, file=sys.stderr, flush=True)

    timer = threading.Timer(WAIT_SECONDS, say)
    timer.daemon = True
    timer.start()
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main_thread else None
    try:
        yield
    finally:
        timer.cancel()
        if is_main_thread:
            signal.signal(signal.SIGINT, before)


def _store(timeout: timedelta) -> dist.Store:
    """Returns the rendezvous store, which a launcher keeps when it restarts the ranks. Waits for no other rank."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    address = _require_env("MASTER_ADDR")
    _require_env("MASTER_PORT")
    port = whole_number_in("MASTER_PORT", 0, most=MOST_PORT)
    hosts_store = whole_number_in("RANK", 0) == 0 and not is_store_of_launcher()
    try:
        return dist.TCPStore(
            address, port, is_master=hosts_store, timeout=timeout, wait_for_workers=False, multi_tenant=hosts_store
        )
    except (dist.DistError, ValueError, OSError) as error:
        report_error(f"the rendezvous store at {address}:{port} cannot be used ({first_line(error)}); check both")
        raise SystemExit(2) from error


def _require_env(name: str) -> str:
    if name not in os.environ:
        message = f"RANK is set, but {name} is not; set both, as torch.distributed.run does, or neither"
        report_error(message)
        raise SystemExit(2)
    return os.environ[name]
