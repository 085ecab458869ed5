"""Texts tokenized on access: a run begins at once, and texts longer than a sequence are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightseq.data.examples import Example, check_ids, window
from lightseq.data.sources import get_text, read_rows
from lightseq.data.targets import EMPTY
from lightseq.data.token_cache import SkippedRows, skipped_notes
from lightseq.data.token_directory import ReadOptions
from lightseq.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class LazyTextExamples:
    """Texts in memory, tokenized on access; a large corpus belongs in a token directory."""

    texts: Sequence[tuple[str, str]]  # where each stands, and what it says
    tokenizer: Tokenizer
    length: int
    vocab_size: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Example:
        where, text = self.texts[index]
        ids = self.tokenizer.encode(text)
        check_ids(ids, self.vocab_size, where)
        return window(ids, ids, 0, self.length)


def open_lazy_texts(
    path: Path, length: int, vocab_size: int, tokenizer: Tokenizer, read_options: ReadOptions
) -> LazyTextExamples:
    rows = (
        (where, get_text(row, read_options.text_column, where)) for where, row in read_rows(path, read_options.limit)
    )
    texts, skipped = list[tuple[str, str]](), SkippedRows()
    for where, text in rows:
        if text:
            texts.append((where, text))
        else:
            skipped.add(EMPTY, where)
    if not texts:
        raise ValueError(f"{path} holds no text")
    cut = f"{path}: tokenised on access and cut at {length:,} tokens; --lazy_preprocess False splits what is longer"
    notes = (*skipped_notes(str(path), skipped.facts()), cut)
    examples = LazyTextExamples(texts, tokenizer, length, vocab_size, notes)
    examples[0]  # a tokenizer too large for the model shows here, not hours later
    return examples
