"""Rows that share prefixes, as trees of nodes: tables, and attention in float64 against every path by itself."""

import random
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from torch import Tensor
from worlds import spawn

from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import SequenceContext, make_context
from lightseq.attention.operator import attention
from lightseq.kernels.attention.base import Saved
from lightseq.kernels.attention.tile import REFERENCE, backward_tile, forward_tile
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.arenas import arenas
from lightseq.schedule.auto import ScheduleChoice, why_impossible
from lightseq.schedule.chunks import chunked_schedule
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.documents import packed_schedule, padded_length
from lightseq.schedule.layout import unshard
from lightseq.schedule.nodes import ROOT, Nodes, check_nodes
from lightseq.schedule.proof import InvalidSchedule, validate
from lightseq.schedule.reach import CHUNK, WINDOW, Reach
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Schedule
from lightseq.schedule.windows import windowed_schedule
from lightseq.sequence.shared_prefixes import share_prefixes

HEADS, DIM = (8, 2), 8
ANSWERS = Nodes((0, 199, *range(240, 521, 40)), (ROOT, *[0] * 8))
REACHES = (None, Reach(WINDOW, 5), Reach(WINDOW, 1), Reach(CHUNK, 6))


def tree(rng: random.Random, count: int, longest: int, roots: float = 0.2) -> Nodes:
    """Draws nodes depth first. A node's parent is on the path to the node before it."""
    boundaries, parents = [0], list[int]()
    for node in range(count):
        path = [node - 1, *Nodes(tuple(boundaries), tuple(parents)).ancestors(node - 1)] if node else []
        parents.append(rng.choice(path) if path and rng.random() > roots else ROOT)
        boundaries.append(boundaries[-1] + rng.choice((1, rng.randint(1, longest))))
    return Nodes(tuple(boundaries), tuple(parents))


def by_hand() -> list[Nodes]:
    """A prompt with three answers, a chain, a deep comb beside documents, and nodes of one token."""
    return [
        Nodes((0, 20, 27, 31, 50), (ROOT, 0, 0, 0)),
        Nodes((0, 5, 9, 30), (ROOT, 0, 1)),
        Nodes((0, 7, 8, 12, 20, 22, 33, 40), (ROOT, 0, 1, 1, 0, ROOT, ROOT)),
        Nodes((0, 1, 2, 3, 4, 5, 6), (ROOT, 0, 1, 1, 0, 4)),
        ANSWERS,
    ]


def schedules(world: int) -> list[Schedule]:
    found = []
    for name, algorithm in SCHEDULES.items():
        for ulysses, groups in product((None, 2), (1, 2) if algorithm.has_head_groups else (1,)):
            possible = why_impossible(ScheduleChoice(name), world, AttentionShape(64, *HEADS, DIM)) is None
            if ulysses == 2 and (name == "ulysses" or world % 2 or world == 2):
                continue
            if possible or (name != "ulysses" and ulysses == 2):
                found.append(make_schedule(name, world, groups, ulysses))
    return found


@pytest.mark.parametrize("world", slow_except([2, 3], (1, 2, 3, 4, 6)))
def test_each_query_meets_its_path_once_and_no_sibling(world: int) -> None:
    rng = random.Random(world)
    for schedule in schedules(world):
        for nodes in [*by_hand(), *(tree(rng, rng.randint(2, 12), 20) for _ in range(4))]:
            whole = nodes.padded(padded_length(schedule, nodes.length))
            validate(packed_schedule(schedule, whole))
            validate(chunked_schedule(schedule, whole, 6, packed=True))
            if SCHEDULES[schedule.name].one_tile_per_query:
                for window in (1, 5, 30):
                    validate(windowed_schedule(schedule, whole, window, packed=True))


def test_a_sibling_that_is_seen_is_caught() -> None:
    schedule = packed_schedule(make_schedule("prefix", 2), Nodes((0, 20, 30, 64), (ROOT, 0, 0)))
    validate(schedule)
    (mask,) = [tile.mask for tile in schedule.forward[-1].tiles[1]]
    assert isinstance(mask, Segments)
    mask.table[-1] += (0, 0, 0, 1, 0)
    with pytest.raises(InvalidSchedule):
        validate(schedule)


def test_positions_are_depths_and_pairs_are_counted_along_paths() -> None:
    nodes = by_hand()[2]
    assert nodes.positions().tolist()[7:22] == [7, 8, 9, 10, 11, *range(8, 16), 7, 8]
    counted = [0, *np.cumsum(nodes.positions() + 1).tolist()]
    assert nodes.area_before(np.arange(nodes.length + 1)).tolist() == counted
    for world, schedule in ((world, make_schedule("prefix", world)) for world in (1, 2, 4)):
        whole = nodes.padded(padded_length(schedule, nodes.length))
        tables = [tile.mask for step in packed_schedule(schedule, whole).forward for t in step.tiles for tile in t]
        assert sum(mask.area for mask in tables if isinstance(mask, Segments)) == whole.area_before(
            np.array([whole.length])
        ), world


@pytest.mark.parametrize("nodes", [ANSWERS, by_hand()[3]], ids=["two calls", "many calls"])
@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 0.01), (torch.float32, 1e-5)], ids=str)
def test_calls_of_a_tile_are_merged_with_the_precision_of_one(nodes: Nodes, dtype: torch.dtype, most: float) -> None:
    schedule = make_schedule("prefix", 1)
    table = packed_schedule(schedule, nodes.padded(padded_length(schedule, nodes.length)))
    mask, tokens = table.forward[0].tiles[0][0].mask, table.nodes.length if table.nodes else 0
    g = torch.Generator().manual_seed(0)
    heads = (HEADS[0], HEADS[1], HEADS[1], HEADS[0])
    q, k, v, dout = (torch.randn(1, tokens, n, DIM, generator=g, dtype=torch.float64).to(dtype) for n in heads)
    found = []
    for wide in (False, True):
        tensors = [x.double() if wide else x for x in (q, k, v)]
        out, lse = forward_tile(REFERENCE, *tensors, mask, DIM**-0.5)
        saved = Saved(*tensors, out, lse)
        found.append([out, *backward_tile(REFERENCE, dout.double() if wide else dout, saved, mask, DIM**-0.5)])
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype and (got.double() - want).norm() <= most * want.norm()


def test_equal_boundaries_with_other_parents_are_other_nodes() -> None:
    schedule, boundaries = make_schedule("prefix", 2), (0, 16, 24, 32)
    parents = (None, (ROOT, 0, 0), (ROOT, 0, 1), (ROOT, ROOT, 1))
    tables = [packed_schedule(schedule, Nodes(boundaries, x)) for x in parents]
    assert len({id(table) for table in tables}) == len(parents)
    assert packed_schedule(schedule, Nodes(boundaries, (ROOT,) * 3)) is tables[0]


def test_nothing_is_fetched_that_no_query_sees() -> None:
    """The second answer needs the prompt, and nothing of the first answer between them."""
    nodes = Nodes((0, 64, 192, 256), (ROOT, 0, 0))
    table = packed_schedule(make_schedule("zigzag", 4), nodes)
    for step in table.forward:
        for tiles in step.tiles:
            for tile in tiles:
                assert isinstance(tile.mask, Segments)
                seen = np.zeros(len(tile.kv) * 32, dtype=bool)
                for _, _, key, keys, _ in tile.mask.table.tolist():
                    seen[key : key + keys] = True
                assert seen.reshape(len(tile.kv), -1).any(1).all(), tile


def test_a_tile_copies_keys_that_do_not_lie_side_by_side() -> None:
    table = packed_schedule(make_schedule("prefix", 2), ANSWERS.padded(1024))
    runs = []
    for rank in range(2):
        for arena in arenas(table.forward, table.layout, rank):
            tiles = [tile for step in table.forward[arena.first : arena.last + 1] for tile in step.tiles[rank]]
            runs += [len(arena.find(tile.kv)) for tile in tiles if {*tile.kv} <= {*arena.chunks}]
    assert max(runs) > 1


@pytest.mark.parametrize("forks, most", [(1, 2), (2, 3), (8, 5), (64, 8)])
def test_forks_along_a_long_row_take_few_calls(forks: int, most: int) -> None:
    rows = [[*range(5 * fork), 1000 + fork] for fork in range(1, forks + 1)]
    nodes = share_prefixes([*rows, [*range(5 * forks + 5)]]).nodes
    assert len(nodes.boundaries) - 1 == 2 * forks + 1
    for ranks in (1, 2):
        schedule = make_schedule("prefix", ranks)
        table = packed_schedule(schedule, nodes.padded(padded_length(schedule, nodes.length)))
        validate(table)
        masks = [tile.mask for step in table.forward for tiles in step.tiles for tile in tiles]
        calls = max(len(mask.varlen_calls) for mask in masks if isinstance(mask, Segments))
        assert calls <= most and (ranks == 2 or calls == most)


def test_segments_are_one_causal_call_and_one_full_call_for_each_depth() -> None:
    answers = Nodes((0, 32, *range(36, 68, 4)), (ROOT, *[0] * 8))
    (tile,) = packed_schedule(make_schedule("prefix", 1), answers).forward[0].tiles[0]
    assert isinstance(tile.mask, Segments)
    calls = tile.mask.varlen_calls
    assert [(call.causal, len(call.segments)) for call in calls] == [(True, 8), (False, 1)]  # the first goes on
    deep = Nodes(tuple(range(0, 50, 7)), (ROOT, 0, 1, 1, 0, 4, 4))
    (tile,) = packed_schedule(make_schedule("prefix", 1), deep).forward[0].tiles[0]
    assert isinstance(tile.mask, Segments)
    assert [call.causal for call in tile.mask.varlen_calls] == [True, False, False]


@pytest.mark.parametrize(
    "boundaries, parents, said",
    [
        ((0, 4, 8), (ROOT,), "1 parents for 2 nodes; give one for each, -1 for a root"),
        ((0, 4, 8), (0, ROOT), "node 0 has parent 0, but stands behind nodes none; "),
        ((0, 4, 8, 9), (ROOT, ROOT, 0), "node 2 has parent 0, but stands behind nodes 1; "),
        ((0, 4, 8, 9), (ROOT, 0, 7), "node 2 has parent 7, but stands behind nodes 1, 0; "),
    ],
)
def test_nodes_out_of_order_are_refused(boundaries: tuple[int, ...], parents: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError) as error:
        check_nodes(boundaries, parents, 9)
    assert str(error.value).startswith(said)


# ---- attention against each path by itself ---------------------------------------------------------------------------


def inputs_of(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, length, heads, DIM) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def visible(nodes: Nodes, reach: Reach | None) -> Tensor:
    """Returns which keys each query sees, token by token along its path."""
    seen = torch.zeros(nodes.length, nodes.length, dtype=torch.bool)
    for node in range(len(nodes.boundaries) - 1):
        path = [*reversed(nodes.ancestors(node)), node]
        tokens = [t for n in path for t in range(*nodes.boundaries[n : n + 2])]
        for place in range(len(tokens) - (nodes.boundaries[node + 1] - nodes.boundaries[node]), len(tokens)):
            first = 0
            if reach is not None:
                is_window = reach.kind == WINDOW
                first = max(place - reach.tokens + 1, 0) if is_window else place // reach.tokens * reach.tokens
            seen[tokens[place], tokens[first : place + 1]] = True
    return seen


def each_path(inputs: list[Tensor], nodes: Nodes, reach: Reach | None) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    keys, values = (x.repeat_interleave(HEADS[0] // HEADS[1], 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, keys) * DIM**-0.5
    weights = scores.masked_fill(~visible(nodes, reach), -torch.inf).softmax(-1)
    out = torch.einsum("bhst,bthd->bshd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def packed(context: SequenceContext, inputs: list[Tensor], nodes: Nodes, reach: Reach | None) -> list[Tensor]:
    documents = context.sequence.pack(nodes.boundaries, nodes.length, nodes.parents)
    q, k, v, dout = (context.sequence.shard(x, documents=documents) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    out, _ = attention(q, k, v, context, documents=documents, reach=reach)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    gathered = []
    for x in found:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        gathered.append(unshard(parts, documents.layout, documents.length)[:, : nodes.length])
    return gathered


def worst_error(rank: int, kernel: str, trees: list[Nodes]) -> tuple[float, str]:
    world, worst = dist.get_world_size(), (0.0, "")
    for schedule, ulysses in [(s.name, s.ulysses_size) for s in schedules(world)]:
        config = AttentionConfig(
            schedule=schedule, ulysses_size=ulysses if schedule != "ulysses" else None, kernel=kernel,
            dtype=torch.float64, device=torch.device("cpu"), packed=True,
        )  # fmt: skip
        context = make_context(dist.group.WORLD, AttentionShape(64, *HEADS, DIM), config)
        for nodes, reach in product(trees, REACHES):
            if reach is not None and reach.kind == WINDOW and not SCHEDULES[schedule].one_tile_per_query:
                continue
            inputs = inputs_of(nodes.length)
            for got, want in zip(packed(context, inputs, nodes, reach), each_path(inputs, nodes, reach), strict=True):
                error = float((got - want).abs().max())
                worst = max(worst, (error, f"{schedule} {ulysses} {nodes} {reach}"))
    return worst


@pytest.mark.parametrize(
    ("world", "kernel"), slow_except([(2, "reference")], product((1, 2, 3, 4), ("reference", "cpu")))
)
def test_attention_equals_every_path_by_itself(world: int, kernel: str) -> None:
    rng = random.Random(world)
    drawn = [tree(rng, rng.randint(3, 14), 25) for _ in range(4)]
    for error, where in spawn(world, worst_error, kernel, [*by_hand(), *drawn]):
        assert error < 1e-12, where


# ---- rows as trees ---------------------------------------------------------------------------------------------------


def rows_of(rng: random.Random) -> list[list[int]]:
    """Draws rows that branch from earlier ones: at a token, at their end, with equal rows, and rows of one token."""
    rows: list[list[int]] = []
    for _ in range(rng.randint(1, 8)):
        if rows and rng.random() < 0.8:
            other = rng.choice(rows)
            rows.append(other[: rng.randint(1, len(other))] + [rng.randrange(4) for _ in range(rng.randint(0, 9))])
        else:
            rows.append([rng.randrange(4) for _ in range(rng.randint(1, 12))])
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_rows_lie_on_paths_of_their_tree_and_every_token_has_one_target(seed: int) -> None:
    rows = rows_of(random.Random(seed))
    shared = share_prefixes(rows)
    check_nodes(shared.nodes.boundaries, shared.nodes.parents, shared.nodes.length)
    sees, positions = visible(shared.nodes, None), shared.nodes.positions()
    targets = shared.targets
    for row, places in zip(rows, shared.places, strict=True):
        assert shared.ids[places].tolist() == row
        assert positions[places].tolist() == list(range(len(row)))
        for i, place in enumerate(places):
            assert sees[place].nonzero().flatten().tolist() == sorted(places[: i + 1].tolist())
        assert shared.ids[targets[places[:-1]]].tolist() == row[1:]  # the next token of every row through here
        goes_on = any(len(other) > len(row) and other[: len(row)] == row for other in rows)
        assert (targets[places[-1]] == -1) != goes_on
    counts = shared.sum_over_rows([np.ones(len(row)) for row in rows])
    assert counts.sum() == sum(map(len, rows)) and (counts >= 1).all()


def test_answers_to_a_prompt_compute_the_prompt_once() -> None:
    prompt = list(range(100))
    shared = share_prefixes([[*prompt, *[200 + i] * (10 + i)] for i in range(4)])
    assert shared.nodes == Nodes((0, 99, 110, 122, 135, 149), (ROOT, 0, 0, 0, 0))
    assert shared.ids[99:101].tolist() == [99, 200]  # each branch begins with a copy of the prompt's last token


@pytest.mark.parametrize("rows, said", [([], "there are no rows"), ([[1], []], "row 1 has no tokens; leave it out")])
def test_rows_without_tokens_are_refused(rows: list[list[int]], said: str) -> None:
    with pytest.raises(ValueError) as error:
        share_prefixes(rows)
    assert str(error.value) == said
