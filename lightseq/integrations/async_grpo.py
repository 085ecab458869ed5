"""TRL's AsyncGRPOTrainer with sequences split over ranks: a worker generates meanwhile, and rows are trees."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer

from lightseq.integrations.accelerate import DATA, SEQUENCE
from lightseq.integrations.rollouts import replaced
from lightseq.integrations.trainer import SequenceParallel
from lightseq.models.decoder import text_config
from lightseq.parts.recurrences import mixer_modules


class RowsOfRanks(async_grpo_trainer.DataCollatorForRollout):
    """TRL's collator, which repeats each group's row for every rank of the group."""

    def __init__(self, *args: Any, ranks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        return {name: x.repeat_interleave(self._ranks, 0) for name, x in super().torch_call(examples).items()}


class SequenceParallelAsync(SequenceParallel):
    """Mixin for TRL's AsyncGRPOTrainer. A group of ranks trains on a row; TRL's own rows and loss are used.

    Attention becomes the table's, instead of TRL's on FlashAttention-3, which copies prefixes. Recurrent layers, which
    TRL refuses, follow the tree, too.
    """

    own_trl_trainers = ("AsyncGRPOTrainer",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _layers_pass_trls_check():
            super().__init__(*args, **kwargs)
        if self._sequence_mesh is None and (mixers := mixer_modules(self.model)):
            raise ValueError(
                f"{type(mixers[0][0]).__name__} would scan across the samples of a row on one rank, where TRL computes "
                "alone; start two or more ranks with torchrun and sequence_parallel_size > 1"
            )
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


@contextmanager
def _layers_pass_trls_check() -> Iterator[None]:
    """Hides `layer_types` of hybrid models from TRL's constructor, which refuses other layers than attention.

    TRL reads them after it has made the model, and before it replaces the head. `hf.enable` checks the layers.
    """
    names = vars(async_grpo_trainer)
    make, add_head = names["create_model_from_path"], names["add_fused_lm_head"]
    hidden = list[tuple[Any, type]]()

    def make_without_types(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = make(*args, **kwargs)
        if mixer_modules(model):
            config = text_config(model.config)
            hidden.append((config, kind := type(config)))
            _set_class(config, type(kind.__name__, (kind,), {"__getattribute__": _without_layer_types}))
        return model

    def add_head_with_types(*args: Any, **kwargs: Any) -> Any:
        _restore(hidden)
        return add_head(*args, **kwargs)

    try:
        with replaced(names, create_model_from_path=make_without_types, add_fused_lm_head=add_head_with_types):
            yield
    finally:
        _restore(hidden)


def _without_layer_types(config: Any, name: str) -> Any:
    return None if name == "layer_types" else super(type(config), config).__getattribute__(name)


def _restore(hidden: list[tuple[Any, type]]) -> None:
    while hidden:
        _set_class(*hidden.pop())


def _set_class(config: Any, kind: type) -> None:
    object.__setattr__(config, "__class__", kind)  # a config checks what is set by name


class SequenceParallelAsyncGRPOTrainer(SequenceParallelAsync, AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer with sequences split over ranks, and shared prefixes computed once."""
