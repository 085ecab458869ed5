"""Training targets of a row: a whole text, the answers in a chat or to a prompt, or given tokens and masks.

A part is a piece of text and whether it is a target. Prompts and the chat template's own text are not targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from lightseq.data.answers import RenderedChat, render_answers, template_of
from lightseq.data.chat_template import ChatTemplate
from lightseq.data.chats import Chat, read_chat, read_turns
from lightseq.data.columns import (
    CHAT,
    CHAT_COLUMNS,
    HARMLESS_BESIDE_TEXT,
    IDS,
    NO_TEXT,
    PAIR,
    PREFERENCE,
    PREFERENCES,
    PROMPT_COLUMNS,
    RENDERED,
    SYSTEM_COLUMNS,
    TEMPLATE_COLUMNS,
    TEXT,
    UNSUPPORTED,
    check_columns,
    check_repeated,
    has_mask,
    is_blank,
)
from lightseq.data.preferences import check_preferences, encode_answers, read_answers
from lightseq.data.samples import EMPTY, NO_ANSWER, Sample
from lightseq.data.sources import ReadOptions, Row, get_column, get_text, join_names
from lightseq.data.token_directory import IntArray
from lightseq.data.token_rows import read_ids
from lightseq.data.tokenizer import TargetMask, TextPart, Tokenizer, strip_after_end

UNENDED: Final = (
    "an answer ends in text instead of a special token, so the model does not learn to stop there; a chat template "
    "whose turns end with a special token teaches it"
)
PROMPT_PARTS: Final = ("input", "context")  # columns that follow a prompt


ReadRow = Callable[[Row, str, Tokenizer], list[Sample]]  # gets the row, its file and number, and the tokenizer


@dataclass(frozen=True)
class RowFormat:
    """Reader for one format of rows."""

    name: str
    read: ReadRow
    masked: bool = True  # some tokens are not targets
    whole: bool = False  # a row is one text

    @property
    def renders(self) -> bool:
        """Returns whether reading a row runs a chat template, which is foreign code."""
        return self.name in RENDERED


def detect_row_format(row: Row, where: str, options: ReadOptions) -> RowFormat:
    """Returns the row format for the columns of the first row. Raises ValueError for unknown columns.

    Tokens come before chats, chats before prompts with answers, and these before text: a column of a later format
    usually repeats the row.
    """
    columns, text_column = list(row), options.text_column
    if not columns:
        raise ValueError(f"{where} has no columns; give it {text_column!r}, messages, or prompt and completion")
    if options.pairs:
        check_preferences(columns, text_column, where)
        return RowFormat(PREFERENCE, _read_preference)
    if text_column != "text" and text_column not in columns:
        raise ValueError(f"{where} has no column {text_column!r}; it has: {join_names(columns)}")
    chats = [name for name in CHAT_COLUMNS if name in columns]
    pair = next((pair for pair in PROMPT_COLUMNS if set(pair) <= set(columns)), None)
    ids = RowFormat(IDS, partial(read_ids, masked=has_mask(row)), masked=has_mask(row))
    if text_column == "text" and row.get("input_ids") is not None:
        return ids
    if text_column == "text" and chats:
        return RowFormat(CHAT, partial(_read_messages, column=chats[0]))
    if text_column == "text" and pair is not None:
        return RowFormat(PAIR, partial(_read_pair, pair=pair))
    if text_column in columns:
        return RowFormat(TEXT, partial(_read_text, column=text_column), masked=False, whole=True)
    if "input_ids" in columns:  # null
        return ids
    for name in columns:
        if name not in HARMLESS_BESIDE_TEXT and UNSUPPORTED.get(name) in (PREFERENCES, NO_TEXT):
            raise ValueError(f"{where}: column {name!r} {UNSUPPORTED[name]}")
    raise ValueError(
        f"{where} has no column {text_column!r}, messages, or prompt and completion; it has: {join_names(columns)}; "
        "rename a question and its answer to prompt and completion; --text_column names a text of which every token "
        "is a target"
    )


def text_of_row(row: Row, column: str, where: str) -> str:
    """Returns the text of a row that is one text. Raises ValueError for columns that mean something else."""
    text = get_text(row, column, where)
    others = check_columns(row, TEXT, (column,), where)
    if column == "text":  # any other column was named by the user
        check_repeated(row, others, [text], column, where)
    return text


def _read_text(row: Row, where: str, _: Tokenizer, *, column: str) -> list[Sample]:
    text = text_of_row(row, column, where)
    return [Sample(((text, True),)) if text else Sample(skipped=EMPTY)]


# ---- chats and answers -----------------------------------------------------------------------------------------------


def _read_messages(row: Row, where: str, tokenizer: Tokenizer, *, column: str) -> list[Sample]:
    others = check_columns(row, CHAT, (column,), where)
    template = template_of(tokenizer, where)
    chat = read_chat(row, read_turns(get_column(row, column, where), column, where), template, where)
    check_repeated(row, others, chat.texts, column, where)
    return _render(chat, template)


def _read_pair(row: Row, where: str, tokenizer: Tokenizer, *, pair: tuple[str, str]) -> list[Sample]:
    """Reads a prompt and its answer with the chat template, or concatenated if the tokenizer has none."""
    others = check_columns(row, PAIR, pair, where)
    prompt, answer = (get_column(row, name, where) for name in pair)
    if isinstance(prompt, list) or isinstance(answer, list):
        turns = [*_side(row, pair[0], "user", where), *_side(row, pair[1], "assistant", where)]
        if unused := [name for name in (*PROMPT_PARTS, "history") if name not in pair and not is_blank(row.get(name))]:
            raise ValueError(
                f"{where}: column {unused[0]!r} cannot be joined to {pair[0]!r} and {pair[1]!r}, which hold turns; "
                "move it into them"
            )
        check_repeated(row, others, [turn["content"] for turn, _ in turns], " and ".join(pair), where)
    else:
        prompt, answer = get_text(row, pair[0], where), get_text(row, pair[1], where)
        more = [name for name in PROMPT_PARTS if name not in pair and not is_blank(row.get(name))]
        prompt = "\n\n".join([prompt, *(get_text(row, name, where) for name in more)])
        check_repeated(row, others, [prompt, answer], " and ".join(pair), where)
        if not answer:
            return [Sample(skipped=NO_ANSWER if prompt else EMPTY)]
        if tokenizer.chat_template is None:
            return [_concatenated(row, prompt, answer, where, tokenizer)]
        turns = [
            *_history(row, where),
            *read_turns(
                [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], pair[1], where
            ),
        ]
    template = template_of(tokenizer, where)
    return _render(read_chat(row, turns, template, where), template)


def _side(row: Row, name: str, role: str, where: str) -> list[tuple[dict[str, Any], bool]]:
    """Returns the turns of a prompt, which are not targets, or of a completion."""
    value = row[name]
    turns = value if isinstance(value, list) else [{"role": role, "content": get_text(row, name, where)}]
    return read_turns(turns, name, where, learns=role == "assistant")


def _history(row: Row, where: str) -> list[tuple[dict[str, Any], bool]]:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(two, list) and len(two) == 2 for two in history):
        raise ValueError(f"{where}: 'history' is {history!r:.60}, not a list of pairs of a prompt and an answer")
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for two in history for role, text in zip(roles, two, strict=True)]
    return read_turns(turns, "history", where)


def _concatenated(row: Row, prompt: str, answer: str, where: str, tokenizer: Tokenizer) -> Sample:
    needs = [name for name in ("history", *SYSTEM_COLUMNS, *TEMPLATE_COLUMNS) if not is_blank(row.get(name))]
    if needs:
        raise ValueError(
            f"{where} has column {needs[0]!r}, which needs a chat template; give --tokenizer one that has, or give "
            "--chat_template"
        )
    answer = strip_after_end(answer, tokenizer)
    return Sample(((prompt, False), (answer, True)), remarks=frozenset() if tokenizer.end else frozenset([UNENDED]))


def _render(chat: Chat, template: ChatTemplate) -> list[Sample]:
    found = [_as_sample(one, template) for one in render_answers(chat, template)]
    return found or [Sample(skipped=NO_ANSWER if chat.turns else EMPTY)]


def _as_sample(rendered: RenderedChat, template: ChatTemplate) -> Sample:
    text, parts, done = rendered.text, list[TextPart](), 0
    for start, end in rendered.spans:
        parts += [(text[done:start], False), (text[start:end], True)]
        done = end
    remarks = set(rendered.remarks)
    if not all(text[start:end].rstrip().endswith(template.special_texts) for start, end in rendered.spans):
        remarks.add(UNENDED)
    return Sample((*parts, (text[done:], False)), remarks=frozenset(remarks))


def _read_preference(row: Row, where: str, tokenizer: Tokenizer) -> list[Sample]:
    answers = read_answers(row, where, tokenizer)
    found = [Sample(answer=x, remarks=frozenset() if x.ends else frozenset([UNENDED])) for x in answers]
    return found or [Sample(skipped=NO_ANSWER)]


# ---- tokenizing ------------------------------------------------------------------------------------------------------


def encode_samples(
    samples: Sequence[Sample], row_format: RowFormat, tokenizer: Tokenizer
) -> list[tuple[IntArray, TargetMask | None]]:
    """Tokenizes samples in one call. Returns the ids of each, and the mask of its targets (None: all)."""
    if row_format.name == PREFERENCE:
        return encode_answers([sample.answer for sample in samples if sample.answer is not None], tokenizer)
    if row_format.whole:
        return [(ids, None) for ids in tokenizer.encode_batch([sample.parts[0][0] for sample in samples], True)]
    encoded = iter(tokenizer.encode_parts([sample.parts for sample in samples if sample.ids is None]))
    return [
        (s.ids, s.targets) if s.ids is not None else _with_special_tokens(*next(encoded), tokenizer) for s in samples
    ]


def _with_special_tokens(ids: IntArray, targets: TargetMask, tokenizer: Tokenizer) -> tuple[IntArray, TargetMask]:
    """Adds the begin and end ids of a document, unless the chat template writes them or the row has them."""
    if tokenizer.chat_template is not None:
        return ids, targets
    begin, end = np.asarray(tokenizer.begin, np.int64), np.asarray(tokenizer.end, np.int64)
    begin = begin[: 0 if np.array_equal(ids[: len(begin)], begin) else None]
    end = end[: 0 if np.array_equal(ids[len(ids) - len(end) :], end) else None]
    mask = [np.zeros(len(begin), np.bool_), targets, np.ones(len(end), np.bool_)]
    return np.concatenate([begin, ids, end]), np.concatenate(mask)
