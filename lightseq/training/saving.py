"""Checkpoint saving in a run: contents of a checkpoint, and waiting for the last save when the run ends."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from lightseq.checkpoint import checkpoints, state_files
from lightseq.checkpoint.manifest import CARD
from lightseq.checkpoint.saver import CheckpointSaver, SaveError
from lightseq.config.optimizers import NO_STATE, OPTIMIZERS
from lightseq.data.tokenizer import ByteTokenizer
from lightseq.distributed.environment import secrets
from lightseq.distributed.world import exit_process, report_error
from lightseq.models import weights
from lightseq.models.tokenizer_files import CHAT_TEMPLATE, remove_chat_templates
from lightseq.parts import adapter_files
from lightseq.training.early_stopping import STOPPING, EarlyStopping
from lightseq.training.metrics import METRICS
from lightseq.training.trainer import Trainer
from lightseq.utils.masking import mask_secrets

FINISH_SECONDS = 60.0  # a failing rank waits this long for a running save


class Saving:
    """Checkpoints of a run, on one rank."""

    def __init__(self, trainer: Trainer) -> None:
        config = trainer.config
        self._config, self._inputs, self._world, self._engine = config, trainer.inputs, trainer.world, trainer.engine
        self._terminal, self._dtype = trainer.terminal, getattr(torch, config.compute_dtype)
        self._saver = CheckpointSaver(
            trainer.output_dir,
            trainer.world,
            records=trainer.output_dir / METRICS,
            retain=config.save_total_limit,
            retain_best=config.retains_best,
            in_background=config.async_save,
            timeout_seconds=2 * config.step_timeout,
        )
        self._prepared = False

    @property
    def failed(self) -> bool:
        """True once a save has failed on this rank. Other ranks learn of it from `StopRequest`."""
        return self._saver.failed

    def fail(self) -> None:
        """Raises SaveError, on every rank, after a save failed on any of them."""
        self._saver.wait()
        raise SaveError("a checkpoint could not be saved on another rank")

    def wait_before_update(self) -> None:
        """Waits until the copies to the host are complete, so that weights may change."""
        self._saver.wait_before_update()

    @property
    def can_prepare(self) -> bool:
        """True once all tensors of a checkpoint exist, until `prepare` is called.

        If float16 skips the first steps, the optimizer has no state until later.
        """
        always_known = OPTIMIZERS[self._config.optim] == NO_STATE or self._config.deepspeed is not None
        return not self._prepared and (always_known or bool(self._engine.optimizer.state))

    def prepare(self) -> None:
        """Allocates host memory for copies of the tensors."""
        self._prepared = True
        tensors = self._engine.tensors()
        note = self._saver.prepare(tensors) if tensors is not None else None
        if note is not None and self._world.is_main:
            self._terminal.note(note)

    def queue_copies(self) -> dict[str, Tensor] | None:
        """Starts copying the tensors to the host, and returns the copies for `save`.

        Waits for the previous save but not for the device. Returns None if the engine writes its own files. Raises
        SaveError.
        """
        tensors = self._engine.tensors()
        return self._saver.queue_copies(tensors) if tensors is not None else None

    def save(
        self,
        step: int,
        copies: dict[str, Tensor] | None,
        card: str,
        eval_loss: float | None,
        stopping: EarlyStopping | None = None,
    ) -> Path:
        """Starts or makes a save of `copies`. Returns the directory that it will be in. Raises SaveError.

        The records of all steps up to `step` must be written. `card`: text of the checkpoint's README.md.
        """
        facts = {checkpoints.DATA_POSITION: self._inputs.stream.state(step), "total_steps": self._inputs.total_steps}
        facts |= {**self._engine.facts(), "config": self._config.to_json(), checkpoints.EVAL_LOSS: eval_loss}
        facts |= {STOPPING: stopping.state()} if stopping is not None else {}
        facts = mask_secrets(facts, secrets())
        if copies is None:
            write = partial(self._write_gathered, card=card)
            return self._saver.save_now(step, facts, write, self._write_state)
        return self._saver.save(step, facts, copies, partial(self._write_model, card=card))

    def _write_gathered(self, directory: Path, card: str) -> None:
        whole = self._engine.full_parameters()
        try:
            self._write_pretrained(directory, chain(whole, weights.stored_buffers(self._engine.model).items()))
            self._write_tokenizer(directory)
            if self._world.is_main:
                (directory / CARD).write_text(card, encoding="utf-8")
        finally:
            for _ in whole:  # after a failed write, still takes part in the collectives of the other ranks
                pass

    def _write_state(self, directory: Path) -> None:
        self._engine.save_state(directory / checkpoints.STATE)

    def _write_model(self, directory: Path, state: Path, card: str) -> None:
        whole = state_files.read_full_tensors(state, state_files.PARAMETER)
        if self._inputs.lora is not None:
            base = self._config.model_name_or_path
            rope = adapter_files.changed_rope(self._config, self._inputs.model_config)
            adapter_files.save(
                whole, directory, self._inputs.lora, base, self._inputs.tokenizer, rope, self._inputs.packed_base
            )
        else:
            buffers = state_files.read_full_tensors(state, state_files.BUFFER)
            self._write_pretrained(directory, chain(whole, buffers))
        self._write_tokenizer(directory)
        (directory / CARD).write_text(card, encoding="utf-8")

    def _write_pretrained(self, directory: Path, whole: Iterable[tuple[str, Tensor]]) -> None:
        weights.save_pretrained(
            self._engine.model, directory, self._dtype, self._inputs.tokenizer, whole, trained_from=self._inputs.weights
        )

    def _write_tokenizer(self, directory: Path) -> None:
        """Writes the tokenizer of bytes, and --chat_template in place of the tokenizer's templates."""
        if not self._world.is_main:
            return
        if self._inputs.bytes_are_tokens:
            ByteTokenizer().as_transformers().save_pretrained(directory)
        if self._inputs.chat_template is not None:
            remove_chat_templates(directory)
            (directory / CHAT_TEMPLATE).write_text(self._inputs.chat_template, encoding="utf-8")

    @contextmanager
    def wait_at_exit(self) -> Iterator[None]:
        """Waits for the running save when the block ends. If a save failed, ends all ranks with one line."""
        try:
            yield
            self._saver.wait()
        except SaveError as error:
            if self._world.is_main:
                self._terminal.close()
            line = f"{error}; free some space, then resume with --resume_from_checkpoint auto"
            report_error(line, prints=self._world.is_main)
            raise SystemExit(1) from error
        except BaseException:
            # The saving threads of other ranks still need this one, so let them finish if they can.
            if not self._saver.wait_at_most(min(self._config.step_timeout / 2, FINISH_SECONDS)):
                traceback.print_exc()
                exit_process(1)
            raise
        self._saver.close()
