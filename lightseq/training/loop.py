"""Training loop: takes the trainer's steps, and logs, evaluates and saves along the way."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from lightseq.architecture.flops import count_adapter_parameters
from lightseq.checkpoint import checkpoints
from lightseq.distributed.agreement import from_rank_0
from lightseq.distributed.preemption import StopRequest
from lightseq.objectives.objective import Evaluation
from lightseq.training.early_stopping import early_stopping
from lightseq.training.errors import exit_on_write_error
from lightseq.training.journal import Journal
from lightseq.training.metrics import RUN, MetricsFile, write_end
from lightseq.training.model_card import model_card
from lightseq.training.profiler import StepProfile
from lightseq.training.samples import Samples
from lightseq.training.saving import Saving
from lightseq.training.step_stats import FlopCounter, StepStats
from lightseq.training.trainer import Trainer

COLLECT_STEPS = 50  # between garbage collections; a step leaves a few hundred objects in cycles, none a tensor


class TrainingLoop:
    """Training loop: takes steps, logs, evaluates and saves."""

    def __init__(self, trainer: Trainer, metrics: MetricsFile | None) -> None:
        """Prepares the loop. `metrics` is None except on rank 0."""
        self.trainer, self._metrics = trainer, metrics
        self._saving = Saving(trainer) if trainer.config.save_strategy != "no" else None
        self._flops = _flop_counter(trainer)
        self._done = trainer.first_step
        self.journal = Journal(trainer, metrics)
        resume_from = trainer.inputs.resume_from
        trainer_state = checkpoints.read_trainer_state(resume_from) if resume_from is not None else {}
        self._stopping = early_stopping(trainer.config, trainer_state)
        self._samples = Samples(trainer, trainer.inputs.prompts) if trainer.inputs.prompts is not None else None

    def run(self) -> str | None:
        """Runs until the last step, or until a signal stops the run after a step. Returns the name of the signal."""
        trainer, config = self.trainer, self.trainer.config
        wait_for_saves = self._saving.wait_at_exit() if self._saving is not None else nullcontext()
        with StopRequest() as stop, trainer.out_of_memory_handler(), wait_for_saves, synchronized_gc() as collect:
            try:
                saved, stopped_by = self._run_steps(stop, collect)
            finally:
                trainer.mark(None, "saving")
        trainer.terminal.close()
        if self._metrics is not None:
            best = checkpoints.best_checkpoint(trainer.output_dir) if config.retains_best else None
            self._write_end(stopped_by)
            losses, eval_losses = self.journal.losses, self.journal.eval_losses
            trainer.terminal.summary(saved, self._metrics.path, losses, best, stopped_by, eval_losses)
        return stopped_by

    def _run_steps(self, stop: StopRequest, collect: Callable[[int], None]) -> tuple[Path | None, str | None]:
        """Returns the newest checkpoint and the name of the signal that stopped the run, if any."""
        trainer, config, saving = self.trainer, self.trainer.config, self._saving
        saved, last = trainer.inputs.resume_from, trainer.inputs.total_steps
        if self._stops_early:  # the run that is resumed has ended
            last = trainer.first_step

        def before_update() -> None:
            if saving is not None:
                saving.wait_before_update()
            stop.begin_poll(saving is not None and saving.failed)  # overlaps with the host's launch of the update

        trainer.before_update.append(before_update)
        if trainer.first_step < last:
            trainer.try_longest()
        profile = StepProfile(config, trainer.output_dir, trainer.world, trainer.memory_parts)
        stats, pending, stopped_by = self._new_stats(), None, None
        for done in range(trainer.first_step + 1, last + 1):
            profile.before(done)
            with record_function(f"step {done}"):
                stats.results.append(trainer.step(done - 1))
            profile.after(done)
            collect(done)
            stopped_by, save_failed = stop.poll_result()
            ends = done == last or stopped_by is not None
            saves = self._due(done, config.save_strategy, config.save_steps) or (ends and saving is not None)
            evaluates = self._is_evaluation_due(done, saves, done == last)
            may_end = ends or (evaluates and self._stopping is not None)
            if done % config.logging_steps == 0 or saves or may_end:
                self.journal.record(pending)  # one step late, so that the device stays busy while the host reads
                pending = stats.close(
                    done, counts_group=trainer.engine.dims.counts_batch, own_seconds=trainer.engine.stopwatch.seconds()
                )
                stats = self._new_stats()
            if evaluates or ends:
                self.journal.record(pending)
                pending = None
            if saving is not None and save_failed:
                saving.fail()
            if saving is not None and saving.can_prepare:
                with stats.paused():
                    saving.prepare()
            evaluation = self._evaluate(done, stats) if evaluates else None
            if self._stops_early:
                ends, saves = True, saving is not None
            self._done = done
            if self._samples is not None and (evaluates or ends) and stopped_by is None:
                with stats.paused():
                    self._samples.write(done)
            if saves and saving is not None:
                trainer.mark(done, "saving")
                with stats.paused(saves=True):
                    copies = saving.queue_copies()
                self.journal.record(pending)  # waits for the device, so the copies are queued first
                pending = None
                with stats.paused(saves=True):
                    eval_loss = evaluation.loss if evaluation else None
                    card = model_card(trainer, done, self.journal.losses, eval_loss)
                    saved = saving.save(done, copies, card, eval_loss, self._stopping)
            if ends:
                break
        profile.close()
        return saved, stopped_by

    def _evaluate(self, done: int, stats: StepStats) -> Evaluation:
        with stats.paused():
            found = self.trainer.evaluate()
            counts: dict[str, Any] = {}
            if self._stopping is not None:
                self._stopping.observe(from_rank_0(found.loss))
                counts = {**self._stopping.state(), "stopped_early": self._stopping.stops}
            self.journal.record_evaluation(done, found, counts)
        return found

    @property
    def _stops_early(self) -> bool:
        return self._stopping is not None and self._stopping.stops

    def _is_evaluation_due(self, done: int, saves: bool, is_last: bool) -> bool:
        """Returns whether the run evaluates after `done` steps."""
        config = self.trainer.config
        due = self._due(done, config.eval_schedule, config.steps_per_evaluation)
        return due or (saves and config.retains_best) or (is_last and config.evaluates_at_end)

    def _write_end(self, stopped_by: str | None) -> None:
        """Records in run.json why the run ended, and says so if it is not the last step. Main rank only."""
        trainer = self.trainer
        reason = stopped_by or ("early_stopping" if self._stops_early else "completed")
        with exit_on_write_error(trainer.output_dir / RUN, trainer.world, trainer.terminal, self._saving is not None):
            write_end(trainer.output_dir, reason, self._done)
        if self._stops_early:
            trainer.terminal.note(f"stopped early after step {self._done}: {self._stopping}")

    def _new_stats(self) -> StepStats:
        trainer = self.trainer
        return StepStats(
            trainer.world,
            self._flops,
            trainer.context.transport,
            has_router_loss=trainer.router_loss.is_trained,
            offload=trainer.engine.offload,
            metrics=trainer.objective.metrics,
        )

    def _due(self, done: int, strategy: str, every: int) -> bool:
        """Returns whether a save or evaluation is due after `done` steps.

        An epoch ends with the step that reads its last example.
        """
        if strategy == "steps":
            return done % every == 0
        epochs = self.trainer.inputs.stream.epochs_after
        return strategy == "epoch" and int(epochs(done)) > int(epochs(done - 1))


def _flop_counter(trainer: Trainer) -> FlopCounter:
    config, placement = trainer.engine.config, trainer.engine.memory.placement
    return FlopCounter(
        model=trainer.inputs.model_config,
        remat=config.remat_policy,
        layers_per_checkpoint=config.group_size,
        tiled=config.tiles_layers,
        adapters=count_adapter_parameters(trainer.inputs.lora, trainer.inputs.model_config, active=True),
        fp8=config.fp8 is not None and not config.fp8_emulate,
        recomputed_layers=placement.recomputed_share if placement else 0.0,
    )


@contextmanager
def synchronized_gc() -> Iterator[Callable[[int], None]]:
    """Disables automatic garbage collection and yields a function that collects every COLLECT_STEPS steps.

    All ranks then collect after the same step, instead of each making the others wait. Objects that exist at the start,
    such as the model's modules, are frozen and never scanned again.
    """

    def collect(step: int) -> None:
        if step % COLLECT_STEPS == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
