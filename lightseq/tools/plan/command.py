"""Plans a training run from its own flags, without a GPU: whether it fits, how fast it is, how long it can be.

python3 -m lightseq plan --model_name_or_path llama3-8b --bf16 --torch_compile --model_max_length 1M \\
    --offload activations --gpus 8 --chip h200 --host_memory 1900
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig

from lightseq.config.command_line import parse, underscored
from lightseq.config.parser import Parser, refused
from lightseq.config.train_config import TrainConfig
from lightseq.kernels.base import KernelSpec
from lightseq.kernels.selection import why_unsupported
from lightseq.memory.planner.breakdown import GIB
from lightseq.memory.planner.plan import make_plan
from lightseq.memory.planner.rates import CHIPS, Chip, chip_named
from lightseq.memory.planner.remedies import faster, longest, remedies
from lightseq.memory.planner.run import CORES, Hardware, PlannedRun
from lightseq.models.architecture import examine, heads_of
from lightseq.models.family import apply_rope, context_warning, resolve
from lightseq.models.presets import Family
from lightseq.modules.fp8 import check_hardware
from lightseq.tools.plan import cluster_command
from lightseq.tools.plan.report import record, shown
from lightseq.training.setup import check_layers

PROGRAM, NOWHERE = "lightseq plan", "nowhere"
MOST_RANKS = 2048  # of a table, which takes half a minute and 4 GB
UNKNOWN = {
    "fp8": "--fp8 rowwise took 8% more memory than planned, tensorwise 2% less (one run each)",
    "deterministic": "--deterministic is taken to cost nothing",
}


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="python3 -m lightseq plan",
        usage="python3 -m lightseq plan --model_name_or_path NAME --model_max_length N --gpus N [--flag ...]",
        description="Predicts memory by category, the seconds of a step by part, where each layer's tensors wait, and "
        "the longest length that fits. Takes the flags of training (llama3/train.py --help) and these. With "
        "--attention: one attention layer over clusters of many sizes (plan --attention --help).",
        allow_abbrev=False,
    )
    out.add_argument("--gpus", type=int, required=True, help="GPUs of the run")
    out.add_argument("--gpus_per_host", type=int, default=8, help="(default: %(default)s)")
    out.add_argument("--chip", default="h200", help=f"{', '.join(CHIPS)} (default: %(default)s)")
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="of a GPU (default: the chip's)")
    out.add_argument(
        "--host_memory", type=float, metavar="GIB", help="of a host, for all its ranks (default: unbounded)"
    )
    out.add_argument(
        "--host_cores", type=int, metavar="N", help=f"of a host, for all its ranks (default: {CORES} a rank)"
    )
    out.add_argument("--json", action="store_true", help="print an object instead of tables")
    out.add_argument("--output", type=Path, metavar="FILE", help="add the object as a line to this file")
    return out


def main(family: Family, words: Sequence[str]) -> int:
    """Status 0 if the run fits, 1 if it does not, 2 with one line for what cannot be planned."""
    if "--attention" in words:
        return cluster_command.main(words)
    try:
        mine, others = parser().parse_known_args([underscored(word) for word in words])
        run = planned_run(family, mine, others)
        plan = make_plan(run)
        further, changes = longest(run), faster(run) if plan.fits else remedies(run)
        found = {"command": " ".join(["python3 -m lightseq plan", *words]), **record(plan, further, changes)}
        found["notes"] = notes(family, plan.run)
        if mine.output is not None:
            _add_line(mine.output, found)
    except (ValueError, OSError) as error:
        return refused(error)
    if mine.json:
        print(json.dumps(found, indent=2))
    else:
        Console(highlight=False).print(shown(plan, further, changes, found["notes"]))
    return 0 if plan.fits else 1


def _add_line(path: Path, found: dict[str, Any]) -> None:
    """Raises ValueError for a file that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written ({error.strerror}); name another file") from error


def planned_run(family: Family, mine: argparse.Namespace, others: Sequence[str]) -> PlannedRun:
    """Raises ValueError for what training would refuse, and for hardware that cannot be."""
    config = parse(["--data_path", NOWHERE, "--output_dir", NOWHERE, *others], PROGRAM)
    if config.deepspeed:
        raise ValueError(f"--deepspeed {config.deepspeed}: the plan knows FSDP2 alone; rehearse instead")
    source = resolve(family, config.model_name, random_init=True)  # the architecture is enough
    model = apply_rope(source.config, config.rope_theta, config.rope_scaling, config.model_max_length)
    check_layers(config, examine(model))
    for name in ("gpus", "gpus_per_host", "host_cores"):
        if (count := getattr(mine, name)) is not None and count < 1:
            raise ValueError(f"--{name} {count}: give at least 1")
    for name in ("gpu_memory", "host_memory"):
        if (given := getattr(mine, name)) is not None and not 0 < given < math.inf:
            raise ValueError(f"--{name} {given:g}: give a number of GiB above 0")
    chip = chip_named(mine.chip)
    _check_chip(config, model, chip)
    gpu = chip.memory_bytes if mine.gpu_memory is None else mine.gpu_memory * GIB
    host = float("inf") if mine.host_memory is None else mine.host_memory * GIB
    run = PlannedRun(model, config, Hardware(chip, mine.gpus, mine.gpus_per_host, gpu, host, mine.host_cores))
    if run.sequence_ranks > MOST_RANKS:
        raise ValueError(
            f"{run.sequence_ranks} ranks on one sequence take a table that is too large to make; "
            f"give --sequence_parallel_size, at most {MOST_RANKS}"
        )
    return run


def _check_chip(config: TrainConfig, model: PreTrainedConfig, chip: Chip) -> None:
    """As training would on such a GPU with every kernel installed."""
    if config.fp8 is not None and not config.fp8_emulate:
        check_hardware(config.fp8, chip.device, chip.capability)
    if config.kernel_name == "auto":
        return
    dtype = getattr(torch, config.compute_dtype)
    spec = KernelSpec("cuda", chip.capability, dtype, heads_of(model).dim, config.deterministic)
    if reason := why_unsupported(config.kernel_name, spec):
        raise ValueError(
            f"--kernel {config.kernel_name} cannot run on {chip.device}: {reason}; choose another, or auto"
        )


def notes(family: Family, run: PlannedRun) -> list[str]:
    found = [text for name, text in UNKNOWN.items() if getattr(run.config, name)]
    square = "needs memory and time in the square of a tile's length: not counted"
    if run.config.kernel_name == "reference":
        found.append(f"the reference kernel {square}")
    elif run.element > 2:
        found.append(
            f"attention in float32 has no fused kernel on a GPU, and the reference kernel {square}; add --bf16"
        )
    if run.config.transport == "gloo":
        found.append("gloo takes tensors through the host, which was not measured: times are those of nccl")
    if run.state_on_host and run.hardware.host_cores is None:
        found.append(
            f"an update on the host is reckoned with {CORES} cores a rank; say how many there are with --host_cores"
        )
    if run.config.packing != "none":
        found.append("packed documents need less attention than a sequence of one, which is what is counted")
    if run.hardware.chip is not CHIPS["h200"]:
        found.append(
            f"rates were measured on H200; {run.hardware.chip.device} is taken to reach the same shares of its peaks"
        )
    if run.hardware.gpus > run.hardware.gpus_per_host:
        found.append("what crosses hosts is assumed (400 Gb/s a GPU), not measured")
    scaled = bool(run.config.rope_scaling)
    before = resolve(family, run.config.model_name, random_init=True).config if scaled else None
    context = context_warning(run.model, run.config.model_max_length, before)
    return found + ([context] if context else [])
