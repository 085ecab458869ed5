"""Estimates of a cell's time: from cells of the same sweep that ran, else from its FLOPs and the device's rate."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launch.sweep_cells import Cell
from launch.sweep_records import Record, median_step
from lightseq.models.presets import FAMILIES

# Assumptions without measurements: the share of its peak that a busy GPU reaches, and the time to start processes.
SHARE_OF_PEAK: Final = 0.4
START_SECONDS: Final = 45.0
# The same for a host without GPUs, whose cores all ranks share. Only the order of magnitude is right.
HOST_FLOPS_PER_SECOND: Final = 10e9
HOST_START_SECONDS: Final = 15.0


@dataclass(frozen=True)
class Measured:
    """A cell that ran: FLOPs and seconds of a step, and the seconds outside steps."""

    cell: Cell
    step_flops: float
    step_seconds: float
    other_seconds: float


def measured(cells: Sequence[Cell], records: Mapping[str, Record]) -> list[Measured]:
    found = []
    for cell in cells:
        record = records[cell.name]
        step = median_step(cell.output_dir) if record.status == "done" else math.nan
        if math.isfinite(step) and (work := step_flops(cell)):
            run_seconds = step * (cell.config.max_steps or 0)
            other = START_SECONDS if record.seconds is None else max(0.0, record.seconds - run_seconds)
            found.append(Measured(cell, work, step, other))
    return found


def estimate(cell: Cell, known: Sequence[Measured], device: str | None) -> float | None:
    """Returns the expected seconds of a cell, None if unknown. No device means a host without GPUs."""
    steps = cell.config.max_steps
    if steps is None:
        return None
    work = step_flops(cell)
    if work is None:
        return None
    per_rank = work / cell.ranks
    if known:
        near = min(known, key=lambda other: distance(cell, other.cell))
        step = near.step_seconds * per_rank / (near.step_flops / near.cell.ranks)
        return near.other_seconds + steps * step
    if device is None:
        return HOST_START_SECONDS + steps * work / HOST_FLOPS_PER_SECOND
    peak = _peak(device)
    return None if peak is None else START_SECONDS + steps * per_rank / (peak * SHARE_OF_PEAK)


def assumed(device: str | None) -> str:
    """Returns how times are estimated if no cell ran."""
    if device is None:
        return f"estimated at {HOST_FLOPS_PER_SECOND / 1e9:.0f} GFLOP/s of a CPU (for a GPU: --device)"
    return f"estimated at {SHARE_OF_PEAK:.0%} of the peak of {device}"


def distance(cell: Cell, other: Cell) -> tuple[int, float]:
    """Returns how unlike two cells are: the settings that differ, then the distance of their lengths."""
    keys = (cell.settings.keys() | other.settings.keys()) - {"model_max_length"}
    differing = sum(cell.settings.get(key) != other.settings.get(key) for key in keys)
    return differing, abs(math.log(cell.config.model_max_length / other.config.model_max_length))


def step_flops(cell: Cell) -> float | None:
    """Returns FLOPs of one optimizer step over all ranks, recomputation included; None for an unknown model."""
    from lightseq.architecture import flops  # imports transformers, which takes seconds: only if needed

    model = _model_config(cell.family, cell.config.model_name)
    if model is None:
        return None
    c = cell.config
    data_ranks = max(1, cell.ranks // (c.sequence_parallel_size or cell.ranks))
    sequences = c.per_device_train_batch_size * c.gradient_accumulation_steps * data_ranks
    shape = (model, c.model_max_length, sequences)
    return float(
        flops.model_flops(*shape) + flops.recompute_flops(*shape, c.remat_policy, c.group_size, c.tiles_layers)
    )


@functools.cache
def _model_config(family: str, name: str):  # type: ignore[no-untyped-def]  # of transformers, which is not imported yet
    from lightseq.architecture.family import preset_config

    known = next(each for each in FAMILIES if each.name == family)
    preset = known.aliases.get(name, name)
    return preset_config(known, preset) if known.preset(preset) else None


def check_device(device: str) -> str:
    """Returns the name of a GPU with a known peak, given in upper or lower case. Raises ValueError for others."""
    found = next((name for name in (device, device.upper()) if _peak(name) is not None), None)
    if found is None:
        raise ValueError(
            f'--device {device} is unknown; give a GPU as h100, or by torch\'s name, such as "NVIDIA H100 80GB HBM3"'
        )
    return found


def _peak(device: str) -> float | None:
    from lightseq.architecture.flops import peak_flops_per_second

    return peak_flops_per_second(device)
