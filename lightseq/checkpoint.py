"""Saves a run so that it goes on as if never stopped, beside the model as a Hugging Face directory.

checkpoint-N/ opens with `from_pretrained`; checkpoint-N/state/ holds float32 master weights and optimizer state, split
as the ranks are (torch.distributed.checkpoint, or DeepSpeed's own files); trainer_state.json what fits in a line.
"""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from lightseq.optimization import set_rate

STATE, FACTS, LOSS, DATA = "state", "trainer_state.json", "eval_loss", "data"


def save(
    output_dir: Path,
    step: int,
    facts: dict[str, Any],
    keep: int | None,
    write_model: Callable[[Path], None],
    write_state: Callable[[Path], None],
    keep_best: bool = False,
) -> Path:
    """Writes checkpoint-`step` under a temporary name and renames it when whole. Every rank calls it.

    Of the older ones the newest stay, `keep` with this one, and with `keep_best` the one of the lowest evaluation loss.
    """
    final, partial = output_dir / f"checkpoint-{step}", output_dir / f"checkpoint-{step}.partial"
    main = dist.get_rank() == 0
    if main:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    write_model(partial)
    dist.barrier()
    write_state(partial / STATE)
    if main:
        (partial / FACTS).write_text(json.dumps({"step": step, **facts}) + "\n")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        kept = best(output_dir) if keep_best else None
        for old in checkpoints(output_dir)[: -keep if keep else 0]:
            if old != kept:
                shutil.rmtree(old)
    dist.barrier()
    return final


def save_state(directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(_tensors(model, optimizer), checkpoint_id=directory)


def check_engine(directory: Path, engine: str | None, ranks: int) -> None:
    """Raises ValueError if another engine wrote the state, or DeepSpeed did on another number of ranks."""
    facts = read_facts(directory)
    saved, saved_ranks = facts.get("engine"), facts.get("ranks")
    if saved == engine and (engine is None or saved_ranks == ranks):
        return
    was = f"{saved} on {saved_ranks} ranks" if saved else "FSDP2"
    raise ValueError(
        f"--resume_from_checkpoint {directory} was saved by {was}, this run is "
        f"{f'{engine} on {ranks}' if engine else 'FSDP2'}; resume as it was saved, or begin anew from its weights "
        f"with --model_name_or_path {directory}"
    )


def checkpoints(output_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted((p for p in found if (p / FACTS).is_file()), key=lambda p: int(p.name.split("-")[1]))


def best(output_dir: Path) -> Path | None:
    """The checkpoint of the lowest evaluation loss, the first of equals; a loss that is no number is none."""
    losses = {path: read_facts(path).get(LOSS) for path in checkpoints(output_dir)}
    known = {path: loss for path, loss in losses.items() if loss is not None and not math.isnan(loss)}
    return min(known, key=lambda path: known[path]) if known else None


def find(output_dir: Path, asked: str) -> Path:
    """The checkpoint that --resume_from_checkpoint names. Raises ValueError if there is none."""
    if asked == "True":
        found = checkpoints(output_dir)
        if not found:
            raise ValueError(f"--resume_from_checkpoint True: {output_dir} holds no whole checkpoint; leave it out")
        return found[-1]
    if not (Path(asked) / FACTS).is_file():
        raise ValueError(f"--resume_from_checkpoint {asked} holds no {FACTS}; name a checkpoint-N directory")
    return Path(asked)


def read_facts(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
    return facts


def restore(directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Fills weights and optimizer state in place, each rank its own part. Raises ValueError for another model's."""
    _make_state(optimizer)
    tensors = _tensors(model, optimizer)
    _check_fit(directory, tensors)
    try:
        dcp.load(tensors, checkpoint_id=directory / STATE)
    except CheckpointException as error:  # on all ranks alike
        if not any("block boundary" in str(failure[0]) for failure in error.failures.values()):
            raise
        raise ValueError(
            f"--resume_from_checkpoint {directory} holds 8-bit states whose blocks {dist.get_world_size()} ranks would "
            "cut apart; resume on as many ranks as it was saved on"
        ) from error


def _check_fit(directory: Path, tensors: dict[str, Tensor]) -> None:
    if not (directory / STATE / ".metadata").is_file():
        raise ValueError(f"--resume_from_checkpoint {directory} has lost its {STATE}/; name another checkpoint")
    saved = dcp.FileSystemReader(directory / STATE).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        size = list(getattr(saved.get(name), "size", ()))
        if name not in saved or size != list(tensor.shape):
            found = f"{name} of shape {size}" if name in saved else f"no {name}"
            raise ValueError(
                f"--resume_from_checkpoint {directory} holds {found}, this run has {list(tensor.shape)}; "
                "resume with the model and the optimizer that it was saved with"
            )
    without_place = [n for n in saved if n not in tensors]
    if without_place:
        raise ValueError(
            f"--resume_from_checkpoint {directory} holds {without_place[0]}, which this run has no place for; "
            "resume with the model and the optimizer that it was saved with"
        )


def _tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a run changes, by name; parameters that are tied appear once."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, Tensor] = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return found


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer has no state before its first step: one of zero gradients at rate 0 makes it and changes nothing."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)
