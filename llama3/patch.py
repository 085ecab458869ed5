"""The entry point for a Llama 3 in a user's own script: `from llama3.patch import patch; context = patch(model, group)`."""

from lightseq.hf import enable as patch

__all__ = ["patch"]
