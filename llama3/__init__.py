"""What is true of the Llama 3 family alone: its published architectures and the hub ids that have them."""

from lightseq.family import Family

from .presets import ALIASES, PRESETS

FAMILY = Family("llama3", PRESETS, ALIASES)

__all__ = ["FAMILY"]
