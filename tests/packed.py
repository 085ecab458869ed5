"""Packed data of a file, as a run makes it of one source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightseq.data.packing import PackedExamples, open_windows_to_pack, pack
from lightseq.data.sources import ReadOptions


def open_packed(
    path: str | Path,
    length: int,
    vocab_size: int,
    tokenizer: Any = None,
    lazy: bool = False,
    progress: bool = True,
    read_options: ReadOptions | None = None,
) -> PackedExamples:
    windows = open_windows_to_pack(path, length, vocab_size, tokenizer, lazy, progress, read_options)
    return pack(path, windows, read_options is not None and read_options.shares_prefixes)
