"""Memory available to processes on this host, within the limits of their cgroups."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from lightseq.distributed.world import World

FREE_SHARE: Final = 0.8  # share of free host memory that automatic offloading may use
MEMBERSHIP: Final = Path("/proc/self/cgroup")
CGROUPS: Final = Path("/sys/fs/cgroup")


class MemoryBytes(NamedTuple):
    """Total and free memory of a host, in bytes."""

    total: int
    free: int


class CgroupFiles(NamedTuple):
    """File names of a group's limit, its usage, and the reclaimable page cache, for one version of cgroups."""

    limit: str
    usage: str
    cache: str  # a line of memory.stat


V1: Final = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = CgroupFiles("memory.max", "memory.current", "inactive_file")


def host_memory(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> MemoryBytes:
    """Returns the host's memory, or the lower limit of the container or batch job, at which Linux kills processes."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _limits(membership, cgroups):
        total, free = min(total, limit), min(free, limit - used)
    return MemoryBytes(total, max(0, free))


def _limits(membership: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and usage of every readable cgroup of this process, in bytes."""
    for directory, names in _groups(membership, cgroups):
        try:
            limit = int((directory / names.limit).read_text())
            used = int((directory / names.usage).read_text())
            lines = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
        except (OSError, ValueError):  # no such file, or "max"
            continue
        yield limit, used - sum(int(size) for name, size in lines if name == names.cache)


def _groups(membership: Path, cgroups: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """Yields the directories of the process's own cgroup and of its parents up to the root.

    Inside a container its own group is the root, whatever its name.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", V1) if controllers else (cgroups, V2)
        own = root / path.lstrip("/")
        yield from ((directory, names) for directory in (own, *own.parents) if directory.is_relative_to(root))


def free_host_memory(world: World, share: float = FREE_SHARE) -> float:
    """Returns this rank's share, in bytes, of the usable free memory of its host."""
    return share * host_memory().free / world.local_size


def host_bytes_for_layers(free: float, state: float) -> float:
    """Returns the bytes of a rank's free host memory that layers may offload to, after weights and optimizer state."""
    return FREE_SHARE * max(0.0, free - state)
