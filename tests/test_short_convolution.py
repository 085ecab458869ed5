"""Kernels of short convolutions against torch's operators, forward and backward."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightseq.kernels.convolution import convolve_fused, convolve_torch

BATCH = 2


class Case(NamedTuple):
    fragments: int
    length: int  # of a fragment
    channels: int
    taps: int = 4
    packed: bool = False
    bias: bool = True
    silu: bool = True


CASES = (
    Case(fragments=2, length=11, channels=5),
    Case(fragments=2, length=11, channels=6, packed=True),
    Case(fragments=1, length=9, channels=3, bias=False),
    Case(fragments=2, length=6, channels=4, silu=False),
    Case(fragments=3, length=2, channels=3, packed=True, bias=False, silu=False),
    Case(fragments=3, length=1, channels=3),
    Case(fragments=1, length=1, channels=1, packed=True),
    Case(fragments=2, length=5, channels=3, taps=1),
    Case(fragments=1, length=9, channels=3, taps=8, packed=True),
)
LONG = (
    Case(fragments=2, length=1003, channels=328),
    Case(fragments=4, length=257, channels=1024, packed=True, bias=False),
    Case(fragments=640, length=3, channels=96, packed=True),  # several tiles for each program
    Case(fragments=2, length=300, channels=200, taps=8, silu=False),
)


def draw(case: Case, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """Draws x, the tokens before its fragments, weight, bias and the tokens inside each document."""
    tokens, width = case.fragments * case.length, case.channels
    x = torch.randn(BATCH, width, tokens, device=device).to(dtype).transpose(1, 2)  # not contiguous
    before = torch.randn(BATCH, case.fragments, case.taps - 1, width, device=device).to(dtype)
    weight = torch.randn(width, case.taps, device=device).to(dtype)
    bias = torch.randn(width, device=device).to(dtype) if case.bias else None
    inside = torch.randint(0, case.taps + 1, (tokens,), dtype=torch.int32, device=device) if case.packed else None
    return [x, before, weight, bias, inside]


def results(run, case: Case, inputs: list[Tensor | None], wide: torch.dtype | None = None) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Returns the output and the gradients of x, before, weight and, if there is one, bias."""
    *given, inside = inputs
    given = [None if x is None else x.detach().to(wide or x.dtype).requires_grad_() for x in given]
    out = run(*given, inside, case.silu)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, device=out.device).to(inputs[0].dtype).to(out.dtype)  # type: ignore[union-attr]
    return [out.detach(), *torch.autograd.grad(out, [x for x in given if x is not None], dout)]


def compare(case: Case, dtype: torch.dtype, device: str) -> None:
    """Compares errors with those of torch's operators in the same dtype, which round more often."""
    torch.manual_seed(0)
    inputs = draw(case, dtype, device)
    exact = results(convolve_torch, case, inputs, torch.float64)
    plain, fused = (results(run, case, inputs) for run in (convolve_torch, convolve_fused))
    floor = torch.finfo(dtype).eps
    for i, (want, got, like) in enumerate(zip(exact, fused, plain, strict=True)):
        assert got.dtype == like.dtype and got.shape == like.shape and got.is_contiguous()
        if want.numel() == 0:
            continue
        error, of_plain = (float((x.double() - want).norm() / want.norm().clamp_min(1e-30)) for x in (got, like))
        assert error <= max(2 * of_plain, floor), (case, dtype, i, error, of_plain)


def check_interpreted() -> None:
    from lightseq.kernels.fused import convolution as fused

    fused.ROWS, fused.BLOCK, fused.UNROLL, fused.MAX_PARTIALS = 8, 4, 2, 3  # several tiles and programs
    for case in CASES:
        compare(case, torch.float32, "cpu")
    for case in CASES[:2]:
        compare(case, torch.bfloat16, "cpu")
    inputs = draw(CASES[4], torch.float32, "cpu")
    inputs = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs]
    torch.library.opcheck(convolve_fused, (*inputs, True))


def test_interpreted_kernels_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported: in a process of its own
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check_interpreted).result()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*CASES, *LONG])
def test_compiled_kernels_equal_torch(case: Case, dtype: torch.dtype) -> None:
    compare(case, dtype, "cuda")
    inputs = draw(case, dtype, "cuda")
    first, second = (results(convolve_fused, case, inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu(1)
def test_a_compiled_layer_keeps_the_kernels_whole() -> None:
    case = LONG[1]
    inputs = draw(case, torch.bfloat16, "cuda")
    compiled = torch.compile(convolve_fused, fullgraph=True)
    for got, want in zip(results(compiled, case, inputs), results(convolve_fused, case, inputs), strict=True):
        assert torch.equal(got, want)
