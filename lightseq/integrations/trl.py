"""TRL's trainers with sequences split over ranks: packed or padded, all weights or adapters.

class MySFT(SequenceParallel, SFTTrainer): ...
"""

from typing import Any

from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.data_utils import is_conversational, is_conversational_from_value

from lightseq.integrations.trainer import SequenceParallel


class _ChecksTemplate:
    """Mixin that refuses chats without a chat template before they are tokenized."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, *args: Any, **kwargs: Any) -> Any:
        row: dict[str, Any] = next(iter(dataset), {})
        is_formatted = "input_ids" in row or any(map(callable, (*args, *kwargs.values())))  # by formatting_func
        is_chat = not is_formatted and (is_conversational(row) or is_conversational_from_value(row))
        if is_chat and not getattr(processing_class, "chat_template", None):
            raise ValueError(
                f"the rows are chats ({', '.join(row)}), but the tokenizer has no chat template; set "
                "chat_template_path or tokenizer.chat_template, or take the tokenizer of a chat model"
            )
        return super()._prepare_dataset(dataset, processing_class, *args, **kwargs)  # type: ignore[misc]


class SequenceParallelSFTTrainer(SequenceParallel, _ChecksTemplate, SFTTrainer):
    """TRL's SFTTrainer with sequences split over ranks."""


class SequenceParallelDPOTrainer(SequenceParallel, _ChecksTemplate, DPOTrainer):
    """TRL's DPOTrainer with sequences split over ranks, in the reference model too."""


class SequenceParallelGRPOTrainer(SequenceParallel, GRPOTrainer):
    """TRL's GRPOTrainer with sequences split over ranks, which generate the completions together."""


class SequenceParallelRLOOTrainer(SequenceParallel, RLOOTrainer):
    """TRL's RLOOTrainer with sequences split over ranks, which generate the completions together."""


class SequenceParallelRewardTrainer(SequenceParallel, _ChecksTemplate, RewardTrainer):
    """TRL's RewardTrainer with sequences split over ranks. One rank has the score of a row's last token."""
