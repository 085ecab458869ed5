"""Rows of preferences: a prompt, a chosen and a rejected answer, rendered and tokenized as TRL's DPOTrainer does.

Both documents of a pair begin with the prompt. Targets begin where the tokens of the prompt alone and of the documents
differ, which need not be the prompt's end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from lightseq.data.answers import render_turns, template_of
from lightseq.data.chat_template import Turn
from lightseq.data.chats import read_chat, read_turns
from lightseq.data.columns import (
    PREFERENCE,
    PREFERENCE_COLUMNS,
    TEMPLATE_COLUMNS,
    check_columns,
    check_repeated,
    is_blank,
)
from lightseq.data.sources import Row, get_text, join_names
from lightseq.data.token_directory import IntArray
from lightseq.data.tokenizer import TargetMask, Tokenizer
from lightseq.sequence.shared_prefixes import common_tokens

PROMPT = "prompt"
Shared = TypeVar("Shared", str, list[Turn])


@dataclass(frozen=True)
class Answer:
    """One answer of a pair, as texts to tokenize."""

    prompt: str
    document: str  # the prompt and this answer
    other: str  # the prompt and the pair's other answer
    adds_special_tokens: bool  # True: the tokenizer adds them. A chat template writes them itself
    ends: bool  # the text ends with a stop token
    where: str  # file and row, for errors


def check_preferences(columns: Sequence[str], text_column: str, where: str) -> None:
    """Raises ValueError unless rows with these columns hold pairs."""
    if missing := [name for name in PREFERENCE_COLUMNS if name not in columns]:
        raise ValueError(
            f"{where} has no column {missing[0]!r} for --objective dpo; it has: {join_names(columns)}; give rows with "
            "chosen and rejected, or leave --objective out"
        )
    if text_column != "text":
        raise ValueError(f"--text_column {text_column} is not read with --objective dpo; leave it out")


def read_answers(row: Row, where: str, tokenizer: Tokenizer) -> list[Answer]:
    """Returns the chosen and the rejected answer of a row, or neither if one is empty.

    Raises ValueError for unknown columns, and for a prompt and answers that do not fit together.
    """
    names = (*([PROMPT] if row.get(PROMPT) is not None else []), *PREFERENCE_COLUMNS)
    others = check_columns(row, PREFERENCE, names, where)
    holds_turns = [name for name in names if isinstance(row.get(name), list)]
    if not holds_turns:
        texts, documents = _render_texts(row, names, where, tokenizer)
    elif len(holds_turns) == len(names):
        texts, documents = _render_turns(row, names, where, tokenizer)
    else:
        text = next(name for name in names if name not in holds_turns)
        remedy = f"give {' and '.join(names)} as turns, or all as text"
        if text == PROMPT:
            remedy += f", or --ignore_columns {PROMPT} if both answers begin with its turns"
        raise ValueError(f"{where}: {text!r} is not a list of turns, but {holds_turns[0]!r} is; {remedy}")
    check_repeated(row, others, texts, " and ".join(names), where)
    if documents is None:
        return []
    prompt, *both = documents
    ends = template_of(tokenizer, where).special_texts if holds_turns else ()
    return [
        Answer(
            prompt,
            document,
            other,
            adds_special_tokens=not holds_turns,
            ends=document.rstrip().endswith(ends) if holds_turns else bool(tokenizer.end),
            where=where,
        )
        for document, other in (both, reversed(both))
    ]


def _render_texts(
    row: Row, names: Sequence[str], where: str, tokenizer: Tokenizer
) -> tuple[list[str], list[str] | None]:
    """Returns the texts of a row, and the texts of the prompt and both documents (None if an answer is empty)."""
    if needs := [name for name in TEMPLATE_COLUMNS if not is_blank(row.get(name))]:
        raise ValueError(f"{where}: column {needs[0]!r} needs a prompt and answers that are turns, not text")
    if getattr(tokenizer, "template_replaced", False):
        raise ValueError(f"--chat_template applies to turns, but {where} holds text; leave it out")
    texts = [get_text(row, name, where) for name in names]
    if PROMPT not in names:
        texts = _split_shared(*texts, where)  # type: ignore[call-arg]
    prompt, *answers = texts
    if not all(answers):
        return texts, None
    end = _backend(tokenizer).eos_token or ""
    return texts, [prompt, *(prompt + (answer if answer.endswith(end) else answer + end) for answer in answers)]


def _render_turns(
    row: Row, names: Sequence[str], where: str, tokenizer: Tokenizer
) -> tuple[list[str], list[str] | None]:
    """Does what `_render_texts` does for turns, with the chat template."""
    template = template_of(tokenizer, where)
    sides = []
    for name in names:
        turns = read_turns(row[name], name, where)
        if not all(wanted for _, wanted in turns):
            raise ValueError(
                f"{where}: a turn of {name!r} is no target by its weight, but all of an answer are; remove it"
            )
        sides.append([turn for turn, _ in turns])
    if PROMPT not in names:
        sides = _split_shared(*sides, where)  # type: ignore[call-arg, arg-type]
    prompt, *answers = sides
    texts = [turn["content"] for side in sides for turn in side]
    if not all(answers):
        return texts, None
    chats = [read_chat(row, [(turn, False) for turn in (*prompt, *answer)], template, where) for answer in answers]
    asked = [([*chats[0].turns[: len(prompt)]], True), *(([*chat.turns], False) for chat in chats)]
    return texts, render_turns(asked, chats[0].inputs, template, where)


def _split_shared(chosen: Shared, rejected: Shared, where: str) -> list[Shared]:
    """Splits off the common beginning of both answers as their prompt: characters without a last space, or turns."""
    count = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if count is None:  # one answer continues the other, or both are equal
        count = min(len(chosen), len(rejected)) - 1
    elif count and chosen[count - 1] == " ":
        count -= 1
    if count <= 0:
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' do not begin with the same prompt; add a column {PROMPT!r} with it"
        )
    return [chosen[:count], chosen[count:], rejected[count:]]


def encode_answers(answers: Sequence[Answer], tokenizer: Tokenizer) -> list[tuple[IntArray, TargetMask | None]]:
    """Tokenizes answers with their prompts in one call. Returns the ids of each document, and its targets."""
    ids: dict[tuple[bool, str], IntArray] = {}
    for adds in (False, True):
        of_kind = [answer for answer in answers if answer.adds_special_tokens is adds]
        texts = [*dict.fromkeys(text for a in of_kind for text in (a.prompt, a.document, a.other))]
        ids |= {(adds, text): found for text, found in zip(texts, _encode(texts, adds, tokenizer), strict=True)}
    encoded = list[tuple[IntArray, TargetMask | None]]()
    for answer in answers:
        prompt, document, other = (
            ids[answer.adds_special_tokens, text] for text in (answer.prompt, answer.document, answer.other)
        )
        begin = min(common_tokens([prompt, answered]) for answered in (document, other))
        targets = np.arange(len(document)) >= begin
        if not targets[1:].any():
            raise ValueError(f"{answer.where} has an answer without a token; correct it, or remove the row")
        encoded.append((document, targets))
    return encoded


def _encode(texts: list[str], adds_special_tokens: bool, tokenizer: Tokenizer) -> list[IntArray]:
    if not adds_special_tokens:
        return tokenizer.encode_batch(texts, whole=False)
    found = _backend(tokenizer)(texts, verbose=False)["input_ids"] if texts else []
    return [np.asarray(ids, dtype=np.int64) for ids in found]


def _backend(tokenizer: Tokenizer) -> Any:
    """Returns transformers' tokenizer. Caches it, because making the tokenizer of bytes takes longer than a row."""
    return _made_backend(cast(Hashable, tokenizer))


@lru_cache(maxsize=1)
def _made_backend(tokenizer: Any) -> Any:
    return tokenizer.as_transformers()
