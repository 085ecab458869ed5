"""Scans and short convolutions over ranks equal a sequential definition in float64, forward and backward."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from worlds import NCCL_WORLDS, spawn

from lightseq.comm.transport_choice import make_transport
from lightseq.kernels.recurrent.base import ScanInputs
from lightseq.kernels.recurrent.scan_kernel_choice import select_kernel
from lightseq.kernels.recurrent.torch_scan import TorchScan
from lightseq.kernels.recurrent.torch_scan import scan as torch_scan
from lightseq.memory.remat import apply_remat
from lightseq.recurrent.head_exchange import SCAN_HEADS_OP
from lightseq.recurrent.scan import SCAN_OP, scan
from lightseq.recurrent.short_convolution import causal_convolution
from lightseq.schedule.layout import MAX_FRAGMENTS, Layout, unshard
from lightseq.sequence import halo
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup, make_sequence_group, release_group

BATCH, SCALE, CPU = 2, 0.7, torch.device("cpu")
GROUPS, HEADS, KEYS, VALUES, TAPS = 2, 4, 5, 3, 4
KINDS = ("delta", "channels", "decay")
MANY_HEADS = 12  # divide by 2, 3 and 4 ranks
EXCHANGED_GROUPS = {
    "delta": 3,
    "channels": 2,
    "decay": 12,
}  # of queries and keys; 3 and 2 divide by some ranks
DOCUMENTS = (0, 1, 2, 9, 40, 41, 75, 83)


def layouts(world: int, recurrent_schedule: str = "chain") -> list[Layout]:
    found = [
        Layout("contiguous", world),
        Layout("contiguous", world, 2),
        Layout("zigzag", world, 2),
        Layout("striped", world, ulysses=world),
        Layout("explicit", world, 2, chunk_groups=(*range(world), *range(world))),
    ]
    if world == 4:
        found.append(Layout("zigzag", world, 2, 2))
    if recurrent_schedule == "heads":  # which takes layouts of many fragments, too
        return [*found, Layout("striped", world)]
    return [replace(layout, most_packed_chunks=MAX_FRAGMENTS) for layout in found]


def group_of(layout: Layout, balances_documents: bool = False) -> SequenceGroup:
    assert dist.group.WORLD is not None
    return make_sequence_group(
        dist.group.WORLD, layout, make_transport("auto", dist.group.WORLD, CPU), balances_documents
    )


def draw(kind: str, length: int, strength: float, heads: int = HEADS, groups: int = GROUPS) -> ScanInputs:
    """Draws inputs of a recurrence. Decays range from almost none to almost all of a state, with their strength."""
    q, k = (torch.randn(BATCH, length, groups, KEYS, dtype=torch.float64) for _ in range(2))
    v = torch.randn(BATCH, length, heads, VALUES, dtype=torch.float64)
    channels = (KEYS,) if kind == "channels" else ()
    g = -strength * torch.rand(BATCH, length, heads, *channels, dtype=torch.float64)
    beta = None if kind == "decay" else 2 * torch.rand(BATCH, length, heads, dtype=torch.float64)
    return ScanInputs(q, F.normalize(k, dim=-1), v, g, beta)


def by_definition(x: ScanInputs, scale: float, boundaries: Sequence[int]) -> Tensor:
    """Computes the recurrence token by token."""
    heads = x.v.shape[2]
    q, k = (part.repeat_interleave(heads // part.shape[2], 2) for part in (x.q, x.k))
    outs = []
    for first, end in pairwise(boundaries):
        state = torch.zeros(BATCH, heads, KEYS, VALUES, dtype=torch.float64)
        for t in range(first, end):
            decay = x.g[:, t].exp()
            state = state * (decay[..., None] if x.g.ndim == 4 else decay[..., None, None])
            new = x.v[:, t]
            if x.beta is not None:
                new = (new - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * x.beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * new[:, :, None]
            outs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1)


def joined(group: SequenceGroup, local: Tensor, length: int, documents: Documents | None) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(group.layout.world)]
    dist.all_gather(parts, local.contiguous())
    return unshard(parts, group.layout if documents is None else documents.layout, length)


@lru_cache
def reference(
    kind: str, strength: float, exchanges: bool, boundaries: tuple[int, ...]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Returns inputs, weights of the outputs in a loss, and the outputs with all gradients of the inputs."""
    length = boundaries[-1]
    torch.manual_seed(length)
    whole = draw(kind, length, strength, *((MANY_HEADS, EXCHANGED_GROUPS[kind]) if exchanges else ()))
    weights = torch.randn(whole.v.shape, dtype=torch.float64)
    given = [x.requires_grad_() for x in whole if x is not None]
    wanted = by_definition(whole, SCALE, boundaries)
    return given, weights, [wanted.detach(), *torch.autograd.grad((wanted * weights).sum(), given)]


def compare_scan(
    group: SequenceGroup, schedule: str, kind: str, length: int, strength: float, documents: Documents | None
) -> None:
    boundaries = (0, length) if documents is None else tuple(documents.padded_boundaries)
    given, weights, expected = reference(kind, strength, schedule == "heads", boundaries)
    mine = [group.shard(x.detach(), documents=documents).requires_grad_() for x in given]
    out = scan(group, ScanInputs(*mine), schedule, SCALE, documents)
    found = torch.autograd.grad((out * group.shard(weights, documents=documents)).sum(), mine)
    for want, got in zip(expected, [out.detach(), *found], strict=True):
        torch.testing.assert_close(joined(group, got, length, documents), want, rtol=1e-9, atol=1e-11)


def every_scan(rank: int, kind: str, recurrent_schedule: str) -> None:
    for layout in layouts(dist.get_world_size(), recurrent_schedule):
        group, shortest = group_of(layout), layout.chunk_count
        cases = ((70, 5.0), (shortest, 1.0), (9 * shortest + 1, 0.01), (150, 0.1))
        for length, strength in cases if recurrent_schedule == "chain" else cases[:2]:
            padded = layout.padded_length(length)  # tokens of padding come last, and change nothing before them
            compare_scan(group, recurrent_schedule, kind, padded, strength, None)
        release_group(group)


@pytest.mark.parametrize(
    ("world", "kind"),
    slow_except([(2, "decay")], product((1, 2, 3, 4, 5), KINDS)),
)
def test_scan_over_ranks_equals_the_sequential_definition(world: int, kind: str) -> None:
    spawn(world, every_scan, kind, "chain")


@pytest.mark.parametrize(
    ("world", "kind"),
    slow_except([(3, "channels")], product((1, 2, 3, 4), KINDS)),
)
def test_scan_by_exchanged_heads_equals_the_sequential_definition(world: int, kind: str) -> None:
    spawn(world, every_scan, kind, "heads")


def packed_scans(rank: int, kind: str, recurrent_schedule: str) -> None:
    for layout in layouts(dist.get_world_size(), recurrent_schedule):
        for balances in (False, True):
            group = group_of(layout, balances)
            for boundaries in (DOCUMENTS, (0, 60, 80), (0, 30, 60, 90)):
                documents = group.pack(boundaries)
                compare_scan(group, recurrent_schedule, kind, documents.padded_boundaries[-1], 0.3, documents)
            release_group(group)


@pytest.mark.parametrize(("world", "kind"), slow_except([(3, "delta")], product((2, 3, 4, 5), KINDS)))
def test_states_start_anew_in_each_document(world: int, kind: str) -> None:
    spawn(world, packed_scans, kind, "chain")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kind"), slow_except([(2, "delta")], product((2, 3, 4), KINDS)))
def test_states_start_anew_with_exchanged_heads(world: int, kind: str) -> None:
    spawn(world, packed_scans, kind, "heads")


def compare_convolution(
    group: SequenceGroup, length: int, documents: Documents | None, activation: str | None = None
) -> None:
    torch.manual_seed(length)
    x = torch.randn(BATCH, length, VALUES, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(VALUES, TAPS, dtype=torch.float64), torch.randn(VALUES, dtype=torch.float64)
    weights, parameters = torch.randn_like(x), [weight.requires_grad_(), bias.requires_grad_()]
    boundaries = (0, length) if documents is None else documents.padded_boundaries
    parts = [F.pad(x[:, a:b].transpose(1, 2), (TAPS - 1, 0)) for a, b in pairwise(boundaries)]
    wanted = torch.cat([F.conv1d(part, weight[:, None], bias, groups=VALUES) for part in parts], 2).transpose(1, 2)
    wanted = wanted if activation is None else F.silu(wanted)
    dx, *of_parameters = torch.autograd.grad((wanted * weights).sum(), [x, *parameters])
    mine = group.shard(x.detach(), documents=documents).requires_grad_()
    out = causal_convolution(group, mine, weight, bias, documents, activation)
    found = torch.autograd.grad((out * group.shard(weights, documents=documents)).sum(), [mine, *parameters])
    for gradient in found[1:]:
        dist.all_reduce(gradient)
    everything = [joined(group, part, length, documents) for part in (out.detach(), found[0])]
    for want, got in zip([wanted.detach(), dx, *of_parameters], [*everything, *found[1:]], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def every_convolution(rank: int) -> None:
    for layout in layouts(dist.get_world_size()):
        for balances in (False, True):
            group = group_of(layout, balances)
            for length in (layout.chunk_count, 5 * layout.chunk_count):
                compare_convolution(group, length, None)
            for boundaries in (DOCUMENTS, (0, 60, 80)):
                documents = group.pack(boundaries)
                compare_convolution(group, documents.padded_boundaries[-1], documents, "silu")
            release_group(group)


@pytest.mark.parametrize("world", slow_except([1, 3], (1, 3, 4, 5)))
def test_convolution_over_ranks_equals_the_whole_sequence(world: int) -> None:
    spawn(world, every_convolution)


class Mixer(nn.Module):
    """A convolution and a scan."""

    def __init__(self, group: SequenceGroup) -> None:
        super().__init__()
        self.group, self.weight = group, nn.Parameter(torch.ones(HEADS * VALUES, TAPS, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        v = causal_convolution(self.group, v.flatten(2), self.weight, None).view_as(v)
        return scan(self.group, ScanInputs(q, k, v, g), "chain")


def calls_of_a_checkpoint(rank: int, compiled: bool) -> list[int]:
    """Returns how often halos and scans are computed, without a checkpoint and with one."""
    counts = []
    for checkpoints in (False, True):
        group = group_of(Layout("zigzag", dist.get_world_size(), 2))
        layer = Mixer(group)
        if checkpoints:
            apply_remat([layer], "attention", compiled=compiled)
        if compiled:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
        x = [group.shard(part).requires_grad_() for part in draw("decay", 16, 1.0) if part is not None]
        with (
            mock.patch.object(halo, "_look_back", side_effect=halo._look_back) as looks,
            mock.patch.object(TorchScan, "forward", autospec=True, side_effect=TorchScan.forward) as scans,
        ):
            layer(*x).sum().backward()
        counts += [looks.call_count, scans.call_count]
    return counts


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_store_halos_and_scans(compiled: bool) -> None:
    assert spawn(2, calls_of_a_checkpoint, compiled) == [[1, 1, 1, 1]] * 2


def check_operator(rank: int) -> None:
    group = group_of(Layout("contiguous", 1))
    for taps, dtype in ((1, torch.float32), (TAPS, torch.float32), (TAPS, torch.bfloat16)):
        x, weight, bias = torch.randn(2, 9, 3), torch.randn(3, taps), torch.randn(3)
        inputs = [part.to(dtype).requires_grad_() for part in (x, weight, bias)]
        before = torch.randn(2, 1, taps - 1, 3).to(dtype)
        operator = torch.ops.lightseq.convolution.default
        torch.library.opcheck(operator, (inputs[0], before, *inputs[1:], None, group.name, True))
        assert causal_convolution(group, *inputs).is_contiguous()  # type: ignore[arg-type]


def test_the_convolution_keeps_the_rules_of_operators() -> None:
    """One fragment, which is the case of `ring`, `ulysses` and a single rank."""
    spawn(1, check_operator)


def check_scans(rank: int) -> None:
    group = group_of(Layout("contiguous", 1))
    for kind in KINDS:
        inputs = [part if part is None else part.requires_grad_() for part in draw(kind, 40, 1.0)]
        for operator in (SCAN_OP, SCAN_HEADS_OP):
            torch.library.opcheck(operator, (*inputs, SCALE, group.name, None))


def test_scans_keep_the_rules_of_operators() -> None:
    spawn(1, check_scans)


def unknown_activation(rank: int) -> None:
    group, x = group_of(Layout("contiguous", 1)), torch.randn(1, 4, 3)
    with pytest.raises(ValueError, match="activation is 'gelu'; use None, silu or swish"):
        causal_convolution(group, x, torch.ones(3, 2), None, activation="gelu")


def test_an_activation_that_is_not_fused_is_refused() -> None:
    spawn(1, unknown_activation)


def scattered(rank: int) -> str:
    group = group_of(Layout("striped", dist.get_world_size()))
    x = [group.shard(part) for part in draw("delta", 16, 1.0) if part is not None]
    with pytest.raises(ValueError, match="use --schedule zigzag") as refusal:
        scan(group, ScanInputs(*x), "chain")
    return str(refusal.value)


def test_scattered_tokens_are_refused() -> None:
    assert len({*spawn(2, scattered)}) == 1


def without_documents(rank: int) -> None:
    group = group_of(Layout("zigzag", dist.get_world_size(), 2))
    x = [group.shard(part) for part in draw("delta", 16, 1.0) if part is not None]
    group.batch.packed = True
    for run in (
        lambda: scan(group, ScanInputs(*x), "chain"),
        lambda: causal_convolution(group, x[2].flatten(2), torch.ones(HEADS * VALUES, 2, dtype=torch.float64), None),
    ):
        with pytest.raises(ValueError, match="the model's layers do not pass them on"):
            run()


def test_a_packed_batch_without_its_documents_is_refused() -> None:
    spawn(2, without_documents)


SEGMENTS = (0, 64, 65, 200, 456, 1000)


def compare_kernels(inputs: ScanInputs, dtype: torch.dtype) -> None:
    """Compares each result of the fast kernel with float64.

    Errors are at most twice those of torch's products, 6e-3, or those of fla's own pass where it rounds more.
    """
    given = ScanInputs(*(None if x is None else x.to("cuda", dtype) for x in inputs))  # type: ignore[arg-type]
    given = given._replace(g=inputs.g.to("cuda", torch.float32))
    if inputs.beta is None:
        given = given._replace(v=inputs.v.to("cuda", torch.float32))  # as Mamba 2 passes them
    kernel = select_kernel(given)
    assert not isinstance(kernel, TorchScan)
    torch.manual_seed(1)
    count, (batch, _, heads, values) = len(SEGMENTS) - 1, given.v.shape
    states = torch.randn(batch, count, heads, given.k.shape[-1], values, device="cuda", dtype=torch.float64)
    dfinal, dout = torch.randn_like(states), torch.randn_like(given.v)

    def results(kernel: object, wide: torch.dtype | None) -> list[Tensor]:
        x, of_state, gradient = given, states.float(), dout
        if wide is not None:
            x = ScanInputs(*(None if part is None else part.to(wide) for part in given))  # type: ignore[arg-type]
            of_state, gradient = states.to(wide), dout.to(wide)
        forward = kernel.forward(x, 0.1, SEGMENTS)  # type: ignore[attr-defined]
        backward = kernel.backward(x, 0.1, SEGMENTS, of_state, gradient)  # type: ignore[attr-defined]
        found = [*forward.summarize(), forward.run(of_state), forward.run(None), backward.initial_gradients()]
        gradients = backward.run(dfinal.to(of_state.dtype))
        return [*found, *(part for part in gradients if part is not None)]

    exact, fast = results(TorchScan(), torch.float64), results(kernel, None)
    rounded = results(TorchScan(), None)
    is_kimi = inputs.g.dim() == 4  # a decay for each channel
    whole = gradients_of_whole_pass(given, states, dfinal, dout) if is_kimi else []
    others = [None] * (len(exact) - len(whole)) + whole
    for want, got, plain, other in zip(exact, fast, rounded, others, strict=True):
        assert got.dtype == plain.dtype
        error, of_plain = ((x.double() - want).norm() / want.norm() for x in (got, plain))
        of_whole = (other.double() - want).norm() / want.norm() if other is not None else 0.0
        bound = max(2 * of_plain, 6e-3, 1.05 * of_whole)
        assert error < bound, (tuple(want.shape), float(error), float(of_plain), float(of_whole))


def gradients_of_whole_pass(x: ScanInputs, states: Tensor, dfinal: Tensor, dout: Tensor) -> list[Tensor]:
    """Returns the gradients of the inputs by fla's own pass of Kimi Delta Attention over the same segments.

    For the gradient of decays it sums products of states in bfloat16, and errs by more than 6e-3 where they are weak.
    """
    from fla.ops.kda import chunk_kda

    rows, length = len(x.v), SEGMENTS[-1]
    starts = [row * length + edge for row in range(rows) for edge in SEGMENTS[:-1]] + [rows * length]
    leaves = [part.flatten(0, 1).unsqueeze(0).detach().requires_grad_() for part in x if part is not None]
    out, final = chunk_kda(
        *leaves, scale=0.1, initial_state=states.float().flatten(0, 1), output_final_state=True,
        cu_seqlens=torch.tensor(starts, device=x.v.device),
    )  # fmt: skip
    given = [dout.flatten(0, 1).unsqueeze(0), dfinal.float().flatten(0, 1)]
    found = torch.autograd.grad([out, final], leaves, given)
    return [part.squeeze(0).unflatten(0, (rows, length)) for part in found]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strength", [0.003, 0.1, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_kernel_equals_the_definition(kind: str, strength: float) -> None:
    pytest.importorskip("fla")  # its kernels are tuned for every shape, which takes minutes
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(2, 1000, 2, 128, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(2, 1000, 4, 64 if kind == "decay" else 128, dtype=torch.float64)
    g = -strength * torch.rand(2, 1000, 4, *((128,) if kind == "channels" else ()), dtype=torch.float64)
    beta = None if kind == "decay" else torch.rand(2, 1000, 4, dtype=torch.float64)
    compare_kernels(ScanInputs(q, k, v, g, beta), torch.bfloat16)


def on_gpus(rank: int) -> list[float]:
    """Returns relative errors of outputs and gradients over ranks, in bfloat16, against float64 on one rank."""
    torch.manual_seed(0)
    length, device = 4096, torch.device("cuda", torch.cuda.current_device())
    q, k = (F.normalize(torch.randn(1, length, 2, 128), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(1, length, 4, 128), -0.05 * torch.rand(1, length, 4), torch.rand(1, length, 4)
    weights = torch.randn(1, length, 4, 128)
    whole = [x.to(device, torch.float64).requires_grad_() for x in (q, k, v, g, beta)]
    wanted = torch_scan(ScanInputs(*whole), 1.0, torch.zeros(1, 4, 128, 128, dtype=torch.float64, device=device))[0]  # type: ignore[arg-type]
    gradients = torch.autograd.grad((wanted * weights.to(device)).sum(), whole)
    layout = Layout("zigzag", dist.get_world_size(), 2)
    assert dist.group.WORLD is not None
    group = make_sequence_group(dist.group.WORLD, layout, make_transport("auto", dist.group.WORLD, device))
    mine = [group.shard(x.detach()).to(torch.bfloat16).requires_grad_() for x in whole]
    mine[3] = group.shard(whole[3].detach()).float().requires_grad_()
    out = scan(group, ScanInputs(*mine), "chain")
    found = torch.autograd.grad((out * group.shard(weights.to(device))).sum(), mine)
    pairs = zip([wanted.detach(), *gradients], [out.detach(), *found], strict=True)
    return [float((joined(group, got, length, None).double() - want).norm() / want.norm()) for want, got in pairs]


@pytest.mark.parametrize("world", NCCL_WORLDS)
def test_scan_over_gpus_equals_one_rank(world: int) -> None:
    errors = spawn(world, on_gpus, device="cuda")[0]
    assert max(errors) < 0.02, errors


@pytest.mark.parametrize("spread", [1, 10, 50])
def test_strong_decays_round_as_little_as_in_transformers_own_scan(spread: int) -> None:
    """Sums of logarithms of decays reach 20,000 in a chunk."""
    torch.manual_seed(0)
    x, keys, queries, weight = (torch.randn(1, 64, HEADS, size) for size in (16, 8, 8, 16))
    rates = -torch.tensor([1.0, 4.0, 8.0, 15.0])
    times = F.softplus(spread * torch.randn(1, 64, HEADS))

    def ours(times: Tensor) -> Tensor:
        dtype = times.dtype
        inputs = ScanInputs(
            queries.to(dtype), keys.to(dtype), x.to(dtype) * times[..., None], rates.to(dtype) * times, None
        )
        return torch_scan(inputs, 1.0, torch.zeros(1, HEADS, 8, 16, dtype=dtype))[0]

    def result(run: Callable[[Tensor], Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        given = times.to(dtype, copy=True).requires_grad_()
        out = run(given)
        (out * weight.to(out.dtype)).sum().backward()
        assert given.grad is not None
        return out.detach().double(), given.grad.double()

    exact = result(ours, torch.float64)
    plain = result(lambda times: mamba2_chunk_scan(x, times, rates, keys, queries, 64)[0], torch.float32)
    for right, theirs, own in zip(exact, plain, result(ours, torch.float32), strict=True):
        assert (own - right).norm() <= 2 * (theirs - right).norm()


def test_gradients_of_strong_decays_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 50, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    g = -3 - 5 * torch.rand(1, 50, 4, generator=generator, dtype=torch.float64)

    def gradient(dtype: torch.dtype) -> Tensor:
        decay = g.to(dtype).requires_grad_()
        inputs = ScanInputs(q.to(dtype), k.to(dtype), v.to(dtype), decay, None)
        out, _ = torch_scan(inputs, 1.0, torch.zeros(1, 4, 8, 8, dtype=dtype))
        (sums,) = torch.autograd.grad(out.square().sum(), decay)
        return sums.sum(1).double()

    wanted = gradient(torch.float64)
    assert float((gradient(torch.float32) - wanted).norm() / wanted.norm()) < 1e-5
