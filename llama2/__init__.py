"""Llama 2: published architectures and their hub ids."""

from .presets import FAMILY

__all__ = ["FAMILY"]
