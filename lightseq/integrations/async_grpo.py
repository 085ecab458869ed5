"""TRL's AsyncGRPOTrainer with sequences split over ranks: a worker generates meanwhile, and rows are trees."""

from functools import partial
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer

from lightseq.integrations.accelerate import DATA, SEQUENCE
from lightseq.integrations.rollouts import replaced
from lightseq.integrations.trainer import SequenceParallel


class RowsOfRanks(async_grpo_trainer.DataCollatorForRollout):
    """TRL's collator, which repeats each group's row for every rank of the group."""

    def __init__(self, *args: Any, ranks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        return {name: x.repeat_interleave(self._ranks, 0) for name, x in super().torch_call(examples).items()}


class SequenceParallelAsync(SequenceParallel):
    """Mixin for TRL's AsyncGRPOTrainer. A group of ranks trains on a row; TRL's own rows and loss are used.

    Only attention changes: the table's, instead of TRL's on FlashAttention-3, which copies prefixes.
    """

    own_trl_trainers = ("AsyncGRPOTrainer",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._sequence_mesh is not None and self._epoch_stop_groups is not None:  # type: ignore[attr-defined]
            # TRL's upper limit of updates counts samples of every rank, and would end the epoch early.
            self.args.max_steps *= self._ranks_per_batch

    def create_accelerator_and_postprocess(self) -> None:
        sends = self.args.accelerator_config
        sends.dispatch_batches = False  # SequenceParallel refuses it, because ranks of a group would get different rows
        super().create_accelerator_and_postprocess()
        sends.dispatch_batches = self.accelerator.dataloader_config.dispatch_batches = True  # see `RowsOfRanks`
        if self._sequence_mesh is not None and self.args.max_inflight_tasks < 0:
            own = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
            self.args.max_inflight_tasks = max(self.args.max_staleness, 1) * own * self._sequence_mesh[DATA].size()

    def get_train_dataloader(self) -> Any:
        if self._sequence_mesh is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        collator = partial(RowsOfRanks, ranks=self._sequence_mesh[SEQUENCE].size())
        with self._as_groups(), replaced(vars(async_grpo_trainer), DataCollatorForRollout=collator):
            return super().get_train_dataloader()  # type: ignore[misc]

    def _trains_on_rollouts(self) -> bool:
        return True


class SequenceParallelAsyncGRPOTrainer(SequenceParallelAsync, AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer with sequences split over ranks, and shared prefixes computed once."""
