"""What a checkpoint of a run is made of, and how the run waits for one that is being written when it ends."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightseq import adapters, checkpoint, state_files, weights
from lightseq.config import TrainConfig
from lightseq.engine import Engine
from lightseq.mesh import World, leave
from lightseq.prepare import Inputs
from lightseq.saver import SaveError, Saver
from lightseq.terminal import Terminal

PATIENCE_SECONDS = 60.0  # of a rank that fails with a save that is being written


class Saving:
    """The checkpoints of one run; with `--save_strategy no`, none."""

    def __init__(self, config: TrainConfig, inputs: Inputs, world: World, engine: Engine, terminal: Terminal) -> None:
        self._config, self._inputs, self._world, self._engine = config, inputs, world, engine
        self._terminal = terminal
        self._saver: Saver | None = None
        if config.save_strategy != "no":
            kept = (config.save_total_limit, config.keep_best)
            patience = 2 * config.step_timeout
            self._saver = Saver(Path(config.output_dir), world, *kept, config.async_save, patience)

    @property
    def failed(self) -> bool:
        return self._saver is not None and self._saver.failed

    def wait(self) -> None:
        """Until nothing is being written. Raises SaveError, on all ranks the same, if that failed."""
        if self._saver is not None:
            self._saver.wait()

    def before_overwriting(self) -> None:
        """To be called before weights change: they may still be on their way to the host."""
        if self._saver is not None:
            self._saver.before_overwriting()

    def prepare(self) -> None:
        """Once the optimizer has its state: what a save will copy is known."""
        tensors = self._engine.tensors()
        note = self._saver.prepare(tensors) if self._saver is not None and tensors is not None else None
        if note is not None and self._world.is_main:
            self._terminal.note(note)

    def save(self, step: int, eval_loss: float | None) -> Path:
        assert self._saver is not None
        facts = {checkpoint.DATA: self._inputs.stream.state(step), "total_steps": self._inputs.total_steps}
        facts |= {**self._engine.facts(), "config": self._config.to_json(), checkpoint.LOSS: eval_loss}
        tensors = self._engine.tensors()
        if tensors is None:
            return self._saver.save_now(step, facts, self._write_now)
        return self._saver.save(step, facts, tensors, self._write_model)

    def _write_now(self, directory: Path) -> None:
        engine, dtype = self._engine, getattr(torch, self._config.compute_dtype)
        weights.save_pretrained(engine.model, directory, dtype, self._inputs.weights, engine.whole_parameters())
        engine.save_state(directory / checkpoint.STATE)

    def _write_model(self, directory: Path, state: Path) -> None:
        whole, dtype = state_files.whole_tensors(state, "model."), getattr(torch, self._config.compute_dtype)
        if self._inputs.lora is not None:
            base = self._config.model_name_or_path
            return adapters.save(whole, directory, self._inputs.lora, base, self._inputs.weights)
        weights.save_pretrained(self._engine.model, directory, dtype, self._inputs.weights, whole)

    @contextmanager
    def around(self) -> Iterator[None]:
        """The steps: what is being saved at their end is saved, and if that fails all ranks say so and end."""
        if self._saver is None:
            yield
            return
        try:
            yield
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
