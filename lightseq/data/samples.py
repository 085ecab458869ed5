"""Samples of a row: token ids or text to tokenize, with their targets."""

from dataclasses import dataclass

from lightseq.data.preferences import Answer
from lightseq.data.token_directory import IntArray
from lightseq.data.tokenizer import TargetMask, TextPart

EMPTY, NO_ANSWER = "empty", "without an answer"  # reasons to skip a row


@dataclass(frozen=True)
class Sample:
    """Token ids, or text parts to tokenize. `skipped` says why a sample has no target."""

    parts: tuple[TextPart, ...] = ()
    ids: IntArray | None = None
    targets: TargetMask | None = None
    skipped: str | None = None
    padding: int = 0  # tokens cut off the end
    remarks: frozenset[str] = frozenset()  # what is unusual, for notes
    ignored: tuple[str, ...] = ()  # columns that the given ids were made from
    answer: Answer | None = None  # answer of a preference pair
