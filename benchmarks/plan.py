"""The points that a benchmark of attention measures: every implementation in every way it was asked for."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from benchmarks.flags import CEILING
from benchmarks.layers import Choice, lightseq_layer, single_gpu_layer
from benchmarks.measure import Case, Layer
from benchmarks.packed import PACKED_PEERS
from benchmarks.peers import PEERS


@dataclass(frozen=True)
class Subject:
    """One implementation in one way of running it."""

    implementation: str
    request: str  # the schedule as typed; empty for peers
    open: Callable[[Case], AbstractContextManager[Layer]]  # sets it up on a rank
    asked: dict[str, Any]  # what the record says where that fails
    choice: Choice | None = None  # lightseq's alone

    @property
    def label(self) -> str:
        return f"{self.implementation} {self.request}".strip()


def subjects(flags: argparse.Namespace) -> list[Subject]:
    """The ceiling first, then the peers, then lightseq."""
    alone = [ceiling(kernel) for kernel in flags.kernels if CEILING in flags.peers]
    peers = [
        Subject(name, "", peer(name, packed=flags.documents is not None), {}) for name in flags.peers if name != CEILING
    ]
    ours = [
        ours_as(request, replace(choice, kernel=kernel, transport=transport))
        for request, choice in flags.schedules
        for kernel in flags.kernels
        for transport in flags.transports
    ]
    return alone + peers + ours


def peer(name: str, packed: bool) -> Callable[[Case], AbstractContextManager[Layer]]:
    """Those for one document and those for several do not compute the same thing."""
    here, others = (PACKED_PEERS, PEERS) if packed else (PEERS, PACKED_PEERS)
    if name in here:
        return here[name]
    assert name in others, name

    def refuse(case: Case) -> AbstractContextManager[Layer]:
        raise ValueError("would attend across documents" if packed else "wants packed documents; give --documents")

    return refuse


def ceiling(kernel: str) -> Subject:
    return Subject(CEILING, "", partial(single_gpu_layer, kernel=kernel), {"kernel": kernel})


def ours_as(request: str, choice: Choice) -> Subject:
    return Subject("lightseq", request, partial(lightseq_layer, choice=choice), asdict(choice), choice)
