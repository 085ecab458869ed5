"""Exact training of language models on sequences longer than one GPU holds."""

from importlib import import_module


def __getattr__(name: str) -> str:
    """Returns the installed version as `__version__`, which takes long to read."""
    if name == "__version__":
        return str(import_module("lightseq.utils.source").own_version())
    raise AttributeError(f"module 'lightseq' has no attribute {name!r}")
