"""Llama 3 in a user's own script: `patch(model, group)` is `lightseq.hf.enable`."""

from lightseq.hf import enable as patch

__all__ = ["patch"]
