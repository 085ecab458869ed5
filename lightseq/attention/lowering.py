"""Lowering of a pass: from its specification and an outbox to a program of addresses."""

from collections.abc import Callable

from torch import Tensor

from lightseq.attention.buffers import Buffer
from lightseq.attention.pass_spec import ChunkSlot, PassSpec, aligned, item_head_group
from lightseq.attention.program import (
    Arrival,
    ChunkRange,
    ChunkRanges,
    Fetch,
    OutputSlot,
    OwnPart,
    Program,
    StepProgram,
    TileProgram,
    reductions_of,
)
from lightseq.comm.transport import Receive, Send
from lightseq.schedule.arenas import arenas, local_start, result_blocks
from lightseq.schedule.table import Tile, result_chunks


def lower(spec: PassSpec, memory: Tensor, peer_view: Callable[[int, Tensor], Tensor]) -> Program:
    """Lowers a pass to a program in an outbox.

    `memory` is the outbox (uint8), `peer_view` is `Transport.peer_view`.
    """
    lowering = _Lowering(spec, memory, peer_view)
    programs: list[StepProgram] = []
    for t in range(len(lowering.steps)):
        programs.append(lowering.step(t, programs[-1].tiles if programs else ()))
    return Program(tuple(lowering.staged.items()), lowering.arenas, tuple(programs))


class _Lowering:
    """Lowering of one pass: finds the memory of everything that it touches.

    `layout` says where the sequence's tokens are, and `layouts[item]` how an item's buffer is laid out. The outboxes of
    all ranks are laid out alike, so a view in this rank's outbox also says where data is in another's (`peer_view`).
    """

    def __init__(self, spec: PassSpec, memory: Tensor, peer_view: Callable[[int, Tensor], Tensor]) -> None:
        self.spec, self.layout, self.rank, self.layouts = spec, spec.schedule.layout, spec.rank, spec.layouts
        self.memory, self.peer_view = memory, peer_view
        self.steps = spec.schedule.steps(spec.backward)
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
        # An arena opens in the step before its first tile, which fills it.
        opens = tuple(i for i, a in enumerate(self.arenas) if a.first == t + 1 or t == a.first == 0)
        sends, fetched, arrivals = self.messages(t)
        fetches = [own for i in opens for own in self.own_fetches(i)] + fetched
        # Own messages first, then the next neighbour's, so that ranks do not all read from one rank.
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
            outboxes_written=t == self.first_move or any(move.is_result for move in step.moves),
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
                (place,) = self.find_in_arena(t + 1, move.item, (move.chunk,), move.head_group)
                assert place.arena is not None
                fetches.append(Fetch(place.arena, place.start, move.src, remote))
        return sends, fetches, arrivals

    def tile(self, t: int, i: int, tile: Tile) -> TileProgram:
        """Lowers tile `i` of step `t`."""
        results = result_chunks(tile, self.spec.backward)
        outputs = tuple(self.output(t, i, item, chunks, tile.head_group) for item, chunks in results.items())
        kv = self.operand(t, "kv", tile.kv, tile.head_group) if "kv" in self.gathered_items else None
        return TileProgram(tile, self.operand(t, "q", tile.q, tile.head_group), kv, outputs)

    def output(self, t: int, i: int, item: str, chunks: tuple[int, ...], head_group: int) -> OutputSlot:
        """Returns the memory for the result of an item that tile `i` of step `t` computes."""
        item_layout = self.layouts[item]
        own = [(c, self.slot(item, x, head_group)) for c, x in enumerate(chunks) if self.layout.home(x) == self.rank]
        sent = self.sent_block(t, self.rank, i, item)
        if sent is not None:
            _, buffer = sent
            views = (*item_layout.unpacked(buffer[:1]), *buffer[1:])  # the lse stays packed: unpacked, it is a copy
            parts = [OwnPart(c, slot, item_layout.unpacked(item_layout.slots(buffer, c, 1))) for c, slot in own]
            return OutputSlot(item, outbox=views, final=None, own=tuple(parts))
        start = local_start(self.layout, self.rank, chunks)
        counts = self.spec.parts[item]
        if start is not None and self.spec.in_final_dtype[item] and all(counts[slot].total() == 1 for _, slot in own):
            final = ChunkRange(None, start, len(chunks), self.item_head_group(item, head_group))
            return OutputSlot(item, outbox=None, final=final, own=())
        return OutputSlot(item, outbox=None, final=None, own=tuple(OwnPart(c, slot, None) for c, slot in own))

    def operand(self, t: int, item: str, chunks: tuple[int, ...], head_group: int) -> ChunkRanges:
        """Returns where a tile of step `t` finds the chunks of an operand."""
        start = local_start(self.layout, self.rank, chunks)
        if start is not None:
            return (ChunkRange(None, start, len(chunks), self.item_head_group(item, head_group)),)
        return self.find_in_arena(t, item, chunks, head_group)

    def own_fetches(self, arena: int) -> list[Fetch]:
        """Returns the copies of this rank's own chunks into an arena."""
        a = self.arenas[arena]
        own = [(i, chunk) for i, chunk in enumerate(a.chunks) if self.layout.home(chunk) == self.rank]
        return [Fetch(arena, i, self.rank, self.staged_chunk(a.item, chunk, a.head_group)) for i, chunk in own]

    def find_in_arena(self, t: int, item: str, chunks: tuple[int, ...], head_group: int) -> ChunkRanges:
        """Returns where chunks lie in the arena that holds them at step `t`."""
        for i, a in enumerate(self.arenas):
            if (a.item, a.head_group) == (item, head_group) and a.first <= t <= a.last and chunks[0] in a.chunks:
                return tuple(ChunkRange(i, start, count, 0) for start, count in a.find(chunks))
        raise AssertionError(f"no arena holds {item} {chunks} of head group {head_group} at step {t}")

    def item_head_group(self, item: str, head_group: int) -> int:
        return item_head_group(self.layouts[item], self.spec.schedule, head_group)

    def slot(self, item: str, chunk: int, head_group: int) -> ChunkSlot:
        """Returns the place of a chunk in the tensors of its home rank."""
        index = self.layout.chunks(self.layout.home(chunk)).index(chunk)
        return ChunkSlot(index, self.item_head_group(item, head_group))

    def staged_chunk(self, item: str, chunk: int, head_group: int) -> Buffer:
        """Returns the buffer at the offset that an operand's chunk has in its home rank's outbox."""
        item_layout, slot = self.layouts[item], self.slot(item, chunk, head_group)
        return item_layout.slots(self.staged[item], slot.head_group * item_layout.chunk_count + slot.chunk, 1)

    def sent_result(self, t: int, src: int, tile: int, item: str, chunk: int) -> Buffer:
        """Returns the buffer at the offset that one chunk of a result has in the outbox of rank `src`."""
        block = self.sent_block(t, src, tile, item)
        assert block is not None, f"tile {tile} of rank {src} sends no {item} at step {t}"
        chunks, buffer = block
        return self.layouts[item].slots(buffer, chunks.index(chunk), 1)

    def sent_block(self, t: int, rank: int, tile: int, item: str) -> tuple[tuple[int, ...], Buffer] | None:
        """Returns the chunks of a tile's result, and the buffer at the offset that they have in the rank's outbox.

        None if the result is not in the outbox. The buffer is in this rank's outbox, whichever rank computes the tile.
        """
        start = self.spec.result_offsets.get(t, 0)
        for block in result_blocks(self.steps[t], self.layout, rank, self.spec.backward):
            item_layout = self.layouts[block.item]
            if (block.tile, block.item) == (tile, item):
                return block.chunks, item_layout.packed(self.memory[start:], len(block.chunks))
            start += aligned(len(block.chunks) * item_layout.chunk_bytes)
        return None
