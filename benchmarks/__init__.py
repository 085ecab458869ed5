"""Measures lightseq and its peers side by side, and writes what it measured as JSONL."""

import lightseq  # noqa: F401  before transformers, whose imports it keeps quiet
