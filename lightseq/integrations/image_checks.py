"""Checks of a trainer that takes images by a processor, before it trains."""

from typing import Any

from lightseq.hf.image_inputs import REMEDY, TOKEN_TYPES, forward_arguments, why_refused
from lightseq.integrations.rollouts import generates
from lightseq.models.decoder import transformers_model


def check_images(trainer: Any) -> None:
    """Raises ValueError if a trainer of TRL has images that cannot be split, or whose tokens it would mark wrongly."""
    columns = getattr(trainer.train_dataset, "column_names", None)
    has_images = isinstance(columns, list) and not {"image", "images"}.isdisjoint(columns)
    if not has_images or not getattr(trainer, "_is_vlm", False):
        return
    model = transformers_model(trainer.accelerator.unwrap_model(trainer.model))
    if (reason := why_refused(model)) is not None:
        raise ValueError(f"the rows have images, but {type(model).__name__} {reason}; {REMEDY}")
    side = trainer.processing_class.tokenizer.padding_side
    if generates(type(trainer)) and side != "left" and forward_arguments(model) & set(TOKEN_TYPES):
        raise ValueError(
            f"the processor pads on the {side}, but TRL pads prompts on the left, so that marks of image tokens would "
            "belong to other tokens; set processor.tokenizer.padding_side = 'left'"
        )
