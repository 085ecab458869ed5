"""Triton kernels that bring results home in one pass over memory; parts may lie in another GPU's memory.

Tensors are (B, S, N, D) of any strides with the heads of a row side by side; arithmetic is float32.
"""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # elements of a row that one program handles


def add_into(totals: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], fresh: bool) -> None:
    """To every total adds the sum of its parts, in float32 and in one launch; `fresh`: the totals hold nothing yet."""
    total, part = totals[0], parts[0][0]
    batch, length, heads, dim = _as_rows(total).shape
    most = max(map(len, parts))
    table = []  # a line for every total: where it lies, how many parts, and where each lies with its strides
    for home, pieces in zip(totals, parts, strict=True):
        table += [home.data_ptr(), len(pieces)]
        for i in range(most):
            piece = _as_rows(pieces[min(i, len(pieces) - 1)])
            table += [piece.data_ptr(), *piece.stride()[:3]]
    rows = _as_rows(total)
    numbers, wide = _prepare(
        tuple(table), 2 + 4 * most, rows.stride(), dim, total.dtype, part.dtype, _stream(total.device)
    )
    columns = min(COLUMNS, triton.next_power_of_2(heads * dim))
    _add[(batch * length, triton.cdiv(heads * dim, columns), len(totals))](
        total, part, numbers, length, heads * dim, dim, *rows.stride()[:3],
        LINE=2 + 4 * most, FRESH=fresh, WIDE=wide, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def _as_rows(x: Tensor) -> Tensor:
    """(B, S, N, D) as it is; an lse (B, N, S), whose rows are those of a head, as (B, N, 1, S)."""
    return x if x.ndim == 4 else x.unsqueeze(2)


@lru_cache(maxsize=4096)
def _prepare(
    table: tuple[int, ...], line: int, strides: tuple[int, ...], dim: int, total: torch.dtype, part: torch.dtype,
    stream: torch.cuda.Stream | None,
) -> tuple[Tensor, bool]:  # fmt: skip
    """The table on the device, and whether every address and stride in it allows accesses of sixteen bytes.

    Addresses repeat from layer to layer. The copy is from pinned memory, so that the host does not wait for it, and on
    the stream that reads it.
    """
    step = 16 // min(total.itemsize, part.itemsize)
    lines = [table[i : i + line] for i in range(0, len(table), line)]
    addresses = [x for numbers in lines for x in (numbers[0], *numbers[2::4])]
    steps = [x for numbers in lines for k in (3, 4, 5) for x in numbers[k::4]] + [dim, *strides[:3]]
    wide = all(x % 16 == 0 for x in addresses) and all(x % step == 0 for x in steps)
    numbers = torch.tensor(table, dtype=torch.int64)
    return numbers if stream is None else numbers.pin_memory().to(stream.device, non_blocking=True), wide


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None  # None: Triton's interpreter


@triton.jit
def _add(
    like_total, like_part, table, length, width, dim, total_b, total_s, total_n,
    LINE: tl.constexpr, FRESH: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, s = row // length, row % length
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    n, d = column // dim, column % dim
    line = table + tl.program_id(2) * LINE
    total = tl.load(line).to(like_total.dtype)
    offset = b * total_b + s * total_s + n * total_n + d
    if WIDE:
        total, offset = tl.multiple_of(total, 16), tl.max_contiguous(tl.multiple_of(offset, 8), 8)
    home = total + offset
    value = tl.zeros((COLUMNS,), tl.float32)
    if not FRESH:
        value += tl.load(home, mask=inside)
    count = tl.load(line + 1)
    for i in tl.static_range((LINE - 2) // 4):
        at = line + 2 + 4 * i
        part = tl.load(at).to(like_part.dtype)
        offset = b * tl.load(at + 1) + s * tl.load(at + 2) + n * tl.load(at + 3) + d
        if WIDE:
            part, offset = tl.multiple_of(part, 16), tl.max_contiguous(tl.multiple_of(offset, 8), 8)
        value += tl.load(part + offset, mask=inside & (i < count), other=0.0).to(tl.float32)
    tl.store(home, value.to(like_total.dtype.element_ty), mask=inside)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Softmax over the union of two sets of keys, in the sigmoid form; out is float32, lse (B, N, S)."""
    batch, length, heads, dim = out.shape
    _merge[(batch * length, heads)](
        out, lse, part, part_lse, length, dim, *out.stride()[:3], *lse.stride(), *part.stride()[:3], *part_lse.stride(),
        DIM=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


@triton.jit
def _merge(
    out, lse, part, part_lse, length, dim, out_b, out_s, out_n, lse_b, lse_n, lse_s,
    part_b, part_s, part_n, part_lse_b, part_lse_n, part_lse_s, DIM: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, s = row // length, row % length
    column = tl.arange(0, DIM)
    inside = column < dim
    lse_at = lse + b * lse_b + n * lse_n + s * lse_s
    old = tl.load(lse_at)
    new = tl.load(part_lse + b * part_lse_b + n * part_lse_n + s * part_lse_s)
    weight = tl.sigmoid(new - old)  # a part that saw no key has lse -inf: weight 0
    out_at = out + b * out_b + s * out_s + n * out_n + column
    x = tl.load(out_at, mask=inside)
    y = tl.load(part + b * part_b + s * part_s + n * part_n + column, mask=inside).to(tl.float32)
    tl.store(out_at, x + weight * (y - x), mask=inside)
    # log(exp(old) + exp(new)), without an exponential that could overflow
    high, low = tl.maximum(old, new), tl.minimum(old, new)
    tl.store(lse_at, high + tl.log(1 + tl.exp(low - high)))
