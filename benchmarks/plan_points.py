"""Measures training steps that test the predictions of `python3 -m lightseq plan`.

python3 benchmarks/plan_points.py --gpus 1,2 --output outputs/plan-points.jsonl --minutes 9

Every point runs in separate processes. The same command continues with the points that are not in the file.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # instead of this folder, whose modules would hide packages

import json
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.command_line import Parser, listed, positive
from benchmarks.processes import Failed, run, torchrun
from benchmarks.records import append, provenance, read_lines
from benchmarks.step_models import model_of
from benchmarks.step_peers.peer import measure
from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.config.lengths import format_tokens
from lightseq.config.parser import print_error
from lightseq.config.train_config import TrainConfig
from lightseq.data.token_directory import write_token_directory
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World
from lightseq.memory.planner.rates import GIB
from lightseq.training.build import build_engine
from lightseq.training.inputs import prepare
from lightseq.training.trainer import Trainer

TIMEOUT_SECONDS = 600.0  # per point
FIXED = "--remat attention --layers_per_checkpoint 1 --tile_layers False --offload none"  # the planner decides nothing
TOKEN_IDS = 32  # different token ids in the data
WORKER = "--worker"  # first argument of a rank's process


@dataclass(frozen=True)
class Point:
    """One run to measure. `words` are training flags besides model, length, bfloat16 and the memory flags above."""

    name: str
    gpus: int
    model: str
    length: int
    words: str = ""
    layers: int | None = None  # cuts the model to its first layers; None: all
    warmup: int = 2
    steps: int = 3

    def flags(self, model: str, on_gpu: bool) -> list[str]:
        base = f"--model_name_or_path {model} --random_init --model_max_length {self.length} --learning_rate 1e-5"
        fixed = [*FIXED.split(), *(["--bf16", "--torch_compile"] if on_gpu else [])]
        return [*base.split(), *fixed, *shlex.split(self.words)]  # a repeated flag replaces the earlier one


K = 2**10
EIGHT_BIT = "--optim adamw_8bit"
AUTO_8BIT = f"--offload auto {EIGHT_BIT}"
BOTH_8BIT = f"--offload both {EIGHT_BIT}"
WITHIN_70 = "--offload auto --device_memory_budget 70"  # as on a GPU of 80 GB
WITHIN_70_8BIT = f"{WITHIN_70} {EIGHT_BIT}"
LEAST = f"{BOTH_8BIT} --layers_per_checkpoint 4 --remat full --tile_layers True"  # memory per GPU
TILED_8BIT = f"{BOTH_8BIT} --remat full --tile_layers True"
LORA = "--lora_rank 16"
POINTS = (
    Point("1b 32K", 2, "llama3.2-1b", 32 * K, steps=5),
    Point("1b 128K", 2, "llama3.2-1b", 128 * K),
    Point("8b 32K", 2, "llama3-8b", 32 * K),
    Point("8b, 8 layers, 128K", 2, "llama3-8b", 128 * K, layers=8, warmup=1, steps=2),
    Point("1b 128K, eager", 2, "llama3.2-1b", 128 * K, "--torch_compile False", warmup=1),
    Point("1b 128K, offload activations", 2, "llama3.2-1b", 128 * K, "--offload activations", warmup=1),
    Point("1b 32K, remat none", 2, "llama3.2-1b", 32 * K, "--remat none", steps=5),
    Point("llama2-7b 32K", 2, "llama2-7b", 32 * K),
    Point("1b 64K, one GPU", 1, "llama3.2-1b", 64 * K),
    Point("1b 256K", 2, "llama3.2-1b", 256 * K, warmup=1, steps=1),
    Point("3b 64K", 2, "llama3.2-3b", 64 * K),
    Point("8b 128K", 2, "llama3-8b", 128 * K, warmup=1, steps=1),
    Point("1b 128K, remat full", 2, "llama3.2-1b", 128 * K, "--remat full", warmup=1, steps=2),
    Point("1b 32K, two sequences", 2, "llama3.2-1b", 32 * K, "--sequence_parallel_size 1"),
    Point("1b 32K, accumulation 2", 2, "llama3.2-1b", 32 * K, "--gradient_accumulation_steps 2"),
    Point("1b 256K, 4 layers a checkpoint", 2, "llama3.2-1b", 256 * K, "--layers_per_checkpoint 4", None, 1, 1),
    Point("8b, 8 layers, 128K, offload both", 2, "llama3-8b", 128 * K, "--offload both", 8, 1, 2),
    Point("8b, 8 layers, 32K, eager, one GPU", 1, "llama3-8b", 32 * K, "--torch_compile False", 8, 1),
    Point("1b 64K, zigzag", 2, "llama3.2-1b", 64 * K, "--schedule zigzag"),
    Point("1b 16K, ddp", 2, "llama3.2-1b", 16 * K, '--fsdp ""', steps=5),
    Point("8b 128K, everything on the host, one GPU", 1, "llama3-8b", 128 * K, LEAST, None, 1, 1),
    Point("8b 128K, offload both, adamw_8bit, one GPU", 1, "llama3-8b", 128 * K, BOTH_8BIT, None, 1, 1),
    Point("8b 192K, offload auto, adamw_8bit, one GPU", 1, "llama3-8b", 192 * K, AUTO_8BIT, None, 1, 1),
    Point("8b 32K, offload both, adamw_8bit, one GPU", 1, "llama3-8b", 32 * K, BOTH_8BIT, None, 1, 2),
    Point("8b 32K, auto within 70 GiB, adamw_8bit, one GPU", 1, "llama3-8b", 32 * K, WITHIN_70_8BIT, None, 1, 2),
    Point("8b 128K, auto within 70 GiB, adamw_8bit, one GPU", 1, "llama3-8b", 128 * K, WITHIN_70_8BIT, None, 1, 1),
    Point("8b 16K, auto within 70 GiB, one GPU", 1, "llama3-8b", 16 * K, WITHIN_70, None, 1, 2),
    Point("8b LoRA 256K, offload auto, one GPU", 1, "llama3-8b", 256 * K, f"{LORA} --offload auto", None, 1, 2),
    Point("8b, 1 layer, 750K, adamw_8bit, one GPU", 1, "llama3-8b", 750 * K, TILED_8BIT, 1, 1, 1),
    Point("8b LoRA, 1 layer, 1M, one GPU", 1, "llama3-8b", 1024 * K, f"{LORA} --tile_layers True", 1, 1, 1),
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    if list(words[:1]) == [WORKER]:
        return one_rank(words[1:])
    try:
        flags = parser().parse_args(words)
    except ValueError as error:
        return print_error(error)
    done = {record["point"] for record in read_lines(flags.output) if not record["skipped"]}
    about, begin = provenance(flags.commit), time.monotonic()
    for point in POINTS:
        left = 60 * flags.minutes - (time.monotonic() - begin)
        if point.name in done or point.gpus not in flags.gpus or flags.points not in point.name:
            continue
        if left < 60:
            print(f"{point.name}: no time left; run the same command to continue here")
            break
        record = take(point, about, min(left, TIMEOUT_SECONDS))
        append(flags.output, record)
        print(line(record), flush=True)
    return 0


def parser() -> Parser:
    out = Parser("benchmarks/plan_points.py", __doc__)
    out.add_argument("--gpus", type=listed(positive), default="1,2", help="measure points for these numbers of GPUs")
    out.add_argument("--points", default="", metavar="TEXT", help="measure only points whose name contains this text")
    out.add_argument("--minutes", type=float, default=60.0, help="start no point after this time")
    out.add_output("outputs/plan-points.jsonl")
    return out


def take(point: Point, about: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Runs a point and returns its record. `skipped` has the reason if it failed."""
    measured: dict[str, Any] = {}
    skipped: str | None = None
    with tempfile.TemporaryDirectory() as folder:
        flags = point.flags(model_directory(point, Path(folder)), about["hardware"]["device"] != "cpu")
        flags += ["--data_path", f"{folder}/data", "--output_dir", f"{folder}/run", "--save_strategy", "no"]
        flags += ["--max_steps", str(point.warmup + point.steps)]
        write_token_directory(Path(folder) / "data", [np.arange(point.length) % TOKEN_IDS], TOKEN_IDS, dict)
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        worker = [str(Path(__file__).resolve()), WORKER, str(result), str(point.warmup), str(point.steps)]
        try:
            run([*torchrun(point.gpus), *worker, *flags], timeout, log)
            measured = json.loads(result.read_text())
        except Failed as why:
            skipped = str(why)
            print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), file=sys.stderr)
    facts = {"point" if key == "name" else key: value for key, value in asdict(point).items()}
    return {"benchmark": "plan points", **facts, "skipped": skipped, **measured, **about}


def model_directory(point: Point, folder: Path) -> str:
    """Returns the preset's name, or a directory with a config of fewer layers."""
    if point.layers is None:
        return point.model
    _, config = model_of(point.model, point.layers)
    config.save_pretrained(folder / "model")
    return str(folder / "model")


def line(record: Mapping[str, Any]) -> str:
    head = f"{record['point']} ({format_tokens(record['length'])} tokens, {record['gpus']} GPUs): "
    if record["skipped"]:
        return f"{head}skipped: {record['skipped']}"
    peak = record.get("peak_memory_allocated_bytes")
    return f"{head}{record['step_seconds']:.3f} s per step" + (f", peak {peak / GIB:.2f} GiB" if peak else "")


# ---- one rank -------------------------------------------------------------------------------------------------------


def one_rank(words: Sequence[str]) -> int:
    result, warmup, steps, *flags = words
    with init_distributed(TrainConfig.step_timeout) as world:
        config = on_all_ranks(world, lambda: parse(flags, "plan_points"))
        inputs = on_all_ranks(world, lambda: prepare(config, BOTH, world))
        trainer = Trainer(config, inputs, world, build_engine(config, inputs, world))
        measured = measure_steps(trainer, int(warmup), int(steps))
        if world.is_main:
            Path(result).write_text(json.dumps(measured) + "\n")
        dist.barrier()
    return 0


class ForwardMemory:
    """Measurement of the device memory that a forward pass leaves allocated for the backward pass."""

    def __init__(self, loss_model: nn.Module, on_gpu: bool) -> None:
        self.bytes = self._before = 0
        if on_gpu:
            loss_model.register_forward_pre_hook(lambda *_: setattr(self, "_before", torch.cuda.memory_allocated()))
            loss_model.register_forward_hook(
                lambda *_: setattr(self, "bytes", torch.cuda.memory_allocated() - self._before)
            )


def measure_steps(trainer: Trainer, warmup: int, steps: int) -> dict[str, Any]:
    """Returns seconds and bytes of a step, the highest over ranks. `parts` are those of rank 0."""
    device, context, offload = trainer.world.device, trainer.context, trainer.engine.offload
    taken = ForwardMemory(trainer.loss_model, device.type == "cuda")
    with trainer.out_of_memory_handler():
        first = measure(trainer.step, range(warmup), device)
        measured = measure(trainer.step, range(warmup, warmup + steps), device)
    buffers, memory = context.transport.buffer_bytes, {}
    if device.type == "cuda":
        free, capacity = torch.cuda.mem_get_info(device)
        allocated = measured["peak_memory_allocated_bytes"] + buffers + context.transport.graph_bytes
        memory = {
            "peak_memory_allocated_bytes": allocated,
            "peak_memory_reserved_bytes": measured["peak_memory_reserved_bytes"] + buffers,
            "attention_buffer_bytes": buffers,
            "between_steps_bytes": torch.cuda.memory_allocated(device),
            "outside_bytes": capacity - free - torch.cuda.memory_reserved(device) - buffers,
            "capacity_bytes": capacity,
        }
    host = {
        "offloaded_bytes": offload.memory.allocated_bytes if offload else 0,
        "host_rss_bytes": psutil.Process().memory_info().rss,
        "host_budget_bytes": offload.memory.limit_bytes if offload else 0,
        "host_cores": len(os.sched_getaffinity(0)),
    }
    layers, plan = trainer.model.config.num_hidden_layers, trainer.engine.memory
    return {
        "step_seconds": statistics.median(measured["step_seconds"]),
        "all_step_seconds": measured["step_seconds"],
        "losses": first["losses"] + measured["losses"],
        "parts": asdict(trainer.memory_parts(taken.bytes if device.type == "cuda" else None)),
        **worst({**memory, **host}, trainer.world),
        "state_on_host": trainer.engine.memory.state_on_host,
        "layers_with_state_on_gpu": plan.layers_with_state_on_gpu if plan.state_on_host else layers,
        "reshard_after_forward": plan.reshard_after_forward,
        "placement": plan.placement.layers if plan.placement else None,
        "tokens": trainer.inputs.stream.sequences_per_step * trainer.config.model_max_length,
        "schedule": context.schedule.name,
        "head_groups": context.schedule.head_groups_per_rank,
        "kernel": context.selection.kernel.name,
        "transport": context.transport.name,
        "config": trainer.config.to_json(),
    }


def worst(facts: Mapping[str, int], world: World) -> dict[str, int]:
    values = torch.tensor(list(facts.values()), dtype=torch.int64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(facts, values.tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
