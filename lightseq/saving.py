"""What a run does about its checkpoints: room for copies, what one consists of, and how a failure ends the run."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightseq import checkpoint, state_files, weights
from lightseq.config import TrainConfig
from lightseq.engine import Engine
from lightseq.mesh import World, leave
from lightseq.prepare import Inputs
from lightseq.saver import SaveError, Saver
from lightseq.terminal import Terminal

PATIENCE_SECONDS = 60.0  # of a rank that fails with a save that is being written


class Saving:
    """The checkpoints of one run, on one rank."""

    def __init__(self, config: TrainConfig, inputs: Inputs, world: World, engine: Engine, terminal: Terminal) -> None:
        self._config, self._inputs, self._world = config, inputs, world
        self._engine, self._terminal = engine, terminal
        self._dtype = getattr(torch, config.compute_dtype)
        kept = (config.save_total_limit, config.keep_best)
        self._saver = Saver(Path(config.output_dir), world, *kept, config.async_save, 2 * config.step_timeout)

    def make_room(self) -> None:
        """Once the optimizer has its state: what a save will copy is known."""
        tensors = self._engine.tensors()
        note = self._saver.prepare(tensors) if tensors is not None else None
        if note is not None and self._world.is_main:
            self._terminal.note(note)

    def before_overwriting(self) -> None:
        self._saver.before_overwriting()

    @property
    def failed(self) -> bool:
        """Whether a save that was begun has failed here; the others will know once they have been asked."""
        return self._saver.failed

    def fail(self) -> None:
        """Ends the run on every rank, once they have agreed that one of them failed. Raises SaveError."""
        self._saver.wait()
        raise SaveError("a checkpoint could not be saved on another rank")

    def save(self, step: int, eval_loss: float | None) -> Path:
        """Begins to save the run as it is after `step`."""
        stream = self._inputs.stream
        data = {"places": stream.places_before(step), "examples": len(stream.examples), "seed": stream.seed}
        facts = {"data": data, "total_steps": self._inputs.total_steps, checkpoint.LOSS: eval_loss}
        facts |= {**self._engine.facts(), "config": self._config.to_json()}
        tensors = self._engine.tensors()
        if tensors is None:
            return self._saver.save_now(step, facts, self._write_now)
        return self._saver.save(step, facts, tensors, self._write_model)

    @contextmanager
    def around(self, ends: Callable[[], None]) -> Iterator[None]:
        """Around the steps: what is being saved at their end is saved, and if that fails all ranks say so and end.

        `ends` is called when the last step is over.
        """
        try:
            try:
                yield
            finally:
                ends()
            self._saver.wait()
        except SaveError as error:
            if self._world.is_main:
                self._terminal.close()
                print(f"error: {error}; make room, and go on with --resume_from_checkpoint auto", file=sys.stderr)
            raise SystemExit(1) from error
        except BaseException:
            # A rank that fails alone leaves the others' threads to write: let them finish what they can.
            if not self._saver.abandon(min(self._config.step_timeout / 2, PATIENCE_SECONDS)):
                traceback.print_exc()
                leave(1)
            raise
        self._saver.close()

    def _write_now(self, directory: Path) -> None:
        engine = self._engine
        source = self._inputs.weights
        weights.save_pretrained(engine.model, directory, self._dtype, source, engine.whole_parameters())
        engine.save_state(directory / checkpoint.STATE)

    def _write_model(self, directory: Path, state: Path) -> None:
        whole = state_files.whole_tensors(state, "model.")
        weights.save_pretrained(self._engine.model, directory, self._dtype, self._inputs.weights, whole)
