"""Lowered program of a rank: one pass over a schedule, with the address of every buffer.

A schedule's table is lowered once for given shapes and run for every layer and step, because at short lengths the host
has less than a millisecond per layer. A program is lowered from a `PassSpec`, which also gives the size of the outbox.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from lightseq.attention.buffers import Buffer, BufferLayout
from lightseq.comm.transport import Receive, Send
from lightseq.kernels.launches import addresses
from lightseq.schedule.layout import Layout
from lightseq.schedule.placement import Arena, arenas, local_start, result_blocks
from lightseq.schedule.table import Schedule, Step, Tile

ALIGNMENT = 256  # bytes; suits the widest loads and the copy engines
REGIONS = 3  # for results in the outbox, used in turn; `Transport.exchange` says how long sent data must stay

Layouts = Mapping[str, BufferLayout]
ChunkSlot = tuple[int, int]  # (index of a chunk in its rank's tensors, head group of the item)
PartCounts = Mapping[ChunkSlot, Counter[int]]  # by result: how many parts are computed, by step


# ---- the specification ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PassSpec:
    """One forward or backward pass of one rank: everything that the table and the shapes determine."""

    schedule: Schedule
    backward: bool
    rank: int
    layouts: Layouts  # by item
    parts: Mapping[str, PartCounts]  # by result item, of this rank's own results
    single_step: Mapping[str, bool]  # by result item: all parts come in one step, so no float32 total is needed
    operand_offsets: Mapping[str, int]  # bytes into the outbox, by item that travels
    result_offsets: Mapping[int, int]  # bytes into the outbox, by step that sends results
    outbox_bytes: int

    @cached_property
    def flops(self) -> float:
        """FLOPs of one rank: the causal half only; a backward pass counts as 2.5 forward passes."""
        q = self.layouts["q"]
        forward = 2 * q.batch * (q.rows * q.chunks) ** 2 * self.schedule.world * q.heads * q.groups * q.dim
        return 2.5 * forward if self.backward else forward


def make_spec(schedule: Schedule, backward: bool, rank: int, layouts: Layouts) -> PassSpec:
    parts = _count_parts(schedule, backward, rank, layouts)
    operand_offsets, result_offsets, outbox_bytes = _outbox(schedule, backward, layouts)
    return PassSpec(
        schedule=schedule,
        backward=backward,
        rank=rank,
        layouts=layouts,
        parts=parts,
        single_step={item: _is_single_step(item, counts) for item, counts in parts.items()},
        operand_offsets=operand_offsets,
        result_offsets=result_offsets,
        outbox_bytes=outbox_bytes,
    )


def steps(schedule: Schedule, backward: bool) -> tuple[Step, ...]:
    return schedule.backward if backward else schedule.forward


def item_group(layout: BufferLayout, schedule: Schedule, head_group: int) -> int:
    """Maps a head group of the schedule to that of an item, which has fewer if groups share key/value heads."""
    return head_group * layout.groups // schedule.total_head_groups


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_single_step(item: str, parts: PartCounts) -> bool:
    """Returns whether an item needs no float32 total: its parts come in one step, or its outputs are not merged."""
    if item == "out":
        return all(counts.total() == 1 for counts in parts.values())
    return all(len(counts) == 1 for counts in parts.values())


def _count_parts(schedule: Schedule, backward: bool, rank: int, layouts: Layouts) -> Mapping[str, PartCounts]:
    mine = {chunk: i for i, chunk in enumerate(schedule.layout.chunks(rank))}
    found: dict[str, dict[ChunkSlot, Counter[int]]] = {"dq": {}, "dkv": {}} if backward else {"out": {}}
    for t, step in enumerate(steps(schedule, backward)):
        for tile in (tile for tiles in step.tiles for tile in tiles):
            for item, slots in found.items():
                group = item_group(layouts[item], schedule, tile.head_group)
                for chunk in tile.kv if item == "dkv" else tile.q:
                    if chunk in mine:
                        slots.setdefault((mine[chunk], group), Counter())[t] += 1
    return found


def _outbox(schedule: Schedule, backward: bool, layouts: Layouts) -> tuple[dict[str, int], dict[int, int], int]:
    """Returns the offsets of operands and of results in every rank's outbox, and its size in bytes."""
    layout, all_steps = schedule.layout, steps(schedule, backward)
    end, operand_offsets = 0, {}
    for item in sorted({move.item for step in all_steps for move in step.moves if not move.is_result}):
        operand_offsets[item] = end
        end += aligned(layouts[item].staged_chunks * layouts[item].chunk_bytes)
    sending = [t for t, following in enumerate(all_steps[1:]) if any(move.is_result for move in following.moves)]
    largest = max((_result_bytes(all_steps[t], layout, backward, layouts) for t in sending), default=0)
    result_offsets = {t: end + i % REGIONS * largest for i, t in enumerate(sending)}
    return operand_offsets, result_offsets, end + min(REGIONS, len(sending)) * largest


def _result_bytes(step: Step, layout: Layout, backward: bool, layouts: Layouts) -> int:
    """Returns the bytes of results that a step leaves in the outbox of the rank with most of them."""
    return max(
        sum(
            aligned(len(block.chunks) * layouts[block.item].chunk_bytes)
            for block in result_blocks(step, layout, r, backward)
        )
        for r in range(layout.world)
    )


# ---- the program ----------------------------------------------------------------------------------------------------


class Fetch(NamedTuple):
    """A chunk that is copied into an arena; `remote` is a view in the outbox of `src`."""

    arena: int
    slot: int
    src: int
    remote: Buffer


class Arrival(NamedTuple):
    """A result that another rank computed for this one; `unpacked` are views of its tensors in the outbox of `src`."""

    item: str
    slot: ChunkSlot
    src: int
    remote: Buffer
    unpacked: Buffer


Parts = Mapping[ChunkSlot, Sequence[Buffer]]


@dataclass(frozen=True, eq=False)
class Reduction:
    """Parts of an item's result that are reduced together, in order for each slot."""

    item: str
    parts: Parts

    @cached_property
    def key(self) -> Hashable:
        """Key of the addresses of the parts."""
        return tuple((slot, addresses(buffer)) for slot, buffers in self.parts.items() for buffer in buffers)


class Operand(NamedTuple):
    """Input of a tile: neighbouring chunks of an arena, or of the rank's own tensors if `arena` is None."""

    arena: int | None
    start: int
    chunks: int
    group: int


class OutputSlot(NamedTuple):
    """Memory for a tile's result of an item.

    It is in the outbox (`outbox`), in the final tensor if no other tile contributes (`final`), or newly allocated.
    `own` are the chunks that this rank still has to reduce: index in the tile, slot, and view in the outbox.
    """

    item: str
    outbox: Buffer | None
    final: Operand | None
    own: tuple[tuple[int, ChunkSlot, Buffer | None], ...]


class TileProgram(NamedTuple):
    tile: Tile
    q: Operand
    kv: Operand | None  # None: kept from the forward pass
    outputs: tuple[OutputSlot, ...]


class StepProgram(NamedTuple):
    sends: tuple[Send, ...]
    opens: tuple[int, ...]  # arenas that are allocated
    fetches: tuple[Fetch, ...]
    arrivals: tuple[Arrival, ...]
    receives: tuple[Receive, ...]  # of the arrivals
    reduced_items: tuple[str, ...]  # items whose results are reduced here
    # For a transport that reads in place. None: some parts are not in an outbox.
    reductions: tuple[Reduction, ...] | None
    tiles: tuple[TileProgram, ...]
    closes: tuple[int, ...]  # arenas that are freed
    has_moves: bool  # between any two ranks
    fresh: bool  # some outbox was written to since the last exchange


@dataclass(frozen=True, eq=False)
class Program:
    staged: tuple[tuple[str, Buffer], ...]  # operands that travel, and their views in the outbox
    arenas: tuple[Arena, ...]
    steps: tuple[StepProgram, ...]


def lower(spec: PassSpec, memory: Tensor, peer_view: Callable[[int, Tensor], Tensor]) -> Program:
    """Lowers a pass to a program in an outbox.

    `memory` is the outbox (uint8), `peer_view` is `Transport.peer_view`.
    """
    lowering = _Lowering(spec, memory, peer_view)
    programs: list[StepProgram] = []
    for t in range(len(lowering.steps)):
        programs.append(lowering.step(t, programs[-1].tiles if programs else ()))
    return Program(tuple(lowering.staged.items()), lowering.arenas, tuple(programs))


def reductions_of(results: Sequence[tuple[str, ChunkSlot, Buffer]]) -> tuple[Reduction, ...]:
    """Groups results that are reduced together by their item."""
    found: dict[str, dict[ChunkSlot, list[Buffer]]] = {}
    for item, slot, part in results:
        found.setdefault(item, {}).setdefault(slot, []).append(part)
    return tuple(Reduction(item, parts) for item, parts in found.items())


class _Lowering:
    """Lowering of one pass: finds the memory of everything that it touches."""

    def __init__(self, spec: PassSpec, memory: Tensor, peer_view: Callable[[int, Tensor], Tensor]) -> None:
        self.spec, self.layout, self.rank, self.layouts = spec, spec.schedule.layout, spec.rank, spec.layouts
        self.memory, self.peer_view = memory, peer_view
        self.steps = steps(spec.schedule, spec.backward)
        self.first_move = next((t for t, step in enumerate(self.steps) if step.moves), None)
        self.gathered_items = spec.schedule.gathered_items(spec.backward)
        self.arenas = arenas(self.steps, self.layout, self.rank, self.gathered_items)
        self.staged = {
            item: self.layouts[item].packed(memory[offset:], self.layouts[item].staged_chunks)
            for item, offset in spec.operand_offsets.items()
        }

    def step(self, t: int, tiles_before: tuple[TileProgram, ...]) -> StepProgram:
        """Lowers step `t`, during which the results of the previous step's tiles are reduced."""
        step = self.steps[t]
        opens = tuple(i for i, a in enumerate(self.arenas) if a.first == t + 1 or t == a.first == 0)
        sends, fetched, arrivals = self.messages(t)
        fetches = [own for i in opens for own in self.own_fetches(i)] + fetched
        # This rank's own first, then the next neighbour's, so that ranks do not all read from the same one.
        fetches.sort(key=lambda fetch: (fetch.src - self.rank) % self.layout.world)
        results = [
            (output.item, slot, part)
            for tile in tiles_before
            for output in tile.outputs
            for _, slot, part in output.own
        ]
        results += [(arrival.item, arrival.slot, arrival.unpacked) for arrival in arrivals]
        known = [(item, slot, part) for item, slot, part in results if part is not None]
        return StepProgram(
            sends=tuple(sends),
            opens=opens,
            fetches=tuple(fetches),
            arrivals=tuple(arrivals),
            receives=tuple(Receive(arrival.src, x, None) for arrival in arrivals for x in arrival.remote),
            reduced_items=tuple(sorted({item for item, _, _ in results})),
            reductions=reductions_of(known) if len(known) == len(results) else None,
            tiles=tuple(self.tile(t, i, tile) for i, tile in enumerate(step.tiles[self.rank])),
            closes=tuple(i for i, a in enumerate(self.arenas) if a.last == t),
            has_moves=bool(step.moves),
            fresh=t == self.first_move or any(move.is_result for move in step.moves),
        )

    def messages(self, t: int) -> tuple[list[Send], list[Fetch], list[Arrival]]:
        """Returns a step's sends, and the operands and results that this rank receives."""
        sends, fetches, arrivals = list[Send](), list[Fetch](), list[Arrival]()
        mine = (move for move in self.steps[t].moves if self.rank in (move.src, move.dst))
        # Operands before results: both ends must list their messages in the same order.
        for move in sorted(mine, key=lambda move: move.is_result):
            if move.is_result:
                here = self.sent_result(t - 1, move.src, move.tile, move.item, move.chunk)
            else:
                here = self.staged_chunk(move.item, move.chunk, move.head_group)
            if move.src == self.rank:
                sends += [Send(move.dst, x) for x in here]
                continue
            remote = tuple(self.peer_view(move.src, x) for x in here)
            if move.is_result:
                slot = self.slot(move.item, move.chunk, move.head_group)
                arrivals.append(Arrival(move.item, slot, move.src, remote, self.layouts[move.item].unpacked(remote)))
            else:
                arena, start = self.find_in_arena(t + 1, move.item, (move.chunk,), move.head_group)
                fetches.append(Fetch(arena, start, move.src, remote))
        return sends, fetches, arrivals

    def tile(self, t: int, i: int, tile: Tile) -> TileProgram:
        results = {"dq": tile.q, "dkv": tile.kv} if self.spec.backward else {"out": tile.q}
        outputs = tuple(self.output(t, i, item, chunks, tile.head_group) for item, chunks in results.items())
        kv = self.operand(t, "kv", tile.kv, tile.head_group) if "kv" in self.gathered_items else None
        return TileProgram(tile, self.operand(t, "q", tile.q, tile.head_group), kv, outputs)

    def output(self, t: int, i: int, item: str, chunks: tuple[int, ...], head_group: int) -> OutputSlot:
        layout = self.layouts[item]
        own = [(c, self.slot(item, x, head_group)) for c, x in enumerate(chunks) if self.layout.home(x) == self.rank]
        sent = self.sent_block(t, self.rank, i, item)
        if sent is not None:
            buffer = sent[1]
            views = (*layout.unpacked(buffer[:1]), *buffer[1:])
            own_views = tuple((c, slot, layout.unpacked(layout.slots(buffer, c, 1))) for c, slot in own)
            return OutputSlot(item, views, None, own_views)
        start = local_start(self.layout, self.rank, chunks)
        parts = self.spec.parts[item]
        if start is not None and self.spec.single_step[item] and all(parts[slot].total() == 1 for _, slot in own):
            return OutputSlot(item, None, Operand(None, start, len(chunks), self.group(item, head_group)), ())
        return OutputSlot(item, None, None, tuple((c, slot, None) for c, slot in own))

    def operand(self, t: int, item: str, chunks: tuple[int, ...], head_group: int) -> Operand:
        start = local_start(self.layout, self.rank, chunks)
        if start is not None:
            return Operand(None, start, len(chunks), self.group(item, head_group))
        arena, start = self.find_in_arena(t, item, chunks, head_group)
        return Operand(arena, start, len(chunks), 0)

    def own_fetches(self, arena: int) -> list[Fetch]:
        """Returns the copies of this rank's own chunks into an arena."""
        a = self.arenas[arena]
        own = [(i, chunk) for i, chunk in enumerate(a.chunks) if self.layout.home(chunk) == self.rank]
        return [Fetch(arena, i, self.rank, self.staged_chunk(a.item, chunk, a.head_group)) for i, chunk in own]

    def find_in_arena(self, t: int, item: str, chunks: tuple[int, ...], head_group: int) -> tuple[int, int]:
        for i, a in enumerate(self.arenas):
            if (a.item, a.head_group) == (item, head_group) and a.first <= t <= a.last and chunks[0] in a.chunks:
                return i, a.find(chunks)
        raise AssertionError(f"no arena holds {item} {chunks} of head group {head_group} at step {t}")

    def group(self, item: str, head_group: int) -> int:
        return item_group(self.layouts[item], self.spec.schedule, head_group)

    def slot(self, item: str, chunk: int, head_group: int) -> ChunkSlot:
        return self.layout.chunks(self.layout.home(chunk)).index(chunk), self.group(item, head_group)

    def staged_chunk(self, item: str, chunk: int, head_group: int) -> Buffer:
        layout = self.layouts[item]
        index, group = self.slot(item, chunk, head_group)
        return layout.slots(self.staged[item], group * layout.chunks + index, 1)

    def sent_result(self, t: int, src: int, tile: int, item: str, chunk: int) -> Buffer:
        block = self.sent_block(t, src, tile, item)
        assert block is not None, f"tile {tile} of rank {src} sends no {item} at step {t}"
        chunks, buffer = block
        return self.layouts[item].slots(buffer, chunks.index(chunk), 1)

    def sent_block(self, t: int, rank: int, tile: int, item: str) -> tuple[tuple[int, ...], Buffer] | None:
        """Returns the chunks of a result that a rank sends, and the buffer at their offset in this rank's outbox."""
        start = self.spec.result_offsets.get(t, 0)
        for block in result_blocks(self.steps[t], self.layout, rank, self.spec.backward):
            layout = self.layouts[block.item]
            if (block.tile, block.item) == (tile, item):
                return block.chunks, layout.packed(self.memory[start:], len(block.chunks))
            start += aligned(len(block.chunks) * layout.chunk_bytes)
        return None
