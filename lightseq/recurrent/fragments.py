"""Fragments of a sequence on the ranks of a group, in the order in which a state travels through them.

A fragment is a run of neighbouring tokens on one rank. Documents cut fragments into segments. A state enters at a
fragment's first segment and leaves at its last one; the segments between them need nothing from other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightseq.kernels.recurrent.base import ScanInputs
from lightseq.schedule.layout import MAX_FRAGMENTS, Layout
from lightseq.sequence.group import SequenceGroup
from lightseq.utils.tensors import upload

MAX_PLANS = 16  # cached; each may keep index tensors on the device, and packed sequences rarely repeat


@dataclass(frozen=True)
class Fragment:
    """Place of a fragment, and whether a state enters it or passes through."""

    rank: int
    slot: int  # place among its rank's fragments
    receives: bool  # its first token continues a document
    passes: bool  # a state passes through it: one document covers it and began before it


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a rank's tokens that one call of a kernel computes."""

    tokens: Tensor | None  # (tokens,) on the device: local tokens of the segments, in their order; None: all tokens
    edges: tuple[int, ...]  # first index of each segment among these tokens, and the end

    def select(self, x: Tensor) -> Tensor:
        """Returns the tokens of the segments among a rank's (B, S, ...)."""
        return x if self.tokens is None else x.index_select(1, self.tokens)

    def select_inputs(self, x: ScanInputs) -> ScanInputs:
        return ScanInputs(*(None if part is None else self.select(part) for part in x))  # type: ignore[arg-type]

    def put(self, out: Tensor, part: Tensor) -> None:
        """Writes the tokens of the segments to their places among a rank's (B, S, ...)."""
        assert self.tokens is not None
        out.index_copy_(1, self.tokens, part)


@dataclass(frozen=True, eq=False)
class FragmentPlan:
    """Fragments of all ranks, and the segments of one."""

    chain: tuple[Fragment, ...]  # fragments of all ranks, in the order of the sequence
    outer: Segments  # first and last segments of this rank's fragments
    inner: Segments | None  # segments inside fragments
    first: Tensor | None  # on the device: first outer segment of each fragment; None: all outer segments
    last: Tensor | None  # on the device: last outer segment of each fragment; None as `first`

    @property
    def communicates(self) -> bool:
        """Returns whether a state travels between fragments. The same on all ranks."""
        return any(fragment.receives for fragment in self.chain)


def count_fragments(group: SequenceGroup, local: int, packed: bool) -> int:
    """Returns how many fragments a rank of a group has at most."""
    layout = group.layout
    return layout.most_packed_chunks if packed and group.balances_documents else layout.fragments_per_rank(local)


def slots_of(group: SequenceGroup, local: int, boundaries: Tensor | None) -> int:
    """Returns how many fragments a rank of a group has at most. Raises ValueError for too many."""
    count = count_fragments(group, local, packed=boundaries is not None)
    if count > MAX_FRAGMENTS:
        raise ValueError(
            f"a recurrence over a {group.layout.kind} layout would pass {count} states a rank; use --schedule zigzag, "
            "or --recurrent_schedule heads"
        )
    return count


def plan_for(group: SequenceGroup, local: int, boundaries: Tensor | None, device: torch.device) -> FragmentPlan:
    """Returns the plan of this rank. `boundaries` are those of packed documents on the CPU, padded."""
    layout, nodes = group.layout_and_nodes(local, boundaries)
    return fragment_plan(layout, group.rank, nodes.boundaries, device)


@lru_cache(maxsize=MAX_PLANS)  # serves all layers, forward and backward
def fragment_plan(layout: Layout, rank: int, boundaries: tuple[int, ...], device: torch.device) -> FragmentPlan:
    """Makes the plan of one rank for a sequence with these document boundaries."""
    size, starts = boundaries[-1] // layout.chunk_count, torch.tensor(boundaries)

    def edges_of(first: int, end: int) -> tuple[int, ...]:
        """Returns where a run of chunks begins, where documents begin inside it, and where it ends."""
        begin, stop = first * size, end * size
        return (begin, *starts[(starts > begin) & (starts < stop)].tolist(), stop)

    runs = {
        (owner, slot): run for owner in range(layout.world) for slot, run in enumerate(runs_of(layout.chunks(owner)))
    }
    chain = []
    for (owner, slot), run in sorted(runs.items(), key=lambda item: item[1]):
        edges = edges_of(*run)
        receives = edges[0] not in boundaries
        chain.append(Fragment(owner, slot, receives, passes=receives and len(edges) == 2))
    mine = [edges_of(*run) for (owner, _), run in runs.items() if owner == rank]
    return _plan(tuple(chain), mine, device)


def _plan(chain: tuple[Fragment, ...], mine: Sequence[tuple[int, ...]], device: torch.device) -> FragmentPlan:
    """Splits the segments of a rank's fragments, given by their global edges, into outer and inner ones."""
    outer, inner = list[tuple[int, int]](), list[tuple[int, int]]()
    first, last, offset = list[int](), list[int](), 0
    for edges in mine:
        segments = [(offset + a - edges[0], offset + b - edges[0]) for a, b in pairwise(edges)]
        first.append(len(outer))
        outer.append(segments[0])
        if len(segments) > 1:
            inner.extend(segments[1:-1])
            outer.append(segments[-1])
        last.append(len(outer) - 1)
        offset += edges[-1] - edges[0]
    ends = [None if len(outer) == len(mine) else upload(torch.tensor(found), device) for found in (first, last)]
    if not inner:
        return FragmentPlan(chain, segments_of(outer, None), None, *ends)
    return FragmentPlan(chain, segments_of(outer, device), segments_of(inner, device), *ends)


def segments_of(found: Sequence[tuple[int, int]], device: torch.device | None) -> Segments:
    edges = [0]
    for begin, end in found:
        edges.append(edges[-1] + end - begin)
    if device is None:
        return Segments(None, tuple(edges))
    tokens = torch.cat([torch.arange(begin, end) for begin, end in found])
    return Segments(upload(tokens, device), tuple(edges))


def runs_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Joins a rank's neighbouring chunks: (first, end) of each run."""
    runs = list[tuple[int, int]]()
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = (runs[-1][0], chunk + 1)
        else:
            runs.append((chunk, chunk + 1))
    return runs
