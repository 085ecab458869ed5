"""Kernels of short convolutions against torch's operators, forward and backward."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightseq.kernels import fragment_convolution as convolution
from lightseq.kernels.fragment_convolution import convolve_torch, gradients_torch

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


def results(run: Any, case: Case, inputs: list[Tensor | None], wide: torch.dtype | None = None) -> list[Tensor]:
    """Returns the output and the gradients of x, before, weight and, if there is one, bias.

    `run` has `convolve` and `convolve_backward`.
    """
    *given, inside = inputs
    x, *others = [None if x is None else x.to(wide or x.dtype).contiguous() for x in given]
    out = run.convolve(x, *others, inside, case.silu)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, device=out.device).to(inputs[0].dtype).to(out.dtype)  # type: ignore[union-attr]
    gradients = run.convolve_backward(dout, x, *others, inside, case.silu)
    return [out, *(gradient for gradient, x in zip(gradients, given, strict=False) if x is not None)]


class Plain:
    """The path without Triton, on any device."""

    convolve = staticmethod(convolve_torch)
    convolve_backward = staticmethod(gradients_torch)


def compare(kernels: Any, case: Case, dtype: torch.dtype, device: str) -> None:
    """Compares errors with those of torch's operators in the same dtype, which round more often."""
    torch.manual_seed(0)
    inputs = draw(case, dtype, device)
    exact = results(Plain, case, inputs, torch.float64)
    plain, fused = results(Plain, case, inputs), results(kernels, case, inputs)
    floor = torch.finfo(dtype).eps
    for i, (want, got, like) in enumerate(zip(exact, fused, plain, strict=True)):
        assert got.shape == like.shape
        if want.numel() == 0:
            continue
        error, of_plain = (float((x.double() - want).norm() / want.norm().clamp_min(1e-30)) for x in (got, like))
        assert error <= max(2 * of_plain, floor), (case, dtype, i, error, of_plain)


def check_interpreted() -> None:
    from lightseq.kernels.fused import convolution_kernels as fused

    fused.ROWS, fused.BLOCK, fused.UNROLL, fused.MAX_PARTIALS = 8, 4, 2, 3  # several tiles and programs
    for case in CASES:
        compare(fused, case, torch.float32, "cpu")
    for case in CASES[:2]:
        compare(fused, case, torch.bfloat16, "cpu")


def test_interpreted_kernels_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported: in a process of its own
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check_interpreted).result()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [*CASES, *LONG])
def test_compiled_kernels_equal_torch(case: Case, dtype: torch.dtype) -> None:
    compare(convolution, case, dtype, "cuda")
    inputs = draw(case, dtype, "cuda")
    first, second = (results(convolution, case, inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))
