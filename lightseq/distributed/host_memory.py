"""The memory of this host that its processes may take: the machine's, or what their cgroups allow of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

MEMBERSHIP: Final = Path("/proc/self/cgroup")
CGROUPS: Final = Path("/sys/fs/cgroup")


class MemoryBytes(NamedTuple):
    """Of a host's memory."""

    total: int
    free: int


class CgroupFiles(NamedTuple):
    """What a version of cgroups calls a group's limit, what it has taken, and the page cache that it can give back."""

    limit: str
    taken: str
    cache: str  # a line of memory.stat


V1: Final = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2: Final = CgroupFiles("memory.max", "memory.current", "inactive_file")


def host_memory(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> MemoryBytes:
    """What the machine has, or less where a container or a batch system allows less: beyond that the kernel kills."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, taken in _limits(membership, cgroups):
        total, free = min(total, limit), min(free, limit - taken)
    return MemoryBytes(total, max(0, free))


def _limits(membership: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """The limit of every group that this process is in, and what counts towards it, as far as they can be read."""
    for directory, names in _groups(membership, cgroups):
        try:
            limit = int((directory / names.limit).read_text())
            taken = int((directory / names.taken).read_text())
            lines = [line.split() for line in (directory / "memory.stat").read_text().splitlines()]
        except (OSError, ValueError):  # no such file, or "max"
            continue
        yield limit, taken - sum(int(size) for name, size in lines if name == names.cache)


def _groups(membership: Path, cgroups: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """From the process's own group up to the root: a container sees its own as the root, under any name."""
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
