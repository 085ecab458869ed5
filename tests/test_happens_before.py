"""Memory that two streams touch is ordered by a wait, and none is freed while another stream uses it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from happens_before import Streams, of_all_ranks, races
from schedules import fitting
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

from lightseq import hf
from lightseq.attention import executor
from lightseq.attention.executor import Executor
from lightseq.attention.gathered import Gathered, gathered_elements
from lightseq.attention.pass_spec import PassSpec
from lightseq.comm import symmetric
from lightseq.comm.routed import Hosts, RoutedTransport, make_routed
from lightseq.comm.symmetric import SymmetricTransport
from lightseq.kernels.fused.launches import Launches
from lightseq.memory import offload, streamed_update
from lightseq.memory.fsdp2 import ReduceScatterIntoSharedPool
from lightseq.memory.offload import HostBufferPool, Offload
from lightseq.memory.remat import apply_remat, checkpoint_groups
from lightseq.memory.streamed_update import Piece, update_pieces
from lightseq.schedule.layout import shard

HEADS = 12, 6  # which two and three ranks can share out
NONE: tuple[set[str], set[str]] = (set(), set())


def emulated(streams: Streams) -> AbstractContextManager[None]:
    found = {
        "Stream": streams.stream,
        "current_stream": streams.current,
        "stream": lambda stream: stream,
    }
    return patch.multiple("torch.cuda", **found, synchronize=streams.synchronize)


class _Mapped:
    """torch's symmetric memory, of files, with a barrier that tells every rank what the others know."""

    def __init__(self, folder: Path, streams: Streams) -> None:
        self.folder, self.streams, self.made = folder, streams, 0

    def empty(self, size: int, **_: object) -> Tensor:
        self.made += 1
        return torch.empty(size, dtype=torch.uint8)

    def rendezvous(self, memory: Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        size, ranks = memory.numel(), range(dist.get_world_size(group))
        files = [str(self.folder / f"{rank}-{self.made}") for rank in ranks]
        dist.barrier(group)
        mapped = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in files]
        memory.set_(mapped[dist.get_rank(group)])
        self.streams.mapped = {x.data_ptr(): (rank, size) for rank, x in enumerate(mapped)}
        return SimpleNamespace(get_buffer=lambda rank, *_: mapped[rank], barrier=lambda: self.streams.barrier(group))


class _Replays:
    """Runs passes as recordings run: on streams of a graph's own, which wait for the current one and it for them."""

    runs = 0

    def run(
        self,
        asked: PassSpec,
        places: object,
        run: Callable[[], None],
        launches: Launches,
        transport: SymmetricTransport,
    ) -> None:
        current, graph = torch.cuda.current_stream(), torch.cuda.Stream()
        side, transport._side = transport._side, torch.cuda.Stream()
        graph.wait_stream(current)
        with graph:
            run()
        transport._side = side
        current.wait_stream(graph)
        transport.after_replay(0, 0)
        _Replays.runs += 1


class _ReplaysSome(_Replays):
    """A rank that replays graphs where others launch one by one."""

    turn = 0

    def run(self, asked: PassSpec, places: object, run: Callable[[], None], *more: Any) -> None:
        _ReplaysSome.turn += 1
        if (self.turn + dist.get_rank()) % 2:
            run()
        else:
            super().run(asked, places, run, *more)


def _transport(hosts: Hosts) -> SymmetricTransport | RoutedTransport:
    if not hosts:
        return SymmetricTransport(dist.group.WORLD, torch.device("cpu"))
    assert dist.group.WORLD is not None
    transport, reason = make_routed(dist.group.WORLD, torch.device("cpu", 0), hosts)
    assert transport is not None, reason
    return transport


def _attention(
    rank: int, folder: Path, without: str, recordings: type[_Replays] | None = None, hosts: Hosts = ()
) -> dict[str, tuple[set[str], set[str]]]:
    """By schedule, what races and what is freed early in three passes forward and backward, of two lengths."""
    from test_attention import _context, _whole

    found, scale = {}, 8**-0.5
    names = fitting(dist.get_world_size(), *HEADS)
    for name, keeps in [*product(names, (False,)), ("ulysses", True)]:
        streams = Streams(rank)
        with ExitStack() as stack:
            stack.enter_context(emulated(streams))
            stack.enter_context(patch.object(symmetric, "symmetric_memory", _Mapped(folder, streams)))
            transport = _transport(hosts)
            transport.supports_graphs = recordings is not None
            stack.enter_context(patch.object(executor, "GraphCache", recordings))
            stack.enter_context(patch.object(executor, "is_short", lambda asked: all(asked.in_final_dtype.values())))
            stack.enter_context(patch("lightseq.attention.context.make_transport", return_value=transport))
            stack.enter_context(patch.object(executor, "second_stream", return_value=torch.cuda.Stream()))
            context = _context(name, "auto", torch.float64, 8, heads=HEADS)
            if without:
                stack.enter_context(patch(f"happens_before.Stream.{without}", lambda *_: None))
            for length in (12, 12, 24):
                parts = [shard(x, context.layout, rank) for x in _whole(length, HEADS, 8, batch=1)]
                table = context.schedule.with_gathered_backward if keeps else context.schedule
                size = gathered_elements(table, *parts[0:3:2])
                forward = Executor(context.schedule, rank, context.selection.kernel, transport, scale)
                backward = Executor(table, rank, context.selection.kernel, transport, scale)
                with streams:
                    q, k, v, dout = (x.clone() for x in parts)
                    kept = Gathered(torch.empty(size, dtype=q.dtype), *k.shape[2:]) if keeps else None
                    out, lse = forward.forward(q, k, v, kept)
                    made = [out, lse, *backward.backward(dout, kept or (q, k, v), out, lse)]
                    for x in made:
                        x.add_(1)
                    del out, lse, made, x, kept, q, k, v, dout
            streams.look_for_freed()
        found[name + " keeping" * keeps] = races(of_all_ranks(streams.touches, dist.group.WORLD)), streams.freed_early
    return found


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(), ((0,), (1, 2))])
def test_exchanges_inside_and_between_hosts_are_ordered_on_every_stream(hosts: Hosts, tmp_path: Path) -> None:
    for found in spawn(3, partial(_attention, hosts=hosts), tmp_path, ""):
        assert all(bad == NONE for bad in found.values()), found


def _recorded(rank: int, folder: Path, recordings: type[_Replays], forgets: bool) -> tuple[Any, int]:
    if forgets:
        SymmetricTransport.after_replay = lambda *_, **__: None  # type: ignore[method-assign]
    return _attention(rank, folder, "", recordings), _Replays.runs


@pytest.mark.slow
@pytest.mark.parametrize("recordings", [_Replays, _ReplaysSome])
def test_recordings_are_in_order_with_all_others(recordings: type[_Replays], tmp_path: Path) -> None:
    for found, runs in spawn(3, _recorded, tmp_path, recordings, False):
        assert all(bad == NONE for bad in found.values()) and runs, found


@pytest.mark.slow
def test_an_outbox_that_closes_before_its_recording_ends_is_seen(tmp_path: Path) -> None:
    ((found, _), *_) = spawn(2, _recorded, tmp_path, _Replays, True)
    assert found["prefix"][0] and found["ulysses keeping"][0], found


@pytest.mark.parametrize("without", [pytest.param("wait_event", marks=pytest.mark.slow), "wait_stream"])
def test_an_exchange_that_does_not_wait_is_seen(without: str, tmp_path: Path) -> None:
    (found, *_) = spawn(2, _attention, tmp_path, without)
    assert all(bad[0] for bad in found.values()), found


def _layers_away(
    group: int, in_flight: int, limit_bytes: float, staying: Sequence[int] = ()
) -> tuple[set[str], set[str]]:
    """Runs two updates from two backward passes each, with an evaluation between them."""
    streams, memory = Streams(0), HostBufferPool(limit_bytes, pinned=False)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, num_key_value_heads=2))
    context, layers = hf.enable(model), list(model.model.layers)
    with emulated(streams), patch.object(offload, "MIN_BYTES", 1):
        outer, inner = (Offload(torch.device("cpu"), memory, in_flight) for _ in range(2))
        outer._side_stream, inner._side_stream = streams.stream(), streams.stream()
        apply_remat(layers, "attention", offload=inner if group > 1 else outer)
        groups = [layers[i : i + group] for i in range(0, len(layers), group)]
        if group > 1:
            checkpoint_groups(groups, inner)
        outer.wrap([some[0] for some in groups[:-1]], groups[-1][0], [groups[i][0] for i in staying])
        batch = hf.shard_batch(context, *torch.randint(64, (2, 1, 24)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with streams:
            for _ in range(2):
                for _ in range(2):
                    model(**batch).loss.backward()
                with torch.no_grad():
                    model(**batch)
                optimizer.step()
                optimizer.zero_grad()
        streams.look_for_freed()
    assert outer.offloaded_bytes and bool(outer.on_device_bytes) == (limit_bytes < 1e5)
    return races(streams.touches), streams.freed_early


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("group", "in_flight", "limit_bytes", "staying"),
    slow_except(
        [(2, 2, 1e6, ())],
        [
            (1, 2, 1e6, ()), (1, 1, 1e6, ()), (1, 2, 9e3, ()), (2, 2, 1e6, ()), (1, 2, 1e6, (3, 4)),
            (1, 1, 1e6, (3, 4)), (1, 2, 1e6, (4,)),
        ],
    ),
)  # fmt: skip
def test_offloaded_activations_are_ordered_on_every_stream(
    group: int, in_flight: int, limit_bytes: float, staying: Sequence[int]
) -> None:
    assert _layers_away(group, in_flight, limit_bytes, staying) == NONE


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_layers_that_do_not_wait_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_wait_for", lambda event: None)
    assert all(_layers_away(1, 2, 1e6))


def _pieces_changed(without: str = "") -> tuple[set[str], set[str]]:
    """Five pieces of two tensors, then three of another kind: more than there are buffers for."""
    streams = Streams(0)
    host, wide = [torch.arange(40.0), torch.ones(40)], [torch.ones(12, dtype=torch.float64)]
    pieces = [
        Piece(tuple(x[i : i + 8] for x in host), 1, (8, 8), lambda there: there[0].add_(there[1]))
        for i in range(0, 40, 8)
    ]
    pieces += [Piece((wide[0][i : i + 4],), 1, (5,), lambda there: there[0].mul_(2)) for i in range(0, 12, 4)]
    with ExitStack() as stack:
        stack.enter_context(emulated(streams))
        stack.enter_context(patch.object(streamed_update, "has_streams", lambda device: True))
        if without:
            stack.enter_context(patch(f"happens_before.Stream.{without}", lambda *_: None))
        with streams:
            for _ in range(2):
                update_pieces(torch.device("cpu"), pieces)
            assert host[0].tolist() == [i + 2 for i in range(40)] and wide[0].tolist() == [4] * 12
        streams.look_for_freed()
    return races(streams.touches), streams.freed_early


def test_pieces_arrive_change_and_leave_in_order() -> None:
    assert _pieces_changed() == NONE


@pytest.mark.parametrize("without", ["wait_stream", "wait_event"])
def test_pieces_that_do_not_wait_are_seen(without: str) -> None:
    assert _pieces_changed(without)[0]


def _gradient_reduced(waits: bool = True, records: bool = True) -> tuple[set[str], set[str]]:
    """A gradient that another stream adds to and frees, in memory that torch has filled, as in deterministic mode."""
    streams = Streams(0)
    main, recorded = streams.current(), []
    with ExitStack() as stack:
        stack.enter_context(emulated(streams))
        stack.enter_context(patch("torch.cuda.default_stream", lambda device: main))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda _, stream: recorded.append(stream)))
        if not waits:
            stack.enter_context(patch("happens_before.Stream.wait_stream", lambda *_: None))
        with streams, streams.stream():
            gradient = ReduceScatterIntoSharedPool().allocate((8,), dtype=torch.float32, device=torch.device("cpu"))
            gradient.add_(1)
            for stream in recorded if records else ():  # torch's allocator reuses memory after these
                streams.learn("main", streams.clock(stream.name))
            del gradient
        streams.look_for_freed()
    return races(streams.touches), streams.freed_early


def test_a_gradient_in_memory_of_activations_is_ordered() -> None:
    assert _gradient_reduced() == NONE


def test_a_gradient_that_does_not_wait_or_is_not_recorded_is_seen() -> None:
    assert _gradient_reduced(waits=False)[0]
    assert _gradient_reduced(records=False)[1]
