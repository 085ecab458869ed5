"""The optimizer's state in files of a fast disk, as DeepSpeed's ZeRO-3 swaps it (ZeRO-Infinity, arXiv 2104.07857).

DeepSpeed compiles `async_io` for that when it is first used, names its files by rank alone, and when it resumes brings
back the files but nothing else: what was too small for one, how many updates there were, and the weights come here.
"""

import fcntl
import re
import shutil
import sys
import uuid
import weakref
from pathlib import Path
from typing import Any, TextIO

import torch

from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.distributed.mesh import World
from lightseq.utils.formatting import first_line

FILES = "offloaded_tensors"  # of a checkpoint
OURS, LOCK = "lightseq-", "lock"  # a run's folder, and what it holds a lock on as long as it lives
SWAPPED = ".swp"  # ends the names of DeepSpeed's files there


def folder_of(engine: object, settings: DeepSpeedSettings) -> str:
    """A place under `nvme_path` that no other run has, for as long as the engine is there.

    Removes what runs left that did not end. Raises OSError where nothing can be written.
    """
    path = Path(settings.settings["zero_optimization"]["offload_optimizer"]["nvme_path"])
    path.mkdir(parents=True, exist_ok=True)
    for left in path.glob(f"{OURS}*"):
        if _is_left(left):
            shutil.rmtree(left, ignore_errors=True)
    mine = path / f"{OURS}{uuid.uuid4().hex}"
    new = mine.with_name(f"new-{mine.name}")
    new.mkdir()
    lock = (new / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(mine)
    weakref.finalize(engine, _remove, mine, lock)
    return str(mine)


def _is_left(folder: Path) -> bool:
    """Returns whether a run made the folder that does not live any more; others may begin their names alike."""
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read():  # a run's output directory has a lock, too, which says whose it is
                return False
    except OSError:  # it has none, somebody holds it, or it is gone by now
        return False
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return all(path.suffix == SWAPPED or path == folder / LOCK for path in files)


def _remove(folder: Path, lock: TextIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def check_async_io(settings: DeepSpeedSettings, world: World) -> None:
    """Compiles what DeepSpeed reads and writes with, where that is not there. Raises ValueError where it cannot."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    here = f"--deepspeed {settings.source}: offload_optimizer goes to 'nvme'"
    builder = AsyncIOBuilder()
    if not builder.is_compatible():
        raise ValueError(
            f"{here}, for which DeepSpeed needs libaio; install libaio-dev and a C++ compiler, or give cpu"
        )
    if world.is_main:
        print("note: DeepSpeed compiles async_io where it has not yet: a minute or two", file=sys.stderr, flush=True)
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise ValueError(f"{here}, but its async_io cannot be compiled ({first_line(error)}); give cpu") from error


def check_saved_alike(settings: DeepSpeedSettings, state: Path, source: Path) -> None:
    """Raises ValueError for a checkpoint of a run whose states were elsewhere: DeepSpeed would bring back none."""
    saved = (state / FILES).is_dir()
    if saved != settings.on_nvme:
        was, here = ("nvme", "not") if saved else ("elsewhere", "there")
        raise ValueError(
            f"--resume_from_checkpoint {source} has the optimizer's state as offload_optimizer left it on {was}, and "
            f"{settings.source} has it {here}; resume with the file that it was saved with"
        )


def restore(engine: Any, state: Path, world: World) -> None:
    """After DeepSpeed has brought back its files, what it saved beside them; and weights of all that."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    optimizer = engine.optimizer
    file = engine._get_zero_ckpt_name(str(state.parent), state.name)
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        saved = torch.load(file, map_location="cpu", weights_only=True)["optimizer_state_dict"]
    _rename(optimizer, next((state / FILES).glob(f"rank{world.rank:02d}")))
    optimizer.checkpoint_event_prologue()
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    optimizer._set_fp32_optimizer_param_groups()
    masters = [x for group in optimizer.optimizer.param_groups for x in group["params"]]
    optimizer._clear_fp32_optimizer_param_groups()
    # A master that is in a file has no elements here.
    whole = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat_numel, strict=True)
    sizes = {id(master): int(n) for master, n in whole}
    for i, states in saved["optimizer_state_dict"]["state"].items():
        master = masters[i]
        # What is in a file of its own was saved without elements. DeepSpeed reads it into what it finds here.
        optimizer.optimizer.state[master] = {
            name: x if x.numel() else torch.empty(sizes[id(master)], dtype=x.dtype) for name, x in states.items()
        }
    for master, value in zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True):
        if value.numel():
            master.data.copy_(value.detach())
    optimizer.reset_swap_buffers()  # and makes weights of every master
    optimizer.checkpoint_event_epilogue()


def _rename(optimizer: Any, saved: Path) -> None:
    """DeepSpeed names a file by numbers that it gave parameters, and goes on from where it was with another model."""
    here = Path(optimizer.optimizer_swapper.swap_folder)
    masters = enumerate(optimizer.fp32_partitioned_groups_flat)
    now = sorted((x.ds_id for i, x in masters if optimizer._swappable_optimizer_subgroup(i)), key=_first)
    files = [match[1] for file in saved.iterdir() if (match := re.fullmatch(r"(\d+_\d+)\.tensor\.swp", file.name))]
    was = sorted(files, key=_first)
    if len(was) != len(now):
        raise ValueError(
            f"{saved} has {len(was)} parts of the optimizer's state, and sub_group_size makes {len(now)}; "
            "resume with the file that it was saved with"
        )
    if was == now:
        return
    for file in saved.iterdir():
        (here / file.name).unlink()
    for before, name in zip(was, now, strict=True):
        for file in saved.glob(f"*{before}.tensor.swp"):
            if file.name.removesuffix(f"{before}.tensor.swp")[-1:] in ("", "-"):
                shutil.copyfile(file, here / file.name.replace(before, name))


def _first(numbers: str) -> int:
    """Of parameters that lie side by side: 3 of 3_12."""
    return int(numbers.split("_")[0])
