"""Predicted time of an attention layer, from a schedule's traffic and a machine's rates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightseq.schedule.cost import BACKWARD_FLOPS, AttentionShape, move_bytes
from lightseq.schedule.table import Move, Schedule
from lightseq.schedule.traffic import StepTraffic, Traffic

FLOAT32_BYTES = 4
# The fixed cost of a kernel call is mostly its last wave of thread blocks. It is half at 8K and below, and grows up to
# 16K: so `auto` takes prefix for short sequences, as measured (benchmarks/results/attention-2xh100-short.jsonl).
HALF_CALL_TOKENS, FULL_CALL_TOKENS = 2**13, 2**14
# Share of the speed with heads of 128, by the largest head dimension that it holds for, at 32K on one H100. 192 is with
# values of 128 (541 of 632 TFLOP/s), 256 all of 256 (717 forward by fa4, 389 backward by cuDNN: dev/LOG.md), and wider
# heads run in the cublas kernel (334 of 632): benchmarks/results/attention-2xh100-other-heads.jsonl.
WIDE_HEAD_SHARES = ((128, 1.0), (192, 0.86), (256, 0.69), (math.inf, 0.53))
# Items of the columns of `StepTraffic`, indexed by `backward`.
COLUMNS = (("q", "kv", "out", None), ("q", "kv", "dq", "dkv"))


@dataclass(frozen=True)
class Rates:
    """Speed of one rank of a machine, and its fixed costs. All positive."""

    flops_per_second: float  # the attention kernel's at full load
    call_seconds: float  # fixed cost of a kernel call from FULL_CALL_TOKENS on, the mean of forward and backward
    host_bytes_per_second: float  # received from ranks of the same host
    network_bytes_per_second: float  # received from other hosts, at the same time
    exchange_seconds: float  # latency of an exchange: barriers, launches
    overlap_loss: float  # slowdown of kernels by communication beside them, as a share of its time
    message_seconds: float  # fixed cost of every item received
    memory_bytes_per_second: float  # for packing sent data and adding up results
    merge_passes: float  # reads and writes of float32 sums per added part
    # Host seconds to launch both passes of a schedule that merges partial outputs. Such passes cannot run as CUDA
    # graphs. 0 for transports without CUDA graphs.
    merging_launch_seconds: float


# Fitted (least relative error, by Gauss-Newton on the logarithms) to benchmarks/results/attention-4xh200.jsonl and
# -512k.jsonl: layers of 32/8 heads of 128 in bfloat16, kernel fa4, four H200 of one host. Points bound by the host are
# left out: at 16K all but ulysses and prefix with one head group. The points do not separate the link, memory and merge
# rates: predicted times hold, single rates need not. The network (400 Gb/s per GPU, 90% used) and NCCL's are assumed.
# The launches are measured for striped at 4K on two H100 (benchmarks/results/attention-2xh100-schedules.jsonl).
H200_SYMMETRIC = Rates(
    flops_per_second=619e12,
    call_seconds=0.12e-3,
    host_bytes_per_second=495e9,
    network_bytes_per_second=45e9,
    exchange_seconds=56e-6,
    overlap_loss=0.19,
    message_seconds=1.8e-6,
    memory_bytes_per_second=8.5e12,
    merge_passes=5.0,
    merging_launch_seconds=3.2e-3,
)
H200_NCCL = replace(
    H200_SYMMETRIC, host_bytes_per_second=145e9, exchange_seconds=0.1e-3, overlap_loss=0.7, merging_launch_seconds=0.0
)
RATES: Mapping[str, Rates] = {"symmetric": H200_SYMMETRIC, "nccl": H200_NCCL}  # by transport


@dataclass(frozen=True)
class Estimate:
    """Seconds of one layer, forward and backward, on the slowest rank of each step."""

    compute_seconds: float
    exposed_seconds: float  # communication that no kernel hides, and the slowdown of kernels by the rest
    memory_seconds: float  # packing, merging and summing
    gathered_bytes: float  # peak bytes of gathered operands on a rank
    launch_seconds: float  # time of the host, for which the device may wait

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds + self.exposed_seconds + self.memory_seconds, self.launch_seconds)


def estimate(traffic: Traffic, shape: AttentionShape, rates: Rates, keep_gathered: bool = False) -> Estimate:
    """Estimates a layer at these rates, run as `make_context` would run it.

    With `keep_gathered` gathered q, k and v stay for the backward pass, if the schedule can keep them.
    """
    if keep_gathered and traffic.schedule.can_keep_gathered:
        traffic = replace(traffic, schedule=replace(traffic.schedule, reuses_gathered=True))
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
    launches = rates.merging_launch_seconds if traffic.accumulates[0] else 0.0
    return Estimate(
        compute_seconds=compute,
        exposed_seconds=exposed,
        memory_seconds=memory,
        gathered_bytes=gathered,
        launch_seconds=launches,
    )


def kernel_seconds(shape: AttentionShape, rates: Rates) -> float:
    """Estimates the seconds of a forward and a backward call on one GPU with the whole sequence."""
    flops = (1 + BACKWARD_FLOPS) * 2 * shape.batch * shape.length**2 / 2 * shape.heads * shape.pair_dims
    return flops / rates.flops_per_second + 2 * _call_seconds(shape, rates)


def _call_seconds(shape: AttentionShape, rates: Rates) -> float:
    return rates.call_seconds * min(max(shape.length, HALF_CALL_TOKENS), FULL_CALL_TOKENS) / FULL_CALL_TOKENS


def column_bytes(schedule: Schedule, shape: AttentionShape, backward: bool) -> np.ndarray:
    """Returns the bytes of one item of each column; 0 for a column that the pass does not have."""
    moves = [item and Move(item, 0, 0, 0) for item in COLUMNS[backward]]
    return np.array([float(move_bytes(schedule, shape, move, backward)) if move else 0.0 for move in moves])


def _compute_seconds(
    step: StepTraffic, schedule: Schedule, shape: AttentionShape, rates: Rates, backward: bool
) -> float:
    """Returns the seconds of the rank that computes longest."""
    chunk = shape.length / schedule.layout.group_layout.chunk_count
    flops = 2 * chunk * chunk * shape.pair_dims * shape.heads / schedule.total_head_groups * shape.batch
    share = next(share for dim, share in WIDE_HEAD_SHARES if shape.head_dim <= dim)
    flops_per_second = rates.flops_per_second * share
    per_area = flops * (BACKWARD_FLOPS if backward else 1.0) / flops_per_second
    return float((step.work @ np.array([per_area, _call_seconds(shape, rates)])).max())


def _moving_seconds(step: StepTraffic, sizes: np.ndarray, rates: Rates) -> float:
    """Returns the seconds of the rank that receives longest. Links inside and across hosts work in parallel."""
    links = ((step.same_host, rates.host_bytes_per_second), (step.other_hosts, rates.network_bytes_per_second))
    cost = [x @ np.where(sizes > 0, sizes / rate + rates.message_seconds, 0.0) for x, rate in links]
    return float(max(x.max() for x in cost))


def _memory_bytes(traffic: Traffic, shape: AttentionShape, sizes: np.ndarray, rates: Rates, backward: bool) -> float:
    """Returns the bytes that one rank reads and writes outside its kernels: it packs operands and reduces results."""
    schedule, travels = traffic.schedule, traffic.travels
    # Head groups that share a key/value head are packed once.
    groups = np.array([schedule.total_head_groups, min(schedule.total_head_groups, shape.kv_heads)])
    own = schedule.layout.chunks_per_rank * groups
    packed = 2 * float((own * sizes[:2] * travels[:2]).sum())
    element = float(shape.element_bytes)
    taken = 0.0
    for i, item in enumerate(COLUMNS[backward][2:]):
        if item is None or not (travels[2 + i] or traffic.accumulates[i]):
            continue
        # A part is read once, and then added to a float32 total or written to the result.
        passes = 1 + rates.merge_passes * FLOAT32_BYTES / element if traffic.accumulates[i] else 2.0
        taken += passes * float(traffic.results[:, i].max()) * sizes[2 + i]
    return float(packed + taken)
