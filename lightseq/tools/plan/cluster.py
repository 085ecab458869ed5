"""Predicts the attention layer over clusters of many sizes: one row for every number of GPUs and schedule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightseq.schedule.algorithms import ulysses_group_size
from lightseq.schedule.auto import (
    ChoiceEstimate,
    ScheduleChoice,
    choose_best,
    estimate_choice,
    possible_choices,
    why_impossible,
)
from lightseq.schedule.cost import BACKWARD_FLOPS, AttentionShape
from lightseq.schedule.timing import Estimate, Rates, kernel_seconds


@dataclass(frozen=True)
class Cluster:
    """Hosts of GPUs: inside one they read each other's memory, across several they send messages."""

    gpus_per_host: int
    rates: Mapping[str, Rates]  # by transport

    def transport(self, gpus: int) -> str:
        return "symmetric" if gpus <= self.gpus_per_host else "nccl"


@dataclass(frozen=True)
class Row:
    """One schedule over a number of GPUs with its best sizes, or why it cannot be had."""

    gpus: int
    schedule: str
    transport: str
    choice: ScheduleChoice | None = None
    estimate: Estimate | None = None
    fastest: bool = False
    skipped: str | None = None


def rows(
    shape: AttentionShape, cluster: Cluster, gpus: Sequence[int], schedules: Sequence[str], limit: float | None = None
) -> Iterator[Row]:
    """Every schedule for every number of GPUs; of each number the row is marked that training would take, the fastest.

    Within 0.2% of it another may seem ahead: heads in more turns cost a little time and save memory.
    """
    for count in gpus:
        transport = cluster.transport(count)
        found = {name: _priced(name, count, shape, cluster) for name in schedules}
        every = [p for some in found.values() for p in some]
        taken = choose_best(every, shape.kv_heads, limit).choice if every else None
        for name, some in found.items():
            if not some:
                yield Row(count, name, transport, skipped=why_impossible(ScheduleChoice(name), count, shape))
                continue
            row = _row(count, transport, choose_best(some, shape.kv_heads, limit), limit)
            yield replace(row, fastest=row.choice is not None and row.choice == taken)


def _priced(name: str, gpus: int, shape: AttentionShape, cluster: Cluster) -> list[ChoiceEstimate]:
    rates = cluster.rates[cluster.transport(gpus)]
    return [
        ChoiceEstimate(choice, estimate_choice(choice, gpus, shape, rates, cluster.gpus_per_host))
        for choice in possible_choices(gpus, shape, ScheduleChoice(name))
    ]


def _row(gpus: int, transport: str, chosen: ChoiceEstimate, limit: float | None) -> Row:
    name = chosen.choice.schedule
    if limit is not None and chosen.estimate.gathered_bytes > limit:
        return Row(
            gpus, name, transport, skipped=f"gathers at least {chosen.estimate.gathered_bytes / 2**30:.2f} GiB a GPU"
        )
    return Row(gpus, name, transport, chosen.choice, chosen.estimate)


def record(row: Row, shape: AttentionShape, cluster: Cluster) -> dict[str, Any]:
    """A row as an object of the JSONL file; what a skipped row does not know is null."""
    e, c = row.estimate, row.choice
    return {
        "gpus": row.gpus,
        "schedule": row.schedule,
        "head_groups": c and (c.head_groups or 1),
        "ulysses_size": c and ulysses_group_size(c.schedule, row.gpus, c.ulysses_size),
        "transport": row.transport,
        "seconds": e and e.seconds,
        "compute_seconds": e and e.compute_seconds,
        "exposed_communication_seconds": e and e.exposed_seconds,
        "memory_seconds": e and e.memory_seconds,
        "tflops_per_gpu": e and flops(shape) / row.gpus / e.seconds / 1e12,
        "efficiency": e and kernel_seconds(shape, cluster.rates[row.transport]) / row.gpus / e.seconds,
        "gathered_bytes": e and e.gathered_bytes,
        "fastest": row.fastest,
        "skipped": row.skipped,
    }


def flops(shape: AttentionShape) -> float:
    """Of one layer, forward and backward, the causal half once."""
    return (1 + BACKWARD_FLOPS) * 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim
