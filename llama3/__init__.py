"""Llama 3: published architectures and their hub ids."""

from lightseq.models.presets import ModelFamily

from .presets import ALIASES, PRESETS, scaled_preset

FAMILY = ModelFamily("llama3", PRESETS, ALIASES, scaled_preset, sibling="llama2")

__all__ = ["FAMILY"]
