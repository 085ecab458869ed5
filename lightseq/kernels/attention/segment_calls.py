"""Varlen calls of a tile's segments on a device: indices of their queries and keys, and the lengths of segments."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq.kernels.attention.base import Saved
from lightseq.schedule.segments import KEYS, QUERIES, Segments, VarlenCall
from lightseq.schedule.table import Mask
from lightseq.utils.tensors import upload


class Lengths(NamedTuple):
    """Cumulative lengths of segments, as flash kernels take them (int32, on the device)."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class DeviceCall:
    """A varlen call on a device: the indices of its queries and keys, and the lengths of its segments."""

    queries: slice | Tensor
    keys: slice | Tensor
    lengths: Lengths
    causal: bool
    window: int | None
    sizes: tuple[tuple[int, int], ...]  # queries and keys of each segment
    repeats_keys: bool  # some segments hold the same key

    @property
    def mask(self) -> Mask:
        return Mask.CAUSAL if self.causal else Mask.FULL

    def has_all_queries(self, q: Tensor) -> bool:
        queries = self.queries
        return isinstance(queries, slice) and (queries.start, queries.stop) == (0, q.shape[1])

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this call's queries, keys and values."""
        return q[:, self.queries], k[:, self.keys], v[:, self.keys]

    def select(self, saved: Saved) -> Saved:
        """Returns this call's queries and keys of the saved tensors."""
        q, k, v, out, lse = saved
        return Saved(
            q=q[:, self.queries],
            k=k[:, self.keys],
            v=v[:, self.keys],
            out=out[:, self.queries],
            lse=lse[:, :, self.queries],
        )


def calls_on(segments: Segments, device: torch.device) -> tuple[DeviceCall, ...]:
    """Returns the calls for segments on a device, cached: every layer of a batch runs the same segments."""
    if device not in segments.cache:
        segments.cache[device] = tuple(_upload_call(call, segments.window, device) for call in segments.varlen_calls)
    return segments.cache[device]


def _upload_call(call: VarlenCall, window: int | None, device: torch.device) -> DeviceCall:
    def here(x: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(x), device)

    rows, keys = call.segments[:, QUERIES], call.segments[:, KEYS]
    begins = here(np.stack([np.concatenate([[0], np.cumsum(x)]) for x in (rows, keys)]).astype(np.int32))
    q, k = (x if isinstance(x, slice) else here(x) for x in (call.queries, call.keys))
    lengths = Lengths(begins[0], begins[1], int(rows.max()), int(keys.max()))
    return DeviceCall(
        queries=q,
        keys=k,
        lengths=lengths,
        causal=call.causal or window is not None,
        window=window,
        sizes=tuple(zip(rows.tolist(), keys.tolist(), strict=True)),
        repeats_keys=not isinstance(call.keys, slice) and len(np.unique(call.keys)) < len(call.keys),
    )
