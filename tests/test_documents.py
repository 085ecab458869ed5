"""Packed documents against each document by itself: tables, balance, attention in float64 under every schedule."""

import gc
import random
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from schedules import fitting
from torch import Tensor
from worlds import GPU_WORLDS, NCCL_WORLDS, gpu_of, spawn

from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, make_context
from lightseq.attention.operator import attention
from lightseq.kernels.attention.base import KernelSpec, Saved
from lightseq.kernels.attention.reference import ReferenceKernel
from lightseq.kernels.attention.registry import KERNELS, RegisteredKernel
from lightseq.kernels.attention.segment_calls import Lengths
from lightseq.kernels.attention.tile import VarlenKernel, backward_tile, forward_tile
from lightseq.kernels.attention.tile_kernel_choice import _order
from lightseq.schedule.algorithms import SCHEDULES, Algorithm, make_schedule, ring
from lightseq.schedule.auto import ScheduleChoice, choose_packed, why_impossible
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import (
    MAX_IMBALANCE,
    MAX_PACKED_TABLES,
    assign_chunks,
    balanced_layout,
    imbalance,
    packed_schedule,
    padded_length,
)
from lightseq.schedule.layout import Layout, unshard
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.proof import InvalidSchedule, validate
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Assignment, Schedule

HEADS, DIM = (8, 2), 8


def _sizes(length: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Boundaries of one document, of documents of one token, of one that spans all ranks, of a padded tail."""
    cuts = sorted(rng.sample(range(1, length), min(length - 1, 9))) if length > 1 else []
    found = [(0, length), (0, *cuts, length)]
    if length > 8:
        found += [(0, 1, 2, 3, length - 2, length - 1, length), (0, 3, length - length // 3)]
    return found


def _schedules(world: int) -> list[Schedule]:
    found = []
    for name, algorithm in SCHEDULES.items():
        for ulysses, groups in product((None, 2), (1, 2) if algorithm.has_head_groups else (1,)):
            if ulysses == 2 and (name == "ulysses" or world % 2 or world == 2):
                continue
            if why_impossible(ScheduleChoice(name), world, AttentionShape(64, *HEADS, DIM)) is None or (
                name != "ulysses" and ulysses == 2
            ):
                found.append(make_schedule(name, world, groups, ulysses))
    return found


@pytest.mark.parametrize("world", slow_except([2, 3], (1, 2, 3, 4, 6, 8)))
def test_each_document_attends_to_itself_once_and_to_no_other(world: int) -> None:
    rng = random.Random(world)
    for schedule in _schedules(world):
        for length in (1, 17, 203):
            for boundaries in _sizes(length, rng):
                whole = Nodes(boundaries).padded(padded_length(schedule, length))
                validate(packed_schedule(schedule, whole))


def test_a_lost_or_foreign_segment_is_caught() -> None:
    schedule = packed_schedule(make_schedule("prefix", 2), Nodes((0, 30, 47, 64)))
    assert any(
        isinstance(t.mask, Segments) and len(t.mask.table) > 1 for s in schedule.forward for r in s.tiles for t in r
    )
    for step, change in product(range(len(schedule.forward)), ("lost", "longer")):
        for tiles in schedule.forward[step].tiles:
            for tile in tiles:
                assert isinstance(tile.mask, Segments)
                kept = tile.mask.table.copy()
                tile.mask.table[-1] += (0, -1, 0, -1, 0) if change == "lost" else (0, 0, -1, 1, 0)
                with pytest.raises(InvalidSchedule):
                    validate(schedule)
                tile.mask.table[:] = kept
    validate(schedule)


def test_nothing_is_fetched_for_documents_that_lie_on_one_rank() -> None:
    for schedule in [s for s in _schedules(4) if s.ulysses_size == 1 and s.name != "striped"]:
        packed = packed_schedule(schedule, Nodes(tuple(range(0, 1025, 64))))
        assert not any(step.moves for step in packed.forward + packed.backward), schedule
    alone = packed_schedule(make_schedule("ring", 4), Nodes((0, 250, 1024)))
    senders = {move.src for step in alone.forward for move in step.moves}
    assert senders == {0, 1, 2}
    first = {(move.src, move.dst) for step in alone.forward for move in step.moves if move.src == 0}
    assert first == {(0, 1), (0, 2), (0, 3)}  # rank 0 holds the first six tokens of the second document


def test_no_key_is_fetched_twice_and_what_a_rank_waits_for_first_is_a_part() -> None:
    for seed in range(5):
        table = packed_schedule(make_schedule("prefix", 4), lognormal(1 << 17, 1 << 10, 1 << 16, seed))
        fetched = [(m.item, m.chunk, m.dst) for step in table.forward for m in step.moves]
        assert len(fetched) == len({*fetched}) and len(table.forward[0].moves) < len(fetched)


def test_ranks_have_equal_tokens_and_nearly_equal_area() -> None:
    schedule = make_schedule("prefix", 4)
    for seed in range(20):
        nodes = lognormal(1 << 17, 1 << 10, 1 << 16, seed)
        layout = packed_schedule(schedule, nodes).layout
        areas = np.diff(nodes.area_before(np.linspace(0, 1 << 17, layout.chunk_count + 1).astype(np.int64)))
        assert {layout.chunk_groups.count(rank) for rank in range(4)} == {layout.chunks_per_rank}
        assert imbalance(areas, layout.chunk_groups) <= MAX_IMBALANCE, (seed, layout)


def test_fewer_chunks_are_made_where_launching_tiles_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks_per_rank(length: int, pairs_per_tile: int) -> int:
        monkeypatch.setattr("lightseq.schedule.documents.PAIRS_PER_TILE", pairs_per_tile)
        return balanced_layout(
            lognormal(length, 1 << 9, 1 << 15, seed=0), make_schedule("prefix", 4).layout
        ).chunks_per_rank

    assert [chunks_per_rank(1 << 15, pairs) for pairs in (0, 1 << 22, 1 << 30)] == [4, 2, 1]
    assert chunks_per_rank(1 << 19, 0) == chunks_per_rank(1 << 19, 1 << 22) == 8


def lognormal(length: int, least: int, most: int, seed: int) -> Nodes:
    """Documents of log-normal lengths, the last cut at the end."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(np.exp(rng.normal(np.log(8192), 1.0, 256)), least, most).astype(int)
    edges = [0, *np.cumsum(sizes).tolist()]
    return Nodes((*[x for x in edges if x < length], length))


def test_chunks_are_shared_out_as_well_as_trying_everything_would() -> None:
    assert imbalance(np.array([8, 7, 6, 5]), assign_chunks(np.array([8, 7, 6, 5]), 2)) == 1.0
    assert imbalance(np.array([1, 1, 1, 9]), assign_chunks(np.array([1, 1, 1, 9]), 2)) == 10 / 6  # two chunks for each


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _kernel_errors(kernel: Any, tensors: list[Tensor], mask: Segments) -> list[float]:
    """Returns the errors of a tile's out, dq, dk and dv against float64; the backward has the true out and lse."""
    q, k, v, dout = (x.double() for x in tensors)
    want, lse = forward_tile(ReferenceKernel(), q, k, v, mask, 0.2)
    wanted = [want, *backward_tile(ReferenceKernel(), dout, Saved(q, k, v, want, lse), mask, 0.2)]
    q, k, v, dout = tensors
    got = [forward_tile(kernel, q, k, v, mask, 0.2)[0]]
    got += backward_tile(kernel, dout, Saved(q, k, v, want.to(q.dtype), lse.float()), mask, 0.2)
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, wanted, strict=True)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "aten", "cudnn"])
def test_gpu_kernels_take_every_kind_of_segments(name: str) -> None:
    spec = KernelSpec("cuda", torch.cuda.get_device_capability(), torch.bfloat16, 64)
    kernel = KERNELS[name].make(spec)
    if reason := kernel.why_unavailable(spec):
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(0)
    masks = set()
    for schedule, boundaries in product((make_schedule("prefix", 2), make_schedule("striped", 2)), (
        (0, 1, 100, 700, 701, 2048), (0, 640, 2048), (0, 2048), tuple(range(0, 2049, 16))
    )):  # fmt: skip
        table = packed_schedule(schedule, Nodes(boundaries))
        rows = 2048 // table.layout.chunk_count
        for tile in [tile for step in table.forward for tiles in step.tiles for tile in tiles]:
            assert isinstance(tile.mask, Segments)
            masks.add(tuple(map(tuple, tile.mask.table.tolist())))
            sizes = [(len(tile.q) * rows, 8), *[(len(tile.kv) * rows, 2)] * 2, (len(tile.q) * rows, 8)]
            tensors = [torch.randn((1, *x, 64), device="cuda", generator=generator).bfloat16() for x in sizes]
            one_by_one = SimpleNamespace(
                causal_alignment=kernel.causal_alignment,
                forward=kernel.forward,
                backward=kernel.backward,
            )
            plain, got = (_kernel_errors(x, tensors, tile.mask) for x in (one_by_one, kernel))
            assert all(error <= 2 * allowed for error, allowed in zip(got, plain, strict=True)), (tile, got, plain)
            assert max(plain) < 0.01, (tile, plain)
    assert len(masks) > 8


class OneCall(ReferenceKernel):
    """Takes segments in one call as flash kernels do, and writes into the memory that it is given."""

    calls = 0

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float,
        into: Tensor | None = None, window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        OneCall.calls += 1
        parts = [
            self.forward(q[None, rows], k[None, keys], v[None, keys], causal, scale, None, window)
            for rows, keys in _runs(lengths)
        ]
        out, lse = (torch.cat([x[i] for x in parts], i + 1)[0] for i in (0, 1))
        return (out if into is None else into.copy_(out)), lse

    def backward_varlen(
        self, dout: Tensor, saved: Saved, lengths: Lengths, causal: bool, scale: float,
        into: Any = (None, None, None), window: int | None = None,
    ) -> Any:  # fmt: skip
        q, k, v, out, lse = saved
        grads = [torch.empty_like(x) if room is None else room for x, room in zip((q, k, v), into, strict=True)]
        for rows, keys in _runs(lengths):
            part = Saved(q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows])
            made = self.backward(dout[None, rows], part, causal, scale, (None, None, None), window)
            for grad, where, x in zip(grads, (rows, keys, keys), made, strict=True):
                grad[where] = x[0]
        return grads


def _runs(lengths: Lengths) -> list[tuple[slice, slice]]:
    assert lengths.q.dtype == lengths.k.dtype == torch.int32 and lengths.q[0] == lengths.k[0] == 0
    assert (lengths.q.diff().max(), lengths.k.diff().max()) == (lengths.longest_q, lengths.longest_k)
    pairs = zip(pairwise(lengths.q.tolist()), pairwise(lengths.k.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in pairs]


def _in_one_call(rank: int) -> None:
    KERNELS["one_call"] = RegisteredKernel(lambda spec: OneCall(), "takes all documents", "CPU")
    _parity(rank, (150,), ("one_call",))
    assert OneCall.calls > 0


def test_varlen_kernels_get_the_arguments_they_expect() -> None:
    spawn(2, _in_one_call)


def test_kernels_that_take_documents_in_one_call_come_first() -> None:
    spec = KernelSpec("cuda", (9, 0), torch.bfloat16, 128, packed=True)
    orders = [_order(spec), _order(replace(spec, capability=(8, 0)))]
    for names in orders:
        takes = [isinstance(KERNELS[name].make(spec), VarlenKernel) for name in names]
        assert takes == sorted(takes, reverse=True) and any(takes), names
    assert {*orders[0]} == {*_order(replace(spec, packed=False))}


def test_packed_heads_are_grouped_only_where_their_keys_are_many() -> None:
    def groups(length: int, heads: int = 32, name: str = "prefix") -> int:
        return choose_packed(4, AttentionShape(length, heads, min(heads, 8), 128), ScheduleChoice(name)).head_groups

    assert [groups(1 << n) for n in (17, 18, 19, 20, 24)] == [1, 1, 2, 4, 8]
    assert groups(1 << 20, heads=9) == 1 and groups(1 << 20, name="zigzag") == 1  # which cannot


# ---- attention -------------------------------------------------------------------------------------------------------


def _context(name: str, kernel: str, dtype: torch.dtype, **sizes: int) -> SequenceContext:
    config = AttentionConfig(name, kernel, dtype=dtype, device=torch.device("cpu"), **sizes)
    return make_context(dist.group.WORLD, AttentionShape(1024, *HEADS, DIM), config)


def _inputs(length: int, dim: int = DIM) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    shapes = [(1, length, n, dim) for n in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def _each_alone(inputs: list[Tensor], boundaries: tuple[int, ...]) -> list[Tensor]:
    """out, dq, dk, dv of every document by itself, by plain attention, side by side."""
    parts = []
    for begin, end in pairwise(boundaries):
        q, k, v = (x[:, begin:end].clone().requires_grad_() for x in inputs[:3])
        k_, v_ = (x.repeat_interleave(HEADS[0] // HEADS[1], 2) for x in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k_) * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        out = torch.einsum("bhst,bthd->bshd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v_)
        parts.append([out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3][:, begin:end])])
    return [torch.cat(x, 1) for x in zip(*parts, strict=True)]


def _packed(context: SequenceContext, inputs: list[Tensor], boundaries: tuple[int, ...]) -> list[Tensor]:
    """The same by all ranks together, padding cut off."""
    documents = context.sequence.pack(boundaries, inputs[0].shape[1])
    q, k, v, dout = (documents.shard(x, context.rank) for x in inputs)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, context, documents=documents)
    assert lse.isfinite().all()
    local = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    gathered = []
    for x in local:
        parts = [torch.empty_like(x) for _ in range(context.layout.world)]
        dist.all_gather(parts, x.contiguous())
        whole = unshard(parts, documents.layout, documents.padded_boundaries[-1])
        gathered.append(whole[:, : boundaries[-1]])
    return gathered


def _parity(rank: int, lengths: tuple[int, ...], kernels: tuple[str, ...]) -> None:
    world = dist.get_world_size()
    cases = [(length, b) for length in lengths for b in _sizes(length, random.Random(length))]
    wanted = {case: _each_alone(_inputs(case[0]), case[1]) for case in cases}
    for name in fitting(world, *HEADS):
        variants: list[tuple[str, dict[str, int]]] = [(kernel, {}) for kernel in kernels]
        if SCHEDULES[name].has_head_groups:
            variants[0] = kernels[0], {"head_groups": 2}
        if name in ("prefix", "zigzag", "striped") and world == 4:
            variants.append(("cpu", {"ulysses_size": 2}))
        for kernel, sizes in variants:
            context = _context(name, kernel, torch.float64, **sizes)
            for (length, boundaries), want in wanted.items():
                for got, x in zip(_packed(context, _inputs(length), boundaries), want, strict=True):
                    error = (got - x).abs().max().item()
                    assert error < 1e-12, f"{context.schedule}, {kernel}, {length}, {boundaries}: off by {error}"


def _tables_left(rank: int) -> int:
    context = _context("striped", "cpu", torch.float64)
    for end in range(2, 2 + 3 * MAX_PACKED_TABLES):
        _packed(context, _inputs(64), (0, end, 64))
    gc.collect()
    return sum(isinstance(x, Schedule) and x.nodes is not None for x in gc.get_objects())


def test_few_tables_of_documents_that_are_past_are_kept() -> None:
    assert max(spawn(2, _tables_left)) <= MAX_PACKED_TABLES


@pytest.mark.parametrize(
    "world", [3, pytest.param(4, marks=pytest.mark.slow)]
)  # 2: with a kernel that takes documents in one call, above
def test_packed_documents_equal_each_one_alone(world: int) -> None:
    spawn(world, _parity, (150,), ("cpu",))


def _farthest_first(layout: Layout) -> Assignment:
    """Ring, from the farthest keys on: what a query meets first is another document, where there are several."""
    return ring(layout)[::-1]


def _parity_farthest_first(rank: int) -> None:
    with patch.dict(SCHEDULES, {"farthest": Algorithm("contiguous", 1, _farthest_first)}, clear=True):
        with patch("schedules.ANY_WORLD", {"farthest"}):
            _parity(rank, (150,), ("cpu",))


def test_a_schedule_needs_only_its_tiles_in_any_order_of_keys() -> None:
    spawn(3, _parity_farthest_first)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_packed_documents_of_any_length_equal_each_one_alone_under_every_kernel(world: int) -> None:
    spawn(world, _parity, (1, 61, 403), ("cpu", "reference"))


def _gpu_errors(rank: int, transport: str) -> dict[str, list[float]]:
    """Relative errors against float64 of schedules and kernels, and of plain bfloat16 attention."""
    length, boundaries, dim, device = 2053, (0, 1, 300, 1500, 1501, 2000), 64, gpu_of(rank)
    inputs = [x.bfloat16().to(device) for x in _inputs(length, dim)]
    want = _each_alone([x.double() for x in inputs], boundaries)
    capability = torch.cuda.get_device_capability()
    spec = KernelSpec("cuda", capability, torch.bfloat16, dim, packed=True)

    def errors(got: list[Tensor]) -> list[float]:
        return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]

    found = {"plain": errors(_each_alone(inputs, boundaries))}
    for name, kernel in product(fitting(dist.get_world_size(), *HEADS), ("fa4", "fa2", "aten", "cudnn")):
        if KERNELS[kernel].make(spec).why_unavailable(spec) is None:
            shape = AttentionShape(1024, *HEADS, dim)
            config = AttentionConfig(name, kernel, transport, dtype=torch.bfloat16, device=device)
            context = make_context(dist.group.WORLD, shape, config)
            found[f"{name} {kernel}"] = errors(_packed(context, inputs, boundaries))
    return found


@pytest.mark.parametrize("world", NCCL_WORLDS)
def test_packed_documents_on_gpus_match_float64(world: int) -> None:
    _check_gpu_errors(world, "nccl")


@pytest.mark.parametrize("world", GPU_WORLDS)
def test_packed_documents_over_mapped_memory_match_float64(world: int) -> None:
    _check_gpu_errors(world, "symmetric")


def _check_gpu_errors(world: int, transport: str) -> None:
    found = spawn(world, _gpu_errors, transport, device="cuda")[0]
    plain = found.pop("plain")
    for label, errors in found.items():
        assert all(e <= 2 * p for e, p in zip(errors, plain, strict=True)), (label, errors, plain)
