"""Proof of a schedule without running it: each causal pair is computed once, operands arrive, results go home."""

from functools import lru_cache

import torch
from torch import Tensor

from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Mask, Schedule, Step, Tile

TOKENS_PER_CHUNK = 2  # with two, causal, full, strict and misaligned tiles differ


class InvalidSchedule(ValueError):
    """Error for a table that does not compute causal attention."""


def validate(schedule: Schedule) -> None:
    """Raises InvalidSchedule, naming the step, unless both passes compute causal attention over the whole sequence.

    A schedule of a packed sequence must compute it over each path of nodes, one with a window only inside it.
    """
    for backward, steps in ((False, schedule.forward), (True, schedule.backward)):
        name = f"{schedule.name} on {schedule.world} ranks, {'backward' if backward else 'forward'}"
        _check_moves(schedule, steps, backward, name)
        _check_coverage(schedule, steps, name)


def _check_moves(schedule: Schedule, steps: tuple[Step, ...], backward: bool, name: str) -> None:
    """Follows every move: an operand stays while each next step reads it, a result leaves the step after its tile."""
    layout = schedule.layout
    held: set[tuple[int, str, int, int]] = set()  # (rank, item, chunk, head_group)
    owed: set[tuple[int, str, int, int, int]] = set()  # (rank, item, chunk, head_group, tile)
    for t, step in enumerate(steps):
        sent = {(m.src, m.item, m.chunk, m.head_group, m.tile) for m in step.moves if m.is_result}
        received = {(m.dst, m.item, m.chunk, m.head_group) for m in step.moves if not m.is_result}
        if len(sent) + len(received) != len(step.moves):
            raise InvalidSchedule(f"{name}, step {t}: the same item moves twice")
        for move in step.moves:
            away = move.dst if not move.is_result else move.src
            home = move.src if not move.is_result else move.dst
            if away == home or layout.home(move.chunk) != home:
                raise InvalidSchedule(f"{name}, step {t}: {move} does not run between a chunk's home and another rank")
        if sent != owed:
            raise InvalidSchedule(f"{name}, step {t}: results {sorted(owed ^ sent)} are due but not sent, or not due")
        used, owed = _needs_and_results(schedule, step, backward)
        if used - held:
            raise InvalidSchedule(f"{name}, step {t}: operands {sorted(used - held)} are missing")
        next_used = _needs_and_results(schedule, steps[t + 1], backward)[0] if t + 1 < len(steps) else set()
        held = used & next_used
        if received - next_used or received & held:
            idle = sorted(received - next_used | received & held)
            raise InvalidSchedule(f"{name}, step {t}: operands {idle} arrive without use")
        held |= received
    if held or owed:
        raise InvalidSchedule(f"{name}: after the last step {sorted(held)} are unused and {sorted(owed)} not sent home")


def _needs_and_results(schedule: Schedule, step: Step, backward: bool) -> tuple[set, set]:
    """Returns the operands that a step's tiles need from other ranks, and the results that they compute for others."""
    needs, results, layout = set(), set(), schedule.layout
    for rank, tiles in enumerate(step.tiles):
        for i, tile in enumerate(tiles):
            q = {chunk for chunk in tile.q if layout.home(chunk) != rank}
            kv = {chunk for chunk in tile.kv if layout.home(chunk) != rank}
            operands = {"q": q, "kv": kv}
            for item in schedule.gathered_items(backward):
                needs |= {(rank, item, c, tile.head_group) for c in operands[item]}
            results |= {(rank, "dq" if backward else "out", c, tile.head_group, i) for c in q}
            results |= {(rank, "dkv", c, tile.head_group, i) for c in kv} if backward else set()
    return needs, results


def _check_coverage(schedule: Schedule, steps: tuple[Step, ...], name: str) -> None:
    """Counts how often each query meets each key, token by token on a short sequence."""
    nodes = schedule.nodes or Nodes((0, schedule.layout.chunk_count * TOKENS_PER_CHUNK))
    length, want = nodes.length, _wanted(nodes, schedule.window)
    for head_group in range(schedule.total_head_groups):
        met = torch.zeros(length, length, dtype=torch.int32)
        for step in steps:
            for tiles in step.tiles:
                for tile in tiles:
                    if tile.head_group == head_group:
                        add_pairs(met, schedule.layout, tile)
        if not torch.equal(met, want):
            q, kv = (met != want).nonzero()[0].tolist()
            raise InvalidSchedule(
                f"{name}, head group {head_group}: query {q} meets key {kv} {met[q, kv]} times, not {want[q, kv]} "
                f"(of {length} tokens)"
            )


def add_pairs(met: Tensor, layout: Layout, tile: Tile) -> None:
    """Adds 1 where a tile's query meets a key, to the counts (tokens, tokens) of a sequence."""
    q, kv = (torch.cat([layout.chunk_positions(c, len(met)) for c in chunks]) for chunks in (tile.q, tile.kv))
    met[q[:, None], kv[None, :]] += _visible(tile.mask, len(q), len(kv))


def _wanted(nodes: Nodes, window: int | None) -> Tensor:
    """Returns 1 where a query sees a key, int32 (tokens, tokens), from the definition of `Nodes`."""
    sizes, position = torch.tensor(nodes.boundaries).diff(), torch.from_numpy(nodes.positions())
    on_path = torch.eye(len(sizes), dtype=torch.int32)
    for node in range(len(sizes)):
        on_path[node, nodes.ancestors(node)] = 1
    node_of_token = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    back = position[:, None] - position[None, :]
    seen = on_path[node_of_token[:, None], node_of_token[None, :]] * (back >= 0)
    return seen if window is None else seen * (back < window)


def _visible(mask: Mask | Segments, queries: int, keys: int) -> Tensor:
    """Returns 1 where a query of a tile sees a key, int32 (queries, keys)."""
    if isinstance(mask, Mask):
        return _visible_under(mask, queries, keys)
    visible = torch.zeros(queries, keys, dtype=torch.int32)
    for q, rows, k, seen, causal in mask.table.tolist():
        part = _visible_under(Mask.CAUSAL if causal else Mask.FULL, rows, seen)
        if mask.window is not None:
            part = part.triu(seen - rows - mask.window + 1)
        if mask.gathered is None:
            visible[q : q + rows, k : k + seen] += part
        else:
            visible[q : q + rows].index_add_(1, torch.from_numpy(mask.gathered[k : k + seen]), part)
    return visible


@lru_cache(maxsize=256)
def _visible_under(mask: Mask, queries: int, keys: int) -> Tensor:
    every = torch.ones(queries, keys, dtype=torch.int32)
    return every if mask is Mask.FULL else every.tril(keys - queries - (mask is Mask.STRICT))
