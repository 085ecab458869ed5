"""Triton kernels that copy, add and merge many tensors in one launch, also from the memory of other GPUs.

A launch is prepared once for its addresses, which repeat from layer to layer, and then costs the host almost nothing.
Tensors are (B, S, N, D) or an lse (B, N, S), their last dimension contiguous.
"""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightseq.kernels.fused.launches import Launch, alignments
from lightseq.utils.tensors import upload

COPY_WORDS = 2048  # words of 8 bytes that one program copies
SUM_ELEMENTS = 2048  # elements per program of a sum
MERGE_ELEMENTS = 1024  # elements per program of a merge


def copy_launch(pairs: Sequence[tuple[Tensor, Tensor]]) -> Launch | None:
    """Prepares dst.copy_(src) for pairs of equal shape and dtype. Returns None if not all fit 8-byte words."""
    lines, starts, steps = [], [], []  # a line for every pair: addresses, shape and strides in words
    for dst, src in ((_as_rows(dst), _as_rows(src)) for dst, src in pairs):
        per_word = 8 // dst.element_size()
        counts = [dst.shape[3], *dst.stride()[:3], *src.stride()[:3]]
        if (
            dst.stride(3) != 1
            or src.stride(3) != 1
            or dst.dtype != src.dtype
            or any(x % per_word for x in counts)
            or (dst.data_ptr() | src.data_ptr()) % 8
        ):
            return None
        batch, length, heads, _ = dst.shape
        dim, *strides = (x // per_word for x in counts)
        lines.append([dst.data_ptr(), src.data_ptr(), batch * length, heads * dim, length, dim, *strides])
        starts += lines[-1][:2]
        steps += lines[-1][5:]
    words = min(_tile(width, COPY_WORDS)[0] for _, _, _, width, *_ in lines)
    some_rows = COPY_WORDS // words
    tiles = max(triton.cdiv(rows, some_rows) * triton.cdiv(width, words) for _, _, rows, width, *_ in lines)
    wide = all(x % 16 == 0 for x in starts) and all(x % 2 == 0 for x in steps)
    arguments = (_table([x for line in lines for x in line], pairs[0][0].device), len(lines))
    constants = {"LINE": len(lines[0]), "ROWS": some_rows, "WORDS": words, "WIDE": wide}
    return Launch(_copy, (len(lines) * tiles, 1, 1), arguments, constants, num_warps=4)


def add_launch(totals: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], overwrite: bool) -> Launch:
    """Prepares adding to every total the sum of its parts, in float32; with `overwrite` the totals hold nothing yet.

    Totals have the same shape, dtype and strides; parts may differ in strides.
    """
    total, part = totals[0], parts[0][0]
    batch, length, heads, dim = _as_rows(total).shape
    most = max(map(len, parts))
    numbers = []  # a line for every total: address, number of parts, address and strides of each
    for home, pieces in zip(totals, parts, strict=True):
        numbers += [home.data_ptr(), len(pieces)]
        for i in range(most):
            piece = _as_rows(pieces[min(i, len(pieces) - 1)])
            numbers += [piece.data_ptr(), *piece.stride()[:3]]
    line, strides = 2 + 4 * most, _as_rows(total).stride()[:3]
    rows, (columns, some_rows) = batch * length, _tile(heads * dim, SUM_ELEMENTS)
    grid = (len(totals) * triton.cdiv(rows, some_rows), triton.cdiv(heads * dim, columns), 1)
    table = _table(numbers, total.device)
    arguments = (total.new_empty(0), part.new_empty(0), table, len(totals), rows, length, heads * dim, dim, *strides)
    step = 16 // min(total.element_size(), part.element_size())
    wide = step if _is_wide(numbers, line, [dim, *strides], step) else 1
    constants = {"LINE": line, "FRESH": overwrite, "WIDE": wide, "ROWS": some_rows, "COLUMNS": columns}
    return Launch(_add, grid, arguments, constants, num_warps=4)


def _as_rows(x: Tensor) -> Tensor:
    """Returns (B, S, N, D) unchanged, and an lse (B, N, S), whose rows are heads, as (B, N, 1, S)."""
    return x if x.ndim == 4 else x.unsqueeze(2)


def _tile(width: int, elements: int) -> tuple[int, int]:
    """Returns (columns, rows) of one program. Columns are a power of two, which divides the width if possible."""
    columns = min(width & -width, elements)
    if columns < 64:
        columns = min(triton.next_power_of_2(width), elements)
    return columns, elements // columns


def _is_wide(numbers: list[int], line: int, steps: list[int], step: int) -> bool:
    """Returns whether every address and stride in the lines of `add_launch` allows accesses of sixteen bytes."""
    lines = [numbers[i : i + line] for i in range(0, len(numbers), line)]
    addresses = [x for one in lines for x in (one[0], *one[2::4])]
    strides = [x for one in lines for k in (3, 4, 5) for x in one[k::4]]
    return all(x % 16 == 0 for x in addresses) and all(x % step == 0 for x in strides + steps)


def _table(numbers: list[int], device: torch.device) -> Tensor:
    """Copies numbers to the device."""
    table = torch.tensor(numbers, dtype=torch.int64)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return upload(table, device)
    while True:  # copied at once, outside the CUDA graph, which would repeat the copy
        with torch.cuda.stream(torch.cuda.Stream(device)):  # torch reuses streams; this one may be capturing
            if not torch.cuda.is_current_stream_capturing():
                return table.to(device)


@triton.jit
def _copy(table, lines, LINE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr):
    # Neighbouring programs work on different lines, so that all peers are read at the same time.
    line, tile = table + tl.program_id(0) % lines * LINE, tl.program_id(0) // lines
    rows, width = tl.load(line + 2).to(tl.int32), tl.load(line + 3).to(tl.int32)
    length, dim = tl.load(line + 4).to(tl.int32), tl.load(line + 5).to(tl.int32)
    across = tl.cdiv(width, WORDS)
    if tile < tl.cdiv(rows, ROWS) * across:  # the grid has tiles for the longest line
        row = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
        word = (tile % across * WORDS + tl.arange(0, WORDS))[None, :]
        b, s = (row // length).to(tl.int64), (row % length).to(tl.int64)
        n, d = (word // dim).to(tl.int64), (word % dim).to(tl.int64)
        to = b * tl.load(line + 6) + s * tl.load(line + 7) + n * tl.load(line + 8) + d
        at = b * tl.load(line + 9) + s * tl.load(line + 10) + n * tl.load(line + 11) + d
        dst = tl.load(line).to(tl.pointer_type(tl.int64))
        src = tl.load(line + 1).to(tl.pointer_type(tl.int64))
        if WIDE:
            dst, src = tl.multiple_of(dst, 16), tl.multiple_of(src, 16)
            to = tl.max_contiguous(tl.multiple_of(to, (1, 2)), (1, 2))
            at = tl.max_contiguous(tl.multiple_of(at, (1, 2)), (1, 2))
        inside = (row < rows) & (word < width)
        tl.store(dst + to, tl.load(src + at, mask=inside), mask=inside)


@triton.jit
def _add(
    like_total, like_part, table, lines, rows, length, width, dim, total_b, total_s, total_n,
    LINE: tl.constexpr, FRESH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line = table + tl.program_id(0) % lines * LINE
    row = ((tl.program_id(0) // lines) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    b, s = (row // length).to(tl.int64), (row % length).to(tl.int64)
    n, d = (column // dim).to(tl.int64), (column % dim).to(tl.int64)
    total = tl.load(line).to(like_total.dtype)
    offset = b * total_b + s * total_s + n * total_n + d
    if WIDE > 1:  # neighbouring elements at addresses divisible by 16
        total, offset = tl.multiple_of(total, 16), tl.max_contiguous(tl.multiple_of(offset, (1, WIDE)), (1, WIDE))
    home = total + offset
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    if not FRESH:
        value += tl.load(home, mask=inside)
    count = tl.load(line + 1)
    for i in tl.static_range((LINE - 2) // 4):
        at = line + 2 + 4 * i
        part = tl.load(at).to(like_part.dtype)
        offset = b * tl.load(at + 1) + s * tl.load(at + 2) + n * tl.load(at + 3) + d
        if WIDE > 1:
            part, offset = tl.multiple_of(part, 16), tl.max_contiguous(tl.multiple_of(offset, (1, WIDE)), (1, WIDE))
        value += tl.load(part + offset, mask=inside & (i < count), other=0.0).to(tl.float32)
    tl.store(home, value.to(like_total.dtype.element_ty), mask=inside)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges a part into out and lse in float32: softmax over the union of their keys. lse is (B, N, S)."""
    tensors = (out, lse, part, part_lse)
    steps = (*out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride())
    types = (out.dtype, part.dtype)
    _merge_launch(out.device, out.shape, steps, types, alignments(tensors))(*tensors)


@lru_cache(maxsize=256)
def _merge_launch(
    device: torch.device, shape: torch.Size, steps: tuple[int, ...], types: tuple[torch.dtype, ...],
    aligned: tuple[bool, ...],
) -> Launch:  # fmt: skip
    """Prepares a merge of tensors of this layout."""
    batch, length, heads, dim = shape
    width = triton.next_power_of_2(dim)
    some_heads = max(1, min(triton.next_power_of_2(heads), MERGE_ELEMENTS // width))
    constants = {"HEADS": some_heads, "DIM": width}
    grid = (batch * length, triton.cdiv(heads, some_heads), 1)
    return Launch(_merge, grid, (length, heads, dim, *steps), constants, num_warps=4)


@triton.jit
def _merge(
    out, lse, part, part_lse, length, heads, dim, out_b, out_s, out_n, lse_b, lse_n, lse_s,
    part_b, part_s, part_n, part_lse_b, part_lse_n, part_lse_s, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, s = row // length, row % length
    n = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    column = tl.arange(0, DIM)[None, :]
    is_head = n < heads
    inside = is_head[:, None] & (column < dim)
    lse_at = lse + b * lse_b + n * lse_n + s * lse_s
    old = tl.load(lse_at, mask=is_head, other=0.0)
    new = tl.load(part_lse + b * part_lse_b + n * part_lse_n + s * part_lse_s, mask=is_head, other=0.0)
    # A part that saw no key has lse -inf and weight 0, even if the total saw none either.
    weight = tl.where(new == float("-inf"), 0.0, tl.sigmoid(new - old))[:, None]
    out_at = out + b * out_b + s * out_s + n[:, None] * out_n + column
    x = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(part + b * part_b + s * part_s + n[:, None] * part_n + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, (x + weight * (y - x)).to(out.dtype.element_ty), mask=inside)
    # log(exp(old) + exp(new)), without an exponential that could overflow
    high, low = tl.maximum(old, new), tl.minimum(old, new)
    tl.store(lse_at, tl.where(low == float("-inf"), high, high + tl.log(1 + tl.exp(low - high))), mask=is_head)
