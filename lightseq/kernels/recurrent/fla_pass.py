"""Parts shared by the kernels that run on flash-linear-attention (package fla-core).

fla's own functions run a whole pass. Here a pass has two steps (base.py), so these kernels call the ones inside fla's:
one prepares chunks of 64 tokens, one carries the state from chunk to chunk, one computes outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.utils import chunk_local_cumsum
from torch import Tensor

from lightseq.kernels.recurrent.base import CHUNK, ScanInputs
from lightseq.kernels.recurrent.tuned_choices import take_tuned_choices
from lightseq.utils.tensors import upload

LOG2_E = 1.4426950408889634  # the kernels take decays as powers of two


class ChunkTables(NamedTuple):
    """Positions of segments and chunks in the flat row of tokens."""

    starts: Tensor  # (segments + 1,): the first token of each segment, and the end
    chunks: Tensor  # (chunks, 2): the segment of each chunk, and its place there
    offsets: Tensor  # (segments + 1,): the first chunk of each segment, and the end


class FlaPass:
    """Inputs as fla's kernels take them: all rows one after another (1, B x S, ...), and q, k, v in the dtype of k.

    The decays are summed within each chunk, and are powers of two.
    """

    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> None:
        take_tuned_choices(x.k.shape[2], x.v.shape[2], x.v.device)
        self._batch, self._scale = len(x.v), scale
        self._dtypes = [part.dtype for part in x if part is not None]
        self._q, self._k, self._v = (self._flat(part) for part in (x.q.to(x.k.dtype), x.k, x.v.to(x.k.dtype)))
        self._tables = _chunk_tables(tuple(edges), self._batch, x.v.device)
        self._of_segments: dict[str, Any] = {"cu_seqlens": self._tables.starts, "chunk_indices": self._tables.chunks}
        self._g = chunk_local_cumsum(self._flat(x.g), chunk_size=CHUNK, scale=LOG2_E, **self._of_segments)

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(0).contiguous()

    def _flat_states(self, states: Tensor | None) -> Tensor | None:
        return None if states is None else states.flatten(0, 1).contiguous()

    def _by_row(self, states: Tensor) -> Tensor:
        """Returns states (B x N, H, ...) as (B, N, H, ...)."""
        return states.unflatten(0, (self._batch, -1))

    def _output(self, out: Tensor) -> Tensor:
        """Returns an output (1, B x S, H, V) as (B, S, H, V), in the dtype of v."""
        return self._rows(out, self._dtypes[2])

    def _gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor | None) -> ScanInputs:
        """Returns the gradients of the inputs. dg is the gradient of decays summed within each chunk."""
        dg = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **self._of_segments)
        found = [part for part in (dq, dk, dv, dg, dbeta) if part is not None]
        return ScanInputs(*(self._rows(part, dtype) for part, dtype in zip(found, self._dtypes, strict=True)))

    def _rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).unflatten(1, (self._batch, -1)).squeeze(0)


@dataclass(frozen=True)
class DeltaStates:
    """Carries the state of a delta rule over all chunks."""

    k: Tensor
    w: Tensor  # fla's w: keys after solving the triangular system of each chunk
    decay: dict[str, Tensor]  # g for one decay per head, gk for one per channel
    of_segments: dict[str, Any]

    def forward(
        self, u: Tensor, initial: Tensor | None, final: bool = False, values: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns states before each chunk, new values from the values u, and final states."""
        found: tuple[Tensor, Tensor, Tensor] = chunk_gated_delta_rule_fwd_h(
            k=self.k, w=self.w, u=u, initial_state=initial, output_final_state=final, save_new_value=values,
            **self.decay, **self.of_segments,
        )  # fmt: skip
        return found

    def summarize(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the transition and the state of each segment's summary, (B x N, H, K, ...)."""
        none, keys, heads = torch.zeros_like(self.w), self.w.shape[-1], self.w.shape[2]
        segments = len(self.of_segments["cu_seqlens"]) - 1
        identity = torch.eye(keys, dtype=torch.float32, device=none.device)
        identity = identity.expand(segments, heads, -1, -1).contiguous()
        return self.forward(none, identity, final=True)[2], self.forward(u, None, final=True)[2]

    def backward(
        self, q: Tensor, dout: Tensor, dv: Tensor, initial: Tensor | None, dfinal: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of the state before each chunk, of initial states, and of new values."""
        found: tuple[Tensor, Tensor, Tensor] = chunk_gated_delta_rule_bwd_dhu(
            q=q, k=self.k, w=self.w, h0=initial, dht=dfinal, do=dout, dv=dv, scale=scale,
            **self.decay, **self.of_segments,
        )  # fmt: skip
        return found


@lru_cache(maxsize=32)  # serves all layers, forward and backward
def _chunk_tables(edges: tuple[int, ...], batch: int, device: torch.device) -> ChunkTables:
    """Returns the positions of the segments of all rows, computed without waiting for the device."""
    starts = torch.tensor([row * edges[-1] + edge for row in range(batch) for edge in edges[:-1]] + [batch * edges[-1]])
    counts = (starts.diff() + CHUNK - 1) // CHUNK
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    segment = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(segment)) - offsets[segment]
    return ChunkTables(*(upload(table, device) for table in (starts, torch.stack([segment, place], 1), offsets)))
