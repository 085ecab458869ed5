"""Tokens before a rank's own equal the whole sequence's, forward and backward."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from worlds import spawn

from lightseq.comm.transport_choice import make_transport
from lightseq.schedule.layout import Layout, unshard
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup, find_group, make_sequence_group, release_group
from lightseq.sequence.halo import previous_tokens, tokens_before

BATCH, WIDTH, CPU = 2, 3, torch.device("cpu")
BOUNDARIES = (0, 1, 3, 30, 31, 70)


def layouts(world: int) -> dict[str, Layout]:
    found = {
        "contiguous": Layout("contiguous", world),
        "several chunks": Layout("contiguous", world, 3),
        "zigzag": Layout("zigzag", world, 2),
        "striped": Layout("striped", world),
        "striped in a Ulysses group": Layout("striped", world, ulysses=world),
        "explicit": Layout("explicit", world, 2, chunk_groups=(*range(world), *reversed(range(world)))),
    }
    if world == 4:
        found |= {f"{kind} of pairs": Layout(kind, 4, n, 2) for kind, n in (("striped", 1), ("zigzag", 2))}  # type: ignore[arg-type]
    return found


def group_of(layout: Layout, balances_documents: bool = False) -> SequenceGroup:
    assert dist.group.WORLD is not None
    return make_sequence_group(
        dist.group.WORLD, layout, make_transport("auto", dist.group.WORLD, CPU), balances_documents
    )


def whole_previous(x: Tensor, count: int, boundaries: Sequence[int]) -> Tensor:
    """The `count` tokens before each token of whole sequences, (batch, length, count, width), zeros where none are."""
    parts = []
    for first, end in pairwise(boundaries):
        padded = F.pad(x[:, first:end], (0, 0, count, 0))
        parts.append(torch.stack([padded[:, j : j + end - first] for j in range(count)], 2))
    return torch.cat(parts, 1)


def joined(group: SequenceGroup, local: Tensor, length: int, documents: Documents | None) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(group.layout.world)]
    dist.all_gather(parts, local.contiguous())
    return unshard(parts, group.layout if documents is None else documents.layout, length)


def compare(group: SequenceGroup, count: int, length: int, documents: Documents | None) -> None:
    """Compares outputs and gradients of `previous_tokens` and `tokens_before` with the whole sequence's."""
    torch.manual_seed(count)
    whole = torch.randn(BATCH, length, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(BATCH, length, count, WIDTH, dtype=torch.float64)
    wanted = whole_previous(whole, count, (0, length) if documents is None else documents.padded_boundaries)
    (dwanted,) = torch.autograd.grad((wanted * weights).sum(), whole, retain_graph=True)
    x = group.shard(whole.detach(), documents=documents).requires_grad_()
    mine = group.shard(weights, documents=documents)
    found = previous_tokens(group, x, count, documents)
    (dfound,) = torch.autograd.grad((found * mine).sum(), x)
    assert torch.equal(joined(group, found.detach(), length, documents), wanted)
    torch.testing.assert_close(joined(group, dfound, length, documents), dwanted, rtol=0, atol=1e-12)

    before = tokens_before(group, x, count, documents)
    fragments = before.shape[1]
    assert torch.equal(before, found.unflatten(1, (fragments, -1))[:, :, 0])
    starts = torch.zeros(x.shape[1], dtype=torch.bool)
    starts[:: x.shape[1] // fragments] = True
    every = joined(group, starts.expand(BATCH, -1).long(), length, documents).bool()  # where fragments start
    (dbefore,) = torch.autograd.grad((before * mine[:, starts]).sum(), x)
    (dwhole,) = torch.autograd.grad((wanted * weights * every[..., None, None]).sum(), whole, retain_graph=True)
    torch.testing.assert_close(joined(group, dbefore, length, documents), dwhole, rtol=0, atol=1e-12)


def every_layout(rank: int) -> None:
    for layout in layouts(dist.get_world_size()).values():
        group, shortest = group_of(layout), layout.chunk_count
        for length, count in ((shortest, 5), (8 * shortest, 1), (8 * shortest, 3), (4 * shortest, 9)):
            compare(group, count, length, None)
        release_group(group)


@pytest.mark.parametrize("world", slow_except([3], [1, 2, 3, 4]))
def test_tokens_across_ranks_equal_the_whole_sequence(world: int) -> None:
    spawn(world, every_layout)


def packed(rank: int) -> None:
    for layout in layouts(dist.get_world_size()).values():
        for balances in (False, True):
            group = group_of(layout, balances)
            documents = group.pack(BOUNDARIES)
            for count in (1, 3, 20):
                compare(group, count, documents.padded_boundaries[-1], documents)
            release_group(group)


@pytest.mark.parametrize("world", slow_except([3], [1, 2, 3, 4]))
def test_tokens_of_other_documents_are_zeros(world: int) -> None:
    spawn(world, packed)


class Convolution(nn.Module):
    """Short causal convolution of every channel, as in Mamba, on a rank's own tokens."""

    def __init__(self, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, taps * WIDTH, dtype=torch.float64).view(taps, WIDTH))

    def forward(self, x: Tensor, group: SequenceGroup, documents: Documents | None) -> Tensor:
        seen = torch.cat([previous_tokens(group, x, len(self.weight) - 1, documents), x.unsqueeze(2)], 2)
        return (seen * self.weight).sum(2).tanh()


def convolved_twice(rank: int, compiles: bool) -> int:
    """Compares two layers on packed documents with conv1d on each document alone; returns how often they compiled."""
    group, layers = group_of(Layout("zigzag", dist.get_world_size(), 2), True), [Convolution(4) for _ in range(2)]
    compiled = torch._dynamo.testing.CompileCounterWithBackend("aot_eager") if compiles else None
    chunks = set()
    for boundaries in (BOUNDARIES, (0, 35, 70)):
        documents = group.pack(boundaries)
        torch.manual_seed(0)
        whole = torch.randn(1, boundaries[-1], WIDTH, dtype=torch.float64)
        wanted = torch.cat([by_conv1d(layers, whole[:, first:end]) for first, end in pairwise(boundaries)], 1)
        wanted_gradients = torch.autograd.grad(wanted.sum(), [layer.weight for layer in layers])
        chunks.add(documents.layout.chunks_per_rank)
        x = group.shard(whole, documents=documents).requires_grad_()
        for layer in layers:
            run = torch.compile(layer, backend=compiled, fullgraph=True) if compiled else layer
            x = run(x, group, documents)
        real = group.shard(torch.ones(1, boundaries[-1], dtype=torch.bool), documents=documents)
        gradients = torch.autograd.grad(x[real].sum(), [layer.weight for layer in layers])
        padded = documents.padded_boundaries[-1]
        found = joined(group, x.detach(), padded, documents)[:, : boundaries[-1]]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        for mine, want in zip(gradients, wanted_gradients, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, want, rtol=0, atol=1e-11)
    assert len(chunks) > 1 or not compiles, "the layouts of both are alike"
    return compiled.frame_count if compiled else 0


def by_conv1d(layers: Sequence[Convolution], x: Tensor) -> Tensor:
    """The layers on one whole document, by torch's own convolution."""
    for layer in layers:
        taps = len(layer.weight)
        padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
        x = F.conv1d(padded, layer.weight.T.unsqueeze(1), groups=WIDTH).transpose(1, 2).tanh()
    return x


@pytest.mark.parametrize("world", [1, 3])
def test_a_convolution_on_packed_documents_equals_each_document_alone(world: int) -> None:
    spawn(world, convolved_twice, False)


def test_a_compiled_layer_is_not_compiled_again_for_other_documents() -> None:
    assert spawn(2, convolved_twice, True) == [1, 1]


def low_precision(rank: int) -> None:
    """Every token is looked at 64 times with a gradient of 1 + 1/128, whose sums bfloat16 would round away."""
    group = group_of(Layout("contiguous", dist.get_world_size()))
    x = torch.ones(1, 128, 1, dtype=torch.bfloat16, requires_grad=True)
    previous_tokens(group, x, 64).backward(torch.full((1, 128, 64, 1), 1 + 2**-7, dtype=torch.bfloat16))
    want = group.shard(torch.arange(256).flip(0)[None].clamp_max(64) * (1 + 2**-7))
    assert x.grad is not None and torch.equal(x.grad[..., 0], want.bfloat16())


def test_gradients_add_up_in_float32() -> None:
    spawn(2, low_precision)


def test_a_convolution_of_one_tap_looks_at_nothing(alone: None) -> None:
    group, x = group_of(Layout("zigzag", 1, 2)), torch.ones(2, 4, 3, requires_grad=True)
    nothing = previous_tokens(group, x, 0)
    assert nothing.shape == (2, 4, 0, 3)
    nothing.sum().backward()
    assert x.grad is not None and not x.grad.any()


def test_a_group_is_found_by_its_name_until_it_is_released(alone: None) -> None:
    first, second = group_of(Layout("zigzag", 1, 2)), group_of(Layout("zigzag", 1, 2))
    assert first.name != second.name and first.name.startswith("zigzag-1-1x2-")
    assert find_group(first.name) is first
    release_group(first)
    with pytest.raises(KeyError):
        find_group(first.name)
    assert find_group(second.name) is second


def test_wrong_requests_are_one_line(alone: None) -> None:
    group = group_of(Layout("zigzag", 1, 2))
    with pytest.raises(ValueError, match="no part of a sequence in 2 chunks"):
        tokens_before(group, torch.zeros(1, 3), 1)
    with pytest.raises(ValueError, match="count is -1; give the tokens to look back"):
        tokens_before(group, torch.zeros(1, 4), -1)
    with pytest.raises(ValueError, match="the documents have 8 tokens, but the ranks hold 4; shard x with them"):
        previous_tokens(group, torch.zeros(1, 4), 1, group.pack((0, 8)))
