"""Measures a model under sequence parallelism: its loss by position, or how well it finds what a long text hides.

python3 -m torch.distributed.run --nproc_per_node=4 -m lightseq evaluate --model_name_or_path outputs/books/checkpoint-1000 \\
    --data_path data/held-out --model_max_length 131072 --bf16 --output_dir outputs/books/evaluation
"""

import argparse
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from lightseq.config import TrainConfig, parse
from lightseq.data import BatchStream, require_target
from lightseq.family import Family
from lightseq.mesh import World, agree, is_main_process, start
from lightseq.metrics import hardware, versions
from lightseq.perplexity import POWERS, Bin, Perplexity, bin_starts, perplexity
from lightseq.prepare import FoundModel, Inputs, evaluation_stream, fetch, find_examples, find_model
from lightseq.trainer import Trainer

RECORD, PROGRAM = "evaluation.jsonl", "lightseq evaluate"
TASKS: Final = ("loss",)
# Flags of training that an evaluation has no use for; it says so where they are given.
UNUSED: Final = (
    *("eval_data_path", "resume_from_checkpoint", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "optim", "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler_type"),
    *("warmup_ratio", "warmup_steps", "remat", "layers_per_checkpoint", "gradient_checkpointing"),
    *("host_memory_budget", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps"),
    *("save_total_limit", "report_to", "profile_steps"),
)


@dataclass(frozen=True)
class Asked:
    """What the flags of this command ask for; None where one was not given."""

    task: str
    bins: str | None


@dataclass(frozen=True)
class Outcome:
    """What was found: a summary, an object a bin or cell, and what a person reads."""

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[str]


@dataclass(frozen=True)
class Task:
    """An evaluation whose inputs were found and checked; `run` does it on a model."""

    inputs: Inputs
    about: Mapping[str, str]  # for the header
    run: Callable[[Trainer], Outcome]


def main(family: Family, argv: Sequence[str]) -> int:
    """`python3 -m lightseq evaluate FLAGS`: its own and those of training."""
    words = list(argv)
    if {"-h", "--help"} & set(words):
        if is_main_process():
            print(parser().format_help())
        return 0
    with start(_timeout(words)) as world:
        asked, given = agree(world, lambda: flags(words))
        config = _without_training(given)
        task = agree(world, lambda: _prepare(asked, config, family, world))
        trainer = Trainer(config, task.inputs, world, None)
        if world.is_main:
            trainer.terminal.header(_header(trainer, task), [*task.inputs.notes, *_notes(given)])
        begin = time.perf_counter()
        outcome = task.run(trainer)
        seconds = time.perf_counter() - begin
        if world.is_main:
            about = _about(config, trainer, f"python3 -m {PROGRAM} {shlex.join(words)}", seconds)
            path = _write(Path(config.output_dir), {"evaluation": asked.task, **outcome.summary, **about}, outcome.rows)
            print("\n".join([*outcome.lines, f"records  {path}"]), flush=True)
    return 0


# ---- what is asked for ----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parser() -> argparse.ArgumentParser:
    out = _Parser(
        prog=f"python3 -m {PROGRAM}",
        usage=f"python3 -m {PROGRAM} --model_name_or_path DIR --data_path DATA --output_dir DIR [--flag value ...]",
        description="Measures a model under sequence parallelism; writes evaluation.jsonl.",
        epilog="All other flags are those of training (llama3/train.py --help): model, data, precision, parallelism.",
        allow_abbrev=False,
        add_help=False,
    )
    out.add_argument("--task", default="loss", help=f"{', '.join(TASKS)} (default: loss)")
    out.add_argument("--bins", help=f"of positions, for loss: {POWERS} (of two), or how many equal ones ({POWERS})")
    return out


def flags(words: Sequence[str]) -> tuple[Asked, TrainConfig]:
    """Raises ValueError with one line for what cannot be met."""
    own, rest = parser().parse_known_args(list(words))
    asked = Asked(**vars(own))
    if asked.task not in TASKS:
        raise ValueError(f"--task {asked.task!r} is unknown; choose from {', '.join(TASKS)}")
    return asked, parse(rest, PROGRAM)


def _timeout(words: Sequence[str]) -> float:
    """Needed before the ranks can agree on anything; what is wrong with the words is said once they can."""
    try:
        return flags(words)[1].step_timeout
    except ValueError:
        return TrainConfig.step_timeout


def _without_training(config: TrainConfig) -> TrainConfig:
    """Nothing waits for a backward pass."""
    offload = "optimizer" if config.offload in ("optimizer", "both") else "none"
    return dataclasses.replace(
        config, remat=None, gradient_checkpointing=None, layers_per_checkpoint=1, profile_steps=None, offload=offload,
        host_memory_budget=None,
    )  # fmt: skip


def _notes(config: TrainConfig) -> list[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    unused = [f"--{flag}" for flag in UNUSED if getattr(config, flag) != defaults[flag]]
    return [f"for training alone, not used here: {', '.join(unused)}"] if unused else []


# ---- a task: what it reads, does and says ---------------------------------------------------------------------------


def _prepare(asked: Asked, config: TrainConfig, family: Family, world: World) -> Task:
    """Everything that can be refused, looked at before any process waits for another and before anything is written."""
    record = Path(config.output_dir) / RECORD
    if record.exists() and not config.overwrite_output_dir:
        raise ValueError(f"{record} exists; name another --output_dir, or replace it with --overwrite_output_dir")
    model = find_model(config, family, world)
    task = _loss_task(asked, config, model, world)
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {config.output_dir} cannot be made ({error.strerror}); name another") from error
    return task


def _loss_task(asked: Asked, config: TrainConfig, model: FoundModel, world: World) -> Task:
    starts = bin_starts(asked.bins or POWERS, config.model_max_length)
    examples = find_examples(config.data_path, model, config, world)
    require_target(examples, config.data_path)
    stream = evaluation_stream(examples, config.model_max_length, config, world.size // model.sequence_size)

    def run(trainer: Trainer) -> Outcome:
        found = trainer.evaluate(starts, shows_progress=True)
        summary = {"loss": found.loss, "perplexity": found.value, "valid_tokens": found.valid_tokens}
        rows = [{**asdict(b), "perplexity": perplexity(b.loss)} for b in found.bins]
        return Outcome({**summary, "sequences": len(examples)}, rows, loss_lines(found))

    about = {"data": f"{config.data_path}, {len(examples):,} examples", "sequence": f"{stream.length:,} tokens"}
    return Task(inputs_of(model, stream, world), about, run)


def inputs_of(model: FoundModel, stream: BatchStream, world: World) -> Inputs:
    """Those of a run without a step."""
    data_rank = world.rank // model.sequence_size
    notes = stream.examples.notes + model.warnings
    return Inputs(model.config, fetch(model), stream, stream, 0, model.sequence_size, data_rank, None, notes)


def loss_lines(found: Perplexity) -> list[str]:
    """A table by position, and the whole."""
    rows = [["positions", "tokens", "loss", "perplexity"]]
    for b in found.bins:
        rows.append([span(b), f"{b.valid_tokens:,}", *numbers(b.loss)])
    rows.append(["all", f"{found.valid_tokens:,}", *numbers(found.loss)])
    return aligned(rows)


def span(b: Bin) -> str:
    return f"{b.first:,}" if b.first == b.last else f"{b.first:,} to {b.last:,}"


def numbers(loss: float | None) -> list[str]:
    value = perplexity(loss)
    return ["-" if loss is None else f"{loss:.4f}", "-" if value is None else f"{value:,.4g}"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns flush right, the first one flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


# ---- what is left behind --------------------------------------------------------------------------------------------


def _header(trainer: Trainer, task: Task) -> dict[str, Any]:
    known = trainer.describe()
    chosen = {name: known[name] for name in ("model", "ranks", "schedule", "kernel", "transport", "parameters")}
    return {
        "model": chosen.pop("model"),
        **task.about,
        **chosen,
        "precision": f"{trainer.config.compute_dtype} compute",
    }


def _about(config: TrainConfig, trainer: Trainer, command: str, seconds: float) -> dict[str, Any]:
    """What it takes to do this again."""
    return {
        "model": config.model_name_or_path, "data": config.data_path, "length": config.model_max_length,
        "ranks": trainer.world.size, "sequence_ranks": trainer.inputs.sequence_size,
        "schedule": trainer.context.schedule.name, "kernel": trainer.context.selection.kernel.name,
        "transport": trainer.context.transport.name, "seconds": seconds, "command": command,
        "hardware": hardware(trainer.world.device), "versions": versions(), "config": config.to_json(),
    }  # fmt: skip


def _write(directory: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    path = directory / RECORD
    path.write_text("".join(json.dumps(record) + "\n" for record in (summary, *rows)))
    return path
