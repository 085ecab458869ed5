"""Disk space that the checkpoints of a run need, checked before the first is written."""

import math
import shutil
from pathlib import Path

from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.breakdown import GIB, MASTER_BYTES, moments_of


def saved_bytes(parameters: int, config: TrainConfig) -> int:
    """Returns the bytes of one checkpoint: float32 weights, optimizer state, and weights in the compute dtype."""
    element = 4 if config.compute_dtype == "float32" else 2
    return int(parameters * (MASTER_BYTES * (1 + moments_of(config)) + element))


def saves_left(config: TrainConfig, done: int, total: int, epochs_left: float) -> int:
    """Returns how many checkpoints a run will still write; the last step is always saved."""
    if config.save_strategy == "no" or done >= total:
        return 0
    if config.save_strategy == "epoch":
        return max(1, math.ceil(epochs_left))
    return total // config.save_steps - done // config.save_steps + bool(total % config.save_steps)


def check_disk(output_dir: Path, one_bytes: int, saves: int, there: int, config: TrainConfig) -> str | None:
    """Returns a note on the disk space of the checkpoints that exist at once, a warning if it is too little.

    Raises ValueError if not even one checkpoint fits. The directory holds `there` checkpoints and may not exist yet.
    """
    if not saves:
        return None
    place = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    there_is = f"{place} has {_shown(free)} free"
    if one_bytes > free:
        raise ValueError(
            f"a checkpoint in --output_dir {output_dir} takes about {_shown(one_bytes)}, and {there_is}; free some, "
            "name another disk, or give --save_strategy no"
        )
    limit = config.save_total_limit
    held = saves if limit is None else min(saves, max(1, limit + 1 + config.keep_best - there))  # old ones go last
    together = f", {held} of them {_shown(held * one_bytes)}" if held > 1 else ""
    said = f"a checkpoint takes about {_shown(one_bytes)}{together}; {there_is}"
    if held * one_bytes <= free:
        return said
    remedy = "give --save_total_limit" if limit is None else "give a lower --save_total_limit"
    return f"warning: {said}; {remedy}, or free some"


def _shown(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
