"""Verifies that a distributed step gives the same results as one process, on the user's hardware and flags.

python3 -m torch.distributed.run --nproc_per_node=4 -m lightseq verify --model_name_or_path llama3-8b --bf16 \\
    --model_max_length 1000000 --schedule prefix

Compares loss and gradients of a few layers with transformers on one process, every kernel with float64, and every byte
of a transfer. Checks that all ranks have the same hardware and software. The exit status is 0 if everything passes.
"""

import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from lightseq.config.checks import ADAM_FLAGS
from lightseq.config.train_config import TrainConfig
from lightseq.data.sources import holds_rows
from lightseq.distributed.agreement import from_rank_0, on_all_ranks
from lightseq.distributed.environment import secrets
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World
from lightseq.kernels.attention.base import compute_capability
from lightseq.memory.planner.choice import plan_on_all_ranks
from lightseq.memory.planner.packed_documents import read_documents
from lightseq.models.architecture import with_layers
from lightseq.models.family import resolve
from lightseq.models.heads import heads_of
from lightseq.models.presets import ModelFamily
from lightseq.tools.plan.rehearsal import scaled_down, shared_folder
from lightseq.tools.training_flags import parse_with_optional_paths, recorded_flags
from lightseq.tools.verify.data import Sample, cut, documents_of, synthetic_samples
from lightseq.tools.verify.data import write as write_samples
from lightseq.tools.verify.kernels import kernel_rows
from lightseq.tools.verify.machines import flags_row, machine, machine_row, software, software_row
from lightseq.tools.verify.model import model_rows
from lightseq.tools.verify.report import SKIP, Row, all_passed, table, write
from lightseq.tools.verify.transport import transport_rows
from lightseq.training.inputs import Inputs, prepare
from lightseq.training.output_directory import create_output_dir
from lightseq.training.setup_checks import kernel_spec
from lightseq.utils.formatting import plural

RECORD, PROGRAM = "verify.jsonl", "lightseq verify"
TIMEOUT_SECONDS = 600.0  # of collectives, in case a rank dies
LAYERS = 2  # multiplied by --layers_per_checkpoint, which is limited to 2
MAX_TOKENS = {"cuda": 4096, "cpu": 256}  # per sequence
MAX_STEP_TOKENS = {"cuda": 32768, "cpu": 1024}  # over all sequences, which the plain model runs one by one
MIN_CHUNK = 4  # tokens
DOCUMENTS = 5  # per packed sequence of synthetic data, each up to a third of its length


def main(family: ModelFamily, argv: Sequence[str]) -> int:
    """Runs `python3 -m lightseq verify` with the flags of training. Without --data_path, uses synthetic data."""
    with init_distributed(TIMEOUT_SECONDS) as world:
        return verify(family, argv, world)


def verify(family: ModelFamily, argv: Sequence[str], world: World) -> int:
    """Runs all checks. Returns the exit status, the same on every rank: 0 if everything passed."""
    begin, command = time.perf_counter(), f"{PROGRAM} {shlex.join(argv)}"
    config = on_all_ranks(world, lambda: parse_with_optional_paths(argv, PROGRAM))
    path = on_all_ranks(world, lambda: _record_path(config, world))
    versions = software(world.device)
    rows = [flags_row(config.to_json()), software_row(versions), machine_row(machine(world.device))]
    if all_passed(rows[:1]):
        rows += _rows_of_run(config, family, world)
    else:
        rows.append(Row("other checks", SKIP, "not run: ranks with different flags could deadlock"))
    status = from_rank_0(0 if all_passed(rows) else 1)
    if world.is_main:
        seconds = time.perf_counter() - begin
        Console(file=sys.stdout, highlight=False).print(table(rows))
        print(f"{'all passed' if not status else 'FAILED'} in {seconds:.0f} s" + (f"  {path}" if path else ""))
        if path is not None:
            header = {"command": command, "seconds": seconds, "passed": not status}
            write(path, header | {"config": recorded_flags(config), "versions": versions}, rows, secrets())
        sys.stdout.flush()
    dist.barrier()  # the launcher may kill all ranks once one has ended, so wait for the table
    return status


def _rows_of_run(config: TrainConfig, family: ModelFamily, world: World) -> list[Row]:
    folder = shared_folder(world, "lightseq-verify-")
    try:
        config = _as_trained(config, family, world)
        short = on_all_ranks(world, lambda: shorten_run(config, folder, world))
        inputs, samples = _prepare_inputs(config, short, family, world)
        model = inputs.model_config
        with scaled_down(short.model_max_length, config.model_max_length):
            rows, transport, group = model_rows(short, inputs, world, samples, synthetic=not config.data_path)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    rows += transport_rows(transport, group, world)
    heads, kv_heads = heads_of(model).query, heads_of(model).key_value
    spec = kernel_spec(config, model, world.device.type, compute_capability(world.device))
    return rows + kernel_rows(spec, heads, kv_heads, world.device)


def _as_trained(config: TrainConfig, family: ModelFamily, world: World) -> TrainConfig:
    """Returns the config with the memory plan of training at the whole length, which the short run verifies."""
    if world.device.type != "cuda":
        return config.with_default_memory_flags()
    model = on_all_ranks(world, lambda: resolve(family, config.model_name, random_init=True).config)
    return plan_on_all_ranks(config, model, world, documents=read_documents(config, model)).run.config


def _record_path(config: TrainConfig, world: World) -> Path | None:
    """Returns the path of the record, if any. Creates its directory now, so that an unusable path fails early."""
    if not config.output_dir:
        return None
    if world.is_main:
        create_output_dir(Path(config.output_dir))
    return Path(config.output_dir) / RECORD


def shorten_run(config: TrainConfig, folder: Path, world: World) -> TrainConfig:
    """Returns the config of a single step on short sequences that changes no weights and writes no files."""
    for flag, value in (("--deepspeed", config.deepspeed), ("--fp8", config.fp8)):
        if value:
            raise ValueError(f"{flag} {value} is not supported by verify; leave it out")
    made = not config.data_path
    from_model = None if made or config.random_init or not holds_rows(config.data_path) else config.model_name_or_path
    short = dataclasses.replace(
        config, random_init=True, tokenizer=config.tokenizer or from_model, max_steps=1,
        data_path=str(folder / "data.pkl") if made else config.data_path, output_dir=str(folder / "run"),
        gradient_accumulation_steps=min(2, config.gradient_accumulation_steps),
        per_device_train_batch_size=min(2, config.per_device_train_batch_size),
        layers_per_checkpoint=min(2, config.group_size), optim="sgd", learning_rate=0.0, max_grad_norm=0.0,
        lr_scheduler_type="constant", lr_scheduler_kwargs=None, warmup_ratio=0.0, warmup_steps=0,
        eval_strategy="no", eval_data_path=None, max_eval_samples=None,
        save_strategy="no", report_to="none", profile_steps=None, profile_memory=False, resume_from_checkpoint=None,
        chat_template=None if made else config.chat_template,
        ignore_columns=None if made else config.ignore_columns,
        **{flag: getattr(TrainConfig, flag) for flag in ADAM_FLAGS},
    )  # fmt: skip
    kind, sequences = world.device.type, _sequences(short, world)
    most = min(config.model_max_length, MAX_TOKENS[kind], MAX_STEP_TOKENS[kind] // sequences)
    ranks = parallel_dims(world, config.sequence_parallel_size).sequence
    return dataclasses.replace(short, model_max_length=length_not_divisible_by_chunks(most, ranks))


def length_not_divisible_by_chunks(most: int, ranks: int) -> int:
    """Returns a length near `most` that is one token longer than a multiple of the number of chunks."""
    chunks = 2 * ranks  # per sequence, the most that any schedule has
    return max(most - (most - 1) % chunks, MIN_CHUNK * chunks + 1)


def _prepare_inputs(
    config: TrainConfig, short: TrainConfig, family: ModelFamily, world: World
) -> tuple[Inputs, list[list[Sample]]]:
    """Returns the inputs for a model of a few layers, and the documents of each sequence of its first step."""
    if config.lora_rank is not None:
        on_all_ranks(world, lambda: _refuse_adapters(config))
    made, length = not config.data_path, short.model_max_length
    samples: list[Sample] = []
    if made:
        model = on_all_ranks(world, lambda: resolve(family, short.model_name, True).config)
        packed = short.packing != "none"
        count = _sequences(short, world) * (DOCUMENTS if packed else 1)
        samples = synthetic_samples(count, length // 3 if packed else length, model.vocab_size)
        if world.local_rank == 0:
            write_samples(Path(short.data_path), samples)
        dist.barrier()
    inputs = on_all_ranks(world, lambda: prepare(short, family, world))
    stream = dataclasses.replace(inputs.stream, shuffle=False)
    few = with_layers(inputs.model_config, LAYERS * short.group_size)
    few.initializer_range = few.hidden_size**-0.5  # large enough to detect a wrong mask in narrow models
    summary = f"verifies {few.num_hidden_layers} layers and {length:,} of {config.model_max_length:,} tokens"
    notes = (f"{summary}, synthetic data",) if made else (summary, *inputs.notes)
    inputs = dataclasses.replace(inputs, model_config=few, stream=stream, notes=notes)
    if made and short.packing == "none":
        return inputs, [[sample] for sample in cut(samples, length)]
    sequences = documents_of(stream)
    on_all_ranks(world, lambda: _check_targets(short, sequences))
    return inputs, sequences


def _check_targets(config: TrainConfig, sequences: Sequence[Sequence[Sample]]) -> None:
    if not any(sample.valid_tokens for sequence in sequences for sample in sequence):
        compared = f"{plural(len(sequences), 'sequence')} of {config.model_max_length:,} tokens"
        raise ValueError(
            f"--data_path {config.data_path} has no target in the {compared} that verify compares; "
            "leave it out to use synthetic data"
        )


def _refuse_adapters(config: TrainConfig) -> None:
    raise ValueError(f"--lora_rank {config.lora_rank} is not supported by verify; leave it out")


def _sequences(config: TrainConfig, world: World) -> int:
    """Returns the number of sequences of one step over all ranks."""
    data_ranks = parallel_dims(world, config.sequence_parallel_size).data_ranks
    return config.gradient_accumulation_steps * config.per_device_train_batch_size * data_ranks
