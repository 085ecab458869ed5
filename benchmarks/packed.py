"""Packed documents in the attention benchmark: their lengths, and peers that keep them apart.

ring-flash-attn cuts every document into one piece (ring), or two (zigzag), for each rank, or gathers all keys (llama3).
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Case, Layer
from benchmarks.peers import flash_attention_2, import_ring_flash_attn, needs_cuda
from lightseq.schedule.documents import document_positions

MULTIPLE = 64  # of every document's length: the peers cut each into equal pieces
LEAST, MOST = 2**10, 2**16


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths from `least` to `most` tokens: two standard deviations of the logarithm lie either side."""

    text: str
    seed: int
    least: int = LEAST
    most: int = MOST

    def boundaries(self, length: int) -> tuple[int, ...]:
        """Of documents that fill a sequence; the last is cut at its end."""
        rng = np.random.default_rng(self.seed)
        middle, spread = np.log(self.least * self.most) / 2, np.log(self.most / self.least) / 4
        edges = [0]
        while edges[-1] < length:
            size = float(np.clip(np.exp(rng.normal(middle, spread)), self.least, self.most))
            edges.append(min(length, edges[-1] + max(1, round(size / MULTIPLE)) * MULTIPLE))
        return tuple(edges)


def lengths(text: str) -> Lengths:
    """`lognormal:SEED`, or `lognormal:SEED:LEAST:MOST` in tokens."""
    kind, *numbers = text.split(":")
    if kind != "lognormal" or len(numbers) not in (1, 3) or not all(n.isdecimal() for n in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no distribution; write lognormal:SEED or lognormal:SEED:128:8192"
        )
    found = Lengths(text, *map(int, numbers))
    if not 1 <= found.least <= found.most:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths go from at least 1 token up")
    return found


def area_balance(case: Case, positions: Tensor) -> float:
    """Mean over the largest rank's attention area, where every rank computes what its own tokens see."""
    everyone: list[Any] = [None] * case.world
    pairs = int((document_positions(case.boundaries)[positions.numpy()] + 1).sum())
    torch.distributed.all_gather_object(everyone, pairs, group=case.group)
    return sum(everyone) / case.world / max(everyone)


def positions_in_pieces(case: Case, pieces: int) -> Tensor:
    """Where this rank's tokens lie: of every document piece r, and with two a rank its mirror image."""
    mine = {1: [case.rank], 2: [case.rank, 2 * case.world - 1 - case.rank]}[pieces]
    edges = torch.tensor(case.boundaries)
    if (edges.diff() % (pieces * case.world)).any():
        raise ValueError(f"a document's length does not divide into {pieces * case.world} pieces")
    documents = [torch.arange(a, b).chunk(pieces * case.world) for a, b in pairwise(case.boundaries)]
    return torch.cat([document[piece] for document in documents for piece in mine])


@contextmanager
def ring_varlen(case: Case, function: str, pieces: int) -> Iterator[Layer]:
    attend = getattr(_package(case), function)
    local = positions_in_pieces(case, pieces)
    edges = torch.tensor(case.boundaries, dtype=torch.int32) // case.world
    longest, edges = int(edges.diff().max()), edges.to(case.device)
    yield _layer(case, local, lambda q, k, v: attend(q, k, v, edges, longest, causal=True, group=case.group))


@contextmanager
def llama3_varlen(case: Case, all_heads: bool) -> Iterator[Layer]:
    package = _package(case)
    edges = torch.tensor(case.boundaries, dtype=torch.int32, device=case.device)
    prepared = package.llama3_flash_attn_prepare_cu_seqlens(edges, True, case.rank, case.world)
    *four, keys = prepared
    stride = case.kv_heads if all_heads else 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return package.llama3_flash_attn_varlen_func(
            q, k, v, *four, heads_k_stride=stride, local_k_slice=keys, causal=True, group=case.group
        )

    yield _layer(case, torch.arange(case.length).chunk(case.world)[case.rank], attend)


def _package(case: Case) -> Any:
    package = import_ring_flash_attn()
    needs_cuda(case, "ring-flash-attn")
    return package


def _layer(case: Case, local: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Layer:
    return Layer(
        attend=lambda q, k, v: attend(q[0], k[0], v[0]).unsqueeze(0),
        positions=local,
        ranks=case.world,
        facts={"kernel": flash_attention_2(), "transport": "nccl", "area_balance": area_balance(case, local)},
    )


PACKED_PEERS: dict[str, Callable[[Case], AbstractContextManager[Layer]]] = {
    "ring-flash-attn-varlen-ring": partial(ring_varlen, function="ring_flash_attn_varlen_func", pieces=1),
    "ring-flash-attn-varlen-zigzag": partial(ring_varlen, function="zigzag_ring_flash_attn_varlen_func", pieces=2),
    "ring-flash-attn-varlen-llama3": partial(llama3_varlen, all_heads=False),  # a key/value head at a time
    "ring-flash-attn-varlen-llama3-all": partial(llama3_varlen, all_heads=True),
}
