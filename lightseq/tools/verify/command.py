"""Verifies that a distributed step gives the same results as one process, on the user's hardware and flags.

lightseq verify --model_name_or_path llama3-8b --bf16 --model_max_length 1000000 --schedule prefix

Compares loss and gradients of a few layers with transformers on one process, the attention kernel with float64, and
every byte of a transfer. Checks that all ranks have the same hardware and software. The exit status is 0 if everything
passes.
"""

import pickle
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedConfig

from lightseq.architecture.family import resolve
from lightseq.architecture.fewer_layers import places_of_kinds, with_layers_at
from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.command_line import REQUIRED_BY_TOOLS, parse
from lightseq.config.flags import DataConfig, MemoryConfig, ModelConfig, ParallelismConfig
from lightseq.config.train_config import TrainConfig
from lightseq.data.mixture import paths_of
from lightseq.data.sources import holds_rows
from lightseq.distributed.agreement import from_rank_0, on_all_ranks
from lightseq.distributed.environment import secrets
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World
from lightseq.kernels.attention.base import compute_capability
from lightseq.models.decoder import ids_of_text, text_config
from lightseq.models.presets import ModelFamily
from lightseq.plan.document_lengths import read_document_lengths
from lightseq.plan.make_plan import plan_on_all_ranks
from lightseq.plan.run import planned_run
from lightseq.tools.verify.data import Document, first_step, synthetic_rows
from lightseq.tools.verify.kernels import kernel_row
from lightseq.tools.verify.machines import machine_row, software
from lightseq.tools.verify.model import model_rows
from lightseq.tools.verify.report import SKIP, Row, all_passed, table, write
from lightseq.tools.verify.transport import transport_row
from lightseq.training.inputs import Inputs, prepare
from lightseq.training.output_directory import create_output_dir
from lightseq.training.setup_checks import kernel_specs
from lightseq.utils.formatting import plural

RECORD, PROGRAM = "verify.jsonl", "lightseq verify"
TIMEOUT_SECONDS = 600.0  # timeout of collectives, in case a rank dies
LAYERS = 2  # multiplied by --layers_per_checkpoint, which is limited to 2
MAX_KINDS = 4  # kinds of layers, each of which is verified even if that takes more layers
MAX_TOKENS = {"cuda": 4096, "cpu": 256}  # per sequence
MAX_STEP_TOKENS = {"cuda": 32768, "cpu": 1024}  # over all sequences, which the plain model runs one by one
MIN_CHUNK = 4  # tokens
DOCUMENTS = 5  # per packed sequence of synthetic data, each up to a third of its length
UNSUPPORTED: Final = ("deepspeed", "fp8", "lora_rank", "router_aux_loss_coef", "router_bias_update_rate")
# Flags that a verified step takes from the command line: these groups, and a few about training.
GROUPS: Final = (ModelConfig, DataConfig, ParallelismConfig, MemoryConfig)
TRAINING_FLAGS: Final = ("bf16", "fp16", "tf32", "torch_compile", "seed", "deterministic")


def main(family: ModelFamily, argv: Sequence[str]) -> int:
    """Runs `lightseq verify` with the flags of training. Without --data_path, uses synthetic data."""
    with init_distributed(TIMEOUT_SECONDS) as world:
        return verify(family, argv, world)


def verify(family: ModelFamily, argv: Sequence[str], world: World) -> int:
    """Runs all checks. Returns the exit status, the same on every rank: 0 if everything passed."""
    begin, command = time.perf_counter(), f"{PROGRAM} {shlex.join(argv)}"
    config = on_all_ranks(world, lambda: _parse(argv))
    path = Path(config.output_dir) / RECORD if config.output_dir else None
    if path is not None:  # now, so that an unusable path fails early
        on_all_ranks(world, lambda: create_output_dir(path.parent) if world.is_main else None)
    rows = [machine_row(config, world.device)]
    if all_passed(rows):
        rows += _rows_of_run(config, family, world)
    else:
        rows.append(Row("other checks", SKIP, "not run: ranks that differ could wait for each other for ever"))
    status = from_rank_0(0 if all_passed(rows) else 1)
    if world.is_main:
        seconds = time.perf_counter() - begin
        Console(file=sys.stdout, highlight=False).print(table(rows))
        print(f"{'all passed' if not status else 'FAILED'} in {seconds:.0f} s" + (f"  {path}" if path else ""))
        if path is not None:
            header = {"command": command, "seconds": seconds, "passed": not status}
            facts = {"config": config.to_json(), "versions": software(world.device)}
            write(path, header | facts, rows, secrets())
        sys.stdout.flush()
    dist.barrier()  # the launcher may kill all ranks once one has ended, so wait for the table
    return status


def _parse(argv: Sequence[str]) -> TrainConfig:
    config = parse(argv, PROGRAM, REQUIRED_BY_TOOLS)
    for flag in UNSUPPORTED:
        if value := getattr(config, flag):
            raise ValueError(f"--{flag} {value} is not supported by verify; leave it out")
    return config


def _rows_of_run(config: TrainConfig, family: ModelFamily, world: World) -> list[Row]:
    with TemporaryDirectory(prefix="lightseq-verify-") as folder:
        step = one_step(_with_memory_plan(config, family, world), Path(folder))
        inputs, sequences = _prepare_inputs(step, not config.data_path, family, world)
        rows, context = model_rows(step, inputs, world, sequences)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    rows.append(transport_row(context.transport, context.group, world.device))
    specs = kernel_specs(
        config, inputs.model_config, world.device.type, compute_capability(world.device), context.layout.world
    )
    attentions = inspect_architecture(inputs.model_config).attentions
    for spec in specs:
        heads = next(x.heads for x in attentions if (x.heads.dim, x.heads.value_dim) == (spec.head_dim, spec.value_dim))
        kernel = context.kernels.of(heads.dim, heads.value_dim).kernel
        rows.append(kernel_row(kernel, spec, heads.query // heads.key_value, world.device))
    return rows


def _with_memory_plan(config: TrainConfig, family: ModelFamily, world: World) -> TrainConfig:
    """Returns the config with the memory plan of training, for all layers."""
    if world.device.type != "cuda":
        return config.with_default_memory_flags()
    model = on_all_ranks(world, lambda: resolve(family, config.model_name, random_init=True).config)
    run = planned_run(config, model, world, read_document_lengths(config, model))
    return plan_on_all_ranks(run, world).run.config


def one_step(config: TrainConfig, folder: Path) -> TrainConfig:
    """Returns the config of a step that draws random weights, and writes nothing outside `folder`."""
    names = [field.name for group in GROUPS for field in fields(group)]
    flags: dict[str, Any] = {name: getattr(config, name) for name in (*names, *TRAINING_FLAGS)}
    for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        flags[name] = min(2, getattr(config, name))
    flags["layers_per_checkpoint"] = min(2, config.group_size)
    flags |= {"random_init": True, "eval_data_path": None, "eval_fraction": None, "max_eval_samples": None}
    if not config.data_path:
        unused = ("chat_template", "ignore_columns", "columns")
        flags |= {"data_path": str(folder / "synthetic.pkl"), **dict.fromkeys(unused)}
        flags |= {"text_column": TrainConfig.text_column, "max_train_samples": None}
    elif not config.random_init and any(map(holds_rows, paths_of(config.data_path))):
        flags["tokenizer"] = config.tokenizer or config.model_name_or_path
    flags |= {"output_dir": str(folder / "run"), "max_steps": 1, "save_strategy": "no"}
    return TrainConfig(**flags, optim="sgd", max_grad_norm=0.0)


def length_not_divisible_by_chunks(most: int, ranks: int) -> int:
    """Returns a length near `most` that is one token longer than a multiple of the number of chunks."""
    chunks = 2 * ranks  # per sequence, the most that any schedule has
    return max(most - (most - 1) % chunks, MIN_CHUNK * chunks + 1)


def _prepare_inputs(
    config: TrainConfig, synthetic: bool, family: ModelFamily, world: World
) -> tuple[Inputs, list[list[Document]]]:
    """Returns the inputs for a model of a few layers, and the documents of each sequence of its first step."""
    dims, kind = on_all_ranks(world, lambda: parallel_dims(world, config.sequence_parallel_size)), world.device.type
    count = config.gradient_accumulation_steps * config.per_device_train_batch_size * dims.data_ranks
    most = min(config.model_max_length, MAX_TOKENS[kind], MAX_STEP_TOKENS[kind] // count)
    length = length_not_divisible_by_chunks(most, dims.sequence)
    if synthetic:
        model = on_all_ranks(world, lambda: resolve(family, config.model_name, random_init=True).config)
        packed = config.packing != "none"
        rows = synthetic_rows(
            count * (DOCUMENTS if packed else 1), length // 3 if packed else length, ids_of_text(model)
        )
        Path(config.data_path).write_bytes(pickle.dumps(rows))
    inputs = on_all_ranks(
        world, lambda: prepare(replace(config, model_max_length=length, share_prefixes=False), family, world)
    )
    stream = replace(inputs.stream, shuffle=False)
    few = _with_few_layers(inputs.model_config, config.group_size)
    text = text_config(few)
    text.initializer_range = text.hidden_size**-0.5  # large enough to detect a wrong mask in narrow models
    note = f"verifies {text.num_hidden_layers} layers and {length:,} of {config.model_max_length:,} tokens"
    sequences = first_step(stream)
    on_all_ranks(world, lambda: _check_targets(config, length, sequences))
    return replace(
        inputs, model_config=few, stream=stream, notes=(note, *(() if synthetic else inputs.notes))
    ), sequences


def _with_few_layers(model: PreTrainedConfig, group_size: int) -> PreTrainedConfig:
    """Returns a config with few layers, and if possible with one of every kind."""
    kinds = min(MAX_KINDS, len(inspect_architecture(model).kinds))
    return with_layers_at(model, places_of_kinds(model, max(LAYERS, kinds + kinds % 2) * group_size))


def _check_targets(config: TrainConfig, length: int, sequences: Sequence[Sequence[Document]]) -> None:
    if not any(document.valid_tokens for sequence in sequences for document in sequence):
        compared = f"{plural(len(sequences), 'sequence')} of {length:,} tokens"
        raise ValueError(
            f"--data_path {config.data_path} has no target in the {compared} that verify compares; "
            "leave it out to use synthetic data"
        )
