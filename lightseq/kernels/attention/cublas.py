"""Attention by cuBLAS: matrix products over blocks of scores in memory, with one fused softmax between them.

For heads that flash kernels do not take, such as Gemma 4's of 512 dimensions. There a score costs so many FLOPs that
writing it to memory and reading it back takes less time than the products.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K key/value heads, D head dim, E head dim of
values, G query heads of a key/value head, R rows: the queries of a block for all heads of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightseq.kernels.attention.base import GradientMemory, KernelSpec, Saved, gradient_memory
from lightseq.kernels.attention.torch_native import HALF, NO_SOFTCAP
from lightseq.kernels.fused import score_blocks
from lightseq.kernels.fused.products import add_batched_product, batched_product

MAX_SCORES = 2**26  # in a block of all heads: 256 MiB in float32
KEYS, MIN_QUERIES = 4096, 128  # size of a block


class CublasKernel:
    """Attention by cuBLAS over blocks of scores. Bit-identical in every run."""

    name = "cublas"
    causal_alignment: Literal["bottom_right"] = "bottom_right"
    has_windows = True

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        if spec.device_type != "cuda":
            return "needs a CUDA device"
        if spec.dtype not in HALF:
            return f"needs bfloat16 or float16, not {str(spec.dtype).removeprefix('torch.')}"
        return NO_SOFTCAP if spec.softcap else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, length, heads, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[3]) if into is None else into
        lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
        for b in range(batch):
            blocks = _Blocks(q[b], k[b], causal, window)
            for rows in blocks.rows():
                total, lse_R = _forward_rows(rows, v[b], scale)
                rows.write(out[b], total)
                lse[b, :, rows.queries] = lse_R.view(heads, -1)
        return out, lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gradients = gradient_memory(into, saved)
        for b in range(dout.shape[0]):
            of_one = Saved(*(x[b] for x in saved))
            _backward_sequence(dout[b], of_one, causal, scale, window, [x[b] for x in gradients])
        dq, dk, dv = gradients
        return dq, dk, dv


def _forward_rows(rows: "_Rows", v_TKE: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the result (K, R, E) of a block's queries in float32 or wider, and its log-sum-exp (K, R)."""
    total: Tensor | None = None
    state = score_blocks.SoftmaxState.empty(rows.q_KRD)
    for block in rows.key_blocks():
        scores = batched_product(rows.q_KRD, block.take(rows.k_TKD).mT)
        weights = state.add(scores, scale, block.mask, rows.q_KRD.dtype)
        if total is None:
            total = batched_product(weights, block.take(v_TKE))
        else:
            add_batched_product(total.mul_(state.rescale.unsqueeze(-1)), weights, block.take(v_TKE))
        del scores, weights  # before the next block's are made
    assert total is not None, "every query of a causal or full tile sees a key"
    return total.div_(state.sums.unsqueeze(-1)), state.lse()


def _backward_sequence(
    dout_SHE: Tensor, saved: Saved, causal: bool, scale: float, window: int | None, into: list[Tensor]
) -> None:
    """Writes dq, dk and dv of one sequence; `saved` has no batch dimension."""
    q, k, v, out, lse_HS = saved
    dq, dk, dv = into
    sums = [
        torch.zeros(x.shape[1], x.shape[0], x.shape[2], dtype=lse_HS.dtype, device=x.device)  # (K, T, D), (K, T, E)
        for x in (k, v)
    ]
    for rows in _Blocks(q, k, causal, window).rows():
        dout_KRE = rows.read(dout_SHE)
        delta = (dout_KRE.to(lse_HS.dtype) * rows.read(out)).sum(-1)
        lse_KR = rows.read(lse_HS.T.unsqueeze(-1)).squeeze(-1)
        dq_KRD = torch.zeros(rows.q_KRD.shape, dtype=lse_HS.dtype, device=q.device)
        for block in rows.key_blocks():
            keys, values = block.take(k), block.take(v)
            scores = batched_product(rows.q_KRD, keys.mT)
            slopes = batched_product(dout_KRE, values.mT)
            weights, dscores = score_blocks.gradients(scores, slopes, lse_KR, delta, scale, block.mask, q.dtype)
            add_batched_product(dq_KRD, dscores, keys)
            add_batched_product(sums[0][:, block.keys], dscores.mT, rows.q_KRD)
            add_batched_product(sums[1][:, block.keys], weights.mT, dout_KRE)
            del scores, slopes, weights, dscores  # before the next block's are made
        rows.write(dq, dq_KRD)
    for to, total in zip((dk, dv), sums, strict=True):
        to.copy_(total.transpose(0, 1))


# ---- blocks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one sequence's scores: q (S, H, D), k (T, K, D), and what its queries see."""

    q: Tensor
    k: Tensor
    causal: bool
    window: int | None

    def rows(self) -> Iterator["_Rows"]:
        """Yields blocks of queries, whose scores against KEYS keys fit in MAX_SCORES."""
        length, heads, _ = self.q.shape
        size = max(MIN_QUERIES, MAX_SCORES // (heads * KEYS) // MIN_QUERIES * MIN_QUERIES)
        for start in range(0, length, size):
            yield _Rows(self, start, min(start + size, length))


@dataclass(frozen=True)
class _Rows:
    """A block of queries of all heads. Rows of a key/value head are ordered by query head, then by query."""

    blocks: _Blocks
    start: int
    stop: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def k_TKD(self) -> Tensor:
        return self.blocks.k

    @cached_property
    def q_KRD(self) -> Tensor:
        return self.read(self.blocks.q)

    def read(self, x_SHD: Tensor) -> Tensor:
        """Returns this block's rows (K, R, D) of a tensor by query."""
        kv_heads = self.blocks.k.shape[1]
        return x_SHD[self.queries].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)

    def write(self, to_SHD: Tensor, x_KRD: Tensor) -> None:
        """Writes rows (K, R, D) to this block's place in a tensor by query."""
        of_query = x_KRD.unflatten(1, (-1, self.stop - self.start)).permute(2, 0, 1, 3).flatten(1, 2)
        to_SHD[self.queries] = of_query

    def key_blocks(self) -> Iterator["_KeyBlock"]:
        """Yields the blocks of keys that some query of this block sees."""
        keys = self.blocks.k.shape[0]
        before = keys - self.blocks.q.shape[0]  # the first query sees these, and itself
        causal, window = self.blocks.causal, self.blocks.window
        stop = before + self.stop if causal else keys
        first = max(0, before + self.start - window + 1) if window is not None else 0
        for begin in range(first, stop, KEYS):
            end = min(begin + KEYS, stop)
            cut = end > before + self.start + 1 or (window is not None and begin <= before + self.stop - 1 - window)
            mask = score_blocks.BlockMask(self.stop - self.start, before + self.start - begin, window)
            yield _KeyBlock(slice(begin, end), mask if causal and cut else None)


class _KeyBlock(NamedTuple):
    keys: slice
    mask: score_blocks.BlockMask | None  # None: all queries see all its keys

    def take(self, x_TKD: Tensor) -> Tensor:
        """Returns the keys or values of this block (K, keys, D), as a view."""
        return x_TKD[self.keys].transpose(0, 1)
