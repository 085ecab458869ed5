"""What is true of the Llama 2 family alone: its published architectures and the hub ids that have them."""

from lightseq.models.presets import ModelFamily

from .presets import ALIASES, PRESETS

FAMILY = ModelFamily("llama2", PRESETS, ALIASES, sibling="llama3")

__all__ = ["FAMILY"]
