"""The symmetric transport where there is no GPU: ranks that map each other's files, in the place of peer memory."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from schedules import fitting
from torch import Tensor
from worlds import spawn

from lightseq.comm import symmetric
from lightseq.comm.symmetric import SymmetricTransport
from lightseq.comm.transport import Exchange, Receive, Send
from lightseq.comm.transport_choice import Blocking
from lightseq.kernels.fused.launches import Launches


class _Files:
    """torch's symmetric memory, of files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.cached, self.error = folder, 0, False, ""
        self.last: Callable[[], Tensor | None] = lambda: None

    def _open(self, rank: int, size: int) -> Tensor:
        return torch.from_file(str(self.folder / f"{rank}-{self.made}"), shared=True, size=size, dtype=torch.uint8)

    def empty_cache(self) -> None:
        self.cached = False

    def empty(self, size: int, **_: object) -> Tensor:
        assert self.last() is None, "the memory before is still there"
        if self.error or self.cached:
            raise RuntimeError(self.error or "CUDA driver error: out of memory")
        self.made += 1
        memory = self._open(dist.get_rank(), size)
        self.last = weakref.ref(memory)
        return memory

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        dist.barrier(group)
        mapped = [self._open(rank, memory.numel()) for rank in dist.get_process_group_ranks(group)]
        return SimpleNamespace(get_buffer=lambda rank, *_: mapped[rank], barrier=lambda: dist.barrier(group))


class _Stream:
    """Does at once what it is told to."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self) -> None: ...


@contextmanager
def mapped_files(folder: Path) -> Iterator[None]:
    """Lets symmetric transports run without a GPU: their memory is files, and streams do at once what they are told."""
    files = _Files(folder)
    streams = {"Stream": _Stream, "current_stream": _Stream, "synchronize": id}
    with (
        patch.object(symmetric, "symmetric_memory", files),
        patch.multiple("torch.cuda", **streams, empty_cache=files.empty_cache),
    ):
        yield


@contextmanager
def _symmetric(folder: Path) -> Iterator[SymmetricTransport]:
    with mapped_files(folder):
        yield SymmetricTransport(dist.group.WORLD, torch.device("cpu"))


def _every_schedule(rank: int, folder: Path, engine_bytes: int, blocking: bool) -> None:
    from test_attention import _context, _distributed, _expected, _whole

    whole = _whole(24, (8, 4), 8)
    want = _expected(whole)
    with (
        patch.object(symmetric, "ENGINE_BYTES", engine_bytes),
        _symmetric(folder) as transport,
        patch("lightseq.attention.context.make_transport", return_value=Blocking(transport) if blocking else transport),
    ):
        for name in fitting(dist.get_world_size(), 8, 4):
            context = _context(name, "auto", torch.float64, 8, heads=(8, 4))
            for got, expected in zip(_distributed(context, whole), want, strict=True):
                assert (got - expected).abs().max() < 1e-12, name
        assert transport.bytes_sent


@pytest.mark.parametrize(
    ("engine_bytes", "blocking"), slow_except([(1 << 20, False)], [(0, False), (1 << 20, False), (1 << 20, True)])
)
def test_every_schedule_is_exact_over_mapped_memory(engine_bytes: int, blocking: bool, tmp_path: Path) -> None:
    spawn(4, _every_schedule, tmp_path, engine_bytes, blocking)


def _larger(rank: int, folder: Path) -> None:
    with _symmetric(folder) as transport:
        for size in (1, 3 << 20, 5 << 20):
            with transport.outbox(size) as outbox:
                assert outbox.memory.numel() >= size
            del outbox
        assert transport.buffer_bytes == 5 << 20


def test_larger_memory_comes_once_the_smaller_is_gone(tmp_path: Path) -> None:
    spawn(2, _larger, tmp_path)


def _one_without(rank: int, folder: Path) -> tuple[bool, str]:
    with _symmetric(folder), patch.object(symmetric, "_why_no_peers", lambda *_: ""):
        symmetric.symmetric_memory.error = "CUDA driver error: operation not permitted\nwhere" if rank == 1 else ""
        made, reason = symmetric.make_symmetric(dist.group.WORLD, torch.device("cpu"))
        return made is None, reason


def test_no_rank_waits_for_one_without_symmetric_memory(tmp_path: Path) -> None:
    assert spawn(3, _one_without, tmp_path) == [(True, "CUDA driver error: operation not permitted")] * 3


def _beside_a_cache(rank: int, folder: Path) -> None:
    with _symmetric(folder) as transport:
        symmetric.symmetric_memory.cached = True
        with transport.outbox(3 << 20) as outbox:
            assert outbox.memory.numel() >= 3 << 20


def test_torch_gives_its_cache_back_where_the_driver_has_no_more(tmp_path: Path) -> None:
    spawn(2, _beside_a_cache, tmp_path)


def _without_room(rank: int, folder: Path) -> list[str]:
    """Returns the errors when the driver refuses a larger outbox; a smaller one must still work."""
    said: list[str] = []
    with _symmetric(folder) as transport:
        for driver in ("CUDA driver error: out of memory", "CUDA driver error: invalid argument"):
            symmetric.symmetric_memory.error = driver
            try:
                with transport.outbox(3 << 30):
                    pass
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")
        symmetric.symmetric_memory.error = ""
        with transport.outbox(1 << 10) as outbox:
            assert outbox.memory.numel() >= 1 << 10
    return said


def test_a_driver_without_memory_is_out_of_memory_as_torch_says_it(tmp_path: Path) -> None:
    found = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB of symmetric memory for attention's exchange"
    )
    assert spawn(2, _without_room, tmp_path) == [[found, "RuntimeError: CUDA driver error: invalid argument"]] * 2


def _sizes(rank: int, folder: Path) -> None:
    """A message of a megabyte and one of eight bytes to every rank, this one too."""
    world, seen = dist.get_world_size(), []

    class Seen(Launches):
        def copy(self, key, build):
            seen.append([to.nbytes for to, _ in build()])
            super().copy(key, build)

    sizes = (symmetric.ENGINE_BYTES, 8)
    with _symmetric(folder) as transport, transport.outbox(sum(sizes)) as outbox:
        mine = outbox.memory[: sum(sizes)].split(sizes)
        for x in mine:
            x.fill_(rank + 1)
        sends = [Send(dst, x) for dst in range(world) if dst != rank for x in mine]
        rooms = [(src, x, torch.empty_like(x)) for src in range(world) for x in mine]
        transport.exchange(
            Exchange(sends, [Receive(r, transport.peer_view(r, x), to) for r, x, to in rooms], copy=Seen().copy)
        )()
        assert all((to == src + 1).all() for src, _, to in rooms)
        dist.barrier()  # nobody leaves while its memory is read
    assert seen == [[8], [8] * (world - 1)]  # its own before the others are waited for


def test_small_messages_are_copied_together(tmp_path: Path) -> None:
    spawn(3, _sizes, tmp_path)
