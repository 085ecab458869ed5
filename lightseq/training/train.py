"""Training on one rank, from the command line to the last step."""

import shlex
from pathlib import Path
from typing import TextIO

from lightseq.checkpoint import checkpoints, resume
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.environment import launcher_note, secrets
from lightseq.distributed.mesh import init_distributed, on_all_ranks
from lightseq.distributed.watchdog import Watchdog
from lightseq.models.presets import ModelFamily
from lightseq.training.engine import build_engine, resume_engine
from lightseq.training.errors import explained_silence
from lightseq.training.loop import Trainer, TrainingLoop
from lightseq.training.metrics import MIRRORS, MetricsFile, write_run
from lightseq.training.output_directory import (
    after_restart,
    another_run_wrote,
    begin,
    clear,
    continues,
    lock,
    set_earlier_aside,
)
from lightseq.training.run_info import describe, facts
from lightseq.training.setup import Inputs, prepare


def train(family: ModelFamily, words: list[str], program: str) -> None:
    """Trains with the flags in `words`. Exits with status 2 and one line on invalid input."""
    # Collectives time out later than the watchdog, which can name the rank at fault.
    timeout, stacks = _watchdog_settings(words, program)
    with init_distributed(2 * timeout) as world, explained_silence(), Watchdog(world, timeout, stacks) as watchdog:
        config = on_all_ranks(world, lambda: after_restart(parse(words, program), world))

        def find_inputs() -> Inputs:
            found = resume.find_checkpoint(Path(config.output_dir), config.resume_from_checkpoint, world)
            return on_all_ranks(world, lambda: prepare(config, family, world, found))

        inputs = find_inputs()
        engine = build_engine(config, inputs, world, watchdog)
        held = on_all_ranks(world, lambda: lock(Path(config.output_dir), world) if world.is_main else None)
        if another_run_wrote(held, config, inputs, world):
            inputs = find_inputs()
            resume_engine(engine, config, inputs, world, watchdog)
        trainer = Trainer(config, inputs, world, engine, watchdog)
        metrics = open_output(trainer, held, f"{program} {shlex.join(words)}")
        TrainingLoop(trainer, metrics).run()
        if held is not None:
            held.close()


def _watchdog_settings(words: list[str], program: str) -> tuple[float, Path]:
    """Returns the watchdog's timeout and directory, which are needed before ranks can communicate.

    Ignores invalid flags, which are reported once ranks can communicate.
    """
    try:
        config = parse(words, program)
    except ValueError:
        return TrainConfig.step_timeout, Path("hang")
    return config.step_timeout, Path(config.output_dir) / "hang"


def open_output(trainer: Trainer, held: TextIO | None, command: str) -> MetricsFile | None:
    """Writes run.json, opens metrics.jsonl and prints the settings, on rank 0, which holds the lock."""
    return on_all_ranks(trainer.world, lambda: _open(trainer, held, command) if held is not None else None)


def _open(trainer: Trainer, held: TextIO, command: str) -> MetricsFile:
    config, inputs, directory = trainer.config, trainer.inputs, trainer.output_dir
    goes_on, notes = continues(inputs.resume_from, directory), trainer.notes
    if not goes_on:
        notes += clear(directory) if config.overwrite_output_dir else set_earlier_aside(directory)
    begin(held, directory, trainer.world)
    checkpoints.remove_leftovers(directory, checkpoints.PARTIAL)
    for broken in inputs.passed_over:
        checkpoints.set_aside(broken, checkpoints.BROKEN)
    mirrors = (MIRRORS[config.report_to](directory),) if config.report_to != "none" else ()
    metrics = MetricsFile(directory, trainer.first_step, mirrors, goes_on)
    notes += metrics.notes + (launcher_note() if config.save_strategy != "no" else ())
    write_run(directory, facts(trainer, command, notes), secrets())
    trainer.terminal.header(describe(trainer), notes)
    return metrics
