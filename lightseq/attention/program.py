"""Lowered program of a rank: one pass over a schedule, with the address of every buffer.

A schedule's table is lowered once for given shapes (`lowering.py`) and run for every layer and step (`executor.py`),
because at short lengths the host has less than a millisecond per layer.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightseq.attention.buffers import Buffer
from lightseq.attention.pass_spec import ChunkSlot
from lightseq.comm.transport import Receive, Send
from lightseq.kernels.fused.launches import addresses
from lightseq.schedule.arenas import Arena
from lightseq.schedule.table import Tile


class Fetch(NamedTuple):
    """A chunk that is copied into an arena; `remote` is a view in the outbox of `src`, which may be this rank."""

    arena: int  # index in `Program.arenas`
    slot: int  # index of the chunk in the arena
    src: int
    remote: Buffer


class Arrival(NamedTuple):
    """A result that another rank computed for this one.

    `remote` are views in the outbox of `src`, and `unpacked` the same memory as tensors (B, S, N, D) and lse (B, N, S).
    """

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
        return tuple([(slot, addresses(buffer)) for slot, buffers in self.parts.items() for buffer in buffers])


class ChunkRange(NamedTuple):
    """Neighbouring chunks of an arena, or of the rank's own tensors if `arena` is None."""

    arena: int | None
    start: int
    chunk_count: int
    head_group: int  # the item's heads in the rank's own tensors; an arena holds only one group


ChunkRanges = tuple[ChunkRange, ...]  # several, if chunks do not lie side by side


class OwnPart(NamedTuple):
    """Part of a tile's result for a chunk of the computing rank, which reduces it."""

    chunk: int  # index in the tile
    slot: ChunkSlot
    view: Buffer | None  # in the outbox; None: the kernel's result is not there


class OutputSlot(NamedTuple):
    """Memory for a tile's result of an item.

    It is in the outbox (`outbox`), in the final tensor if no other tile contributes (`final`), or, if both are None,
    newly allocated by the kernel. `own` are the parts that this rank still has to reduce.
    """

    item: str
    outbox: Buffer | None
    final: ChunkRange | None
    own: tuple[OwnPart, ...]


class TileProgram(NamedTuple):
    """One kernel call: where its operands are and where its results go."""

    tile: Tile
    q: ChunkRanges
    kv: ChunkRanges | None  # None: gathered in the forward pass
    outputs: tuple[OutputSlot, ...]


class StepProgram(NamedTuple):
    """One step: the messages that start with it, and the tiles that run meanwhile."""

    sends: tuple[Send, ...]
    opens: tuple[int, ...]  # arenas that are allocated, because this step fills them for the next
    fetches: tuple[Fetch, ...]
    arrivals: tuple[Arrival, ...]
    receives: tuple[Receive, ...]  # one for each arrival
    reduced_items: tuple[str, ...]  # items whose results are reduced here
    # For a transport that reads in place. None: some parts are not in an outbox.
    reductions: tuple[Reduction, ...] | None
    tiles: tuple[TileProgram, ...]
    closes: tuple[int, ...]  # arenas that are freed
    has_moves: bool  # between any two ranks
    outboxes_written: bool  # some rank has written to its outbox since the last exchange


@dataclass(frozen=True, eq=False)
class Program:
    """Program of a pass."""

    staged: tuple[tuple[str, Buffer], ...]  # operands that travel, and their views in the outbox
    arenas: tuple[Arena, ...]
    steps: tuple[StepProgram, ...]


def reductions_of(results: Sequence[tuple[str, ChunkSlot, Buffer]]) -> tuple[Reduction, ...]:
    """Groups results that are reduced together, each (item, slot, part), by their item."""
    found: dict[str, dict[ChunkSlot, list[Buffer]]] = {}
    for item, slot, part in results:
        found.setdefault(item, {}).setdefault(slot, []).append(part)
    return tuple([Reduction(item, parts) for item, parts in found.items()])
