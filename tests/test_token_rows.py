"""Kernels around experts: copies of tokens, sums of their rows, and grouped products on a GPU."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from lightseq.kernels.grouped_products import grouped_product
from lightseq.kernels.token_rows import copy_to_rows, sum_rows

TOKENS, COPIES, HIDDEN = 9, 3, 1100  # the last: two programs a row
UNWRITTEN = 7.0
STOPS = (0, 11, TOKENS * COPIES)  # rows of this rank's experts


def _routes(device: str) -> tuple[Tensor, Tensor]:
    order_R = torch.randperm(TOKENS * COPIES, device=device)
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(len(order_R), device=device)
    return order_R, places_R


def check_rows(device: str) -> None:
    from lightseq.kernels.fused import token_rows as fused

    order_R, places_R = _routes(device)
    for dtype in (torch.float32, torch.bfloat16):
        tokens, rows = (torch.randn(n, HIDDEN, device=device).to(dtype) for n in (TOKENS, TOKENS * COPIES))
        for stop in STOPS:
            end = torch.tensor([stop], dtype=torch.int32, device=device)
            copied = torch.full_like(rows, UNWRITTEN)
            fused.copy_to_rows(tokens, order_R, end, copied)
            assert torch.equal(copied[:stop], tokens[order_R // COPIES][:stop])
            assert (copied[stop:] == UNWRITTEN).all()
            summed, others = torch.empty_like(tokens), rows.clone()
            others[stop:] = torch.nan
            fused.sum_rows(others, places_R, end, summed)
            own = torch.where((places_R < stop)[:, None], rows[places_R], 0)
            torch.testing.assert_close(summed, own.view(TOKENS, COPIES, HIDDEN).double().sum(1).to(dtype))


def test_interpreted_kernels_skip_rows_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported: in a process of its own
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check_rows, "cpu").result()


@pytest.mark.gpu(1)
def test_compiled_kernels_skip_rows_of_other_ranks() -> None:
    check_rows("cuda")


@pytest.mark.parametrize("stop", STOPS)
def test_without_kernels_rows_of_other_ranks_count_for_nothing(stop: int) -> None:
    order_R, places_R = _routes("cpu")
    tokens, ends_E = torch.randn(TOKENS, 4), torch.tensor([0, stop], dtype=torch.int32)
    rows = copy_to_rows(tokens, order_R, ends_E)
    rows[stop:] = torch.nan
    torch.testing.assert_close(
        sum_rows(rows, places_R, ends_E, TOKENS), tokens * (places_R < stop).view(TOKENS, -1).sum(1, keepdim=True)
    )


@pytest.mark.gpu(1)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel", ["quack", "torch"])
def test_grouped_products_on_a_gpu(kernel: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts have no rows, and rows past the last expert's are not numbers."""
    if kernel == "torch":
        monkeypatch.setattr("lightseq.kernels.grouped_products._quack_gemm", lambda: None)
    sizes, inner, outer = torch.tensor([7, 0, 300, 0, 129, 0]), 256, 384
    ends, stop = sizes.cumsum(0), int(sizes.sum())
    x, dy = (torch.randn(stop + 50, n, device="cuda", dtype=torch.bfloat16) for n in (inner, outer))
    x[stop:], dy[stop:] = torch.nan, torch.nan
    shape = (len(sizes), inner, outer) if transposed else (len(sizes), outer, inner)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    x.requires_grad_()
    y = grouped_product(x, weight, ends.int().cuda(), transposed)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    for e, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        rows = slice(end - size, end)
        w, gradient = ((z if transposed else z.T).double() for z in (weight[e].detach(), weight.grad[e]))
        for found, expected in (
            (y[rows], x[rows].double() @ w),
            (x.grad[rows], dy[rows].double() @ w.T),
            (gradient, x[rows].double().T @ dy[rows].double()),
        ):
            assert (found.double() - expected).norm() <= 5e-3 * expected.norm()
