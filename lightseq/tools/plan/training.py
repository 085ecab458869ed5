"""Plan of a training run from its flags, printed as tables or as a JSON object."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedConfig

from lightseq.architecture.family import apply_rope, check_weights_are_not_quantized, context_warning, resolve
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.context import one_rank_context
from lightseq.config.command_line import REQUIRED_BY_TOOLS, parse
from lightseq.config.train_config import TrainConfig
from lightseq.data.mixture import paths_of
from lightseq.data.sources import HUB_PREFIX
from lightseq.data.token_directory import META
from lightseq.distributed.parallel_dims import check_expert_size
from lightseq.kernels.attention.tile_kernel_choice import why_unsupported
from lightseq.models import bnb4
from lightseq.models.presets import ModelFamily
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.expert_parallel import split_of
from lightseq.parts.experts import experts_modules
from lightseq.parts.fp8 import check_hardware
from lightseq.parts.packed_base import bits_of, held_as_stored, is_in_mxfp4, mark
from lightseq.plan.advice import changes_to_fit, faster_change, longest
from lightseq.plan.breakdown import GIB
from lightseq.plan.document_lengths import read_document_lengths
from lightseq.plan.hardware import Hardware
from lightseq.plan.make_plan import make_plan
from lightseq.plan.rates import DEFAULT_CORES, MEASURED_ON, chip_named
from lightseq.plan.run import PlannedRun
from lightseq.schedule.auto import MAX_SEQUENCE_RANKS
from lightseq.tools.plan.answers import answers_of
from lightseq.tools.plan.report import record, tables
from lightseq.training.find_teacher import check_vocabularies, teacher_source
from lightseq.training.router_flags import make_routers
from lightseq.training.setup_checks import bfloat16_warning, check_layers, check_mixers, check_packing, kernel_specs
from lightseq.utils.files import open_output

PROGRAM = "lightseq plan"


def report(family: ModelFamily, own: argparse.Namespace, training: Sequence[str], command: str) -> bool:
    """Prints the plan of a run. Returns whether it fits. Raises ValueError for flags that cannot be planned."""
    run = planned_run(family, own, training)
    plan = make_plan(run)
    length, faster = longest(run), faster_change(run) if plan.fits else None
    changes = [faster] if faster else [] if plan.fits else changes_to_fit(run, length)
    found = {"command": command, **record(plan, length, changes)}
    found["notes"] = _notes(family, plan.run, may_offload=run.config.offload != "none")
    if own.documents is not None:
        found["notes"].insert(0, answers_of(own.documents).describe(run.config.model_max_length))
    if own.output is not None:
        _append(own.output, found)
    if own.json:
        print(json.dumps(found, indent=2))
    else:
        Console(highlight=False).print(tables(plan, length, changes, found["notes"]))
    return plan.fits


def _append(path: Path, found: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_output(path, appends=True) as file:
            file.write(json.dumps(found) + "\n")
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written ({error.strerror}); give another file") from error


def planned_run(family: ModelFamily, own: argparse.Namespace, training: Sequence[str]) -> PlannedRun:
    """Parses the flags. Raises ValueError for flags that training refuses, and for impossible hardware."""
    config = parse(training, PROGRAM, REQUIRED_BY_TOOLS)
    if config.deepspeed:
        raise ValueError(f"--deepspeed {config.deepspeed}: only FSDP2 can be planned; run train --max_steps 2 instead")
    source, form = resolve(family, config.model_name, random_init=True), None  # the architecture is enough
    if not config.random_init:
        check_weights_are_not_quantized(source, config.model_name)
        form = held_as_stored(config, source.stored_form)
        if form is not None and config.lora_rank is None:
            given = f"--model_name_or_path {config.model_name} in {bits_of(form)}"
            raise ValueError(f"{given} has weights that do not train; add --lora_rank")
        config = replace(config, load_in_4bit=config.load_in_4bit or form == bnb4.READ_FORMAT)
    model = apply_rope(source.config, config.rope_theta, config.rope_scaling, config.model_max_length)
    if form is not None:
        mark(model, form, source.left_out)
    check_layers(config, inspect_architecture(model))
    if config.packing != "none":
        check_packing(config.packing, model)
    _check_routers(config, model)
    for name in ("gpus", "gpus_per_host", "host_cores"):
        if (count := getattr(own, name)) is not None and count < 1:
            raise ValueError(f"--{name} {count}: give at least 1")
    for name in ("gpu_memory", "host_memory"):
        if (size := getattr(own, name)) is not None and not 0 < size < math.inf:
            raise ValueError(f"--{name} {size:g}: give a number of GiB above 0")
    chip = chip_named(own.chip)
    gpu = chip.memory_bytes if own.gpu_memory is None else own.gpu_memory * GIB
    host = math.inf if own.host_memory is None else own.host_memory * GIB
    hardware = Hardware(chip, own.gpus, own.gpus_per_host, gpu, host, own.host_cores)
    documents = read_document_lengths(config, model)
    if own.documents is not None:
        documents = answers_of(own.documents).lengths(config.model_max_length, inspect_architecture(model))
    run = PlannedRun(model, config, hardware, documents=documents, teacher=_teacher(family, config, model))
    _check_chip(run)
    check_mixers(config, run.architecture, run.sequence_ranks)
    _check_experts(run)
    if run.sequence_ranks > MAX_SEQUENCE_RANKS:
        raise ValueError(
            f"{run.sequence_ranks} ranks per sequence are too many to plan; "
            f"give --sequence_parallel_size of at most {MAX_SEQUENCE_RANKS}"
        )
    if config.compute_dtype == "float32" and config.kernel_name == "auto":
        raise ValueError(
            "attention in float32 has no fused kernel on a GPU, and the memory of the reference kernel is not planned; "
            "add --bf16, or --kernel reference to plan everything else"
        )
    return run


def _teacher(family: ModelFamily, config: TrainConfig, model: PreTrainedConfig) -> PreTrainedConfig | None:
    """Returns the config of --teacher. Raises ValueError if it has another vocabulary than the model."""
    if config.teacher is None:
        return None
    teacher = teacher_source(family, config.teacher, needs_weights=False).config
    check_vocabularies(config, model, teacher)
    return teacher


def _check_routers(config: TrainConfig, config_of_model: PreTrainedConfig) -> None:
    """Raises ValueError for flags of routers that the model does not have."""
    if config.router_aux_loss_coef or config.router_bias_update_rate:
        model = build_to_train(config_of_model)
        make_routers(config, model, one_rank_context())


def _check_experts(run: PlannedRun) -> None:
    """Raises ValueError if the experts do not split over the ranks as --expert_parallel_size says."""
    ranks, hardware = run.config.expert_ranks, run.hardware
    if ranks > 1:
        check_expert_size(ranks, hardware.ranks_per_host)
        for _, experts in experts_modules(build_to_train(run.model)):
            split_of(experts, ranks, hardware.gpus // ranks)


def _check_chip(run: PlannedRun) -> None:
    """Raises ValueError if training would refuse the flags on this GPU even with every kernel installed."""
    config, chip = run.config, run.hardware.chip
    if config.fp8 is not None and not config.fp8_emulate:
        check_hardware(config.fp8, chip.device, chip.capability)
    if config.kernel_name == "auto":
        return
    for spec in kernel_specs(config, run.model, "cuda", chip.capability, run.sequence_ranks):
        if reason := why_unsupported(config.kernel_name, spec):
            raise ValueError(
                f"--kernel {config.kernel_name} cannot run on {chip.device}: {reason}; choose another, or auto"
            )


def _notes(family: ModelFamily, run: PlannedRun, may_offload: bool) -> list[str]:
    """Returns the plan's assumptions and omissions, and the warning about the model's context length."""
    config, hardware = run.config, run.hardware
    notes = {
        "--fp8 rowwise took 8% more memory than planned, tensorwise 2% less (one run each)": config.fp8,
        "hosts are assumed to have unlimited memory, for the longest length too; --host_memory GIB says how much": (
            may_offload and math.isinf(hardware.host_memory)
        ),
        "--deterministic is assumed to cost nothing": config.deterministic,
        "weights in MXFP4 were not measured": is_in_mxfp4(run.model),
        "the reference kernel needs memory and time quadratic in a tile's length, which is not counted": (
            config.kernel_name == "reference"
        ),
        "gloo copies tensors through the host, which was not measured: times assume nccl": (config.transport == "gloo"),
        f"the update on the host is planned with {DEFAULT_CORES} cores per rank; --host_cores changes that": (
            run.state_on_host and hardware.host_cores is None
        ),
        "attention is counted as for one document per sequence; packed documents need less: give --data_path a token "
        "directory or .pkl to count them": config.packing != "none" and run.documents is None,
        f"--share_prefixes True is counted in token directories only, and not in {config.data_path}": (
            config.share_prefixes and run.documents is not None and not (Path(config.data_path) / META).exists()
        ),
        f"rates were measured on H200; {hardware.chip.device} is assumed to reach the same fractions of its peaks": (
            hardware.chip is not MEASURED_ON
        ),
        "bandwidth between hosts is assumed (400 Gb/s per GPU), not measured": (hardware.gpus > hardware.gpus_per_host),
    }
    notes |= {
        f"--data_path {path} is not here, so its documents are not counted": True
        for path in paths_of(config.data_path or "")
        if config.packing != "none" and not Path(path).exists() and not path.startswith(HUB_PREFIX)
    }
    before = resolve(family, config.model_name, random_init=True).config if config.rope_scaling else None
    longest = run.documents.longest_tokens if run.documents else config.model_max_length
    context = context_warning(run.model, longest, before)
    found = bfloat16_warning(config, hardware.chip.device, hardware.chip.capability)
    found += [note for note, applies in notes.items() if applies]
    return found + ([context] if context else [])
