"""Texts tokenised on access: a run begins at once, and what is longer than a sequence is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lightseq.examples import Example, check_ids, window
from lightseq.rows import texts_of
from lightseq.tokenizer import Tokenizer
from lightseq.tokens import Reading, plural


@dataclass(frozen=True)
class TextExamples:
    """Texts held in memory and tokenised on access; a large corpus belongs in a token directory."""

    path: Path
    texts: Sequence[str]
    tokenizer: Tokenizer
    length: int
    vocab_size: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Example:
        ids = self.tokenizer.encode(self.texts[index])
        check_ids(ids, self.vocab_size, f"{self.path} text {index}")
        return window(ids, ids, 0, self.length)


def open_lazily(path: Path, length: int, vocab_size: int, tokenizer: Tokenizer, reading: Reading) -> TextExamples:
    rows = list(islice(texts_of(path, reading.text_column), reading.limit))
    texts = [text for text in rows if text]
    if not texts:
        raise ValueError(f"{path} holds no text")
    left_out = (f"{path}: {plural(len(rows) - len(texts), 'empty text')} left out",) if len(rows) > len(texts) else ()
    cut = f"{path}: tokenised on access and cut at {length:,} tokens; --lazy_preprocess False splits what is longer"
    examples = TextExamples(path, texts, tokenizer, length, vocab_size, (*left_out, cut))
    examples[0]  # a tokenizer too large for the model shows here, not hours later
    return examples
