"""Short passes of attention run as CUDA graphs where they come in the same memory again, to the same results."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from schedules import fitting
from torch import Tensor
from worlds import GPU_WORLDS, spawn

from lightseq.attention import recorded
from lightseq.attention.context import SequenceContext
from lightseq.attention.executor import _backward_pass, _forward_pass
from lightseq.attention.operator import attention
from lightseq.attention.recorded import TIMES_BEFORE, Recordings, is_short
from lightseq.comm.select import Unrecorded
from lightseq.comm.transport import Outbox
from lightseq.kernels import Launches
from lightseq.schedule.algorithms import make_schedule
from lightseq.schedule.documents import packed_schedule
from lightseq.schedule.layout import shard


class _Graph:
    """Knows whether something is being recorded, and how often it ran again."""

    recording = False
    refuses = False

    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self, *_: object) -> None:
        _Graph.recording = True

    def capture_end(self) -> None:
        _Graph.recording = False
        if _Graph.refuses:
            raise RuntimeError("operation failed due to a previous error during capture\nand more of it")

    def replay(self) -> None:
        self.replays += 1


class _Passes:
    """Of a transport that counts what it is told of, as a GPU's does."""

    def __init__(self) -> None:
        self.bytes_sent, self.launched, self.recorded_while = 0, 0, list[bool]()
        self.outbox = Outbox(torch.empty(0), recorded=self._recorded)
        self.recordings, self.again, self.held = Recordings(), 0, 0
        self.launches, self.table = Launches(), lambda: None
        self.launches._known["a copy"] = self.table  # type: ignore[assignment]

    def _recorded(self, bytes_sent: int, held: int) -> None:
        self.bytes_sent += bytes_sent
        self.held = held
        self.again += 1

    def _launch(self) -> None:
        self.launched += not _Graph.recording
        self.bytes_sent += 10
        self.launches.copy("a copy", list)
        if _Graph.recording:
            self.recorded_while.append(gc.isenabled())

    def run(self, places: str, rank: int = 0) -> None:
        run: Any = self.recordings.run
        run(_Asked(rank), places, self._launch, self.launches, self, self.outbox)


class _Asked(NamedTuple):
    rank: int


@pytest.fixture
def passes() -> Iterator[_Passes]:
    stream = SimpleNamespace(wait_stream=lambda _: None, stream_id=0)
    found = {
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda: stream,
        "is_current_stream_capturing": lambda: False,
        "memory_snapshot": lambda _: [{"total_size": 30}, {"total_size": 12}],
    }
    _Graph.refuses = False
    with patch.multiple("torch.cuda", **found):
        yield _Passes()


def test_a_pass_is_recorded_once_it_came_in_the_same_places_before(passes: _Passes) -> None:
    for _ in range(TIMES_BEFORE):
        passes.run("here")
        passes.run("there")
    assert passes.launched == 2 * TIMES_BEFORE and not passes.recordings.known
    for _ in range(3):
        passes.run("here")
    assert passes.launched == 2 * TIMES_BEFORE and passes.again == 3
    ((recording, bytes_sent, launches),) = passes.recordings.known.values()
    assert (recording.replays, bytes_sent) == (3, 10)
    assert launches == [passes.table], "what a recording reads has to stay as long as it"
    assert passes.bytes_sent == 10 * (2 * TIMES_BEFORE + 3) and passes.held == 42
    assert passes.recorded_while == [False], "what cycles hold may not be freed while a GPU records"
    assert gc.isenabled()


def test_passes_in_ever_other_places_are_never_recorded(passes: _Passes) -> None:
    with patch.object(recorded, "MOST_SEEN", 8):
        for number in range(20):
            passes.run(f"place {number}")
        assert passes.launched == 20 and len(passes.recordings._seen) <= 8


def test_no_more_are_recorded_than_there_is_room_for(passes: _Passes) -> None:
    with patch.object(recorded, "MOST_RECORDINGS", 1):
        for place in ("here", "there"):
            for _ in range(TIMES_BEFORE + 2):
                passes.run(place)
    assert len(passes.recordings.known) == 1 and passes.launched == 2 * TIMES_BEFORE + 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_recorded_is_launched_and_rank_0_says_so_once(passes: _Passes, rank: int) -> None:
    _Graph.refuses = True
    with pytest.warns(UserWarning, match="one by one") if rank == 0 else nullcontext() as said:
        for _ in range(2 * TIMES_BEFORE + 2):
            passes.run("here", rank)
    assert passes.launched == 2 * TIMES_BEFORE + 2 and not passes.recordings.known
    if said is not None:
        assert [str(w.message).splitlines() for w in said] == [
            ["short passes of attention are launched one by one, for recording failed: "
             "operation failed due to a previous error during capture"]
        ]  # fmt: skip


def _pass(name: str, tokens: int, backward: bool, boundaries: tuple[int, ...] = (), batch: int = 1) -> Any:
    table = make_schedule(name, 4)
    if boundaries:
        table = packed_schedule(table, boundaries)
    shape = torch.Size((batch, tokens // 4, 32, 128))
    if backward:
        return _backward_pass(table, 0, shape, 8, torch.bfloat16, 2, torch.float32)
    return _forward_pass(table, 0, shape, 8, torch.bfloat16)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["ulysses", "prefix"])
def test_passes_that_take_the_gpu_long_are_not_recorded(name: str, backward: bool) -> None:
    assert is_short(_pass(name, 16384, backward))
    assert not is_short(_pass(name, 65536, backward))
    assert not is_short(_pass(name, 1024, backward, batch=512)), "there memory is not small"


def test_passes_whose_results_are_merged_or_tables_differ_are_not_recorded() -> None:
    assert not is_short(_pass("zigzag", 16384, False))
    assert not is_short(_pass("prefix", 16384, False, boundaries=(0, 4096, 16384)))


@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_all_ranks_are_those_of_the_causal_half(backward: bool) -> None:
    whole = 4 * 16384**2 / 2 * 32 * 128
    assert 4 * _pass("prefix", 16384, backward).flops == whole * (2.5 if backward else 1)


def test_an_unrecorded_transport_differs_in_nothing_else() -> None:
    opened = Outbox(torch.empty(1), {"place": 1}, recorded=lambda *_: None)
    carrier: Any = SimpleNamespace(
        name="symmetric", passed_over="", at=id, exchange=id, outbox=lambda _: nullcontext(opened)
    )
    changed = Unrecorded(carrier)
    with changed.outbox(1) as outbox:
        assert outbox.recorded is None and outbox.memory is opened.memory and outbox.known is opened.known
    assert (changed.name, changed.at, changed.exchange) == ("symmetric-unrecorded", id, id)


HEADS, DIM, LENGTH, TIMES = (12, 12), 64, 1536, 12


def _repeated(rank: int) -> dict[str, tuple[int, float, list[str]]]:
    """By schedule: recordings, the largest error in any of `TIMES` passes over new values, and whether bits differ."""
    from test_attention import _context, _dense

    world, found = dist.get_world_size(), {}
    generator = torch.Generator("cuda").manual_seed(0)

    def several(context: SequenceContext) -> list[list[Tensor]]:
        here = [shard(x, context.layout, rank).clone().requires_grad_(i < 3) for i, x in enumerate(whole[0])]
        results = []
        for values in whole:
            with torch.no_grad():
                for x, value in zip(here, values, strict=True):
                    x.copy_(shard(value, context.layout, rank))
            out, lse = attention(*here[:3], context)
            results.append([x.cpu() for x in (out.detach(), lse, *torch.autograd.grad(out, here[:3], here[3]))])
            del out, lse
        return results

    heads = [HEADS[0], HEADS[1], HEADS[1], HEADS[0]]
    whole = [
        [torch.randn(1, LENGTH, h, DIM, generator=generator, device="cuda").bfloat16() for h in heads]
        for _ in range(TIMES)
    ]
    for name in fitting(world, *HEADS):
        made = {}
        for transport in ("symmetric", "symmetric-unrecorded"):
            context = _context(name, "auto", torch.bfloat16, DIM, "cuda", transport, heads=HEADS)
            made[transport] = several(context)
            if transport == "symmetric":
                recordings = context.transport._outbox.known.get(Recordings)
                count = len(recordings.known) if recordings else 0
            else:
                assert Recordings not in context.transport._carrier._outbox.known
        # The gradients of queries add up in the order in which a kernel's blocks come to it.
        bits = [
            what
            for mine, theirs in zip(*made.values(), strict=True)
            for what, x, y in zip(("out", "lse"), mine, theirs, strict=False)
            if not torch.equal(x, y)
        ]
        error = 0.0
        for values, mine in zip(whole, made["symmetric"], strict=True):
            q, k, v = (x.double().requires_grad_() for x in values[:3])
            out = _dense(q, k, v)
            for x, y in zip(
                (mine[0], *mine[2:]), (out, *torch.autograd.grad(out, (q, k, v), values[3].double())), strict=True
            ):
                want = shard(y.detach(), context.layout, rank).cpu()
                error = max(error, float((x - want).norm() / want.norm()))
        found[name] = count, error, bits
    return found


@pytest.mark.parametrize("world", [*GPU_WORLDS, pytest.param(3, marks=pytest.mark.gpu(1))])
def test_recorded_passes_compute_with_what_lies_there_now(world: int) -> None:
    for found in spawn(world, _repeated, device="cuda"):
        assert found["prefix"][0] and found["ulysses"][0], found
        for name, (_, error, bits) in found.items():
            assert error < 6e-3 and not bits, (name, error, bits)
