"""Weights in four bits: bitsandbytes' values, whole or gathered by FSDP2, read by operators and never saved dense."""

from collections.abc import Callable

import pytest
import torch
from packed_weights import check_copies, check_gathers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from worlds import spawn

from lightseq.kernels.grouped_products import grouped_product
from lightseq.models import nf4
from lightseq.models.nf4 import Nf4Bytes
from lightseq.models.packed import PackedWeight

functional = pytest.importorskip("bitsandbytes.functional")
SHAPES = ((300, 128), (2, 192), (5, 6, 64))  # rows that neither 2 nor 3 ranks share evenly; fewer rows than ranks


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def single(weight: Tensor) -> PackedWeight:
    """Returns a weight without double quantization."""
    nibbles, state = functional.quantize_4bit(weight, quant_type="nf4")
    scales, nested = state.absmax.view(torch.uint8), torch.empty(0)
    return PackedWeight(
        Nf4Bytes(nibbles.flatten(), scales, nested, torch.tensor(0.0)), weight.shape, weight.dtype, weight.shape
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_a_matrix_and_of_its_rows_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    weight = drawn((300, 128), dtype)
    nibbles, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    ours, dense = nf4.quantize(weight), functional.dequantize_4bit(nibbles, state)
    assert ours.raw.codes.equal(nibbles.flatten()) and ours.raw.scales.equal(state.absmax)
    assert ours.raw.nested.equal(state.state2.absmax) and ours.raw.offset.equal(state.offset)
    assert ours.dense().equal(dense)
    nibbles, state = functional.quantize_4bit(weight, quant_type="nf4")
    assert single(weight)[77:240].dense().equal(functional.dequantize_4bit(nibbles, state)[77:240])
    assert ours[77:240].dense().equal(dense[77:240]) and isinstance(ours[77:240], PackedWeight)
    assert sum(part.nbytes for part in ours.raw.tensors) < 0.52 * weight.numel()


@pytest.mark.compat
def test_a_product_saves_no_dense_weight_and_has_the_gradient_of_one() -> None:
    weight = nn.Parameter(nf4.quantize(drawn((300, 128))), requires_grad=False)
    x = drawn((10, 128)).view(2, 5, 128).requires_grad_()
    saved = list[Tensor]()
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = nn.functional.linear(x, weight)
    assert [type(t) for t in saved if t.numel() == weight.numel()] == [PackedWeight]
    y.sin().sum().backward()
    dense, again = weight.detach().dense(), x.detach().requires_grad_()
    nn.functional.linear(again, dense).sin().sum().backward()
    assert x.grad is not None and again.grad is not None and x.grad.equal(again.grad)
    assert (x @ weight.T).equal(y) and weight[3:9, 64:].equal(dense[3:9, 64:])


def test_nothing_but_a_copy_writes_to_a_weight() -> None:
    weight = nf4.quantize(drawn((300, 128)))
    with pytest.raises(ValueError, match="four bits"):
        weight.add_(1)
    weight.copy_(2 * drawn((300, 128)))
    assert weight.dense().equal(nf4.quantize(2 * drawn((300, 128))).dense())


def test_a_build_for_gpus_quantizes_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    dense = drawn((300, 128))
    weight = nf4.empty(dense.shape, dense.dtype, dense.device)
    weight.fill_rows(dense, 0)
    assert weight.dense().equal(nf4.quantize(dense).dense())


@pytest.mark.compat
@pytest.mark.parametrize("world", [1, 2, 3])
def test_fsdp2_gathers_the_same_bits(world: int) -> None:
    spawn(world, gathers)


def gathers(_rank: int) -> None:
    dense = [drawn(shape) for shape in SHAPES]
    check_gathers([*map(nf4.quantize, dense)])
    check_gathers([*map(nf4.quantize, dense)], dense.__getitem__)
    check_gathers([*map(single, dense)])


@pytest.mark.compat
@pytest.mark.parametrize("world", [1, 2])
def test_fsdp2_gathers_and_frees_copies_of_host_memory(world: int) -> None:
    spawn(world, gathers_copies)


def gathers_copies(_rank: int) -> None:
    check_copies(nf4.quantize(drawn((300, 128))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_experts_have_the_values_of_bitsandbytes(dtype: torch.dtype) -> None:
    weight = drawn((5, 30, 64), dtype)
    dense = functional.dequantize_4bit(
        *functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    ).view(weight.shape)
    ours = nf4.quantize(weight)
    assert ours.dense().equal(dense) and ours[1:4].dense().equal(dense[1:4]) and isinstance(ours[1:4], PackedWeight)
    assert ours[2].equal(dense[2]) and ours.transpose(1, 2).equal(dense.transpose(1, 2))


def linear_and_experts() -> list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]:
    linear = nn.Linear(128, 300, bias=False)
    linear.weight = nn.Parameter(nf4.quantize(drawn((300, 128))), requires_grad=False)
    experts = nn.Parameter(nf4.quantize(drawn((3, 40, 128))), requires_grad=False)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)
    return [(linear.weight, linear.forward), (experts, lambda x: grouped_product(x, experts, ends, False))]


@pytest.mark.compat
@pytest.mark.parametrize("which", [0, 1])
def test_a_compiled_layer_saves_no_dense_weight(which: int) -> None:
    weight, eager = linear_and_experts()[which]
    x, saved, found = drawn((10, 128)), list[Tensor](), []
    for forward in (eager, torch.compile(eager, backend="aot_eager", fullgraph=True)):
        saved.clear()
        leaf = x.clone().requires_grad_()
        with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = forward(leaf.sin()).sin()
        y.sum().backward()
        found.append((y.detach(), leaf.grad))
    assert any(t.dtype == torch.uint8 for t in saved)  # by the compiled layer
    assert not any(type(t) is Tensor and t.numel() == weight.numel() for t in saved)
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
