"""What one rank does in one pass over a schedule, with every place in memory worked out: made once, run often.

A training step runs the same pass for every layer, and at short lengths the host has less than a millisecond for each.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from lightseq.attention.buffers import Bundle
from lightseq.attention.passes import Pass, Place, aligned, item_group, passes
from lightseq.comm.transport import Receive, Send
from lightseq.kernels.launches import addresses
from lightseq.schedule.placement import Arena, arenas, blocks, local_place
from lightseq.schedule.table import Tile


class Fill(NamedTuple):
    """A chunk that travels into an arena; `there` is where it lies in the outbox of `src`."""

    arena: int
    slot: int
    src: int
    there: Bundle


class Arrival(NamedTuple):
    """A result that comes home."""

    item: str
    place: Place
    src: int
    there: Bundle
    unpacked: Bundle


Parts = Mapping[Place, Sequence[Bundle]]


@dataclass(frozen=True, eq=False)
class Taking:
    """All results for an item that come home together, of each place in order."""

    item: str
    parts: Parts

    @cached_property
    def key(self) -> Hashable:
        """Stands for where they lie."""
        return tuple((place, addresses(bundle)) for place, bundles in self.parts.items() for bundle in bundles)


class Operand(NamedTuple):
    """What a tile reads: neighbouring chunks of an arena, or of the rank's own tensors where `arena` is None."""

    arena: int | None
    start: int
    chunks: int
    group: int


class Room(NamedTuple):
    """Where a tile leaves its result for an item.

    In the outbox (`posted`); in the final tensor, where the tile is the only one to contribute (`final`); or in memory
    of its own. `own` are the chunks that this rank has yet to take in: which, where to, and where they were posted.
    """

    item: str
    posted: Bundle | None
    final: Operand | None
    own: tuple[tuple[int, Place, Bundle | None], ...]


class TileProgram(NamedTuple):
    tile: Tile
    q: Operand
    kv: Operand | None  # None: kept since the forward pass
    rooms: tuple[Room, ...]


class StepProgram(NamedTuple):
    sends: tuple[Send, ...]
    opens: tuple[int, ...]  # arenas
    fills: tuple[Fill, ...]
    arrivals: tuple[Arrival, ...]
    receives: tuple[Receive, ...]  # of the arrivals
    lands: tuple[str, ...]  # items of which results come home
    takes: tuple[Taking, ...] | None  # where a transport reads in place; None: some lie in memory of the pass
    tiles: tuple[TileProgram, ...]
    closes: tuple[int, ...]
    travels: bool  # something moves, on this rank or another
    fresh: bool  # outboxes were written to since the last exchange


@dataclass(frozen=True, eq=False)
class Program:
    staged: tuple[tuple[str, Bundle], ...]  # operands that travel, and where they lie in the outbox
    arenas: tuple[Arena, ...]
    steps: tuple[StepProgram, ...]


def make_program(asked: Pass, memory: Tensor, at: Callable[[int, Tensor], Tensor]) -> Program:
    """`memory` is the outbox; `at` is `Transport.at`."""
    places = _Places(asked, memory, at)
    steps: list[StepProgram] = []
    for t in range(len(places.steps)):
        steps.append(places.step(t, steps[-1].tiles if steps else ()))
    return Program(tuple(places.staged.items()), places.arenas, tuple(steps))


class _Places:
    """Finds the places of everything that a pass touches."""

    def __init__(self, asked: Pass, memory: Tensor, at: Callable[[int, Tensor], Tensor]) -> None:
        schedule, backward, rank, forms = asked.schedule, asked.backward, asked.rank, asked.forms
        self.asked, self.layout, self.rank, self.forms = asked, schedule.layout, rank, forms
        self.memory, self.at = memory, at
        self.steps = passes(schedule, backward)
        self.first_move = next((t for t, step in enumerate(self.steps) if step.moves), None)
        self.gathers = schedule.gathers(backward)
        self.arenas = arenas(self.steps, self.layout, rank, self.gathers)
        self.staged = {
            item: forms[item].packed(memory[x:], forms[item].staged_chunks) for item, x in asked.staged.items()
        }

    def step(self, t: int, before: tuple[TileProgram, ...]) -> StepProgram:
        """`before` are the tiles of the step before."""
        step = self.steps[t]
        opens = tuple(i for i, a in enumerate(self.arenas) if a.first == t + 1 or t == a.first == 0)
        sends, fetched, arrivals = self.messages(t)
        fills = [own for i in opens for own in self.own_fills(i)] + fetched
        # What is here already, then the next neighbour's: so no rank is read by all others at once.
        fills.sort(key=lambda fill: (fill.src - self.rank) % self.layout.world)
        own = [(room.item, place, posted) for tile in before for room in tile.rooms for _, place, posted in room.own]
        home = [*own, *((a.item, a.place, a.unpacked) for a in arrivals)]
        known = [(item, place, part) for item, place, part in home if part is not None]
        return StepProgram(
            sends=tuple(sends),
            opens=opens,
            fills=tuple(fills),
            arrivals=tuple(arrivals),
            receives=tuple(Receive(a.src, x, None) for a in arrivals for x in a.there),
            lands=tuple(sorted({item for item, _, _ in home})),
            takes=takings(known) if len(known) == len(home) else None,
            tiles=tuple(self.tile(t, i, tile) for i, tile in enumerate(step.tiles[self.rank])),
            closes=tuple(i for i, a in enumerate(self.arenas) if a.last == t),
            travels=bool(step.moves),
            fresh=t == self.first_move or any(move.is_result for move in step.moves),
        )

    def messages(self, t: int) -> tuple[list[Send], list[Fill], list[Arrival]]:
        """What this rank sends in a step, and the operands and results that come to it."""
        sends, fills, arrivals = list[Send](), list[Fill](), list[Arrival]()
        mine = (move for move in self.steps[t].moves if self.rank in (move.src, move.dst))
        # Operands before results, as they are received: both ends of a message have to list it in the same order.
        for move in sorted(mine, key=lambda move: move.is_result):
            here = self.posted(t - 1, move.src, move.tile, move.item, move.chunk) if move.is_result else (
                self.staged_chunk(move.item, move.chunk, move.heads)
            )  # fmt: skip
            if move.src == self.rank:
                sends += [Send(move.dst, x) for x in here]
                continue
            there = tuple(self.at(move.src, x) for x in here)
            if move.is_result:
                place = self.place(move.item, move.chunk, move.heads)
                arrivals.append(Arrival(move.item, place, move.src, there, self.forms[move.item].unpacked(there)))
            else:
                arena, slot = self.arena_slot(t + 1, move.item, (move.chunk,), move.heads)
                fills.append(Fill(arena, slot, move.src, there))
        return sends, fills, arrivals

    def tile(self, t: int, i: int, tile: Tile) -> TileProgram:
        results = {"dq": tile.q, "dkv": tile.kv} if self.asked.backward else {"out": tile.q}
        rooms = tuple(self.room(t, i, item, chunks, tile.heads) for item, chunks in results.items())
        kv = self.operand(t, "kv", tile.kv, tile.heads) if "kv" in self.gathers else None
        return TileProgram(tile, self.operand(t, "q", tile.q, tile.heads), kv, rooms)

    def room(self, t: int, i: int, item: str, chunks: tuple[int, ...], heads: int) -> Room:
        form = self.forms[item]
        own = [(c, self.place(item, x, heads)) for c, x in enumerate(chunks) if self.layout.home(x) == self.rank]
        posted = self.block(t, self.rank, i, item)
        if posted is not None:
            bundle = posted[1]
            views = (*form.unpacked(bundle[:1]), *bundle[1:])
            return Room(item, views, None, tuple((c, p, form.unpacked(form.slots(bundle, c, 1))) for c, p in own))
        start = local_place(self.layout, self.rank, chunks)
        parts = self.asked.parts[item]
        if start is not None and self.asked.at_once[item] and all(parts[place].total() == 1 for _, place in own):
            return Room(item, None, Operand(None, start, len(chunks), self.group(item, heads)), ())
        return Room(item, None, None, tuple((c, place, None) for c, place in own))

    def operand(self, t: int, item: str, chunks: tuple[int, ...], heads: int) -> Operand:
        start = local_place(self.layout, self.rank, chunks)
        if start is not None:
            return Operand(None, start, len(chunks), self.group(item, heads))
        arena, slot = self.arena_slot(t, item, chunks, heads)
        return Operand(arena, slot, len(chunks), 0)

    def own_fills(self, arena: int) -> list[Fill]:
        a = self.arenas[arena]
        own = [(i, c) for i, c in enumerate(a.chunks) if self.layout.home(c) == self.rank]
        return [Fill(arena, i, self.rank, self.staged_chunk(a.item, c, a.heads)) for i, c in own]

    def arena_slot(self, t: int, item: str, chunks: tuple[int, ...], heads: int) -> tuple[int, int]:
        for i, a in enumerate(self.arenas):
            if (a.item, a.heads) == (item, heads) and a.first <= t <= a.last and chunks[0] in a.chunks:
                return i, a.find(chunks)
        raise AssertionError(f"no arena holds {item} {chunks} of head group {heads} at step {t}")

    def group(self, item: str, heads: int) -> int:
        return item_group(self.forms[item], self.asked.schedule, heads)

    def place(self, item: str, chunk: int, heads: int) -> Place:
        return self.layout.chunks(self.layout.home(chunk)).index(chunk), self.group(item, heads)

    def staged_chunk(self, item: str, chunk: int, heads: int) -> Bundle:
        form = self.forms[item]
        place, group = self.place(item, chunk, heads)
        return form.slots(self.staged[item], group * form.chunks + place, 1)

    def posted(self, t: int, src: int, tile: int, item: str, chunk: int) -> Bundle:
        block = self.block(t, src, tile, item)
        assert block is not None, f"tile {tile} of rank {src} leaves no {item} at step {t}"
        chunks, bundle = block
        return self.forms[item].slots(bundle, chunks.index(chunk), 1)

    def block(self, t: int, rank: int, tile: int, item: str) -> tuple[tuple[int, ...], Bundle] | None:
        """The chunks that a tile of any rank posts, and the memory at their place in this rank's outbox."""
        start = self.asked.regions.get(t, 0)
        for block in blocks(self.steps[t], self.layout, rank, self.asked.backward):
            form = self.forms[block.item]
            if (block.tile, block.item) == (tile, item):
                return block.chunks, form.packed(self.memory[start:], len(block.chunks))
            start += aligned(len(block.chunks) * form.chunk_bytes)
        return None


def takings(home: Sequence[tuple[str, Place, Bundle]]) -> tuple[Taking, ...]:
    """Results that come home together, by the item."""
    found: dict[str, dict[Place, list[Bundle]]] = {}
    for item, place, part in home:
        found.setdefault(item, {}).setdefault(place, []).append(part)
    return tuple(Taking(item, parts) for item, parts in found.items())
