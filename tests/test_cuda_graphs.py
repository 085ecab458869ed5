"""Short attention passes run as CUDA graphs if they use the same memory again, with the same results."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
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

from lightseq.attention import cuda_graphs, executor
from lightseq.attention.buffers import BufferLayout
from lightseq.attention.context import SequenceContext
from lightseq.attention.cuda_graphs import RUNS_BEFORE_CAPTURE, GraphCache, is_short
from lightseq.attention.executor import Executor, _backward_spec, _forward_spec
from lightseq.attention.gathered import Gathered, gathered_elements
from lightseq.attention.operator import attention
from lightseq.comm.transport import base_transport_name
from lightseq.comm.transport_choice import make_transport
from lightseq.kernels.attention.base import KernelSpec
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.fused.launches import Launches
from lightseq.schedule.algorithms import make_schedule
from lightseq.schedule.documents import packed_schedule
from lightseq.schedule.layout import shard
from lightseq.schedule.nodes import Nodes


class _Graph:
    """Stands in for a CUDA graph: knows whether something is being recorded, and counts replays."""

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
    """Stands in for a GPU transport, and counts its calls."""

    def __init__(self) -> None:
        self.bytes_sent, self.launched, self.recorded_while = 0, 0, list[bool]()
        self.recordings, self.again, self.held = GraphCache(), 0, 0
        self.launches, self.table = Launches(), lambda: None
        self.launches._known["a copy"] = self.table  # type: ignore[assignment]
        self.breaks: type[BaseException] | None = None  # what a pass raises while it is recorded

    def after_replay(self, bytes_sent: int, held: int) -> None:
        self.bytes_sent += bytes_sent
        self.held = held
        self.again += 1

    def _launch(self) -> None:
        self.launched += not _Graph.recording
        self.bytes_sent += 10
        self.launches.copy("a copy", list)
        if _Graph.recording:
            self.recorded_while.append(gc.isenabled())
            if self.breaks:
                raise self.breaks("out of memory")

    def run(self, *places: str, rank: int = 0, times: int = 1) -> None:
        run: Any = self.recordings.run
        for place in places * times:
            run(_Asked(rank), place, self._launch, self.launches, self)


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
        "get_allocator_backend": lambda: "native",
        "current_device": lambda: 0,
    }
    _Graph.refuses = False
    ended.clear()
    end = patch.object(torch._C, "_cuda_endAllocateToPool", _end_allocation, create=True)
    with patch.multiple("torch.cuda", **found), end:
        yield _Passes()


def _end_allocation(device: int, pool: tuple[int, int]) -> None:
    """Notes that torch's allocator was told that nobody records into a pool any more."""
    ended.append((device, pool))


ended: list[tuple[int, tuple[int, int]]] = []


def test_a_pass_is_recorded_once_it_ran_in_the_same_memory(passes: _Passes) -> None:
    passes.run("here", "there", times=RUNS_BEFORE_CAPTURE)
    assert passes.launched == 2 * RUNS_BEFORE_CAPTURE and not passes.recordings.graphs
    passes.run("here", times=3)
    assert passes.launched == 2 * RUNS_BEFORE_CAPTURE and passes.again == 3
    ((recording, bytes_sent, launches),) = passes.recordings.graphs.values()
    assert (recording.replays, bytes_sent) == (3, 10)
    assert launches == [passes.table], "what a recording reads has to stay as long as it"
    assert passes.bytes_sent == 10 * (2 * RUNS_BEFORE_CAPTURE + 3) and passes.held == 42
    assert passes.recorded_while == [False], "what cycles hold may not be freed while a GPU records"
    assert gc.isenabled()


def test_the_recordings_and_the_passes_that_are_remembered_are_limited(passes: _Passes) -> None:
    with patch.object(cuda_graphs, "MAX_SEEN", 8), patch.object(cuda_graphs, "MAX_GRAPHS", 1):
        passes.run(*(f"place {number}" for number in range(20)))
        assert passes.launched == 20 and len(passes.recordings._seen) <= 8
        passes.run("here", times=RUNS_BEFORE_CAPTURE + 2)
        passes.run("there", times=RUNS_BEFORE_CAPTURE + 2)
    assert len(passes.recordings.graphs) == 1 and passes.launched == 20 + 2 * RUNS_BEFORE_CAPTURE + 2


@pytest.mark.parametrize("rank", [0, 1])
def test_passes_that_cannot_be_recorded_are_launched_and_rank_0_warns_once(passes: _Passes, rank: int) -> None:
    _Graph.refuses = True
    with pytest.warns(UserWarning, match="without CUDA graphs") if rank == 0 else nullcontext() as said:
        passes.run("here", rank=rank, times=2 * RUNS_BEFORE_CAPTURE + 2)
    assert passes.launched == 2 * RUNS_BEFORE_CAPTURE + 2 and not passes.recordings.graphs
    assert passes.bytes_sent == 10 * passes.launched, "of a pass that was not recorded nothing counts"
    assert ended == [(0, (0, 0))], "or cached memory would never be given back again"
    if said is not None:
        assert [str(w.message).splitlines() for w in said] == [
            ["short attention passes run without CUDA graphs: recording one failed ("
             "operation failed due to a previous error during capture)"]
        ]  # fmt: skip


def _failed(_: int) -> tuple[int, list[str], int, list[float]]:
    passes, x = _Passes(), torch.ones(2**20, device="cuda")
    read = list[float]()

    def run() -> None:
        passes.launched += 1
        read.append(float((x + x).sum()))  # a GPU cannot record that the host waits for it

    passes._launch = run  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        passes.run("here", times=2 * RUNS_BEFORE_CAPTURE + 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        large = torch.empty(2**28, device="cuda")
    del large
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return passes.launched, [str(one.message) for one in said], torch.cuda.memory_reserved(), read


@pytest.mark.gpu(1)
def test_after_a_failed_recording_passes_run_and_memory_is_freed() -> None:
    launched, said, reserved, read = spawn(1, _failed, device="cuda")[0]
    tries = 2 * RUNS_BEFORE_CAPTURE + 2
    assert launched == tries + 1 and read == [2.0**21] * tries
    assert len(said) == 1 and "without CUDA graphs" in said[0], said
    assert reserved < 2**28, "what was allocated after it was not given back"


def _pass(name: str, tokens: int, backward: bool, boundaries: tuple[int, ...] = (), batch: int = 1) -> Any:
    table = make_schedule(name, 4)
    if boundaries:
        table = packed_schedule(table, Nodes(boundaries))
    shape = torch.Size((batch, tokens // 4, 32, 128))
    if backward:
        return _backward_spec(table, 0, shape, 8, 128, torch.bfloat16)
    return _forward_spec(table, 0, shape, torch.Size((batch, tokens // 4, 8, 128)), torch.bfloat16)


@pytest.mark.parametrize("backward", [False, True])
def test_only_short_passes_without_merged_results_are_recorded(backward: bool) -> None:
    for name in ("ulysses", "prefix"):
        assert is_short(_pass(name, 16384, backward))
        assert not is_short(_pass(name, 65536, backward))
        assert not is_short(_pass(name, 1024, backward, batch=512)), "there memory is not small"
    assert not is_short(_pass("zigzag", 16384, False))
    assert not is_short(_pass("prefix", 16384, False, boundaries=(0, 4096, 16384)))
    causal_half = 4 * 16384**2 / 2 * 32 * 128
    assert 4 * _pass("prefix", 16384, backward).flops == causal_half * (2.5 if backward else 1)


def test_the_first_error_of_a_recording_is_reported_and_an_interrupt_is_raised(passes: _Passes) -> None:
    _Graph.refuses, passes.breaks = True, KeyboardInterrupt
    passes.run("here", times=RUNS_BEFORE_CAPTURE)
    with pytest.raises(KeyboardInterrupt):
        passes.run("here")
    passes.breaks = torch.OutOfMemoryError
    with pytest.warns(UserWarning, match=r"recording one failed \(out of memory"):
        passes.run("here")


def test_nothing_is_recorded_with_an_allocator_without_pools(passes: _Passes) -> None:
    with patch("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync"):
        passes.recordings = GraphCache()
    passes.run("here", times=RUNS_BEFORE_CAPTURE + 2)
    assert passes.launched == RUNS_BEFORE_CAPTURE + 2


def test_suffixes_leave_the_name_of_a_transport() -> None:
    for name in ("auto", "auto-blocking", "auto-unrecorded", "auto-blocking-unrecorded"):
        assert base_transport_name(name) == "auto"


@pytest.mark.parametrize("name", ["gloo-blocking", "gloo-unrecorded"])
def test_an_unused_transport_is_freed_without_a_search_for_cycles(name: str) -> None:
    assert spawn(1, _made_and_let_go, name)[0]


def _made_and_let_go(_rank: int, name: str) -> bool:
    assert dist.group.WORLD is not None
    gc.disable()
    made = weakref.ref(make_transport(name, dist.group.WORLD, torch.device("cpu")))
    return made() is None


def _keys(_: int) -> dict[str, tuple[int, int]]:
    """Changes one input of a pass after the other, and returns by which hashes each pass would be recorded."""
    from test_attention import _context

    context = _context("ulysses", "cpu", torch.float32, 8, heads=(4, 4))
    q, k, v, dout, out = (torch.randn(1, 8, 4, 8) for _ in range(5))
    lse, size = torch.randn(1, 4, 8), gathered_elements(context.schedule.with_gathered_backward, q, v)
    kept, other = (Gathered(torch.randn(size), 4, 8) for _ in range(2))
    own = {"rank": context.rank, "kernel": context.selection.kernel, "transport": context.transport, "scale": 0.5}
    slow = KERNELS["reference"].make(KernelSpec("cpu", (0, 0), torch.float32, 8))
    same = {"q": q, "k": k, "v": v, "schedule": context.schedule, **own}
    back = {"dout": dout, "own": (q, k, v), "out": out, "lse": lse, "schedule": context.schedule, **own}
    again = {"own": kept, "schedule": context.schedule.with_gathered_backward}

    seen = list[tuple[int, int]]()

    class Noting:
        def run(self, asked: Any, places: Any, run: Callable[[], None], *_: Any) -> None:
            seen.append((hash(asked), hash(places)))
            run()

    whole, buffers = BufferLayout.whole, dict[Any, Any]()

    def same_buffer(form: BufferLayout, device: torch.device, dtype: torch.dtype) -> Any:
        return buffers.setdefault((form, dtype), whole(form, device, dtype))

    def run_forward(q: Any, k: Any, v: Any, kept: Any = None, **own: Any) -> tuple[int, int]:
        Executor(**own).forward(q, k, v, kept)
        return seen.pop()

    def run_backward(dout: Any, own: Any, out: Any, lse: Any, **executor: Any) -> tuple[int, int]:
        Executor(**executor).backward(dout, own, out, lse)
        return seen.pop()

    forward = {
        "forward": {}, "q": {"q": q.clone()}, "k": {"k": k.clone()}, "v": {"v": v.clone()}, "scale": {"scale": 0.25},
        "strides": {"q": torch.as_strided(q, q.shape, (256, 8, 64, 1))}, "kernel": {"kernel": slow}, "same": {},
        "kept": {"kept": kept}, "kept elsewhere": {"kept": other},
    }  # fmt: skip
    backward = {
        "backward": {}, "dout": {"dout": dout.clone()}, "own": {"own": (q, k.clone(), v)}, "out": {"out": out.clone()},
        "lse": {"lse": lse.clone()}, "of kept": again, "of kept elsewhere": again | {"own": other}, "back again": {},
    }  # fmt: skip
    with (
        patch.object(executor, "GraphCache", Noting),
        patch.object(executor, "is_short", lambda _: True),
        patch.object(type(context.transport), "supports_graphs", True),
        patch.object(BufferLayout, "whole", same_buffer),
    ):
        found = {name: run_forward(**same | changed) for name, changed in forward.items()}
        found |= {name: run_backward(**back | changed) for name, changed in backward.items()}
        buffers.clear()
        return found | {"results elsewhere": run_forward(**same)}


def test_passes_with_other_work_or_memory_are_recorded_apart() -> None:
    found = spawn(2, _keys)[0]
    assert found.pop("same") == found["forward"] and found.pop("back again") == found["backward"]
    assert len(set(found.values())) == len(found) == 17, found


HEADS, DIM, LENGTH, TIMES = (12, 12), 64, 1536, 12


def _repeated(rank: int) -> dict[str, tuple[int, float, list[str]]]:
    """Returns for each schedule the recordings, the largest error of `TIMES` passes, and whether bits differ."""
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
                recordings = context.transport._outbox.cache.get(GraphCache)
                count = len(recordings.graphs) if recordings else 0
            else:
                assert GraphCache not in context.transport._inner._outbox.cache
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
def test_recorded_passes_compute_with_the_present_values(world: int) -> None:
    for found in spawn(world, _repeated, device="cuda"):
        assert found["prefix"][0] and found["ulysses"][0], found
        for name, (_, error, bits) in found.items():
            assert error < 6e-3 and not bits, (name, error, bits)
