"""What is true of the Llama 3 family alone: its published architectures and the hub ids that have them."""

from lightseq.models.presets import Family

from .presets import ALIASES, PRESETS, grown

FAMILY = Family("llama3", PRESETS, ALIASES, grown, sibling="llama2")

__all__ = ["FAMILY"]
