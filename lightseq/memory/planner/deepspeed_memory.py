"""Host memory that DeepSpeed's own offloading takes on a rank.

Counted after DeepSpeed 0.19.8, which by default pins with torch; freed pieces stay pinned.
"""

from math import ceil

from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.memory.planner.breakdown import moments_of
from lightseq.memory.planner.memory import pinned_by_torch
from lightseq.memory.planner.run import FLOAT32, PlannedRun

SUB_GROUP = 10**9  # weights of a rank that ZeRO-3 updates at a time, where the config says nothing


def deepspeed_bytes_on_host(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Returns the bytes that `offload_optimizer` and `offload_param` will take of a rank's host memory."""
    taken = 0.0
    if settings.on_cpu("offload_optimizer"):
        taken += moments_of(run.config) * FLOAT32 * run.local_parameters
        taken += _masters_of_shards(run, settings) if settings.stage == 3 else _masters_of_partition(run, settings)
    if settings.on_cpu("offload_param"):
        taken += _weights(run, settings)
    return taken


def _masters_of_partition(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Counts stage_1_and_2.py: masters, their gradients and the weights made of them (`__init__`,
    `initialize_optimizer_states`), a buffer for the largest gradient, and whole gradients that accumulate one by one;
    the partition may end within one."""
    pins, weights, element = _pins(settings, "offload_optimizer"), run.local_parameters, run.itemsize
    whole = [_taken(width * weights, pins) for width in (FLOAT32, FLOAT32, element)]
    gradients = [_taken(element * size, pins) for size in run.architecture.sizes]
    accumulated = run.config.gradient_accumulation_steps > 1
    return sum(whole) + max(gradients) + accumulated * (sum(gradients) / run.shards + max(gradients))


def _masters_of_shards(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Counts stage3.py: masters (`_create_fp32_partitions`), not pinned, and their gradients twice: by sub-group
    (`initialize_optimizer_states`) and all together (`grad_partitions_flat_buffer`)."""
    pins, weights = _pins(settings, "offload_optimizer"), run.local_parameters
    group = _sub_group(run, settings)
    by_group = weights / group * _taken(FLOAT32 * group, pins)
    return FLOAT32 * weights + by_group + _taken(FLOAT32 * weights, pins)


def _sub_group(run: PlannedRun, settings: DeepSpeedSettings) -> int:
    """Weights of a rank that are updated at a time, at most."""
    asked = settings.settings["zero_optimization"].get("sub_group_size")
    known = isinstance(asked, int | float) and asked >= 1  # what DeepSpeed refuses later is not refused here
    return int(min(run.local_parameters, int(asked) if known else SUB_GROUP))


def _weights(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Counts one pinned buffer (stage3.py, `_create_param_groups_fp16_flat_cpu_memory`), and before that each weight
    (partition_parameters.py, `_partition_param`)."""
    pieces = [_taken(run.itemsize * ceil(size / run.shards), True) for size in run.architecture.sizes]
    return _taken(run.itemsize * run.local_parameters, True) + _pins(settings, "offload_param") * sum(pieces)


def _pins(settings: DeepSpeedSettings, part: str) -> bool:
    return bool(settings.settings["zero_optimization"][part].get("pin_memory", True))


def _taken(size: int, pins: bool) -> int:
    return pinned_by_torch(size) if pins else size
