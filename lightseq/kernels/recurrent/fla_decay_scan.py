"""Mamba 2's recurrence, without a delta rule, with flash-linear-attention's kernels for simple GLA, on GPUs.

The two kernels that carry a state are launched here, because the functions around them wait for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from fla.ops.common.chunk_h import chunk_bwd_kernel_dh, chunk_fwd_kernel_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv, chunk_fwd_o
from torch import Tensor

from lightseq.kernels.recurrent.base import CHUNK, ScanInputs, Summary
from lightseq.kernels.recurrent.fla_pass import FlaPass

# Arguments of the state kernels, which serve other recurrences too.
ONE_DECAY_PER_HEAD = {
    "USE_G": True, "USE_G_GAMMA": False, "USE_GK": False, "USE_GV": False,
    "g_gamma": None, "gk": None, "gv": None, "STATE_V_FIRST": False, "BT": CHUNK, "BS": CHUNK,
}  # fmt: skip


class _Pass(FlaPass):
    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> None:
        super().__init__(x, scale, edges)
        _, tokens, heads, values = self._v.shape
        self._k_of_heads = self._of_heads(self._k)
        self._of_state_kernels: dict[str, Any] = ONE_DECAY_PER_HEAD | {
            "g": self._g, "cu_seqlens": self._tables.starts, "split_offsets": self._tables.offsets,
            "T": tokens, "H": heads, "K": self._k.shape[-1], "V": values,
        }  # fmt: skip

    def _of_heads(self, x: Tensor) -> Tensor:
        """Repeats queries or keys (1, B x S, G, K) for each head of values, which the state kernels need."""
        return x.unsqueeze(3).expand(-1, -1, -1, self._v.shape[2] // x.shape[2], -1).flatten(2, 3).contiguous()

    def _empty_states(self) -> tuple[Tensor, Tensor]:
        """Returns uninitialized states before each chunk, in the dtype of k, and of each segment, in float32.

        TileLang's gradient kernel, the only one for Hopper with Triton 3.4 to 3.7.0, takes states in the dtype of k.
        """
        heads, keys, values = self._v.shape[2], self._k.shape[-1], self._v.shape[-1]
        of_chunks = self._k.new_empty(1, len(self._tables.chunks), heads, keys, values)
        segments = len(self._tables.starts) - 1
        return of_chunks, self._k.new_empty(segments, heads, keys, values, dtype=torch.float32)

    def _grid(self) -> Callable[[Mapping[str, int]], tuple[int]]:
        keys, values, heads = self._k.shape[-1], self._v.shape[-1], self._v.shape[2]
        count = heads * (len(self._tables.starts) - 1)
        return lambda block: (-(-keys // block["BK"]) * -(-values // block["BV"]) * count,)

    def _states(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Carries the state over all chunks. Returns states before each chunk, and final states."""
        states, final = self._empty_states()
        chunk_fwd_kernel_h[self._grid()](
            k=self._k_of_heads, v=self._v, h=states, h0=initial, ht=final, **self._of_state_kernels
        )
        return states, final


class _Forward(_Pass):
    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> None:
        super().__init__(x, scale, edges)
        self._log_decay, self._edges = x.g, edges

    def summarize(self) -> Summary:
        total = torch.stack([self._log_decay[:, first:end].sum(1) for first, end in pairwise(self._edges)], 1)
        return Summary(total.float().exp()[..., None, None], self._by_row(self._states(None)[1]))

    def run(self, states: Tensor | None) -> Tensor:
        h, _ = self._states(self._flat_states(states))
        out = chunk_fwd_o(q=self._q, k=self._k, v=self._v, h=h, g=self._g, scale=self._scale, **self._of_segments)
        return self._output(out)


class _Backward(_Pass):
    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor) -> None:
        super().__init__(x, scale, edges)
        self._initial, self._dout = self._flat_states(states), self._flat(dout.to(x.k.dtype))
        self._q_of_heads = self._of_heads(self._q)

    def _state_gradients(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Carries the gradient of the state back. Returns it before each chunk, and of initial states."""
        gradients, initial = self._empty_states()
        chunk_bwd_kernel_dh[self._grid()](
            q=self._q_of_heads, do=self._dout, dh=gradients, dht=dfinal, dh0=initial, scale=self._scale,
            HQ=self._v.shape[2], NG=1, **self._of_state_kernels,
        )  # fmt: skip
        return gradients, initial

    def initial_gradients(self) -> Tensor:
        return self._by_row(self._state_gradients(None)[1])

    def run(self, dfinal: Tensor | None) -> ScanInputs:
        h, _ = self._states(self._initial)
        dh, _ = self._state_gradients(self._flat_states(dfinal))
        del self._k_of_heads, self._q_of_heads  # a pass takes much memory
        dq, dk, _, dg = chunk_bwd_dqkwg(
            q=self._q, k=self._k, v=self._v, g=self._g, h=h, do=self._dout, dh=dh, scale=self._scale,
            **self._of_segments,
        )  # fmt: skip
        del h
        dv = chunk_bwd_dv(q=self._q, k=self._k, g=self._g, do=self._dout, dh=dh, scale=self._scale, **self._of_segments)
        return self._gradients(dq, dk, dv, dg, None)


class FlaDecayScan:
    """Kernel for recurrences without a delta rule, with one decay for each head, in float16 or bfloat16.

    Queries and keys (C and B of Mamba 2) set the dtype of all matrix products: values in float32 are rounded to it, as
    in mamba-ssm. Outputs and the gradients of values have the dtype of the values.
    """

    forward, backward = _Forward, _Backward
