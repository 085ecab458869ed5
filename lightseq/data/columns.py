"""Columns of rows, and the roles and keys of chat turns: what each one means. Everything else is refused by name.

The reader and the tables of docs/data.md are made from these lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Final, NamedTuple

from lightseq.utils.formatting import plural

# Formats of rows, as notes call them.
TEXT, CHAT, PAIR, IDS = "text", "chat", "prompt and answer", "ids"
PREFERENCE = "chosen and rejected"
RENDERED: Final = (CHAT, PAIR, PREFERENCE)  # formats rendered by a chat template


class RowUnit(NamedTuple):
    """Number of documents in a row, which stay side by side, and the name of such a row."""

    documents: int
    name: str


UNITS: Final[Mapping[str, RowUnit]] = {PREFERENCE: RowUnit(2, "pair")}


def unit_of(format_name: str) -> RowUnit:
    """Returns how many documents a row of a format holds, and what the row is called."""
    return UNITS.get(format_name, RowUnit(1, f"{format_name} row"))


def _words(text: str) -> list[str]:
    return text.split()


CHAT_COLUMNS: Final = ("messages", "conversations", "conversation")
PROMPT_COLUMNS: Final = (
    ("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"),
    ("instruction", "output"), ("instruction", "response"), ("query", "response"),
    ("question", "answer"), ("question", "response"), ("problem", "solution"), ("input", "output"),
)  # fmt: skip

# Inputs of a chat template, in a column each.
TEMPLATE_COLUMNS: Final[Mapping[str, str]] = {
    "tools": "functions for the chat template: a list of JSON schemas, or its JSON text",
    "documents": "documents for the chat template: a list of objects with title and text",
    "chat_template_kwargs": "further variables of the chat template, such as `enable_thinking`",
}
SYSTEM_COLUMNS: Final[Mapping[str, str]] = {
    "system": "the system turn",
    "system_prompt": "the system turn",
}
MASK_COLUMNS: Final[Mapping[str, str]] = {
    "labels": "targets: the id of the token itself, not shifted, or -100",
    "completion_mask": "targets: 1, and 0 for the prompt",
    "assistant_masks": "targets: 1, and 0 for all else",
    "loss_mask": "targets: 1, and 0 for all else",
}
DOCUMENT_COLUMNS: Final[Mapping[str, str]] = {
    "position_ids": "documents of a packed row: a position of 0 begins one",
    "seq_lengths": "documents of a packed row: the tokens of each",
    "cu_seqlens": "documents of a packed row: the start of each, and the end of the last",
    "seq_idx": "documents of a packed row: the number of its document for each token",
}
# Columns that are read but do not decide the format.
BESIDE: Final[Mapping[str, Mapping[str, str]]] = {
    TEXT: {},
    CHAT: {**SYSTEM_COLUMNS, **TEMPLATE_COLUMNS},
    PAIR: {
        "input": "follows the prompt, after an empty line",
        "context": "follows the prompt, after an empty line",
        "history": "earlier turns: a list of pairs of a prompt and an answer, which are targets too",
        **SYSTEM_COLUMNS,
        **TEMPLATE_COLUMNS,
    },
    PREFERENCE: {
        "prompt": "turns, or text; without it, what both answers begin with",
        "tools": TEMPLATE_COLUMNS["tools"],
        "chat_template_kwargs": TEMPLATE_COLUMNS["chat_template_kwargs"],
        **dict.fromkeys(
            ("score_chosen", "score_rejected", "chosen_rating", "rejected_rating", "chosen_score", "rejected_score"),
            "not used: all pairs count the same",
        ),
    },
    IDS: {
        "attention_mask": "1, and 0 for padding at the end, which is cut off",
        "token_type_ids": "only zeros are accepted",
        **MASK_COLUMNS,
        **DOCUMENT_COLUMNS,
    },
}

# Columns that describe a row without changing what is trained.
HARMLESS: Final = frozenset(
    _words("""
    id ids idx index uid uuid guid row_id conv_id conversation_id conversation_hash chat_id prompt_id message_id
    question_id example_id sample_id doc_id document_id session_id thread_id hash md5 sha256
    source sources source_id source_dataset data_source origin dataset dataset_name dataset_id subset split config
    category categories subcategory task tasks task_name task_type task_id type question_type problem_type topic topics
    domain domains tag tags keywords intent skill skills capability difficulty level grade
    url urls link title name author authors created created_at created_utc timestamp date time year added updated_at
    lang language languages language_score language_confidence license licence copyright version revision
    meta metadata info extra extra_info additional_info annotations comment comments notes note
    model model_name model_id generator generation_model teacher temperature top_p seed
    turn turns num_turns n_turns length len num_tokens n_tokens token_count tokens_count word_count char_count
    text_length path file filename file_name file_path repo repo_name repository commit size dump quality
    toxic redacted openai_moderation detoxify_moderation user_id country state hashed_ip __index_level_0__
    needle_depth parallel_tool_calls tool_choice offset_mapping overflow_to_sample_mapping
    """)
)

PREFERENCES: Final = "holds preferences, which only lightseq train --objective dpo reads (docs/preferences.md)"
PREFERENCE_COLUMNS: Final = ("chosen", "rejected")
ONLY_TEXT: Final = "lightseq train reads text only, and SequenceParallelTrainer takes images (docs/trainers.md)"
NO_TEXT: Final = f"holds no text; {ONLY_TEXT}"
WEIGHTS: Final = ("weight", "weights", "loss_weight", "sample_weight", "token_weights", "loss_scale")
# Columns that change what is trained and are not supported, with the reason or remedy.
UNSUPPORTED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        _words(
            "chosen rejected chosen_messages rejected_messages chosen_response rejected_response label margin score "
            "score_chosen score_rejected chosen_rating rejected_rating reward rewards preference"
        ),
        PREFERENCES,
    ),
    **dict.fromkeys(_words("image images video videos audio audios"), NO_TEXT),
    **dict.fromkeys(WEIGHTS, "weighs targets, which all count the same here"),
    **dict.fromkeys(
        _words("mask masks response_mask special_tokens_mask prompt_mask train_mask target_mask"),
        f"is no mask of targets here; these are: {', '.join(MASK_COLUMNS)}",
    ),
}
# A class or score is harmless beside a text. Beside an answer, it may mean that the answer is bad.
HARMLESS_BESIDE_TEXT: Final = frozenset({"label", "score", "int_score", "perplexity"})

# Roles of turns, in lower case, as chat templates call them.
ROLES: Final[Mapping[str, str]] = {
    **{role: role for role in ("system", "user", "assistant", "tool", "developer")},
    **dict.fromkeys(("human", "prompter", "usr"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "chatgpt", "chatbot"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),  # the content is a call in JSON
}
CALL_ROLES: Final = ("function_call", "tool_call")
# Keys of a turn that say whether its answer is a target, as OpenAI, axolotl, ms-swift and LlamaFactory write it.
TARGET_KEYS: Final = ("weight", "train", "training", "loss", "loss_weight")
CONTENT_KEYS: Final = ("role", "content", "from", "value", "tool_calls", "function_call")
REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
# Keys of a turn that templates may read and that may be left out.
HARMLESS_KEYS: Final = frozenset(
    _words(
        "id name tool_call_id message_id parent_id timestamp created_at date model language lang metadata meta source "
        "hashed_ip header state country toxic redacted turn_identifier"
    )
)
TEXT_PARTS: Final = ("text", "input_text", "output_text")  # types of parts of a content


class UnknownColumnError(ValueError):
    """Error for a column that is refused or unknown, and may change the meaning of all rows."""


def is_blank(value: Any) -> bool:
    """Returns whether a value counts as absent: null, or an empty text, list or object, as Arrow fills columns."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def has_mask(row: Mapping[str, Any]) -> bool:
    """Returns whether a row of token ids has labels or a mask of targets; null counts as absent."""
    return any(row.get(name) is not None for name in MASK_COLUMNS)


def check_masked(row: Mapping[str, Any], masked: bool, where: str) -> None:
    """Raises ValueError if a row has labels or a mask and the first row has none, or the reverse."""
    if has_mask(row) and not masked:
        given = next(name for name in MASK_COLUMNS if row.get(name) is not None)
        raise ValueError(f"{where} has {given}, but the first row has none; give every row labels or a mask")
    if masked and not has_mask(row):
        raise ValueError(f"{where} has no labels or mask, but the first row has; give every row labels or a mask")


def check_columns(row: Mapping[str, Any], format_name: str, used: Collection[str], where: str) -> list[str]:
    """Returns columns that must repeat the row in another format. `used` are the columns that are read.

    Beside token ids these are the columns that the ids were made from, whatever their names.
    Raises UnknownColumnError naming a column that is not supported or not known.
    """
    others = []
    beside_text = format_name == TEXT or (format_name == IDS and not is_blank(row.get("text")))
    for column, value in row.items():
        known = column in used or column in BESIDE[format_name] or _is_harmless(column, value, beside_text)
        if known or is_blank(value):
            continue
        if column in UNSUPPORTED and not (format_name == PREFERENCE and UNSUPPORTED[column] == PREFERENCES):
            raise UnknownColumnError(f"{where}: column {column!r} {UNSUPPORTED[column]}; remove it{_or_ignore(column)}")
        other_format = column in OTHER_FORMATS and (format_name != IDS or column not in PLAIN_PAIR)
        if not other_format and not (format_name == IDS and _is_source(value)):
            raise UnknownColumnError(
                f"{where}: column {column!r} is not known beside {' and '.join(used)}; remove it{_or_ignore(column)}"
            )
        others.append(column)
    return others


def _is_harmless(column: str, value: Any, beside_text: bool) -> bool:
    if beside_text and column in HARMLESS_BESIDE_TEXT:
        return not isinstance(value, bool)
    return column in HARMLESS or (column in WEIGHTS and value == 1)


def _is_source(value: Any) -> bool:
    """Returns whether a value is text, turns, an object or a time, which cannot change how token ids are trained.

    A mask, a weight or other ids would be numbers.
    """
    left, seen = [value], set[int]()
    while left:
        item = left.pop()
        if isinstance(item, list | tuple):
            if id(item) not in seen:  # a pickle may refer to one list many times
                seen.add(id(item))
                left.extend(item)
        elif isinstance(item, dict):
            if any(isinstance(inner, bytes) for inner in item.values()):  # an image, as datasets store it
                return False
        elif not isinstance(item, str | date | None):
            return False
    return True


def _or_ignore(column: str) -> str:
    if not column or "," in column:
        return ""  # --ignore_columns cannot name such a column
    shown = column if column.isprintable() else ascii(column)
    return f", or give --ignore_columns {shown} if it changes nothing in training"


def ignored_columns_notes(columns: Collection[str]) -> list[str]:
    """Returns a note on the columns that token ids were made from, if there are any."""
    shown = ", ".join(column if column.isprintable() else ascii(column) for column in columns)
    return [f"ignored {plural(len(columns), 'column')} beside input_ids, which are trained: {shown}"] if columns else []


PLAIN_PAIR: Final = ("inputs", "targets")  # text, or ids
# Text columns of all formats. In a row of another format, such a column may repeat the row's text.
OTHER_FORMATS: Final = frozenset(
    {"text", "input_ids", *PLAIN_PAIR, *CHAT_COLUMNS, *(name for pair in PROMPT_COLUMNS for name in pair)}
)


def check_repeated(row: Mapping[str, Any], others: Iterable[str], texts: Sequence[str], used: str, where: str) -> None:
    """Raises ValueError if a column of another format holds text that is not in `texts`, the texts of `used`."""
    trained = [squeeze(text) for text in texts if text]
    for column in others:
        found = [squeeze(text) for text in _strings(row[column])]
        repeats = all(text in "".join(trained) for text in found) or all(text in "".join(found) for text in trained)
        if not found or not repeats:
            raise UnknownColumnError(
                f"{where}: column {column!r} differs from {used}, which would be trained on; remove one of "
                f"them{_or_ignore(column)}"
            )


def _strings(value: Any) -> list[str]:
    """Returns a text, or the text contents of turns."""
    if isinstance(value, str):
        return [value]
    turns = value if isinstance(value, list) else []
    contents = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)]
    return [content for content in contents if isinstance(content, str)]


def squeeze(text: str) -> str:
    """Returns the text without whitespace, for comparing texts that a template may have trimmed."""
    return "".join(text.split())
