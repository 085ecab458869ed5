"""Rehearsal: a training step without the attention computation, to see within minutes whether a length fits.

python3 -m torch.distributed.run --nproc_per_node=4 -m lightseq rehearse --model_name_or_path llama3-8b --random_init \\
    --bf16 --model_max_length 1000000 --offload activations
"""

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightseq import hf
from lightseq.attention import context
from lightseq.attention.context import SequenceContext
from lightseq.config.train_config import TrainConfig
from lightseq.data.token_directory import write_token_directory
from lightseq.distributed.agreement import from_rank_0, on_all_ranks
from lightseq.distributed.environment import secrets
from lightseq.distributed.host_memory import free_host_memory
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World
from lightseq.kernels.attention.base import KernelSpec
from lightseq.kernels.attention.elided import Elided
from lightseq.kernels.attention.selection import Selection, select
from lightseq.memory import recomputation
from lightseq.memory.offload import HostBufferPool
from lightseq.memory.planner.breakdown import GIB, Breakdown
from lightseq.memory.planner.packed_documents import read_documents
from lightseq.models.flops import total_parameters
from lightseq.models.presets import ModelFamily
from lightseq.modules import loss, mlp
from lightseq.tools.training_flags import parse_with_optional_paths, recorded_flags
from lightseq.training.build import build_engine
from lightseq.training.inputs import Inputs, prepare
from lightseq.training.machine import hardware, versions
from lightseq.training.optimization import make_state
from lightseq.training.output_directory import create_output_dir
from lightseq.training.run_info import describe_run
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import plural
from lightseq.utils.masking import mask_secrets

MIN_VOCABULARY = 32  # token ids that every model has
MAX_WHOLE_TOKENS = 2**18  # per rank; above, only the first tile is computed and host memory is only counted
MIN_TILE_TOKENS = 64  # smallest tile of a scaled-down run
STAGES = ("setting up", "the optimizer's state", "the step")
RECORD, PROGRAM = "rehearsal.jsonl", "lightseq rehearse"


@dataclass(frozen=True)
class Rehearsal:
    """Memory of a step: the peak of the worst rank and the breakdown of rank 0.

    Without a GPU, the peak is None and only parts that can be computed are known.
    """

    length: int
    ranks: int
    peak_bytes: int | None
    capacity_bytes: int | None
    offloaded_bytes: int
    seconds: float  # since the process started
    spent: dict[str, float]  # seconds by stage
    parts: Breakdown
    host_counted: bool  # host memory was counted, not allocated

    def lines(self) -> list[str]:
        spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.spent.items())
        how = ", counted" if self.host_counted else ""
        end = [
            f"host memory       {self.offloaded_bytes / GIB:9.2f} GiB per rank for activations{how}",
            f"took {self.seconds:.0f} s: {spent}",
        ]
        if self.peak_bytes is None or self.capacity_bytes is None:
            verdict = "without a GPU only these parts are known; rehearse on the hardware that you will train on"
        else:
            verdict = f"fits: {self.peak_bytes / GIB:.2f} of {self.capacity_bytes / GIB:.2f} GiB per GPU"
        return [*self.parts.lines(), *end, verdict]


def main(family: ModelFamily, argv: Sequence[str]) -> int:
    """Runs `python3 -m lightseq rehearse` with the flags of training and synthetic data. Returns 0 if it fits."""
    with init_distributed(TrainConfig.step_timeout) as world:
        training_config = on_all_ranks(world, lambda: parse_with_optional_paths(argv, PROGRAM))
        if training_config.output_dir:  # now, because a step can take minutes
            on_all_ranks(world, lambda: create_output_dir(Path(training_config.output_dir)))
        folder = shared_folder(world, "lightseq-rehearsal-")
        try:
            config = within_free_memory(rehearsal_config(training_config, folder), world)
            inputs = on_all_ranks(world, lambda: synthetic_inputs(config, family, world, folder))
            documents = on_all_ranks(world, lambda: read_documents(training_config, inputs.model_config))
            inputs = dataclasses.replace(inputs, documents=documents)
            dist.barrier()  # every rank has opened its files
        finally:
            if world.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        with rehearsal_patches(config.model_max_length, inputs.dims.sequence):
            engine = build_engine(config, inputs, world)
            trainer = Trainer(config, inputs, world, engine)
            if world.is_main:
                trainer.terminal.header(describe_trial(trainer, synthetic=True), trainer.notes)
            result = rehearse(trainer)
        if world.is_main:
            print("\n".join(result.lines()), flush=True)
            if training_config.output_dir:
                _write(Path(training_config.output_dir), result, training_config, world)
    return 0


def rehearse(trainer: Trainer) -> Rehearsal:
    """Takes a step with the optimizer state in place. Running out of memory ends the process as in training."""
    times, on_gpu = [psutil.Process().create_time(), time.time()], trainer.world.device.type == "cuda"
    # DeepSpeed's engine has created its state already, and state on the host does not affect the GPU.
    memory = trainer.engine.memory
    if trainer.inputs.deepspeed is None and (memory.layers_with_state_on_gpu or not memory.state_on_host):
        with trainer.out_of_memory_handler():
            make_state(trainer.engine.optimizer, only=trainer.world.device)
    times.append(time.time())
    taken = ForwardMemory(trainer.loss_model, on_gpu)
    for step in range(1 if trainer.local_tokens > MAX_WHOLE_TOKENS else 2):  # the first compiles kernels
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with trainer.out_of_memory_handler():
            trainer.step(step)
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
        offload is not None and isinstance(offload.memory, CountedMemory),
    )  # fmt: skip


@contextmanager
def rehearsal_patches(length: int, sequence_ranks: int) -> Iterator[None]:
    """Makes models built inside the block skip the attention computation and, for long sequences, all but one tile.

    Memory use is that of a real run, except that for long sequences host memory is counted instead of allocated. Tiled
    operations leave everything past the first tile uninitialized.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(context, "select", elided_selection))
        if length > MAX_WHOLE_TOKENS * sequence_ranks:
            stack.enter_context(patch.object(mlp, "tiles", first_tile))  # of MLPs, and of layers over tiles
            stack.enter_context(patch.object(loss, "chunks", first_tile))
            stack.enter_context(patch.object(recomputation, "HostBufferPool", CountedMemory))
        yield


def first_tile(tokens: int, size: int) -> Iterator[slice]:
    """Yields the rows of the first tile only."""
    yield slice(0, size)


class CountedMemory(HostBufferPool):
    """Host buffer pool that counts memory: all buffers of a size share one. Allocating 100 GiB can take a minute."""

    def __init__(self, limit_bytes: float, pinned: bool) -> None:
        super().__init__(limit_bytes, pinned)
        self._made: dict[int, Tensor] = {}

    def make(self, elements: int, dtype: torch.dtype) -> Tensor:
        size = elements * dtype.itemsize
        if size not in self._made:
            self._made[size] = super().make(size, torch.uint8)
        return self._made[size].view(dtype)


def elided_selection(name: str, spec: KernelSpec) -> Selection:
    """Selects a kernel and replaces its computation by zeros. Memory and communication stay the same."""
    found = select(name, spec)
    return dataclasses.replace(found, kernel=Elided(found.kernel))


@contextmanager
def scaled_down(length: int, full_length: int) -> Iterator[None]:
    """Gives a run of `length` tokens the schedule of a run of `full_length`, and proportionally smaller tiles."""
    enable: Callable[..., SequenceContext] = hf.enable

    def enable_at_full_length(*args: Any, **options: Any) -> SequenceContext:
        return enable(*args, **{**options, "length": full_length})

    def shrunk(tokens: int) -> int:
        return max(min(tokens, MIN_TILE_TOKENS), int(tokens / (full_length / length)))

    with (
        patch.object(hf, "enable", enable_at_full_length),
        patch.object(mlp, "TILE_TOKENS", shrunk(mlp.TILE_TOKENS)),
        patch.object(loss, "CHUNK_TOKENS", shrunk(loss.CHUNK_TOKENS)),
    ):
        yield


class ForwardMemory:
    """Measurement of the device memory that a forward pass leaves allocated for the backward pass."""

    def __init__(self, loss_model: nn.Module, on_gpu: bool) -> None:
        self.bytes = self._before = 0
        if on_gpu:
            loss_model.register_forward_pre_hook(lambda *_: setattr(self, "_before", torch.cuda.memory_allocated()))
            loss_model.register_forward_hook(
                lambda *_: setattr(self, "bytes", torch.cuda.memory_allocated() - self._before)
            )


def shared_folder(world: World, prefix: str) -> Path:
    """Creates a temporary directory with the same name on every host."""
    folder = Path(from_rank_0(tempfile.mkdtemp(prefix=prefix) if world.is_main else ""))
    folder.mkdir(exist_ok=True)
    return folder


def describe_trial(trainer: Trainer, synthetic: bool) -> dict[str, Any]:
    """Describes a run whose weights are random whatever the model's are, and whose data may be synthetic."""
    model, count = trainer.inputs.model_config, len(trainer.inputs.stream.examples)
    size = f"{total_parameters(model):,} parameters in {plural(model.num_hidden_layers, 'layer')}"
    facts = {**describe_run(trainer), "model": f"architecture of {trainer.config.model_name}, {size}, random weights"}
    return {**facts, "data": f"synthetic, {plural(count, 'example')}"} if synthetic else facts


def rehearsal_config(config: TrainConfig, folder: Path) -> TrainConfig:
    """Returns the config of a run of two steps that reads and writes nothing outside `folder`."""
    return dataclasses.replace(
        config, data_path=str(folder / "data"), output_dir=str(folder / "run"), max_steps=2, random_init=True,
        chat_template=None, text_column=TrainConfig.text_column, ignore_columns=None,
        eval_strategy="no", eval_data_path=None, max_eval_samples=None, save_strategy="no",
        keep_best=False, report_to="none", profile_steps=None, profile_memory=False, resume_from_checkpoint=None,
        gradient_accumulation_steps=min(2, config.gradient_accumulation_steps),
        lr_scheduler_type=TrainConfig.lr_scheduler_type, lr_scheduler_kwargs=None,  # planned for more steps
    )  # fmt: skip


def within_free_memory(config: TrainConfig, world: World) -> TrainConfig:
    """Limits --host_memory_budget to the free host memory, because memory that is only counted cannot run out."""
    if config.host_memory_budget is None:
        return config
    free = free_host_memory(world, share=1.0) / GIB
    return dataclasses.replace(config, host_memory_budget=min(config.host_memory_budget, free))


def synthetic_inputs(config: TrainConfig, family: ModelFamily, world: World, folder: Path) -> Inputs:
    """Prepares inputs with synthetic data: one long document in which every token has a target."""
    if world.local_rank == 0:
        ids = np.arange(config.model_max_length, dtype=np.int64) % MIN_VOCABULARY
        write_token_directory(folder / "data", [ids], MIN_VOCABULARY, dict)
    dist.barrier()
    return prepare(config, family, world)


def _write(directory: Path, result: Rehearsal, config: TrainConfig, world: World) -> None:
    record = {
        **asdict(result),
        "config": recorded_flags(config),
        "hardware": hardware(world.device),
        "versions": versions(),
    }
    (directory / RECORD).write_text(json.dumps(mask_secrets(record, secrets())) + "\n")
