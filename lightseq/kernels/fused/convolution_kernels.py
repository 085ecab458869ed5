"""Triton kernels for a depthwise causal convolution of fragments, with SiLU, and its gradients.

Row 0 of a fragment is the first of the HALO = W - 1 tokens before it, and row HALO its own first token. A program walks
over the rows of a tile in one block of channels. It keeps the last W rows in registers, so that each is read once.

Shape suffixes: B batch, S local sequence, F fragments, C channels, W taps, P partial sums.
"""

# mypy: ignore-errors
# Triton's functions are compiled from their source and have no types that a checker could read.

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # rows that a program writes; it reads W - 1 more
BLOCK = 128  # channels of one program
UNROLL = 4  # rows that are loaded at once, which hides the latency of memory
WARPS = 1
MAX_PARTIALS = 256  # sums of weight gradients over some rows, each of (W + 1) x C float32


def convolve(
    x_BSC: Tensor, before_BFWC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, inside_S: Tensor | None, silu: bool
) -> Tensor:
    """Returns the convolution (B, S, C) in x's dtype; sums are in float32. x and before are contiguous."""
    assert x_BSC.is_contiguous() and before_BFWC.is_contiguous()
    (batch, fragments, *_), (channels, taps) = before_BFWC.shape, weight_CW.shape
    length = x_BSC.shape[1] // fragments
    tiles, out_BSC = triton.cdiv(length, ROWS), torch.empty_like(x_BSC)
    grid = (batch * fragments * tiles * triton.cdiv(channels, BLOCK),)
    _forward[grid](
        x_BSC, before_BFWC, weight_CW.t().contiguous(), bias_C, inside_S, out_BSC, length, fragments, channels, tiles,
        TAPS=taps, SILU=silu, ROWS=ROWS, UNROLL=UNROLL, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out_BSC


def convolve_backward(
    dout_BSC: Tensor,
    x_BSC: Tensor,
    before_BFWC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    inside_S: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, before, weight (C, W) and bias (C,), the last two in float32.

    dout, x and before are contiguous. Weight gradients are sums of partial sums, in an order that the shapes decide.
    """
    assert dout_BSC.is_contiguous() and x_BSC.is_contiguous() and before_BFWC.is_contiguous()
    (batch, fragments, *_), (channels, taps) = before_BFWC.shape, weight_CW.shape
    length = x_BSC.shape[1] // fragments
    tiles = triton.cdiv(taps - 1 + length, ROWS)
    total = batch * fragments * tiles
    each = triton.cdiv(total, MAX_PARTIALS)
    programs = triton.cdiv(total, each)
    dx_BSC, dbefore_BFWC = torch.empty_like(x_BSC), torch.empty_like(before_BFWC)
    partial_PWC = x_BSC.new_empty(programs, taps + 1, channels, dtype=torch.float32)
    _backward[(programs * triton.cdiv(channels, BLOCK),)](
        dout_BSC, x_BSC, before_BFWC, weight_CW.t().contiguous(), bias_C, inside_S, dx_BSC, dbefore_BFWC, partial_PWC,
        length, fragments, channels, tiles, total, each,
        TAPS=taps, SILU=silu, ROWS=ROWS, UNROLL=UNROLL, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    sums_WC = partial_PWC.sum(0)
    return dx_BSC, dbefore_BFWC, sums_WC[:taps].t().clone(), sums_WC[taps].clone()  # results that share no memory


@triton.jit
def _row_of(own, before, fragment, row, length, channels, HALO: tl.constexpr):
    """Returns the address of a fragment's row: one of the HALO rows before it, or its own."""
    is_own = row >= HALO
    start = tl.where(is_own, fragment * length - HALO, fragment * HALO)
    return tl.where(is_own, own, before) + (start + row) * channels


@triton.jit
def _forward(
    x, before, weight, bias, inside, out, length, fragments, channels, tiles,
    TAPS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALO: tl.constexpr = TAPS - 1
    blocks = tl.cdiv(channels, BLOCK)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < channels
    tile = tl.program_id(0) // blocks
    fragment = (tile // tiles).to(tl.int64)
    first = HALO + tile % tiles * ROWS
    end = tl.minimum(first + ROWS, HALO + length)
    offset_x = fragment * length - HALO  # plus the row: the token in x
    offset_inside = fragment % fragments * length - HALO

    weights, window = (), ()  # by the number of rows looked back; the window begins with the newest row
    for back in tl.static_range(TAPS):
        tap = tl.load(weight + (HALO - back) * channels + c, mask=is_channel, other=0.0)
        weights = weights + (tap.to(tl.float32),)
    for back in tl.static_range(1, TAPS):
        at = _row_of(x, before, fragment, first - back, length, channels, HALO) + c
        window = window + (tl.load(at, mask=is_channel, other=0.0).to(tl.float32),)
    start = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        start += tl.load(bias + c, mask=is_channel, other=0.0).to(tl.float32)

    for top in range(0, end - first, UNROLL):
        rows = ()
        for step in tl.static_range(UNROLL):
            row = first + top + step
            rows = rows + (tl.load(x + (offset_x + row) * channels + c, mask=is_channel & (row < end), other=0.0),)
        for step in tl.static_range(UNROLL):
            row = first + top + step
            full = (rows[step].to(tl.float32),) + window
            window = full[:HALO]
            if inside is not None:
                seen = tl.load(inside + offset_inside + row, mask=row < end, other=0)
            value = start
            for back in tl.static_range(TAPS):
                if inside is not None:
                    value += weights[back] * tl.where(back <= seen, full[back], 0.0)
                else:
                    value += weights[back] * full[back]
            if SILU:
                value *= tl.sigmoid(value)
            to = out + (offset_x + row) * channels + c
            tl.store(to, value.to(out.dtype.element_ty), mask=is_channel & (row < end))


@triton.jit
def _backward(
    dout, x, before, weight, bias, inside, dx, dbefore, partial, length, fragments, channels, tiles, total, each,
    TAPS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALO: tl.constexpr = TAPS - 1
    blocks = tl.cdiv(channels, BLOCK)
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < channels
    program = tl.program_id(0) // blocks
    zeros = tl.zeros([BLOCK], tl.float32)

    weights, dweights = (), ()  # by the number of rows looked back
    for back in tl.static_range(TAPS):
        tap = tl.load(weight + (HALO - back) * channels + c, mask=is_channel, other=0.0)
        weights = weights + (tap.to(tl.float32),)
        dweights = dweights + (zeros,)
    dbias = zeros
    start = zeros
    if bias is not None:
        start += tl.load(bias + c, mask=is_channel, other=0.0).to(tl.float32)

    for index in range(tl.minimum(each, total - program * each)):
        tile = program * each + index
        fragment = (tile // tiles).to(tl.int64)
        first = tile % tiles * ROWS
        end = tl.minimum(first + ROWS, HALO + length)
        offset_x = fragment * length - HALO
        offset_inside = fragment % fragments * length - HALO
        # `pending` sums the gradient of each row in the window. A row is done once HALO later rows have added theirs.
        window, pending = (), ()
        for back in tl.static_range(1, TAPS):
            at = _row_of(x, before, fragment, first - back, length, channels, HALO) + c
            window = window + (tl.load(at, mask=is_channel & (first >= back), other=0.0).to(tl.float32),)
            pending = pending + (zeros,)

        for top in range(0, end + HALO - first, UNROLL):
            rows, drows = (), ()
            for step in tl.static_range(UNROLL):
                row = first + top + step
                in_reach = (row < end + HALO) & (row < HALO + length)
                at = _row_of(x, before, fragment, row, length, channels, HALO) + c
                rows = rows + (tl.load(at, mask=is_channel & in_reach, other=0.0),)
                is_token = is_channel & in_reach & (row >= HALO)
                drows = drows + (tl.load(dout + (offset_x + row) * channels + c, mask=is_token, other=0.0),)
            for step in tl.static_range(UNROLL):
                row = first + top + step
                full = (rows[step].to(tl.float32),) + window
                window = full[:HALO]
                if inside is not None:
                    seen = tl.load(inside + offset_inside + row, mask=(row >= HALO) & (row < HALO + length), other=0)
                    masked = ()
                    for back in tl.static_range(TAPS):
                        masked = masked + (tl.where(back <= seen, full[back], 0.0),)
                else:
                    masked = full
                gradient = drows[step].to(tl.float32)
                if SILU:
                    value = start
                    for back in tl.static_range(TAPS):
                        value += weights[back] * masked[back]
                    sigmoid = tl.sigmoid(value)
                    gradient *= sigmoid * (1 + value * (1 - sigmoid))
                counted = tl.where(row < end, gradient, 0.0)  # rows after the tile belong to the next one
                dbias += counted
                old_sums, old_dweights = (zeros,) + pending, dweights
                sums, dweights = (), ()
                for back in tl.static_range(TAPS):
                    dweights = dweights + (old_dweights[back] + counted * masked[back],)
                    part = gradient
                    if inside is not None:
                        part = tl.where(back <= seen, gradient, 0.0)
                    sums = sums + (old_sums[back] + weights[back] * part,)
                pending = sums[:HALO]
                done = row - HALO
                home = _row_of(dx, dbefore, fragment, done, length, channels, HALO) + c
                is_done = is_channel & (done >= first) & (done < end)
                tl.store(home, sums[HALO].to(dx.dtype.element_ty), mask=is_done)

    to = partial + program.to(tl.int64) * (TAPS + 1) * channels + c
    for back in tl.static_range(TAPS):
        tl.store(to + (HALO - back) * channels, dweights[back], mask=is_channel)
    tl.store(to + TAPS * channels, dbias, mask=is_channel)
