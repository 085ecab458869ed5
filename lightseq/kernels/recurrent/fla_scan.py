"""Delta rules with the Triton and TileLang kernels of flash-linear-attention (package fla-core), on GPUs.

fla's own functions run a whole pass. Here a pass has two steps (base.py), so these call the kernels inside them: one
for what the chunks of 64 tokens need, one that carries the state from chunk to chunk, one for the outputs.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd
from fla.ops.utils import chunk_local_cumsum
from torch import Tensor

from lightseq.kernels.recurrent.base import CHUNK, ScanInputs, Summary
from lightseq.utils.tensors import upload

LOG2_E = 1.4426950408889634  # the kernels take decays as powers of two


class FlaScan:
    """Kernel for delta rules with one decay for each head, in float16 or bfloat16."""

    def forward(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> "_Forward":
        return _Forward(x, scale, edges)

    def backward(
        self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor
    ) -> "_Backward":
        return _Backward(x, scale, edges, states, dout)


class _Pass:
    """Inputs as the kernels take them, and what every chunk needs."""

    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> None:
        assert x.beta is not None
        self._batch, self._scale = len(x.v), scale
        self._q, self._k, self._v, self._beta = map(_flat, (x.q, x.k, x.v, x.beta))
        starts, chunks = _segments(tuple(edges), self._batch, x.v.device)
        self._of_segments: dict[str, Any] = {"cu_seqlens": starts, "chunk_indices": chunks}
        self._g = chunk_local_cumsum(_flat(x.g), chunk_size=CHUNK, scale=LOG2_E, **self._of_segments)
        self._w, self._u, self._solved = chunk_gated_delta_rule_fwd_intra(
            k=self._k, v=self._v, g=self._g, beta=self._beta, **self._of_segments
        )

    def _states(self, u: Tensor, initial: Tensor | None, final: bool, values: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Carries the state over all chunks: states before each chunk, new values, and final states."""
        found: tuple[Tensor, Tensor, Tensor] = chunk_gated_delta_rule_fwd_h(
            k=self._k, w=self._w, u=u, g=self._g, initial_state=initial, output_final_state=final,
            save_new_value=values, **self._of_segments,
        )  # fmt: skip
        return found

    def _by_row(self, states: Tensor) -> Tensor:
        """Returns states (B x N, H, ...) as (B, N, H, ...)."""
        return states.unflatten(0, (self._batch, -1))


class _Forward(_Pass):
    def summarize(self) -> Summary:
        none = torch.zeros_like(self._w)
        keys, segments = self._k.shape[-1], len(self._of_segments["cu_seqlens"]) - 1
        identity = torch.eye(keys, dtype=torch.float32, device=none.device)
        identity = identity.expand(segments, self._v.shape[2], -1, -1).contiguous()
        _, _, transition = self._states(none, identity, final=True, values=False)
        _, _, state = self._states(self._u, None, final=True, values=False)
        return Summary(self._by_row(transition), self._by_row(state))

    def run(self, states: Tensor | None) -> Tensor:
        h, v_new, _ = self._states(self._u, _flat_states(states), final=False, values=True)
        out: Tensor = chunk_fwd_o(q=self._q, k=self._k, v=v_new, h=h, g=self._g, scale=self._scale, **self._of_segments)
        return out.unflatten(1, (self._batch, -1)).squeeze(0)


class _Backward(_Pass):
    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor) -> None:
        super().__init__(x, scale, edges)
        self._initial, self._dout, self._g_dtype = _flat_states(states), _flat(dout), x.g.dtype
        self._dv = chunk_bwd_dv_local(q=self._q, k=self._k, g=self._g, do=self._dout, scale=scale, **self._of_segments)

    def _state_gradients(self, initial: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Carries the gradient of the state back: before each chunk, of initial states, and of new values."""
        found: tuple[Tensor, Tensor, Tensor] = chunk_gated_delta_rule_bwd_dhu(
            q=self._q, k=self._k, w=self._w, g=self._g, h0=initial, dht=dfinal, do=self._dout, dv=self._dv,
            scale=self._scale, **self._of_segments,
        )  # fmt: skip
        return found

    def initial_gradients(self) -> Tensor:
        assert self._initial is not None
        return self._by_row(self._state_gradients(self._initial, None)[1])

    def run(self, dfinal: Tensor | None) -> ScanInputs:
        h, v_new, _ = self._states(self._u, self._initial, final=False, values=True)
        dh, _, dv = self._state_gradients(self._initial, _flat_states(dfinal))
        del self._u, self._dv  # a pass takes much memory, and these are as large as the values
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=self._q, k=self._k, v=v_new, w=self._w, g=self._g, h=h, dv=dv, do=self._dout, dh=dh, scale=self._scale,
            **self._of_segments,
        )  # fmt: skip
        del h, dh, v_new
        dk_solved, dv, dbeta, dg_solved = prepare_wy_repr_bwd(
            k=self._k, v=self._v, beta=self._beta, g=self._g, A=self._solved, dw=dw, du=dv, **self._of_segments
        )
        dg = chunk_local_cumsum(dg.add_(dg_solved), chunk_size=CHUNK, reverse=True, **self._of_segments)
        found = (dq, dk.add_(dk_solved), dv, dg, dbeta)
        dtypes = (self._q.dtype, self._k.dtype, self._v.dtype, self._g_dtype, self._beta.dtype)
        return ScanInputs(*(
            gradient.to(dtype).unflatten(1, (self._batch, -1)).squeeze(0)
            for gradient, dtype in zip(found, dtypes, strict=True)
        ))  # fmt: skip


def _flat(x: Tensor) -> Tensor:
    """Returns (1, B x S, ...), because kernels take segments of one row."""
    return x.flatten(0, 1).unsqueeze(0).contiguous()


def _flat_states(states: Tensor | None) -> Tensor | None:
    return None if states is None else states.flatten(0, 1).contiguous()


@lru_cache(maxsize=32)  # serves all layers, forward and backward
def _segments(edges: tuple[int, ...], batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns where the segments of all rows begin, and of each chunk its segment and its place there."""
    starts = [row * edges[-1] + edge for row in range(batch) for edge in edges[:-1]] + [batch * edges[-1]]
    sizes = torch.tensor(starts).diff()
    counts = (sizes + CHUNK - 1) // CHUNK
    segment = torch.arange(len(sizes)).repeat_interleave(counts)
    place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return upload(torch.tensor(starts), device), upload(torch.stack([segment, place], 1), device)
