"""A training run on every rank, from the words of a command line to its last step, which is watched."""

import shlex
from pathlib import Path

from lightseq.checkpoint import resume
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import init_distributed, on_all_ranks
from lightseq.distributed.watchdog import Watchdog
from lightseq.models.presets import ModelFamily
from lightseq.training.errors import explained_silence
from lightseq.training.loop import Trainer
from lightseq.training.output_directory import after_restart
from lightseq.training.setup import Inputs, prepare


def train(family: ModelFamily, words: list[str], program: str) -> None:
    """Exits 2, with one line, on input that it refuses."""
    # The watchdog is first to speak: it knows who is to blame, where a collective only knows that it waited.
    timeout, stacks = _watched(words, program)
    with init_distributed(2 * timeout) as world, explained_silence():
        with Watchdog(world, timeout, stacks) as watchdog:
            config = on_all_ranks(world, lambda: after_restart(parse(words, program), world))

            def look() -> Inputs:
                found = resume.find_checkpoint(Path(config.output_dir), config.resume_from_checkpoint, world)
                return on_all_ranks(world, lambda: prepare(config, family, world, found))

            command = f"{program} {shlex.join(words)}"
            Trainer(config, look(), world, command, watchdog=watchdog, look_again=look).train()


def _watched(words: list[str], program: str) -> tuple[float, Path]:
    """The watchdog's timeout and folder, needed before the ranks can agree on anything.

    What is wrong with the words is said once they can.
    """
    try:
        config = parse(words, program)
    except ValueError:
        return TrainConfig.step_timeout, Path("hang")
    return config.step_timeout, Path(config.output_dir) / "hang"
