"""The contents of a run's checkpoints, and the wait for one that is being written when the run ends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightseq.checkpoint import checkpoints, state_files
from lightseq.checkpoint.saver import CheckpointSaver, SaveError
from lightseq.distributed.environment import report_error, secrets
from lightseq.distributed.mesh import exit_process
from lightseq.models import adapters, weights
from lightseq.utils.masking import mask_secrets

if TYPE_CHECKING:
    from lightseq.training.loop import Trainer

NOTED_SECONDS = 1.0  # of waiting for the save before
PATIENCE_SECONDS = 60.0  # of a rank that fails with a save that is being written


class Saving:
    """The checkpoints of one run, on one rank."""

    def __init__(self, trainer: Trainer) -> None:
        config = trainer.config
        self._config, self._inputs, self._world, self._engine = config, trainer.inputs, trainer.world, trainer.engine
        self._terminal, self._dtype = trainer.terminal, getattr(torch, config.compute_dtype)
        limits = (config.save_total_limit, config.keep_best)
        self._saver = CheckpointSaver(
            trainer.output_dir, trainer.world, *limits, config.async_save, 2 * config.step_timeout
        )
        self._prepared = False
        self._warned = False  # of saves that follow each other too closely

    @property
    def failed(self) -> bool:
        """True once a save that was begun has failed here; the others know after they have been asked."""
        return self._saver.failed

    def fail(self) -> None:
        """Ends the run on every rank, once they have agreed that one of them failed. Raises SaveError."""
        self._saver.wait()
        raise SaveError("a checkpoint could not be saved on another rank")

    def wait_before_update(self) -> None:
        """Waits until weights may change: they may still be on their way to the host."""
        self._saver.wait_before_update()

    @property
    def can_prepare(self) -> bool:
        """True once what a save will copy is known, until it is prepared.

        Where float16 overflows, the first steps are skipped, and the optimizer has no state yet.
        """
        always_known = self._config.optim == "sgd" or self._config.deepspeed is not None
        return not self._prepared and (always_known or bool(self._engine.optimizer.state))

    def prepare(self) -> None:
        self._prepared = True
        tensors = self._engine.tensors()
        note = self._saver.prepare(tensors) if tensors is not None else None
        if note is not None and self._world.is_main:
            self._terminal.note(note)

    def save(self, step: int, eval_loss: float | None) -> Path:
        self._wait_for_the_one_before(step)
        facts = {checkpoints.DATA: self._inputs.stream.state(step), "total_steps": self._inputs.total_steps}
        facts |= {**self._engine.facts(), "config": self._config.to_json(), checkpoints.LOSS: eval_loss}
        facts = mask_secrets(facts, secrets())
        tensors = self._engine.tensors()
        if tensors is None:
            return self._saver.save_now(step, facts, self._write_gathered, self._write_state)
        return self._saver.save(step, facts, tensors, self._write_model)

    def _wait_for_the_one_before(self, step: int) -> None:
        """Waits: there is room for one save's copies. Warns once of saves that come faster than the disk writes."""
        begin = time.monotonic()
        self._saver.wait()
        waited = time.monotonic() - begin
        if waited > NOTED_SECONDS and self._world.is_main and not self._warned:
            self._warned = True
            self._terminal.note(
                f"warning: step {step} waited {waited:.1f} s to be saved, for the checkpoint before it was still being "
                "written; save less often, or to a faster disk"
            )

    def _write_gathered(self, directory: Path) -> None:
        whole = self._engine.full_parameters()
        try:
            weights.save_pretrained(self._engine.model, directory, self._dtype, self._inputs.tokenizer, whole)
        finally:
            for _ in whole:  # all ranks gather each of them, whether or not the disk takes it
                pass

    def _write_state(self, directory: Path) -> None:
        self._engine.save_state(directory / checkpoints.STATE)

    def _write_model(self, directory: Path, state: Path) -> None:
        whole = state_files.read_full_tensors(state, "model.")
        if self._inputs.lora is not None:
            base, rope = self._config.model_name_or_path, adapters.changed_rope(self._config, self._inputs.model_config)
            return adapters.save(whole, directory, self._inputs.lora, base, self._inputs.tokenizer, rope)
        weights.save_pretrained(self._engine.model, directory, self._dtype, self._inputs.tokenizer, whole)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Encloses the steps: finishes what is being saved at their end; if that fails, all ranks say so and end."""
        try:
            yield
            self._saver.wait()
        except SaveError as error:
            if self._world.is_main:
                self._terminal.close()
            line = f"{error}; make room, and go on with --resume_from_checkpoint auto"
            report_error(line, prints=self._world.is_main)
            raise SystemExit(1) from error
        except BaseException:
            # A rank that fails alone leaves the others' threads to write: let them finish what they can.
            if not self._saver.wait_at_most(min(self._config.step_timeout / 2, PATIENCE_SECONDS)):
                traceback.print_exc()
                exit_process(1)
            raise
        self._saver.close()
