"""Training targets of a row: a whole text, the answers in a chat or to a prompt, or given tokens and masks.

A part is a piece of text and whether it is a target. Prompts and the chat template's own text are no targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from lightseq.data.answers import RenderedChat, render_answers, template_of
from lightseq.data.chat_template import ChatTemplate
from lightseq.data.chats import Chat, read_chat, read_turns
from lightseq.data.columns import (
    CHAT,
    CHAT_COLUMNS,
    DOCUMENT_COLUMNS,
    HARMLESS_BESIDE_TEXT,
    IDS,
    MASK_COLUMNS,
    NO_TEXT,
    PAIR,
    PREFERENCE,
    PREFERENCES,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TEMPLATE_COLUMNS,
    TEXT,
    UNSUPPORTED,
    check_columns,
    check_masked,
    check_repeated,
    has_mask,
    is_blank,
)
from lightseq.data.preferences import Answer, check_preferences, encode_answers, read_answers
from lightseq.data.sources import Row, get_column, get_text, join_names
from lightseq.data.token_directory import IntArray
from lightseq.data.tokenizer import TargetMask, TextPart, Tokenizer, strip_after_end
from lightseq.utils.tensors import IGNORE_INDEX

EMPTY, NO_ANSWER = "empty", "without an answer"
UNENDED: Final = (
    "an answer ends in text instead of a special token, so the model does not learn to stop there; a chat template "
    "whose turns end with a special token teaches it"
)
PROMPT_PARTS: Final = ("input", "context")  # columns that follow a prompt
PACKED: Final = "a packed row is split into its documents, which --packing best_fit packs again"


@dataclass(frozen=True)
class Sample:
    """Token ids, or text parts to tokenize; `skipped` is the reason if there is no target."""

    parts: tuple[TextPart, ...] = ()
    ids: IntArray | None = None
    targets: TargetMask | None = None
    skipped: str | None = None
    padding: int = 0  # tokens cut off the end
    remarks: frozenset[str] = frozenset()  # what is unusual, for notes
    ignored: tuple[str, ...] = ()  # columns that the given ids were made from
    answer: Answer | None = None  # one of a pair, to tokenize


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
        return self.name in (CHAT, PAIR, PREFERENCE)


def detect_row_format(row: Row, text_column: str, where: str, pairs: bool = False) -> RowFormat:
    """Returns the row format for the columns of the first row. Raises ValueError for unknown columns.

    With `pairs` rows must hold a chosen and a rejected answer, without it they must not.

    Tokens come before chats, chats before prompts with answers, and these before text: a column of a later format
    usually repeats the row.
    """
    columns = list(row)
    if not columns:
        raise ValueError(f"{where} has no columns; give it {text_column!r}, messages, or prompt and completion")
    if pairs:
        check_preferences(columns, text_column, where)
        return RowFormat(PREFERENCE, _read_preference)
    if text_column != "text" and text_column not in columns:
        raise ValueError(f"{where} has no column {text_column!r}; it has: {join_names(columns)}")
    chats = [name for name in CHAT_COLUMNS if name in columns]
    pair = next((pair for pair in PROMPT_COLUMNS if set(pair) <= set(columns)), None)
    ids = RowFormat(IDS, partial(_read_ids, masked=has_mask(row)), masked=has_mask(row))
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


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _read_ids(row: Row, where: str, _: Tokenizer, *, masked: bool) -> list[Sample]:
    """Reads a tokenized row, without its padding on the right, as one sample per packed document."""
    made_from = check_columns(row, IDS, ("input_ids",), where)
    ids = _integers(row, "input_ids", where)
    masks = [_target_mask(row, name, ids, where) for name in MASK_COLUMNS if row.get(name) is not None]
    if len(ids):
        check_masked(row, masked, where)
    if row.get("token_type_ids") is not None and _integers(row, "token_type_ids", where).any():
        raise ValueError(f"{where}: 'token_type_ids' are not all zero; remove them if the model does not use them")
    real = _real_tokens(row, len(ids), where)
    if not real:
        return [Sample(skipped=EMPTY)]
    targets = np.logical_and.reduce(masks) if masks else None
    if targets is not None and targets[real:].any():
        raise ValueError(f"{where} has targets in its padding; mask them")
    borders = _document_borders(row, real, len(ids), where)
    remarks = frozenset([PACKED]) if len(borders) > 2 else frozenset()
    found = []
    for start, end in pairwise(borders):
        mask = None if targets is None else targets[start:end]
        if mask is not None and not mask[1:].any():
            found.append(Sample(skipped=NO_ANSWER, remarks=remarks))
        else:
            found.append(Sample(ids=ids[start:end], targets=mask, remarks=remarks))
    return [replace(found[0], padding=len(ids) - real, ignored=tuple(made_from)), *found[1:]]


def _target_mask(row: Row, name: str, ids: IntArray, where: str) -> TargetMask:
    """Returns the mask of targets in a column: labels, or zeros and ones."""
    values = _integers(row, name, where)
    if name == "labels" and (values.shape != ids.shape or bool(((values != ids) & (values != IGNORE_INDEX)).any())):
        raise ValueError(f"{where}: 'labels' differ from input_ids; give each target its id, and other tokens -100")
    if values.shape != ids.shape or (name != "labels" and not np.isin(values, (0, 1)).all()):
        raise ValueError(
            f"{where}: {name!r} is {row[name]!r:.40}, not a 0 or 1 for each of the {len(ids):,} input_ids; correct it"
        )
    return np.asarray(values != IGNORE_INDEX if name == "labels" else values == 1)


def _document_borders(row: Row, real: int, count: int, where: str) -> list[int]:
    """Returns the start of each packed document, and the end of the last. Raises ValueError if columns differ."""
    found: dict[str, list[int]] = {}
    for name in (name for name in DOCUMENT_COLUMNS if not is_blank(row.get(name))):
        values = _integers(row, name, where)
        per_token = name in ("position_ids", "seq_idx") and len(values) == count
        starts = _document_starts(name, values[:real] if per_token else values, real if per_token else count)
        if starts is None:
            raise ValueError(
                f"{where}: {name!r} is {row[name]!r:.60}, which does not divide {count:,} input_ids into documents; "
                "correct or remove it"
            )
        found[name] = [start for start in starts if start < real]
    if len({tuple(starts) for starts in found.values()}) > 1:
        raise ValueError(f"{where}: {' and '.join(found)} differ in where documents begin; correct or remove one")
    return [*next(iter(found.values()), [0]), real]


def _document_starts(name: str, values: IntArray, count: int) -> list[int] | None:
    """Returns the first token of each document by one of DOCUMENT_COLUMNS; None if its values are inconsistent."""
    if name in ("seq_lengths", "cu_seqlens"):
        ends = np.cumsum(values) if name == "seq_lengths" else values[1:]
        begins = np.concatenate([[0], ends[:-1]]) if name == "seq_lengths" else values[:-1]
        valid = len(begins) > 0 and begins[0] == 0 and ends[-1] == count and bool((begins < ends).all())
        return begins.tolist() if valid else None
    if len(values) != count or values[0] != 0:
        return None
    steps = np.diff(values)
    if name == "position_ids":
        valid = bool(((steps == 1) | (values[1:] == 0)).all())
        return [0, *(np.flatnonzero(values[1:] == 0) + 1).tolist()] if valid else None
    return [0, *(np.flatnonzero(steps) + 1).tolist()] if bool(np.isin(steps, (0, 1)).all()) else None


def _integers(row: Row, name: str, where: str) -> IntArray:
    """Returns a column that is a list of integers or booleans; null counts as empty."""
    values = get_column(row, name, where)
    try:
        found = np.asarray(values if values is not None else [], dtype=np.int64 if not values else None)
    except (ValueError, OverflowError):  # ragged lists, or a number beyond 64 bits
        found = np.empty((0, 0))
    if found.dtype == np.bool_ and name != "input_ids":
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind != "i":
        raise ValueError(f"{where}: {name!r} is {values!r:.40}, not a list of integers")
    return found


def _real_tokens(row: Row, count: int, where: str) -> int:
    """Returns the number of tokens before the padding. Raises ValueError unless padding is on the right."""
    if row.get("attention_mask") is None:
        return count
    mask = _integers(row, "attention_mask", where)
    real = int(np.count_nonzero(mask))
    if len(mask) != count:
        fault = f"has {len(mask):,} values for {count:,} input_ids"
    elif not np.isin(mask, (0, 1)).all():
        fault = "has values beside 0 and 1"
    elif not (mask[:real] == 1).all():
        fault = "has holes" if mask[0] else "has padding on the left"
    else:
        return real
    raise ValueError(
        f"{where}: 'attention_mask' {row['attention_mask']!r:.40} {fault}; pad on the right, or not at all"
    )


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
    """Returns the turns of a prompt, which are no targets, or of a completion."""
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
