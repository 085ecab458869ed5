"""Training targets of a row: a whole text, the answers in a chat or to a prompt, or given labels.

A part is a piece of text and whether it is a target. Prompts and the chat template's own text are no targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lightseq.data.sources import Row, check_encodable, get_column, get_text, join_names
from lightseq.data.token_directory import IntArray
from lightseq.data.tokenizer import TargetMask, TextPart, Tokenizer
from lightseq.utils.formatting import first_line
from lightseq.utils.labels import IGNORE_INDEX

CHAT_COLUMNS: Final = ("messages", "conversations")
PROMPT_COLUMNS: Final = (
    ("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"), ("question", "answer"),
    ("instruction", "output"), ("instruction", "response"), ("query", "response"),
)  # fmt: skip
# Roles in chats with `from` and `value`.
ROLES: Final[Mapping[str, str]] = {"human": "user", "gpt": "assistant", "bot": "assistant"}
EMPTY, NO_ANSWER = "empty", "without an answer"
IDS: Final = "ids"  # name of the format of tokenized rows
CHAT, PAIR = "chat", "prompt and answer"  # names of the formats that a chat template renders


@dataclass(frozen=True)
class Sample:
    """Token ids, or text parts to tokenize; `skipped` is the reason if the row has no target."""

    parts: tuple[TextPart, ...] = ()
    ids: IntArray | None = None
    targets: TargetMask | None = None
    skipped: str | None = None
    padding: int = 0  # tokens cut off the end


ReadRow = Callable[[Row, str, Tokenizer], Sample]  # gets the row, its file and number for errors, and the tokenizer


@dataclass(frozen=True)
class RowFormat:
    """Reader for one format of rows."""

    name: str
    read: ReadRow
    masked: bool = True  # some tokens are not targets
    whole: bool = False  # a row is one text


def detect_row_format(columns: Sequence[str], text_column: str, where: str) -> RowFormat:
    """Returns the row format for the columns of the first row. Raises ValueError for unknown columns."""
    if not columns:
        raise ValueError(f"{where} has no columns; give it {text_column!r}, messages, or prompt and completion")
    chat = next((name for name in CHAT_COLUMNS if name in columns), None)
    pair = next((pair for pair in PROMPT_COLUMNS if set(pair) <= set(columns)), None)
    if text_column != "text" and text_column not in columns:
        raise ValueError(f"{where} has no column {text_column!r}; it has: {join_names(columns)}")
    if text_column in columns:
        return RowFormat("text", lambda row, where, _: _read_text(row, text_column, where), masked=False, whole=True)
    if chat is not None:
        return RowFormat(CHAT, lambda row, where, tokenizer: _read_chat(_messages(row, chat, where), where, tokenizer))
    if pair is not None:
        return RowFormat(PAIR, lambda row, where, tokenizer: _read_pair(row, pair, where, tokenizer))
    if "input_ids" in columns:
        return RowFormat(IDS, _read_ids, masked="labels" in columns)
    raise ValueError(
        f"{where} has no column {text_column!r}, messages, or prompt and completion; it has: {join_names(columns)}; "
        "name the text with --text_column"
    )


def _read_text(row: Row, name: str, where: str) -> Sample:
    text = get_text(row, name, where)
    return Sample(((text, True),)) if text else Sample(skipped=EMPTY)


def _read_ids(row: Row, where: str, _: Tokenizer) -> Sample:
    """Reads a tokenized row, without its padding on the right."""
    ids = _integers(row, "input_ids", where)
    labels = _integers(row, "labels", where) if "labels" in row else ids
    if labels.shape != ids.shape or bool(((labels != ids) & (labels != IGNORE_INDEX)).any()):
        raise ValueError(f"{where}: 'labels' differ from input_ids; give each target its id, and other tokens -100")
    real = _real_tokens(row, len(ids), where)
    padding, ids, targets = len(ids) - real, ids[:real], labels[:real] != IGNORE_INDEX
    if not real:
        return Sample(skipped=EMPTY)
    if "labels" not in row:
        return Sample(ids=ids, padding=padding)
    return Sample(ids=ids, targets=targets, padding=padding) if targets[1:].any() else Sample(skipped=NO_ANSWER)


def _integers(row: Row, name: str, where: str) -> IntArray:
    """Returns a column that is a list of integers; null counts as empty."""
    values = get_column(row, name, where)
    try:
        found = np.asarray(values if values is not None else [], dtype=np.int64 if not values else None)
    except (ValueError, OverflowError):  # ragged lists, or a number beyond 64 bits
        found = np.empty((0, 0))
    if found.ndim != 1 or found.dtype.kind != "i":
        raise ValueError(f"{where}: {name!r} is {values!r:.40}, not a list of integers")
    return found


def _real_tokens(row: Row, count: int, where: str) -> int:
    """Returns the number of tokens before the padding. Raises ValueError unless padding is on the right."""
    if row.get("attention_mask") is None:
        return count
    mask = _integers(row, "attention_mask", where)
    real = int(np.count_nonzero(mask))
    if len(mask) != count or not mask[:real].all():
        raise ValueError(
            f"{where}: 'attention_mask' {row['attention_mask']!r:.40} has padding on the left, holes, or another "
            f"length than the {count:,} input_ids; pad on the right, or not at all"
        )
    return real


def _read_pair(row: Row, pair: tuple[str, str], where: str, tokenizer: Tokenizer) -> Sample:
    """Reads a prompt and its answer with the chat template, or concatenated if the tokenizer has none."""
    prompt, answer = (get_column(row, name, where) for name in pair)
    if isinstance(prompt, list) and isinstance(answer, list):
        turns = [turn for name in pair for turn in _messages(row, name, where)]
        return _read_chat(turns, where, tokenizer)
    prompt, answer = get_text(row, pair[0], where), get_text(row, pair[1], where)
    if row.get("input"):
        prompt += f"\n\n{get_text(row, 'input', where)}"
    if not answer:
        return Sample(skipped=NO_ANSWER if prompt else EMPTY)
    if tokenizer.chat_template is None:
        return Sample(((prompt, False), (answer, True)))
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return _read_chat(turns, where, tokenizer)


def _messages(row: Row, name: str, where: str) -> list[dict[str, Any]]:
    """Returns a chat's turns with role and content. Raises ValueError if the column holds anything else."""
    messages = get_column(row, name, where)
    if not isinstance(messages, list | None) or not all(isinstance(turn, dict) for turn in messages or ()):
        raise ValueError(f"{where}: {name!r} is {messages!r:.40}, not a list of turns with role and content")
    turns = []
    for turn in messages or ():
        if "from" in turn:
            turn = {"role": ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}
        if not isinstance(turn.get("role"), str) or not ("content" in turn or turn.get("tool_calls")):
            raise ValueError(f"{where}: a turn of {name!r} has no role or content; it has: {join_names(turn)}")
        turns.append({key: value for key, value in turn.items() if value is not None})
    return turns


def _read_chat(messages: list[dict[str, Any]], where: str, tokenizer: Tokenizer) -> Sample:
    """Reads a chat: the text that the template writes for an answer is a target, the prompt before it is not.

    Turns after the last answer are dropped.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a chat, but tokenizer {tokenizer.name} has no chat template; give --tokenizer one that has, "
            "or give --chat_template"
        )
    parts: list[TextPart] = []
    done = ""
    for number, turn in enumerate(messages):
        if turn.get("role") != "assistant" or not (turn.get("content") or turn.get("tool_calls")):
            continue
        prompt = _render(tokenizer, messages[:number], True, where)
        answered = _render(tokenizer, messages[: number + 1], False, where)
        if not prompt.startswith(done) or not answered.startswith(prompt):
            raise ValueError(
                f"{where}: {tokenizer.template_name} rewrites earlier turns, so answers cannot be located; "
                "give one turn per row, another --chat_template or another --tokenizer"
            )
        parts += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
        done = answered
    return Sample(tuple(parts)) if parts else Sample(skipped=NO_ANSWER if messages else EMPTY)


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool, where: str) -> str:
    assert tokenizer.chat_template is not None
    try:
        written = tokenizer.chat_template(messages, add_generation_prompt)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"{where}: {tokenizer.template_name} fails: {first_line(error)}") from error
    return check_encodable(written, f"{where}, rendered by {tokenizer.template_name}")


def encode_samples(
    samples: Sequence[Sample], row_format: RowFormat, tokenizer: Tokenizer
) -> list[tuple[IntArray, TargetMask | None]]:
    """Tokenizes samples in one call. Returns the ids of each, and the mask of its targets (None: all)."""
    if row_format.whole:
        return [(ids, None) for ids in tokenizer.encode_batch([sample.parts[0][0] for sample in samples], True)]
    encoded = iter(tokenizer.encode_parts([sample.parts for sample in samples if sample.ids is None]))
    return [
        (s.ids, s.targets) if s.ids is not None else _with_special_tokens(*next(encoded), tokenizer) for s in samples
    ]


def _with_special_tokens(ids: IntArray, targets: TargetMask, tokenizer: Tokenizer) -> tuple[IntArray, TargetMask]:
    """Adds the begin and end ids of a document, unless the chat template writes them."""
    if tokenizer.chat_template is not None:
        return ids, targets
    begin, end = np.asarray(tokenizer.begin, np.int64), np.asarray(tokenizer.end, np.int64)
    mask = [np.zeros(len(begin), np.bool_), targets, np.ones(len(end), np.bool_)]
    return np.concatenate([begin, ids, end]), np.concatenate(mask)
