"""Exact training of language models on sequences longer than one GPU holds."""

__version__ = "0.1.0"
