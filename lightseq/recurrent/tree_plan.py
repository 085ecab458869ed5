"""Pieces of a row of trees on the ranks of a group, and how states travel between them.

A piece is the part of a node in one fragment: a run of tokens on one rank, of one node. It begins with the final state
of the piece before it on its path, which may be on another rank. Pieces from which others begin are links, the others
leaves. Links above a piece of another rank are shared: all ranks get their summaries. What begins from the others is on
their own rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightseq.recurrent.fragments import MAX_PLANS, Segments, runs_of, segments_of
from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import ROOT, Nodes
from lightseq.utils.tensors import upload


class Piece(NamedTuple):
    """Run of a row's tokens on one rank, in one node."""

    rank: int
    first: int  # position in the row
    end: int
    before: int  # index of the piece that it begins from, or ROOT


class Step(NamedTuple):
    """Links of one depth, computed together from the states of the depth above. Indices are on the device."""

    summaries: Tensor  # indices of the links in the table of summaries
    rows: Tensor  # rows of their final states
    begin: Tensor  # rows of their initial states


@dataclass(frozen=True, eq=False)
class TreePlan:
    """One rank's pieces of a tree, and the rows of their initial states.

    Row 0 holds zeros. Shared links follow, `most_shared` rows for each rank, and then this rank's other links.
    """

    links: Segments | None
    leaves: Segments | None
    links_begin: Tensor  # row that each link begins from
    leaves_begin: Tensor
    link_rows: Tensor  # row of each link's final state
    shared_links: Tensor  # this rank's shared links, among its links
    most_shared: int  # links that one rank shares at most; with 0 nothing travels
    shared_rows: int  # rows that all ranks' shared links take
    row_count: int
    shared_steps: tuple[Step, ...]  # from the roots down; summaries are those of all ranks
    own_steps: tuple[Step, ...]  # the same for links that this rank does not share


@lru_cache(maxsize=MAX_PLANS)  # serves all layers, forward and backward
def tree_plan(layout: Layout, rank: int, nodes: Nodes, device: torch.device) -> TreePlan:
    """Makes the plan of one rank for a row of trees in a layout."""
    pieces = _pieces(layout, nodes)
    links = sorted({piece.before for piece in pieces} - {ROOT})
    shared = _shared(pieces)
    of_rank = [[link for link in links if link in shared and pieces[link].rank == r] for r in range(layout.world)]
    most = max(map(len, of_rank))
    row = {ROOT: 0}
    for r, mine in enumerate(of_rank):
        row |= {link: 1 + r * most + place for place, link in enumerate(mine)}
    others = [link for link in links if link not in shared and pieces[link].rank == rank]
    row |= {link: 1 + layout.world * most + place for place, link in enumerate(others)}

    own = _in_local_order(layout, rank, pieces)
    own_links = [index for index in own if index in row]
    own_leaves = [index for index in own if index not in row]
    starts = dict(zip(own, _local_starts(pieces, own), strict=True))
    place = {link: place for place, link in enumerate(own_links)}

    def segments(found: Sequence[int]) -> Segments | None:
        runs = [(starts[index], starts[index] + pieces[index].end - pieces[index].first) for index in found]
        return segments_of(runs, device) if runs else None

    def indices(found: Iterable[int]) -> Tensor:
        return upload(torch.tensor([*found], dtype=torch.int64), device)

    def steps(found: Iterable[int], summary: dict[int, int]) -> tuple[Step, ...]:
        return tuple(
            Step(
                indices(summary[x] for x in of), indices(row[x] for x in of), indices(row[pieces[x].before] for x in of)
            )
            for of in _by_depth(pieces, found)
        )

    everywhere = sorted(shared)
    return TreePlan(
        links=segments(own_links),
        leaves=segments(own_leaves),
        links_begin=indices(row[pieces[link].before] for link in own_links),
        leaves_begin=indices(row[pieces[leaf].before] for leaf in own_leaves),
        link_rows=indices(row[link] for link in own_links),
        shared_links=indices(place[link] for link in of_rank[rank]),
        most_shared=most,
        shared_rows=layout.world * most,
        row_count=1 + layout.world * most + len(others),
        shared_steps=steps(everywhere, {link: row[link] - 1 for link in everywhere}),
        own_steps=steps(others, place),
    )


def _pieces(layout: Layout, nodes: Nodes) -> list[Piece]:
    """Returns the pieces of all ranks, in the order of the row."""
    size = nodes.length // layout.chunk_count
    owned = sorted((run, rank) for rank in range(layout.world) for run in runs_of(layout.chunks(rank)))
    ranks = {first * size: rank for (first, _), rank in owned}
    starts = {start: node for node, start in enumerate(nodes.boundaries[:-1])}
    edges = sorted({*ranks, *nodes.boundaries})
    found, last, rank, node = list[Piece](), dict[int, int](), 0, 0
    for first, end in pairwise(edges):
        rank, before = ranks.get(first, rank), len(found) - 1
        if first in starts:
            node = starts[first]
            before = last.get(nodes.all_parents[node], ROOT)
        last[node] = len(found)
        found.append(Piece(rank, first, end, before))
    return found


def _shared(pieces: Sequence[Piece]) -> set[int]:
    """Returns the links above pieces of other ranks."""
    found = set[int]()
    for piece in pieces:
        above = piece.before
        if above != ROOT and pieces[above].rank != piece.rank:
            while above != ROOT and above not in found:
                found.add(above)
                above = pieces[above].before
    return found


def _in_local_order(layout: Layout, rank: int, pieces: Sequence[Piece]) -> list[int]:
    """Returns a rank's pieces in the order in which it holds them."""
    size = pieces[-1].end // layout.chunk_count
    mine = [index for index, piece in enumerate(pieces) if piece.rank == rank]
    runs = [(first * size, end * size) for first, end in runs_of(layout.chunks(rank))]
    return [index for first, end in runs for index in mine if first <= pieces[index].first < end]


def _local_starts(pieces: Sequence[Piece], own: Sequence[int]) -> list[int]:
    starts = [0]
    for index in own:
        starts.append(starts[-1] + pieces[index].end - pieces[index].first)
    return starts[:-1]


def _by_depth(pieces: Sequence[Piece], links: Iterable[int]) -> list[list[int]]:
    """Groups links, given in the order of the row, by how many of them lie above each."""
    depth, groups = dict[int, int](), list[list[int]]()
    for link in links:
        depth[link] = depth.get(pieces[link].before, -1) + 1
        if depth[link] == len(groups):
            groups.append([])
        groups[depth[link]].append(link)
    return groups
