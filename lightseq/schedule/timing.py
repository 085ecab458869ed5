"""Predicts the seconds of an attention layer, forward and backward, from a schedule's load and a machine's rates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightseq.schedule.cost import BACKWARD_FLOPS, AttentionShape, move_bytes
from lightseq.schedule.table import Move, Schedule
from lightseq.schedule.traffic import StepTraffic, Traffic

FLOAT32_BYTES = 4
COLUMNS = (("q", "kv", "out", None), ("q", "kv", "dq", "dkv"))  # what a load's columns are forward and backward


@dataclass(frozen=True)
class Rates:
    """What one rank of a machine does in a second, and what it loses each time. All positive."""

    flops_per_second: float  # of the attention kernel at full load
    call_seconds: float  # a kernel call costs on top: launch and tail, the mean of forward and backward
    host_bytes_per_second: float  # received from ranks of the same host
    network_bytes_per_second: float  # received from other hosts, at the same time
    exchange_seconds: float  # until anything arrives in a step: barriers, launches
    overlap_loss: float  # what kernels lose to communication beside them, as a share of its time
    message_seconds: float  # every bundle received costs on top of its bytes
    memory_bytes_per_second: float  # packing what travels, adding up results
    merge_passes: float  # how often float32 sums are read or written for each part that is added


# Fitted by calibration.py beside this file to benchmarks/results/attention-4xh200.jsonl and -512k.jsonl: layers of 32/8
# heads of 128 in bfloat16, kernel fa4, four H200 of one host. Left out is what waited for the host: at 16K all but
# ulysses and prefix with all heads at once. From these points the fit trades the link, memory and merge rates for one
# another: times that it predicts hold, the rates one by one need not. The network (400 Gb/s a GPU, nine tenths of it
# used) and what NCCL changes are assumed.
H200_SYMMETRIC = Rates(619e12, 0.12e-3, 495e9, 45e9, 56e-6, 0.19, 1.8e-6, 8.5e12, 5.0)
H200_NCCL = replace(H200_SYMMETRIC, host_bytes_per_second=145e9, exchange_seconds=0.1e-3, overlap_loss=0.7)
RATES: Mapping[str, Rates] = {"symmetric": H200_SYMMETRIC, "nccl": H200_NCCL}  # by transport


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer, forward and backward, on the slowest rank of each step; their parts add up to them."""

    compute_seconds: float
    exposed_seconds: float  # communication that no kernel hides, and what kernels lose to the rest
    memory_seconds: float  # packing, merging and summing
    gathered_bytes: float  # operands that a rank holds at once to compute with, at most

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds + self.memory_seconds


def estimate(traffic: Traffic, shape: AttentionShape, rates: Rates, keep_gathered: bool = False) -> Estimate:
    """What the table that the load was counted from takes at these rates, as `make_context` would run it."""
    if keep_gathered and traffic.schedule.can_keep_gathered:
        traffic = replace(traffic, schedule=replace(traffic.schedule, keeps_gathered=True))
    compute = exposed = memory = gathered = 0.0
    for backward in (False, True):
        sizes = column_bytes(traffic.schedule, shape, backward)
        for step in traffic.steps:
            busy = _compute_seconds(step, traffic.schedule, shape, rates, backward)
            moving = _moving_seconds(step, sizes, rates)
            compute += step.count * busy
            arriving = moving + rates.exchange_seconds * (moving > 0)
            exposed += step.count * (max(arriving - busy, 0.0) + rates.overlap_loss * min(moving, busy))
            gathered = max(gathered, float((step.gathered @ sizes[:2]).max()))
        memory += _memory_bytes(traffic, shape, sizes, rates, backward) / rates.memory_bytes_per_second
    return Estimate(compute, exposed, memory, gathered)


def kernel_seconds(shape: AttentionShape, rates: Rates) -> float:
    """One GPU with the whole sequence: a forward and a backward call."""
    flops = (1 + BACKWARD_FLOPS) * 4 * shape.batch * shape.length**2 / 2 * shape.heads * shape.head_dim
    return flops / rates.flops_per_second + 2 * rates.call_seconds


def column_bytes(schedule: Schedule, shape: AttentionShape, backward: bool) -> np.ndarray:
    """Bytes of one bundle of each of a load's columns; 0 for a column that the pass does not have."""
    moves = [item and Move(item, 0, 0, 0) for item in COLUMNS[backward]]
    return np.array([float(move_bytes(schedule, shape, move, backward)) if move else 0.0 for move in moves])


def _compute_seconds(
    step: StepTraffic, schedule: Schedule, shape: AttentionShape, rates: Rates, backward: bool
) -> float:
    """Of the rank that computes longest."""
    chunk = shape.length / schedule.layout.outer.chunk_count
    flops = 4 * chunk * chunk * shape.head_dim * shape.heads / schedule.head_groups * shape.batch
    per_area = flops * (BACKWARD_FLOPS if backward else 1.0) / rates.flops_per_second
    return float((step.work @ np.array([per_area, rates.call_seconds])).max())


def _moving_seconds(step: StepTraffic, sizes: np.ndarray, rates: Rates) -> float:
    """Of the rank that receives longest; links inside a host and across hosts work side by side."""
    links = ((step.same_host, rates.host_bytes_per_second), (step.other_hosts, rates.network_bytes_per_second))
    cost = [x @ np.where(sizes > 0, sizes / rate + rates.message_seconds, 0.0) for x, rate in links]
    return float(max(x.max() for x in cost))


def _memory_bytes(traffic: Traffic, shape: AttentionShape, sizes: np.ndarray, rates: Rates, backward: bool) -> float:
    """What one rank reads and writes beside its kernels: packing what it sends, taking in results."""
    schedule, travels = traffic.schedule, traffic.travels
    groups = np.array(
        [schedule.head_groups, min(schedule.head_groups, shape.kv_heads)]
    )  # shared heads travel packed once
    own = schedule.layout.chunks_per_rank * groups
    packed = 2 * float((own * sizes[:2] * travels[:2]).sum())
    element = float(shape.element_bytes)
    taken = 0.0
    for i, item in enumerate(COLUMNS[backward][2:]):
        if item is None or not (travels[2 + i] or traffic.accumulates[i]):
            continue
        passes = 1 + rates.merge_passes * FLOAT32_BYTES / element if traffic.accumulates[i] else 2.0
        taken += passes * float(traffic.results[:, i].max()) * sizes[2 + i]
    return float(packed + taken)
