"""Host memory per rank of DeepSpeed's offloading.

Follows the source of DeepSpeed 0.19.8, which pins with torch by default; freed memory stays pinned.
"""

from math import ceil

from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.plan.breakdown import moments_of
from lightseq.plan.memory import pinned_by_torch
from lightseq.plan.run import PlannedRun
from lightseq.schedule.timing import FLOAT32_BYTES

SUB_GROUP = 10**9  # DeepSpeed's default sub_group_size: weights that ZeRO-3 updates at a time


def deepspeed_bytes_on_host(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Returns the bytes of a rank's host memory that `offload_optimizer` and `offload_param` will take."""
    taken = 0.0
    if settings.on_cpu("offload_optimizer"):
        taken += moments_of(run.config) * FLOAT32_BYTES * run.local_parameters
        taken += _masters_of_shards(run, settings) if settings.stage == 3 else _masters_of_partition(run, settings)
    if settings.on_cpu("offload_param"):
        taken += _weights(run, settings)
    return taken


def _masters_of_partition(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Returns the bytes of master weights and their buffers under ZeRO-1 and 2 (stage_1_and_2.py).

    Counts masters, their gradients and the low-precision weights (`__init__`, `initialize_optimizer_states`), a buffer
    for the largest gradient, and accumulated gradients; the last one may reach beyond the partition.
    """
    pins, weights, element = _pins(settings, "offload_optimizer"), run.local_parameters, run.itemsize
    whole = [_taken(width * weights, pins) for width in (FLOAT32_BYTES, FLOAT32_BYTES, element)]
    gradients = [_taken(element * size, pins) for size in run.architecture.sizes]
    accumulated = run.config.gradient_accumulation_steps > 1
    return sum(whole) + max(gradients) + accumulated * (sum(gradients) / run.shards + max(gradients))


def _masters_of_shards(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Returns the bytes of master weights and their gradients under ZeRO-3 (stage3.py).

    Masters are not pinned (`_create_fp32_partitions`). Gradients exist twice: per sub-group
    (`initialize_optimizer_states`) and in one buffer (`grad_partitions_flat_buffer`).
    """
    pins, weights = _pins(settings, "offload_optimizer"), run.local_parameters
    group = _sub_group(run, settings)
    by_group = weights / group * _taken(FLOAT32_BYTES * group, pins)
    return FLOAT32_BYTES * weights + by_group + _taken(FLOAT32_BYTES * weights, pins)


def _sub_group(run: PlannedRun, settings: DeepSpeedSettings) -> int:
    """Returns the number of a rank's weights that ZeRO-3 updates at a time."""
    asked = settings.settings["zero_optimization"].get("sub_group_size")
    known = isinstance(asked, int | float) and asked >= 1  # DeepSpeed reports invalid values later
    return int(min(run.local_parameters, int(asked) if known else SUB_GROUP))


def _weights(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Returns the bytes of offloaded weights.

    Counts one pinned buffer (stage3.py, `_create_param_groups_fp16_flat_cpu_memory`) and, if weights are pinned, each
    of them once more (partition_parameters.py, `_partition_param`).
    """
    pieces = [_taken(run.itemsize * ceil(size / run.shards), True) for size in run.architecture.sizes]
    return _taken(run.itemsize * run.local_parameters, True) + _pins(settings, "offload_param") * sum(pieces)


def _pins(settings: DeepSpeedSettings, part: str) -> bool:
    return bool(settings.settings["zero_optimization"][part].get("pin_memory", True))


def _taken(size: int, pins: bool) -> int:
    return pinned_by_torch(size) if pins else size
