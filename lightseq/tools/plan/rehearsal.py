"""A training step with everything but attention's arithmetic: whether a length fits is known in a minute or two.

python3 -m torch.distributed.run --nproc_per_node=4 -m lightseq rehearse --model_name_or_path llama3-8b --random_init \\
    --bf16 --model_max_length 1000000 --offload activations
"""

import dataclasses
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn

from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.data.token_directory import write_token_directory
from lightseq.distributed.environment import secrets
from lightseq.distributed.mesh import World, init_distributed, on_all_ranks
from lightseq.memory.planner.breakdown import GIB, Breakdown, advice
from lightseq.models.presets import ModelFamily
from lightseq.parallelize import MOST_WHOLE_TOKENS
from lightseq.training.loop import Trainer
from lightseq.training.metrics import hardware, versions
from lightseq.training.optimization import make_state
from lightseq.training.setup import Inputs, prepare
from lightseq.utils.masking import mask_secrets

LEAST_VOCABULARY = 32  # token ids that every model has
STAGES = ("setting up", "the optimizer's state", "the step")
RECORD, NOWHERE, PROGRAM = "rehearsal.jsonl", "nowhere", "lightseq rehearse"


@dataclass(frozen=True)
class Rehearsal:
    """What a step took in bytes: the peak of the rank that took most, the parts of rank 0.

    Without a GPU only what can be counted is known.
    """

    length: int
    ranks: int
    peak_bytes: int | None
    capacity_bytes: int | None
    offloaded_bytes: int
    seconds: float  # since the process began
    spent: dict[str, float]  # of these, on what
    parts: Breakdown
    host_counted: bool  # and not made

    def lines(self, config: TrainConfig) -> list[str]:
        spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.spent.items())
        how = ", counted" if self.host_counted else ""
        end = [
            f"host memory       {self.offloaded_bytes / GIB:9.2f} GiB a rank for what layers keep{how}",
            f"took {self.seconds:.0f} s: {spent}",
        ]
        if self.peak_bytes is None or self.capacity_bytes is None:
            return [
                *self.parts.lines(),
                *end,
                "without a GPU only these parts are known; rehearse where you will train",
            ]
        peak = f"{self.peak_bytes / GIB:.2f} of {self.capacity_bytes / GIB:.2f} GiB a GPU"
        return [*self.parts.lines(), *end, f"fits: {peak}", f"for more room: {advice(self.parts, config)}"]


def main(family: ModelFamily, argv: Sequence[str]) -> int:
    """`python3 -m lightseq rehearse FLAGS`, those of training; data is made up. Status 0 if it fits."""
    words = ["--data_path", NOWHERE, "--output_dir", NOWHERE, *argv]
    with init_distributed(TrainConfig.step_timeout) as world:
        asked = on_all_ranks(world, lambda: parse(words, PROGRAM))
        folder = shared_folder(world, "lightseq-rehearsal-")
        try:
            config = without_traces(asked, folder)
            inputs = on_all_ranks(world, lambda: made_up_inputs(config, family, world, folder))
            trainer = Trainer(config, inputs, world, f"{PROGRAM} {shlex.join(argv)}", rehearses=True)
            dist.barrier()  # every rank has opened what it reads, and what runs out of memory ends at once
        finally:
            if world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        result = rehearse(trainer)
        if world.is_main:
            print("\n".join(result.lines(asked)), flush=True)
            if asked.output_dir != NOWHERE:
                _write(Path(asked.output_dir), result, asked, world)
    return 0


def rehearse(trainer: Trainer) -> Rehearsal:
    """One step as all will be once the optimizer has its state. What runs out of memory ends as in training."""
    times, on_gpu = [psutil.Process().create_time(), time.time()], trainer.world.device.type == "cuda"
    # DeepSpeed makes its state with its engine; state on the host, which the update makes, leaves the GPU as it is.
    if trainer.inputs.deepspeed is None and (trainer.state_stays or not trainer.state_on_host):
        with trainer.explained_out_of_memory():
            make_state(trainer.engine.optimizer, only=trainer.world.device)
    times.append(time.time())
    taken = TakenByForward(trainer.loss_model, on_gpu)
    for step in range(1 if trainer.local_tokens > MOST_WHOLE_TOKENS else 2):  # in the first, kernels are compiled
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with trainer.explained_out_of_memory():
            trainer._step(step)
            if on_gpu:
                torch.cuda.synchronize()
    times.append(time.time())
    spent = dict(zip(STAGES, (b - a for a, b in pairwise(times)), strict=True))
    offload = trainer.engine.offload
    parts = trainer.memory_parts(taken.bytes if on_gpu else None)
    host = offload.memory.allocated_bytes if offload else 0
    worst = torch.tensor([parts.total, host], dtype=torch.float64, device=trainer.world.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    peak, host = (int(x) for x in worst.tolist())
    return Rehearsal(
        trainer.config.model_max_length, trainer.world.size, peak if on_gpu else None,
        hardware(trainer.world.device).get("memory_bytes"), host, times[-1] - times[0], spent, parts,
        offload is not None and offload.memory.counts_only,
    )  # fmt: skip


class TakenByForward:
    """Device memory that the forward pass leaves taken for the backward pass."""

    def __init__(self, loss_model: nn.Module, on_gpu: bool) -> None:
        self.bytes = self._before = 0
        if on_gpu:
            loss_model.register_forward_pre_hook(lambda *_: setattr(self, "_before", torch.cuda.memory_allocated()))
            loss_model.register_forward_hook(
                lambda *_: setattr(self, "bytes", torch.cuda.memory_allocated() - self._before)
            )


def shared_folder(world: World, prefix: str) -> Path:
    """A temporary directory of one name on every host."""
    name = [tempfile.mkdtemp(prefix=prefix) if world.is_main else ""]
    dist.broadcast_object_list(name)
    folder = Path(name[0])
    folder.mkdir(exist_ok=True)
    return folder


def without_traces(asked: TrainConfig, folder: Path) -> TrainConfig:
    """The run that was asked for, of two steps, which reads and leaves nothing."""
    return dataclasses.replace(
        asked, data_path=str(folder / "data"), output_dir=str(folder / "run"), max_steps=2, random_init=True,
        eval_strategy="no", eval_data_path=None, save_strategy="no", keep_best=False, report_to="none",
        profile_steps=None, profile_memory=False, resume_from_checkpoint=None,
        gradient_accumulation_steps=min(2, asked.gradient_accumulation_steps),
    )  # fmt: skip


def made_up_inputs(config: TrainConfig, family: ModelFamily, world: World, folder: Path) -> Inputs:
    """Data of one long document: every token has a target."""
    if world.local_rank == 0:
        ids = np.arange(config.model_max_length, dtype=np.int64) % LEAST_VOCABULARY
        write_token_directory(folder / "data", [ids], LEAST_VOCABULARY, dict)
    dist.barrier()
    return prepare(config, family, world)


def _write(directory: Path, result: Rehearsal, config: TrainConfig, world: World) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    record = {**asdict(result), "config": config.to_json(), "hardware": hardware(world.device), "versions": versions()}
    (directory / RECORD).write_text(json.dumps(mask_secrets(record, secrets())) + "\n")
