"""Llama 2: published architectures and their hub ids."""

from lightseq.models.presets import ModelFamily

from .presets import ALIASES, PRESETS

FAMILY = ModelFamily("llama2", PRESETS, ALIASES, sibling="llama3")

__all__ = ["FAMILY"]
