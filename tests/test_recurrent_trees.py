"""Scans and short convolutions over rows of trees equal their paths one by one in float64, forward and backward."""

import random

import pytest
import torch
import torch.distributed as dist
from test_recurrent import BATCH, KINDS, SCALE, TAPS, VALUES, by_definition, draw, group_of, joined, layouts
from test_trees import by_hand, tree
from torch import Tensor
from torch.nn import functional as F
from worlds import spawn

from lightseq.kernels.recurrent.base import ScanInputs
from lightseq.recurrent.scan import scan
from lightseq.recurrent.short_convolution import causal_convolution
from lightseq.schedule.nodes import Nodes
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup, release_group
from lightseq.sequence.halo import positions_before, previous_tokens


def path_of(nodes: Nodes, node: int) -> Tensor:
    """Returns the positions of a path's tokens, from its root to the end of a node."""
    path = [*reversed(nodes.ancestors(node)), node]
    return torch.cat([torch.arange(nodes.boundaries[x], nodes.boundaries[x + 1]) for x in path])


def own_tokens(nodes: Nodes, node: int) -> Tensor:
    return torch.arange(nodes.boundaries[node], nodes.boundaries[node + 1])


def scan_paths(x: ScanInputs, nodes: Nodes) -> Tensor:
    """Computes every node's outputs by the recurrence over its whole path."""
    out = torch.empty_like(x.v)
    for node in range(len(nodes.boundaries) - 1):
        path = path_of(nodes, node)
        part = ScanInputs(*(None if each is None else each[:, path] for each in x))  # type: ignore[arg-type]
        own = own_tokens(nodes, node)
        out = out.index_copy(1, own, by_definition(part, SCALE, (0, len(path)))[:, -len(own) :])
    return out


def convolve_paths(x: Tensor, weight: Tensor, bias: Tensor, nodes: Nodes) -> Tensor:
    out = torch.empty_like(x)
    for node in range(len(nodes.boundaries) - 1):
        part = F.pad(x[:, path_of(nodes, node)].transpose(1, 2), (TAPS - 1, 0))
        own = own_tokens(nodes, node)
        whole = F.conv1d(part, weight[:, None], bias, groups=VALUES).transpose(1, 2)
        out = out.index_copy(1, own, whole[:, -len(own) :])
    return F.silu(out)


def compare_scan(group: SequenceGroup, kind: str, schedule: str, documents: Documents) -> None:
    nodes = documents.nodes
    torch.manual_seed(nodes.length)
    sizes = (12, 12 if kind == "decay" else 2) if schedule == "heads" else ()
    whole = draw(kind, nodes.length, 0.3, *sizes)
    weights = torch.randn_like(whole.v)
    given = [x.requires_grad_() for x in whole if x is not None]
    wanted = scan_paths(whole, nodes)
    expected = [wanted.detach(), *torch.autograd.grad((wanted * weights).sum(), given)]
    mine = [documents.shard(x.detach(), group.rank).requires_grad_() for x in given]
    out = scan(group, ScanInputs(*mine), schedule, SCALE, documents)
    found = torch.autograd.grad((out * documents.shard(weights, group.rank)).sum(), mine)
    for want, got in zip(expected, [out.detach(), *found], strict=True):
        torch.testing.assert_close(joined(group, got, nodes.length, documents), want, rtol=1e-9, atol=1e-11)


def compare_convolution(group: SequenceGroup, documents: Documents) -> None:
    nodes = documents.nodes
    torch.manual_seed(nodes.length)
    x = torch.randn(BATCH, nodes.length, VALUES, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(VALUES, TAPS, dtype=torch.float64), torch.randn(VALUES, dtype=torch.float64)
    weights, parameters = torch.randn_like(x), [weight.requires_grad_(), bias.requires_grad_()]
    wanted = convolve_paths(x, weight, bias, nodes)
    dx, *of_parameters = torch.autograd.grad((wanted * weights).sum(), [x, *parameters])
    mine = documents.shard(x.detach(), group.rank).requires_grad_()
    out = causal_convolution(group, mine, weight, bias, documents, "silu")
    found = torch.autograd.grad((out * documents.shard(weights, group.rank)).sum(), [mine, *parameters])
    for gradient in found[1:]:
        dist.all_reduce(gradient)
    everything = [joined(group, part, nodes.length, documents) for part in (out.detach(), found[0])]
    for want, got in zip([wanted.detach(), dx, *of_parameters], [*everything, *found[1:]], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def compare_tokens_before(group: SequenceGroup, documents: Documents) -> None:
    """Compares the tokens before each token with those on its path."""
    nodes = documents.nodes
    x = torch.randn(1, nodes.length, 2, dtype=torch.float64)
    found = previous_tokens(group, documents.shard(x, group.rank), 3, documents)
    before = positions_before(torch.arange(nodes.length), 3, nodes)
    wanted = torch.where((before >= 0)[..., None], x[0, before], 0.0)
    torch.testing.assert_close(found, documents.shard(wanted[None], group.rank))
    for token in range(nodes.length):
        node = int(torch.searchsorted(torch.tensor(nodes.boundaries), token, right=True)) - 1
        path = path_of(nodes, node).tolist()
        place = path.index(token)
        assert before[token].tolist() == [path[place - back] if back <= place else -1 for back in (3, 2, 1)]


def trees_of(seed: int, count: int) -> list[Nodes]:
    rng = random.Random(seed)
    return [*by_hand()[:3], *(tree(rng, rng.randint(2, 9), 11) for _ in range(count))]


def few_trees(rank: int, kind: str) -> None:
    """Compares two trees, of which every rank has two fragments."""
    compare(group_of(layouts(dist.get_world_size())[2]), kind, "chain", by_hand()[2:4])


def every_tree(rank: int, kind: str, schedule: str) -> None:
    for number, layout in enumerate(layouts(dist.get_world_size(), schedule)):
        compare(group_of(layout, number % 2 == 0), kind, schedule, trees_of(number, 3))


def compare(group: SequenceGroup, kind: str, schedule: str, trees: list[Nodes]) -> None:
    for nodes in trees:
        documents = group.pack(nodes.boundaries, nodes.length, nodes.parents)
        compare_scan(group, kind, schedule, documents)
        if kind == KINDS[0] and schedule == "chain":
            compare_convolution(group, documents)
            compare_tokens_before(group, documents)
    release_group(group)


def test_a_node_begins_with_its_parents_final_state_and_last_tokens() -> None:
    spawn(3, few_trees, "delta")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["chain", "heads"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_kind_of_scan_takes_random_trees(world: int, kind: str, schedule: str) -> None:
    spawn(world, every_tree, kind, schedule)
