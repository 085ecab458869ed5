"""Training loop: takes the trainer's steps, and logs, evaluates and saves along the way."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch.profiler import record_function

from lightseq.checkpoint import checkpoints
from lightseq.distributed.preemption import StopRequest
from lightseq.training.evaluation import Perplexity
from lightseq.training.journal import Journal
from lightseq.training.metrics import MetricsFile
from lightseq.training.profiler import StepProfile
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
        self.journal = Journal(trainer, metrics)

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
            best = checkpoints.best_checkpoint(trainer.output_dir) if config.keep_best else None
            trainer.terminal.summary(saved, self._metrics.path, self.journal.losses, best, stopped_by)
        return stopped_by

    def _run_steps(self, stop: StopRequest, collect: Callable[[int], None]) -> tuple[Path | None, str | None]:
        """Returns the newest checkpoint and the name of the signal that stopped the run, if any."""
        trainer, config, saving = self.trainer, self.trainer.config, self._saving
        saved, last = trainer.inputs.resume_from, trainer.inputs.total_steps

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
            if done % config.logging_steps == 0 or saves or ends:
                self.journal.record(pending)  # one step late, so that the device stays busy while the host reads
                pending = stats.close(
                    done, counts_group=trainer.engine.dims.counts_batch, own_seconds=trainer.engine.stopwatch.seconds()
                )
                stats = self._new_stats()
            evaluates = self._due(done, config.eval_strategy, config.eval_steps) or (saves and config.keep_best)
            if evaluates or ends:
                self.journal.record(pending)
                pending = None
            if saving is not None and save_failed:
                saving.fail()
            if saving is not None and saving.can_prepare:
                with stats.paused():
                    saving.prepare()
            evaluation = self._evaluate(done, stats) if evaluates else None
            if saves and saving is not None:
                trainer.mark(done, "saving")
                with stats.paused(saves=True):
                    copies = saving.queue_copies()
                self.journal.record(pending)  # waits for the device, so the copies are queued first
                pending = None
                with stats.paused(saves=True):
                    saved = saving.save(done, copies, evaluation.loss if evaluation is not None else None)
            if ends:
                break
        profile.close()
        return saved, stopped_by

    def _evaluate(self, done: int, stats: StepStats) -> Perplexity:
        with stats.paused():
            found = self.trainer.evaluate()
            means = {"eval_loss": found.loss, "eval_perplexity": found.value, "eval_accuracy": found.accuracy}
            self.journal.log({"step": done, **means})
        return found

    def _new_stats(self) -> StepStats:
        engine = self.trainer.engine
        return StepStats(self.trainer.world, self._flops, engine.context.transport, engine.offload)

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
        adapters=trainer.adapter_parameters,
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
