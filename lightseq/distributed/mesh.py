"""Process group, devices and meshes of a run: how data, sequences and parameters are split among ranks.

Only this module, environment.py, start_over.py and launch/ read environment variables.
"""

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightseq.distributed.environment import cache_compiled_kernels, refuse_variable, whole_number_in
from lightseq.distributed.error_report import report_error
from lightseq.distributed.host_memory import host_memory
from lightseq.distributed.rendezvous import RendezvousMonitor
from lightseq.distributed.start_over import (
    MOST_PORT,
    RESTARTS_PER_ATTEMPT,
    attempt,
    is_store_of_launcher,
    launch_id,
    memory_limit,
)
from lightseq.utils.formatting import divisors, first_line, plural

T = TypeVar("T")
GLOO_RELEASE_SECONDS = 0.1
FREE_SHARE = 0.8  # of free host memory that automatic offloading may use


@dataclass(frozen=True)
class World:
    """Rank and device of this process. `local_size` processes share its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    restarts: int = 0  # restarts of this run by the launcher, or by itself after it ran out of memory
    launch: str = ""  # id of the launch, equal on every rank and after a restart

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Meshes:
    """Data and sequence coordinates of a rank, and the mesh for sharding (or replicating and sharding) parameters."""

    data_ranks: int
    data_rank: int
    sequence: DeviceMesh
    parameters: DeviceMesh


def make_deterministic() -> None:
    """Makes torch compute the same bits from the same inputs, on GPUs too."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def use_host_cores(world: World) -> None:
    """Gives CPU work of GPU runs, such as AdamW, this rank's share of the host's cores.

    torch's launcher allows one thread if OMP_NUM_THREADS is unset; a larger number set by the user stays. CPU runs are
    left alone, because the number of threads changes the last bits of sums.
    """
    share = len(os.sched_getaffinity(0)) // world.local_size
    if world.device.type == "cuda" and torch.get_num_threads() == 1 < share:
        torch.set_num_threads(share)


def set_deepspeed_environment(world: World) -> None:
    """Sets what DeepSpeed reads from the environment at import: its device and the local rank."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))


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
    memory_limit()  # refuses an invalid one before the ranks meet
    with RendezvousMonitor(rank, size, timeout_seconds / 2, restarts, exit_process) as monitor:
        store = _store(timeout)
        monitor.connect(store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            store=dist.PrefixStore(f"start {restarts}", store),  # entries from before a restart hold dead addresses
            rank=rank,
            world_size=size,
        )
    try:
        # The launcher's own run id is "none" by default.
        launch = store.compare_set("lightseq: launch", "", launch).decode()
        yield World(rank, size, local_rank, local_size, device, restarts, launch)
    except Exception as error:  # Python prints the traceback
        report_error(f"rank {rank}: {type(error).__name__}: {first_line(error)}", prints=False)
        raise
    finally:
        # gloo's thread needs the interpreter's lock to release its last work, and aborts if the interpreter is gone.
        # torch's caches may keep the group, so nothing waits for that thread.
        time.sleep(GLOO_RELEASE_SECONDS)
        dist.destroy_process_group()


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


def on_all_ranks(world: World, prepare: Callable[[], T]) -> T:
    """Returns `prepare()` on every rank; if it raises ValueError or OSError on any, all ranks exit with status 2.

    The lowest failing rank prints its error in one line. `prepare` must not wait for other ranks unless it fails on all
    of them alike.
    """
    refusal, result = None, None
    try:
        result = prepare()
    except (ValueError, OSError) as error:
        where = f" (rank {world.rank} on {socket.gethostname()})" if world.rank else ""
        refusal = (first_line(error) if isinstance(error, OSError) else " ".join(str(error).split())) + where
    refusals: list[str | None] = [None] * world.size
    dist.all_gather_object(refusals, refusal)
    first = next((rank for rank, line in enumerate(refusals) if line is not None), None)
    if first is None:
        assert refusal is None
        return result  # type: ignore[return-value]
    report_error(str(refusals[first]), prints=world.rank == first)
    dist.barrier()  # a launcher ends all processes as soon as one ends: print first
    raise SystemExit(2)


def from_rank_0(value: T) -> T:
    """Returns rank 0's value on every rank. `value` must pickle."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def set_device(world: World) -> None:
    """Makes the world's GPU the current device of this thread; new threads start with GPU 0."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def is_first_to(task: str) -> bool:
    """Returns True on the rank that calls this first for `task`. Waits for no rank, so a failing one may call it."""
    return dist.distributed_c10d._get_default_store().add(f"lightseq: {task}", 1) == 1


def mark_done(task: str) -> None:
    """Marks a task as done for the ranks in `wait_until_done`."""
    dist.distributed_c10d._get_default_store().set(f"lightseq: {task}: done", "")


def wait_until_done(task: str, seconds: float) -> None:
    """Waits until another rank has marked the task as done, at most `seconds`."""
    store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
    while time.monotonic() < until and not store.check([f"lightseq: {task}: done"]):
        time.sleep(0.1)


def exit_process(status: int) -> NoReturn:
    """Exits at once. The usual shutdown would wait for ranks that may be waiting for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def free_host_memory(world: World, share: float = FREE_SHARE) -> float:
    """Returns this rank's share, in bytes, of the usable free memory of its host."""
    return share * host_memory().free / world.local_size


def host_bytes_for_layers(free: float, state: float) -> float:
    """Returns the bytes of a rank's free host memory that layers may offload to, after weights and optimizer state."""
    return FREE_SHARE * max(0.0, free - state)


def check_devices(world: World) -> None:
    """Raises ValueError if two processes would share a GPU."""
    if world.device.type == "cuda" and world.local_size > torch.cuda.device_count():
        raise ValueError(
            f"{world.local_size} processes on a host with {torch.cuda.device_count()} GPUs; start one process per GPU "
            "(--nproc_per_node), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on CPU"
        )


def check_sequence_size(world: World, sequence_parallel_size: int | None) -> int:
    """Returns the number of ranks that share a sequence (default: all).

    Raises ValueError if it does not divide the world.
    """
    size = sequence_parallel_size or world.size
    if world.size % size:
        raise ValueError(
            f"--sequence_parallel_size {size} does not divide {plural(world.size, 'rank')}; use {divisors(world.size)}"
        )
    return size


def make_meshes(world: World, sequence_size: int, fsdp_mode: str) -> Meshes:
    """Returns the meshes of a run.

    Neighbouring ranks share a sequence, so that its blocks stay inside a host if possible. Parameters: full_shard
    splits them over all ranks; hybrid_shard over the ranks of a host, with copies across hosts; ddp keeps a copy on
    every rank. The last two are a (copies x shards) mesh, which FSDP2 treats as hybrid sharding. Raises ValueError on
    every rank if hybrid_shard meets hosts with different numbers of ranks.
    """
    kind = world.device.type
    data_ranks = world.size // sequence_size
    both = init_device_mesh(kind, (data_ranks, sequence_size), mesh_dim_names=("data", "sequence"))
    shards = {"full_shard": world.size, "hybrid_shard": world.local_size, "ddp": 1}[fsdp_mode]
    if fsdp_mode == "hybrid_shard":
        _check_hosts(world)
    if fsdp_mode == "full_shard":
        parameters = init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    else:
        parameters = init_device_mesh(kind, (world.size // shards, shards), mesh_dim_names=("replicate", "shard"))
    return Meshes(data_ranks, world.rank // sequence_size, both["sequence"], parameters)


def _check_hosts(world: World) -> None:
    sizes = [world.local_size] * world.size
    if world.size > 1:
        dist.all_gather_object(sizes, world.local_size)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"--fsdp hybrid_shard needs equally many ranks on every host, but they have {min(sizes)} to {max(sizes)}; "
            "start as many on each, or use --fsdp full_shard"
        )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
