"""The entry point for a Llama 2 in a user's own script: `from llama2.patch import patch; context = patch(model, group)`."""

from lightseq.hf import enable as patch

__all__ = ["patch"]
