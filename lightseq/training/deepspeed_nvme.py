"""The optimizer's state in files of a fast disk, as DeepSpeed's ZeRO-3 swaps it (ZeRO-Infinity, arXiv 2104.07857).

DeepSpeed compiles `async_io` for that when it is first used, names its files by rank alone, and when it resumes brings
back the files but nothing else: what was too small for one, how many updates there were, and the weights come here.
"""

import re
import shutil
import sys
import uuid
import weakref
from pathlib import Path
from typing import Any

import torch

from lightseq.ranks.mesh import World
from lightseq.training.deepspeed_config import DeepSpeedSettings
from lightseq.words import first_line

FILES = "offloaded_tensors"  # of a checkpoint


def folder_of(engine: object, settings: DeepSpeedSettings) -> str:
    """A place under `nvme_path` that no other run has, for as long as the engine is there.

    Raises OSError where nothing can be written.
    """
    path = (
        Path(settings.settings["zero_optimization"]["offload_optimizer"]["nvme_path"]) / f"lightseq-{uuid.uuid4().hex}"
    )
    path.mkdir(parents=True)
    weakref.finalize(engine, shutil.rmtree, path, ignore_errors=True)
    return str(path)


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
    file = state / f"zero_pp_rank_{world.rank}_mp_rank_00_optim_states.pt"
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        saved = torch.load(file, map_location="cpu", weights_only=True)["optimizer_state_dict"]
    _rename(optimizer, next((state / FILES).glob(f"rank{world.rank:02d}")))
    optimizer.checkpoint_event_prologue()
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    optimizer._set_fp32_optimizer_param_groups()
    masters = [x for group in optimizer.optimizer.param_groups for x in group["params"]]
    optimizer._clear_fp32_optimizer_param_groups()
    sizes = {id(x): n for x, n in zip(optimizer.fp32_partitioned_groups_flat, _sizes(optimizer), strict=True)}
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
    swapped = [
        x.ds_id
        for i, x in enumerate(optimizer.fp32_partitioned_groups_flat)
        if optimizer._swappable_optimizer_subgroup(i)
    ]
    masters = (match[1] for file in saved.iterdir() if (match := re.fullmatch(r"(\d+_\d+)\.tensor\.swp", file.name)))
    was = sorted(masters, key=lambda numbers: int(numbers.split("_")[0]))
    if was == swapped:
        return
    for file in saved.iterdir():
        (here / file.name).unlink()
    for before, now in zip(was, swapped, strict=True):
        for file in saved.glob(f"*{before}.tensor.swp"):
            shutil.copyfile(file, here / file.name.replace(before, now))


def _sizes(optimizer: Any) -> list[int]:
    """Weights of every sub-group; a master that is in a file has none."""
    return [int(n) for n in optimizer.fp16_partitioned_groups_flat_numel]
