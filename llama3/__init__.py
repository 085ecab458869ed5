"""What is true of the Llama 3 family alone: its published architectures and the hub ids that have them."""

from lightseq.models.presets import ModelFamily

from .presets import ALIASES, PRESETS, scaled_preset

FAMILY = ModelFamily("llama3", PRESETS, ALIASES, scaled_preset, sibling="llama2")

__all__ = ["FAMILY"]
