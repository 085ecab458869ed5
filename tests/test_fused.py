"""The Triton kernels that bring results home against their torch versions: compiled on a GPU, interpreted on a CPU."""

import ast
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightseq.kernels.attention.lse_merge import merge
from lightseq.kernels.fused import launches
from lightseq.kernels.fused.launches import Launches, addresses

BATCH, LENGTH = 2, 3
WIDTHS = [(3, 20), (2, 24), (17, 64)]  # heads and head dim, never a power of two together; the last: two programs a row
DTYPES = (torch.float32, torch.bfloat16)
SUMS = [((3,), True), ((1, 17, 2), False)]  # how many parts of every total in one launch, and whether it overwrites
WORDS = 4  # of an lse
FOREIGN = 7.0  # what memory holds that is not the kernels' to write


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _part(heads: int, dim: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Returns random numbers laid out as a kernel makes them, as they travel, heads first, or as some rank's heads."""
    as_made = _random((BATCH, LENGTH, heads, dim), dtype, device, seed)
    as_packed = _random((LENGTH, BATCH, 2 * heads, dim), dtype, device, seed)[:, :, heads:].transpose(0, 1)
    heads_first = _random((BATCH, heads, LENGTH, dim), dtype, device, seed).transpose(1, 2)
    inside = _random((BATCH, LENGTH + 2, 2 * heads, dim), dtype, device, seed)[:, 1:-1, heads:]
    return (as_made, as_packed, heads_first, inside)[seed % 4]


def _totals(count: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, list[Tensor]]:
    """Chunks of one tensor, in which nothing else may change, and that tensor."""
    around = torch.full((BATCH, count * (LENGTH + 1) + 1, heads + 1, dim), FOREIGN, dtype=dtype, device=device)
    totals = [around[:, 1 + i * (LENGTH + 1) :, 1:][:, :LENGTH] for i in range(count)]
    for i, total in enumerate(totals):
        total.copy_(_random((BATCH, LENGTH, heads, dim), dtype, device, 900 + i))
    return around, totals


def _launches() -> Launches:
    """Without anything prepared; in the interpreter's process with the Triton kernels on a CPU too."""
    if os.environ.get("TRITON_INTERPRET"):
        from lightseq.kernels.fused import copies as fused

        launches.fused_kernels = lambda x: fused
    return Launches()


def _check_sum(totals: list[Tensor], parts: list[list[Tensor]], overwrite: bool, label: str) -> None:
    terms = [[x.double() for x in ([] if overwrite else [t]) + p] for t, p in zip(totals, parts, strict=True)]
    if overwrite:
        for total in totals:
            total.fill_(torch.nan)  # what an overwritten total holds must not matter
    _launches().add("sum", lambda: (totals, parts), overwrite)
    for total, some in zip(totals, terms, strict=True):
        want, rounding = sum(some), 1e-6 * sum(x.abs() for x in some)  # float32 sums, rounded once
        room = torch.finfo(total.dtype).eps * want.abs() + rounding
        assert ((total.double() - want).abs() <= room).all(), label


def check_sums(device: str) -> None:
    for (heads, dim), total_dtype, part_dtype, (counts, overwrite) in product(WIDTHS, DTYPES, DTYPES, SUMS):
        label = f"{heads} x {dim}, {part_dtype} into {total_dtype}, {counts} parts, overwrite: {overwrite}"
        around, totals = _totals(len(counts), heads, dim, total_dtype, device)
        parts = [[_part(heads, dim, part_dtype, device, i + j) for i in range(n)] for j, n in enumerate(counts)]
        _check_sum(totals, parts, overwrite, label)
        for total in totals:
            total.fill_(FOREIGN)
        assert (around == FOREIGN).all(), f"{label}: wrote where it may not"


def check_copies(device: str) -> None:
    """Exact in every type, of many shapes at once: chunks and an lse (B, N, S) with -inf where no key was seen."""
    for (heads, dim), dtype, seed in product(WIDTHS, DTYPES, range(4)):
        around, totals = _totals(2, heads, dim, dtype, device)
        sources = [_part(heads, dim, dtype, device, seed + i) for i in (0, 1)]
        packed = torch.full((BATCH, 6, 2 * WORDS), FOREIGN, device=device)
        lse = _random((3, BATCH, WORDS), torch.float32, device, 1).transpose(0, 1)
        lse[:, 1, 2] = -torch.inf
        pairs = [*zip(totals, sources, strict=True), (packed[:, 3:, WORDS:], lse)]
        known = _launches()
        known.copy("copy", lambda pairs=pairs: pairs)  # type: ignore[misc]
        assert known._known, f"{heads} x {dim} of {dtype} are whole words, which a kernel can copy"
        for to, x in pairs:
            assert torch.equal(to, x), f"{heads} x {dim}"
            to.fill_(FOREIGN)
        assert (around == FOREIGN).all() and (packed == FOREIGN).all()


def check_copies_of_many_rows(device: str) -> None:
    """Several programs down and across, of tensors that need different numbers of them in one launch."""
    shapes = [(2, 50, 4, 128), (2, 50, 2, 128), (1, 7, 2, 128)]
    pairs = []
    for i, (batch, length, heads, dim) in enumerate(shapes):
        around = torch.full((batch, length + 1, heads + 1, dim), FOREIGN, dtype=torch.bfloat16, device=device)
        pairs.append((around[:, 1:, :heads], _random(shapes[i], torch.bfloat16, device, i)))
    known = _launches()
    known.copy("copy", lambda: pairs)
    assert known._known
    for to, x in pairs:
        assert torch.equal(to, x), f"{tuple(x.shape)}"
        to.fill_(FOREIGN)
        assert (to._base == FOREIGN).all()


def check_copies_that_do_not_fit(device: str) -> None:
    """Tensors that words do not fit are told apart, and copied one by one."""
    dense = torch.randn(BATCH, LENGTH, 3, 20).to(device)
    odd, wide = torch.randn(BATCH, LENGTH, 3, 21).to(device), torch.randn(BATCH, LENGTH, 20, 3).to(device)
    for source in (odd[..., :20], odd[..., 1:], wide.transpose(2, 3), dense[:, :1, :1, :1].expand_as(dense)):
        to = torch.full_like(dense, FOREIGN)
        _launches().copy("copy", lambda to=to, source=source: [(to, source)])  # type: ignore[misc]
        assert torch.equal(to, source), f"strides {source.stride()}"


def check_repeated_launches(device: str) -> None:
    """Memory comes back from the allocator as another shape or type: what was prepared for it before does not fit."""
    known = _launches()
    memory, other = torch.empty(2, 4096, dtype=torch.uint8, device=device)
    for shape, dtype in [((2, 3, 2, 8), DTYPES[0]), ((1, 3, 2, 8), DTYPES[0]), ((4, 3, 2, 8), DTYPES[0]),
                         ((4, 3, 2, 8), DTYPES[1]), ((2, 3, 2, 8), DTYPES[0])]:  # fmt: skip
        x = _random(shape, dtype, device, 3)
        to, source = (m[: x.nbytes].view(dtype).view(shape) for m in (memory, other))
        for fill in (1.0, 2.0):
            source.copy_(fill * x)
            to.fill_(FOREIGN)
            known.copy(addresses([to, source]), lambda to=to, source=source: [(to, source)])  # type: ignore[misc]
            assert torch.equal(to, source), f"copy of {shape} {dtype}"
            for overwrite, want in ((True, source), (False, 2 * source)):
                known.add(addresses([to, source]), lambda to=to, source=source: ([to], [[source]]), overwrite)
                assert torch.equal(to, want), f"sum of {shape} {dtype}, overwrite: {overwrite}"


def check_merges(device: str) -> None:
    from lightseq.kernels.fused import copies as fused

    for (heads, dim), dtype, seed in product(WIDTHS, DTYPES, range(4)):
        out_dtype = torch.float32 if seed % 2 else dtype
        around, (out,) = _totals(1, heads, dim, out_dtype, device)
        lse = 3 * _random((BATCH, LENGTH, 2 * heads), torch.float32, device, 2).transpose(1, 2)[:, heads:]
        part = _part(heads, dim, dtype, device, seed)
        part_lse = 30 * _random((LENGTH, BATCH, heads), torch.float32, device, seed).permute(1, 2, 0)
        part_lse[:, :, 1], part[:, 1] = -torch.inf, 0.0  # queries that saw no key
        part_lse[0, 0, 2], part[0, 2, 0] = -torch.inf, 0.0
        lse[1, :, 1:], out[1, 1:] = -torch.inf, 0.0  # nor did they before; the second time they do now
        before, before_lse = out.clone(), lse.clone()
        want, want_lse = merge(out.double(), lse.double(), part.double(), part_lse.double())
        for _ in range(2):  # the second launch is a prepared one
            out.copy_(before)
            lse.copy_(before_lse)
            fused.merge_into(out, lse, part, part_lse)
        tolerance = max(1e-5, torch.finfo(out_dtype).eps)  # twice the error of rounding
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        assert torch.equal(out[:, 1], before[:, 1]) and torch.equal(out[0, 2, 0], before[0, 2, 0])
        assert torch.equal(lse[:, :, 1], before_lse[:, :, 1]) and lse[0, 0, 2] == before_lse[0, 0, 2]
        assert torch.equal(out[1, 2], part[1, 2].to(out_dtype)) and torch.equal(lse[1, :, 2], part_lse[1, :, 2])
        out.fill_(FOREIGN)
        assert (around == FOREIGN).all()


CHECKS = [
    check_sums,
    check_copies,
    check_copies_of_many_rows,
    check_copies_that_do_not_fit,
    check_repeated_launches,
    check_merges,
]


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_kernels_do_what_torch_does(check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported: in a process of its own
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check, "cpu").result()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("check", CHECKS)
def test_compiled_kernels_do_what_torch_does(check: Callable) -> None:
    check("cuda")


@pytest.mark.parametrize(
    ("prepared_by", "kernel"), [("copy_launch", "_copy"), ("add_launch", "_add"), ("_merge_launch", "_merge")]
)
def test_constants_are_named_in_the_order_of_the_kernels_signature(prepared_by: str, kernel: str) -> None:
    """For the second launch hands them over without their names."""
    source = Path(launches.__file__).with_name("copies.py").read_text(encoding="utf-8")
    functions = {f.name: f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}
    arguments = functions[kernel].args.args
    constants = [x.arg for x in arguments if x.annotation is not None]
    assert constants == [x.arg for x in arguments][-len(constants) :]
    (given,) = (node.value for node in ast.walk(functions[prepared_by])
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))  # fmt: skip
    assert [key.value for key in given.keys] == constants
