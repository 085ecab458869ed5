"""Executor of any schedule's programs on one rank, forward and backward.

Shape suffixes: B batch, S local sequence, H query heads, K key/value heads, D head dim, E head dim of values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps

import torch
from torch import Tensor

from lightseq.attention.accumulate import ACCUMULATORS, Accumulator, accumulation_dtype
from lightseq.attention.buffers import Buffer, buffer_layout
from lightseq.attention.cuda_graphs import GraphCache, is_short
from lightseq.attention.gathered import Gathered
from lightseq.attention.lowering import lower
from lightseq.attention.pass_spec import ChunkSlot, PassSpec, make_spec
from lightseq.attention.program import ChunkRanges, OutputSlot, Program, Reduction, StepProgram, reductions_of
from lightseq.attention.tile_streams import CURRENT_STREAM, second_stream
from lightseq.comm.transport import Exchange, Outbox, Receive, Transport
from lightseq.kernels.attention.base import Kernel, Saved
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.kernels.fused.launches import Launches, addresses
from lightseq.schedule.documents import MAX_PACKED_TABLES
from lightseq.schedule.table import Schedule

MAX_PROGRAMS = 128  # cached per outbox: a forward and a backward pass for every sequence length

GatheredBuffers = Mapping[tuple[str, int], Buffer]  # by item and head group; see `Gathered.buffers`


@dataclass(frozen=True)
class Executor:
    """Executor of the passes of one schedule on one rank."""

    schedule: Schedule
    rank: int
    kernel: Kernel
    transport: Transport
    scale: float  # factor of the scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gathered: Gathered | None = None) -> tuple[Tensor, Tensor]:
        """Returns out (B, S, H, E) in q's dtype and lse (B, H, S) of the local queries over the causal sequence.

        q is (B, S, H, D), k is (B, S, K, D) and v (B, S, K, E). `gathered` is memory that keeps the gathered operands
        for the backward pass.
        """
        spec = _forward_spec(self.schedule, self.rank, q.shape, v.shape, q.dtype)
        with self.transport.outbox(spec.outbox_bytes) as outbox:
            run, accumulators = self._prepare_pass(spec, {"q": (q,), "kv": (k, v)}, gathered, outbox)
            run()
        out, lse = accumulators["out"].finals
        return out, lse

    def backward(
        self, dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor] | Gathered, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv of the local chunks, in the inputs' dtypes; partial gradients add up in float32.

        `qkv` are the rank's own q, k and v, or those that the forward pass gathered; the schedule then reuses them
        (`Schedule.with_gathered_backward`). out and lse are the results of the forward pass.
        """
        operands: dict[str, Buffer]
        if isinstance(qkv, Gathered):
            gathered, kv_heads, dim, operands = qkv, qkv.kv_heads, qkv.dim, {"q": (dout, out, lse)}
        else:
            q, k, v = qkv
            gathered, kv_heads, dim, operands = None, k.shape[2], k.shape[3], {"q": (q, dout, out, lse), "kv": (k, v)}
        spec = _backward_spec(self.schedule, self.rank, dout.shape, kv_heads, dim, dout.dtype)
        with self.transport.outbox(spec.outbox_bytes) as outbox:
            run, accumulators = self._prepare_pass(spec, operands, gathered, outbox)
            run()
        (dq,), (dk, dv) = accumulators["dq"].finals, accumulators["dkv"].finals
        return dq, dk, dv

    def _prepare_pass(
        self, spec: PassSpec, operands: Mapping[str, Buffer], gathered: Gathered | None, outbox: Outbox
    ) -> tuple[Callable[[], None], Mapping[str, Accumulator]]:
        """Returns a function that runs the pass while the outbox is open, and the accumulators of its results.

        A short pass runs as a CUDA graph after a few runs in the same memory.
        """
        device = operands["q"][0].device
        accumulators = {
            item: ACCUMULATORS[item](spec.layouts[item], device, in_final_dtype)
            for item, in_final_dtype in spec.in_final_dtype.items()
        }
        program, launches = program_and_launches(spec, self.transport, outbox)
        execution = _Execution(self, spec, program, operands, accumulators, launches, gathered)
        if not (self.transport.supports_graphs and is_short(spec)):
            return execution.run, accumulators
        for accumulator in accumulators.values():
            accumulator.open()
        touched = [*operands.values(), *(accumulator.finals for accumulator in accumulators.values())]
        memory = [] if gathered is None else [gathered.memory]
        memory_key = addresses([x for buffer in touched for x in buffer] + memory)
        graphs = outbox.cache.get(GraphCache) or outbox.cache.setdefault(GraphCache, GraphCache())
        key = (self.kernel, self.scale, memory_key)
        return partial(graphs.run, spec, key, execution.run, launches, self.transport), accumulators


class _Execution:
    """One run of a program: the rank's operands, the gathered ones, and results that are still to be reduced."""

    def __init__(
        self, executor: Executor, spec: PassSpec, program: Program, operands: Mapping[str, Buffer],
        accumulators: Mapping[str, Accumulator], launches: Launches, gathered: Gathered | None,
    ) -> None:  # fmt: skip
        self._executor, self._spec, self._program, self._layouts = executor, spec, program, spec.layouts
        self._operands, self._accumulators, self._launches = operands, accumulators, launches
        self._gathered = gathered
        self._gathered_buffers: GatheredBuffers = {}  # views of `gathered`, made when the pass runs
        self._arenas: dict[int, Buffer] = {}
        # Results for this rank's own chunks, reduced during the next step.
        self._unreduced: list[tuple[str, ChunkSlot, Buffer]] = []

    def run(self) -> None:
        kernel, scale, device = self._executor.kernel, self._executor.scale, self._operands["q"][0].device
        for accumulator in self._accumulators.values():
            accumulator.begin()
        self._gathered_buffers = self._views_of_gathered()
        self._stage()
        for step in self._program.steps:
            finish_exchange = self._exchange(step)
            second = second_stream(device) if len(step.tiles) > 1 else None
            memories = [[self._memory_of(output) for output in outputs] for *_, outputs in step.tiles]
            if second is not None:
                second.wait_stream(torch.cuda.current_stream())
            for i, ((tile, q, kv, outputs), into) in enumerate(zip(step.tiles, memories, strict=True)):
                with torch.cuda.stream(second) if i % 2 and second is not None else CURRENT_STREAM:
                    # Do not name the operands: a name would keep their memory until the next tile.
                    made: tuple[Tensor, ...]
                    if self._spec.backward:
                        made = backward_tile(
                            kernel,
                            *self._backward_operands(tile.head_group, q, kv),
                            tile.mask,
                            scale,
                            _gradient_memory(into),
                        )
                    else:
                        made = forward_tile(
                            kernel,
                            *self._forward_operands(q, kv),
                            tile.mask,
                            scale,
                            into[0][0] if into[0] else None,
                        )
                    self._deliver(outputs, into, made)
                    del made
            if second is not None:
                torch.cuda.current_stream().wait_stream(second)
            finish_exchange()
            for arena in step.closes:
                del self._arenas[arena]
        for accumulator in self._accumulators.values():
            accumulator.open()
        self._reduce(reductions_of(self._unreduced))
        self._unreduced = []
        for accumulator in self._accumulators.values():
            accumulator.finish()

    def _views_of_gathered(self) -> GatheredBuffers:
        """Returns views of the memory of gathered operands: packed in the forward pass, which fills them."""
        if self._gathered is None:
            return {}
        schedule, rank = self._executor.schedule, self._executor.rank
        if not self._spec.backward:
            return self._gathered.buffers(schedule, rank, self._layouts)
        # The layouts of dq and dkv are those of q and kv in the forward pass; the backward q item holds more tensors.
        layouts = {"q": self._layouts["dq"], "kv": self._layouts["dkv"]}
        packed = self._gathered.buffers(schedule, rank, layouts)
        return {key: layouts[key[0]].unpacked(buffer) for key, buffer in packed.items()}

    def _stage(self) -> None:
        """Copies the operands that travel into the outbox."""
        staged = self._program.staged
        if staged:
            operand_keys = tuple(addresses(self._operands[item]) for item, _ in staged)
            self._launches.copy((self._program, operand_keys), self._staging_copies)

    def _staging_copies(self) -> list[tuple[Tensor, Tensor]]:
        staged = self._program.staged
        return [pair for item, into in staged for pair in self._layouts[item].stage(into, self._operands[item])]

    def _exchange(self, step: StepProgram) -> Callable[[], None]:
        """Starts a step's transfers. Returns a function that waits for them."""
        arena_slots: dict[int, list[Buffer]] = {}
        for i in step.opens:
            arena = self._program.arenas[i]
            # The forward pass gathers into memory that outlives it. The backward pass has no arenas for what it reuses.
            kept = None if self._spec.backward else self._gathered_buffers.get((arena.item, arena.head_group))
            device = self._operands[arena.item][0].device
            self._arenas[i] = kept or self._layouts[arena.item].empty(len(arena.chunks), device)
        receives = []
        for i, slot, src, remote in step.fetches:
            if i not in arena_slots:
                arena_slots[i] = self._layouts[self._program.arenas[i].item].split(self._arenas[i])
            receives += [Receive(src, x, y) for x, y in zip(remote, arena_slots[i][slot], strict=True)]
        fetched = len(receives)
        receives += step.receives
        unreduced, self._unreduced = self._unreduced, []
        for item in step.reduced_items:
            self._accumulators[item].open()

        def on_received(received: list[Tensor]) -> None:
            parts = received[fetched:]
            # A transport that reads in place hands over the very views that the program prepared.
            if step.reductions is not None and all(x is r.remote for x, r in zip(parts, step.receives, strict=True)):
                self._reduce(step.reductions)
                return
            rest, arrived = iter(parts), []
            for item, slot, _, remote, unpacked in step.arrivals:
                here = tuple(next(rest) for _ in remote)
                arrived.append((item, slot, unpacked if here[0] is remote[0] else self._layouts[item].unpacked(here)))
            self._reduce(reductions_of(unreduced + arrived))

        if not step.has_moves:
            return lambda: on_received([])
        exchange = Exchange(
            sends=step.sends,
            receives=receives,
            on_received=on_received,
            outboxes_written=step.outboxes_written,
            copy=self._launches.copy,
            idle=not step.tiles,
        )
        return self._executor.transport.exchange(exchange)

    def _reduce(self, reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            self._accumulators[reduction.item].reduce(reduction, self._launches)

    def _operand(self, item: str, ranges: ChunkRanges) -> Buffer:
        """Returns views of an operand's chunks, or copies side by side if there are several ranges."""
        layout, parts = self._layouts[item], list[Buffer]()
        for arena, start, count, head_group in ranges:
            if arena is None:
                parts.append(layout.local(self._operands[item], start, count, head_group))
            else:
                parts.append(layout.unpacked(layout.slots(self._arenas[arena], start, count)))
        if len(parts) == 1:
            return parts[0]
        # An lse is (B, N, S), other tensors are (B, S, N, D).
        return tuple(torch.cat(x, 2 if x[0].ndim == 3 else 1) for x in zip(*parts, strict=True))

    def _forward_operands(self, q: ChunkRanges, kv: ChunkRanges | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of a tile."""
        assert kv is not None, "only the backward pass reuses gathered keys and values"
        (q_,), (k, v) = self._operand("q", q), self._operand("kv", kv)
        return q_, k, v

    def _backward_operands(self, head_group: int, q: ChunkRanges, kv: ChunkRanges | None) -> tuple[Tensor, Saved]:
        """Returns dout of a tile, and the tensors that its forward pass saved."""
        q_, dout, out, lse = self._gathered_buffers.get(("q", head_group), ()) + self._operand("q", q)
        k, v = self._gathered_buffers[("kv", head_group)] if kv is None else self._operand("kv", kv)
        return dout, Saved(q_, k, v, out, lse)

    def _memory_of(self, output: OutputSlot) -> Buffer:
        """Returns the memory that a tile may write a result to; empty if there is none."""
        if output.outbox is not None:
            return output.outbox
        if output.final is not None:
            _, start, count, head_group = output.final
            accumulator = self._accumulators[output.item]
            accumulator.open()
            return self._layouts[output.item].local(accumulator.finals, start, count, head_group)
        return ()

    def _deliver(self, outputs: tuple[OutputSlot, ...], into: list[Buffer], made: tuple[Tensor, ...]) -> None:
        """Copies results to their memory unless the kernel wrote there. Collects results that this rank reduces.

        `made` is (out, lse), or (dq, dk, dv).
        """
        results = (made[:1], made[1:]) if self._spec.backward else (made,)
        for output, memory, result in zip(outputs, into, results, strict=True):
            for dst, x in zip(memory, result, strict=bool(memory)):
                if dst is not x:
                    _copy(dst, x)
            for chunk, slot, view in output.own:
                part = view or self._layouts[output.item].local(result, chunk, 1, 0)
                self._unreduced.append((output.item, slot, part))


def _gradient_memory(into: list[Buffer]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the memory that a kernel may write dq, dk and dv to; None if there is none."""
    (dq,), (dk, dv) = into[0] or (None,), into[1] or (None, None)
    return dq, dk, dv


def _copy(dst: Tensor, x: Tensor) -> None:
    """Copies x to dst. An lse (B, N, S) is split by chunk if dst is in an outbox: (chunks, B, N, R)."""
    by_chunk = dst.ndim > x.ndim
    dst.copy_(x.unflatten(2, (dst.shape[0], -1)).permute(2, 0, 1, 3) if by_chunk else x)


# ---- caches ---------------------------------------------------------------------------------------------------------


def program_and_launches(spec: PassSpec, transport: Transport, outbox: Outbox) -> tuple[Program, Launches]:
    """Returns a pass's program in this outbox and its launches, cached. The oldest is dropped if there are too many."""
    packed = spec.schedule.nodes is not None
    known: dict[PassSpec, tuple[Program, Launches]] = outbox.cache.setdefault((Program, packed), {})
    if spec not in known:
        if len(known) >= (MAX_PACKED_TABLES if packed else MAX_PROGRAMS):
            del known[next(iter(known))]
        known[spec] = lower(spec, outbox.memory, transport.peer_view), outbox.cache.get(Launches, Launches)()
    return known[spec]


def _cached_specs(make: Callable[..., PassSpec]) -> Callable[..., PassSpec]:
    """Caches the specs that all layers share, but few of packed sequences, because their tables do not repeat."""
    whole, packed = lru_cache(MAX_PROGRAMS)(make), lru_cache(MAX_PACKED_TABLES)(make)
    return wraps(make)(lambda schedule, *more: (whole if schedule.nodes is None else packed)(schedule, *more))


@_cached_specs
def _forward_spec(
    schedule: Schedule, rank: int, q_shape: torch.Size, v_shape: torch.Size, dtype: torch.dtype
) -> PassSpec:
    *tokens, heads, dim = q_shape
    *_, kv_heads, value_dim = v_shape
    out_shape = (*tokens, heads, value_dim)
    layouts = {
        "q": buffer_layout(schedule, [q_shape], dtype),
        "kv": buffer_layout(schedule, [(*tokens, kv_heads, dim), v_shape], dtype),
        "out": buffer_layout(schedule, [out_shape], dtype, accumulation_dtype(dtype)),
    }
    return make_spec(schedule, False, rank, layouts)


@_cached_specs
def _backward_spec(
    schedule: Schedule, rank: int, out_shape: torch.Size, kv_heads: int, dim: int, dtype: torch.dtype
) -> PassSpec:
    """Makes the spec of a backward pass. The item `q` holds q (unless a gathered q is reused), dout, out and lse."""
    *tokens, heads, value_dim = out_shape
    q_shape = (*tokens, heads, dim)
    of_queries = [out_shape, out_shape] if schedule.reuses_gathered else [q_shape, out_shape, out_shape]
    kv = buffer_layout(schedule, [(*tokens, kv_heads, dim), (*tokens, kv_heads, value_dim)], dtype)
    layouts = {
        "q": buffer_layout(schedule, of_queries, dtype, accumulation_dtype(dtype)),
        "kv": kv,
        "dq": buffer_layout(schedule, [q_shape], dtype),
        "dkv": kv,
    }
    return make_spec(schedule, True, rank, layouts)
