"""Exact training of Llama 2 and Llama 3 on sequences longer than a GPU holds."""

__version__ = "0.1.0"
