"""Training on one rank, from the command line to the last step."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from lightseq.checkpoint import checkpoints, resume
from lightseq.config.command_line import launcher_flags_note, parse
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import from_rank_0, on_all_ranks
from lightseq.distributed.environment import launcher_note, secrets
from lightseq.distributed.start import init_distributed
from lightseq.distributed.watchdog import Watchdog
from lightseq.models.presets import ModelFamily
from lightseq.training.build import build_engine, resume_engine
from lightseq.training.errors import exit_on_no_response
from lightseq.training.hub_upload import create_repository, upload
from lightseq.training.inputs import Inputs, prepare
from lightseq.training.loop import TrainingLoop
from lightseq.training.metrics import MetricsFile, write_run
from lightseq.training.output_directory import (
    another_run_wrote,
    check_shared,
    continues_after_restart,
    lock_directory,
    lock_owner,
    mark_begun,
    name_unwritable,
    remove_run,
    resumes_in_place,
    set_earlier_aside,
)
from lightseq.training.run_info import describe_run, run_facts
from lightseq.training.setup_checks import check_same_flags
from lightseq.training.trackers import start_tracker
from lightseq.training.trainer import Trainer
from lightseq.utils.masking import mask_secrets


def train(family: ModelFamily, argv: list[str], program: str) -> str | None:
    """Trains with the flags in `argv`. Returns the name of the signal that stopped the run, if any.

    Exits with status 2 and one line on invalid input.
    """
    # Collectives time out later than the watchdog, which can name the rank at fault.
    timeout, stacks = _watchdog_settings(argv, program)
    with init_distributed(2 * timeout) as world, exit_on_no_response(), Watchdog(world, timeout, stacks) as watchdog:
        config = on_all_ranks(world, lambda: parse(argv, program))
        check_same_flags(config, world)
        output_dir = Path(config.output_dir)
        # Less than the timeout of collectives, in which other ranks wait.
        visible_seconds = min(checkpoints.VISIBLE_SECONDS, config.step_timeout / 2)
        # A shared file system may still show an older state of the directory to other hosts.
        if from_rank_0(on_all_ranks(world, lambda: continues_after_restart(output_dir, world))):
            config = replace(config, resume_from_checkpoint="True")

        def find_inputs() -> Inputs:
            resume_point = resume.find_checkpoint(output_dir, config.resume_from_checkpoint, world, visible_seconds)
            return on_all_ranks(world, lambda: prepare(config, family, world, resume_point))

        inputs = find_inputs()
        repository = on_all_ranks(world, lambda: create_repository(config) if world.is_main else None)
        engine = build_engine(config, inputs, world, watchdog)
        # Locking creates the directory, so it comes after everything that can fail without leaving a trace.
        lock_file = on_all_ranks(world, lambda: lock_directory(output_dir, world) if world.is_main else None)
        if config.save_strategy != "no":
            owner = from_rank_0(lock_owner(output_dir))
            on_all_ranks(world, lambda: check_shared(output_dir, owner, visible_seconds))
        if another_run_wrote(lock_file, config, inputs.resume_point, world):
            inputs = find_inputs()
            resume_engine(engine, config, inputs, world, watchdog)
        trainer = Trainer(config, inputs, world, engine, watchdog)
        command = f"{program} {shlex.join(argv)}"
        metrics = open_output(trainer, lock_file, command, launcher_flags_note(argv, world.local_size))
        stopped_by = TrainingLoop(trainer, metrics).run()
        if metrics is not None:
            metrics.close()
        if lock_file is not None:
            lock_file.close()
        # A launcher that sees a rank end after a signal may end the others, and rank 0 writes last.
        on_all_ranks(world, lambda: None)
    if repository is not None and stopped_by is None:
        upload(config, repository)
    return stopped_by


def _watchdog_settings(argv: list[str], program: str) -> tuple[float, Path]:
    """Returns the watchdog's timeout and directory, which are needed before ranks can communicate.

    Ignores invalid flags, which are reported once ranks can communicate.
    """
    try:
        config = parse(argv, program)
    except ValueError:
        return TrainConfig.step_timeout, Path("hang")
    return config.step_timeout, Path(config.output_dir) / "hang"


def open_output(
    trainer: Trainer, lock_file: TextIO | None, command: str, notes: tuple[str, ...] = ()
) -> MetricsFile | None:
    """Writes run.json, opens metrics.jsonl and prints the settings, on rank 0, which holds the lock."""

    def open_on_rank_0() -> MetricsFile | None:
        if lock_file is None:
            return None
        with name_unwritable(trainer.output_dir):
            return _open(trainer, lock_file, command, notes)

    return on_all_ranks(trainer.world, open_on_rank_0)


def _open(trainer: Trainer, lock_file: TextIO, command: str, notes: tuple[str, ...]) -> MetricsFile:
    config, inputs, directory = trainer.config, trainer.inputs, trainer.output_dir
    resumes, notes = resumes_in_place(inputs.resume_from, directory), trainer.notes + notes
    if not resumes:
        notes += remove_run(directory) if config.overwrite_output_dir else set_earlier_aside(directory)
    mark_begun(lock_file, directory, trainer.world)
    checkpoints.remove_leftovers(directory, checkpoints.PARTIAL)
    for broken, _ in inputs.resume_point.damaged:
        checkpoints.set_aside(broken, checkpoints.BROKEN)
    flags = mask_secrets(config.to_json(), secrets())
    trackers = (start_tracker(config.report_to, directory, flags),) if config.report_to != "none" else ()
    metrics = MetricsFile(directory, trainer.first_step, trackers, resumes)
    notes += metrics.notes + (launcher_note() if config.save_strategy != "no" else ())
    write_run(directory, run_facts(trainer, command, notes), secrets())
    trainer.terminal.header(describe_run(trainer), notes)
    return metrics
