"""https://github.com/zhuzilin/ring-flash-attention with FlashAttention-2, for one document and for packed documents.

Packed variants cut every document into one piece (ring) or two pieces (zigzag) per rank, or gather all keys (llama3).
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_peers import flash_attn_stand_in
from benchmarks.measure import Case, Layer, gathered
from lightseq.schedule.documents import document_positions


def import_package() -> ModuleType:
    """Imports ring-flash-attn without its adapters, which need names that transformers 5 removed."""
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    with flash_attn_stand_in.in_place():
        return importlib.import_module("ring_flash_attn")


def package_for(case: Case) -> Any:
    package = import_package()
    case.needs_cuda("ring-flash-attn")
    return package


@contextmanager
def layer(case: Case, function: str, layout: str) -> Iterator[Layer]:
    attend = getattr(package_for(case), function)
    yield Layer(
        attend=lambda q, k, v: attend(q, k, v, causal=True, group=case.group),
        positions=case.positions(layout),
        ranks=case.world,
        facts={"kernel": flash_attn_stand_in.kernel(), "transport": "nccl"},
    )


@contextmanager
def varlen_layer(case: Case, function: str, pieces: int) -> Iterator[Layer]:
    attend = getattr(package_for(case), function)
    edges = torch.tensor(case.boundaries, dtype=torch.int32)
    if (edges.diff() % (pieces * case.world)).any():
        raise ValueError(f"a document's length is not a multiple of {pieces * case.world}")
    mine = [case.rank, 2 * case.world - 1 - case.rank][:pieces]  # the second piece mirrors the first
    documents = [torch.arange(a, b).chunk(pieces * case.world) for a, b in pairwise(case.boundaries)]
    local = torch.cat([document[piece] for document in documents for piece in mine])
    edges = edges // case.world
    longest, edges = int(edges.diff().max()), edges.to(case.device)
    yield packed_layer(case, local, lambda q, k, v: attend(q, k, v, edges, longest, causal=True, group=case.group))


@contextmanager
def llama3_varlen_layer(case: Case, all_heads: bool) -> Iterator[Layer]:
    package = package_for(case)
    edges = torch.tensor(case.boundaries, dtype=torch.int32, device=case.device)
    *four, keys = package.llama3_flash_attn_prepare_cu_seqlens(edges, True, case.rank, case.world)
    stride = case.kv_heads if all_heads else 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return package.llama3_flash_attn_varlen_func(
            q, k, v, *four, heads_k_stride=stride, local_k_slice=keys, causal=True, group=case.group
        )

    yield packed_layer(case, torch.arange(case.length).chunk(case.world)[case.rank], attend)


def packed_layer(case: Case, local: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Layer:
    """Returns facts of the record. `area_balance` is the mean attention area per rank over the largest."""
    areas = gathered(case, int((document_positions(case.boundaries)[local.numpy()] + 1).sum()))
    balance = sum(areas) / case.world / max(areas)
    return Layer(
        attend=lambda q, k, v: attend(q[0], k[0], v[0]).unsqueeze(0),
        positions=local,
        ranks=case.world,
        facts={"kernel": flash_attn_stand_in.kernel(), "transport": "nccl", "area_balance": balance},
    )
