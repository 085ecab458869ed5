"""Chats of rows: turns with the roles and contents that chat templates take, and the answers to learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import TemplateError

from lightseq.data.chat_template import ChatTemplate, TemplateInputs, TemplateNames, Turn
from lightseq.data.columns import (
    CALL_ROLES,
    CONTENT_KEYS,
    HARMLESS_KEYS,
    ONLY_TEXT,
    REASONING_KEYS,
    ROLES,
    SYSTEM_COLUMNS,
    TARGET_KEYS,
    TEXT_PARTS,
    is_blank,
)
from lightseq.data.sources import Row, join_names
from lightseq.utils.files import parse_json
from lightseq.utils.formatting import first_line

# Parameters of transformers' apply_chat_template, which a row cannot set.
RESERVED_VARIABLES: Final = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
)  # fmt: skip
CALL_KEYS: Final = ("id", "type", "index", "function", "name", "arguments")
OR_LOST: Final = ", which would be lost; remove it, or give --chat_template one that does"


@dataclass(frozen=True)
class Chat:
    """Turns, and for each whether it is an answer to learn."""

    turns: tuple[Turn, ...]
    learnt: tuple[bool, ...]
    inputs: TemplateInputs
    where: str  # file and row, for errors

    @property
    def texts(self) -> list[str]:
        """The contents of all turns."""
        return [turn["content"] for turn in self.turns]


def is_answer(turn: Turn) -> bool:
    """Returns whether a turn is the assistant's and holds something to learn."""
    return turn["role"] == "assistant" and any(turn.get(key) for key in ("content", "tool_calls", *REASONING_KEYS))


def read_chat(row: Row, turns: Sequence[tuple[Turn, bool]], template: ChatTemplate, where: str) -> Chat:
    """Returns the chat of `turns`, as `read_turns` reads them, with the system prompt and functions of the row.

    Raises ValueError for keys and variables that the template does not read.
    """
    inputs = _read_inputs(row, where)
    try:
        names = template.names(inputs)
    except (ValueError, RecursionError, TemplateError) as error:
        raise ValueError(f"{where}: {template.name} cannot be parsed: {first_line(error)}") from error
    given = [name for name, value in (("tools", inputs.tools), ("documents", inputs.documents)) if value]
    for name in (*given, *inputs.variables):
        if name not in names.variables or (name in RESERVED_VARIABLES and name not in given):
            raise ValueError(f"{where}: {template.name} does not read {name!r}{OR_LOST}")
    turns = [*_system_turns(row, turns, where), *turns]
    for turn, _ in turns:
        if turn["role"] == "developer" and "developer" not in names.texts:
            turn["role"] = "system"
        _check_keys(turn, names, template.name, where)
    for value in (inputs.tools, inputs.documents, inputs.variables, *(turn.get("tool_calls") for turn, _ in turns)):
        _check_json(value, where)
    learnt = tuple(learns and is_answer(turn) for turn, learns in turns)
    return Chat(tuple(turn for turn, _ in turns), learnt, inputs, where)


def _read_inputs(row: Row, where: str) -> TemplateInputs:
    tools, documents, variables = (
        _json_column(row, name, kind, where)
        for name, kind in (("tools", list), ("documents", list), ("chat_template_kwargs", dict))
    )
    schemas = [_function_schema(tool) for tool in tools] if tools else None
    return TemplateInputs(schemas, documents, variables or {})


def _function_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Wraps a schema in an object whose type is function, as templates expect."""
    return {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool


def _json_column(row: Row, name: str, kind: type, where: str) -> Any:
    """Returns a list or an object of a column, which may also be its JSON text; None if it is blank."""
    value = _value_of(row.get(name))
    if is_blank(value) or (isinstance(value, str) and not value.strip()):
        return None
    items = value if isinstance(value, list) else [value]
    if not isinstance(value, kind) or not all(isinstance(item, dict) for item in items):
        wanted = "a list of objects" if kind is list else "an object"
        raise ValueError(f"{where}: {name!r} is {row[name]!r:.60}, not {wanted} or its JSON text; correct it")
    return value


def _value_of(value: Any) -> Any:
    """Parses a JSON text and keeps its nulls. Removes Arrow's nulls from other values."""
    return _json_or(value, value) if isinstance(value, str) else drop_nulls(value)


def _json_or(text: str, default: Any) -> Any:
    """Returns the value of a JSON text; the default if it is not JSON."""
    try:
        return parse_json(text, unique_keys=True)
    except ValueError:
        return default


def _check_json(value: Any, where: str) -> None:
    """Raises ValueError for a value that is not JSON, such as a time that Arrow parsed from text."""
    if isinstance(value, Mapping):
        for item in value.values():
            _check_json(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, where)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"{where} has {value!r:.60}, a {type(value).__name__}, which JSON does not have; write it as text"
        )


def drop_nulls(value: Any) -> Any:
    """Returns a value without the null members of its objects: Arrow fills every object of a column with all keys."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _system_turns(row: Row, turns: Sequence[tuple[Turn, bool]], where: str) -> list[tuple[Turn, bool]]:
    """Returns the turn of a column with the system prompt, unless the chat begins with it."""
    found = [name for name in SYSTEM_COLUMNS if not is_blank(row.get(name))]
    texts = {name: read_content(row[name], f"{where}: {name!r}") for name in found}
    first = turns[0][0] if turns and turns[0][0]["role"] in ("system", "developer") else None
    for name, text in texts.items():
        if first is not None and first["content"].strip() != text.strip():
            raise ValueError(f"{where}: column {name!r} differs from the system turn of the chat; remove one of them")
    if len(set(texts.values())) > 1:
        raise ValueError(f"{where}: columns {' and '.join(found)} differ; remove one of them")
    return [({"role": "system", "content": texts[found[0]]}, False)] if found and first is None else []


def read_turns(value: Any, column: str, where: str, learns: bool = True) -> list[tuple[Turn, bool]]:
    """Returns a chat's turns, each with whether it may be a target. Raises ValueError if the column holds no turns.

    `learns` False: no turn is a target.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json_or(value, value)
    if not isinstance(value, list | None) or not all(isinstance(turn, dict) for turn in value or ()):
        raise ValueError(f"{where}: {column!r} is {value!r:.40}, not a list of turns with role and content; correct it")
    turns = [_read_turn(turn, f"{where}: a turn of {column!r}") for turn in value or ()]
    return [(turn, learns and wanted) for turn, wanted in turns]


def _read_turn(turn: Mapping[str, Any], where: str) -> tuple[Turn, bool]:
    keys, others = ("role", "content"), ("from", "value")
    if turn.get("from") is not None:
        keys, others = others, keys
    named, content = (turn.get(key) for key in keys)
    for key, other in zip(keys, others, strict=True):
        if not is_blank(turn.get(other)) and turn[other] != turn.get(key):
            raise ValueError(f"{where} has both {key!r} and {other!r}; keep one of them")
    holds = keys[1] in turn or any(turn.get(key) for key in ("tool_calls", "function_call", *REASONING_KEYS))
    if not isinstance(named, str) or not holds:
        raise ValueError(f"{where} has no role or content; it has: {join_names(turn)}")
    role = ROLES.get(named.strip().lower())
    if role is None:
        raise ValueError(
            f"{where} has the role {named!r:.40}, which is not known; give it one of: {', '.join(sorted(set(ROLES)))}"
        )
    found: Turn = {"role": role, "content": ""}
    calls = _tool_calls(turn, where)
    if named.strip().lower() in CALL_ROLES:
        calls += _calls_in_text(content, where)
    else:
        found["content"] = read_content(content, where, encode=role == "tool")
    if calls and role != "assistant":
        raise ValueError(f"{where} calls functions, but its role is {named!r:.40}; only the assistant can")
    if calls:
        found["tool_calls"] = calls
    rest = drop_nulls({key: value for key, value in turn.items() if key not in (*CONTENT_KEYS, *TARGET_KEYS)})
    thoughts = [key for key in REASONING_KEYS if not is_blank(rest.get(key))]
    if len({repr(rest[key]) for key in thoughts}) > 1:
        raise ValueError(f"{where} has both {thoughts[0]!r} and {thoughts[1]!r}; keep one of them")
    return {**found, **rest}, _is_target(turn, role, where)


def _is_target(turn: Mapping[str, Any], role: str, where: str) -> bool:
    """Returns whether the keys of an answer make it a target. Raises ValueError for weights between 0 and 1."""
    marks = {key: turn[key] for key in TARGET_KEYS if turn.get(key) is not None}
    for key, value in marks.items():
        if value not in (0, 1):
            raise ValueError(f"{where} has {key} {value!r:.40}; give 1 to learn the answer or 0 not to, or remove it")
        if value and role != "assistant":
            raise ValueError(f"{where} has {key} {value!r}, but its role is {role}; only answers are learnt, remove it")
    return all(marks.values())


def read_content(content: Any, where: str, encode: bool = False) -> str:
    """Returns the text of a content: itself, its parts joined, or with `encode` an object as JSON. Null is empty."""
    if isinstance(content, list) and all(isinstance(part, str) for part in content):
        return "".join(content)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(_read_part(drop_nulls(part), where) for part in content)
    if isinstance(content, dict) and encode:
        return json.dumps(drop_nulls(content), ensure_ascii=False)
    if not isinstance(content, str | None):
        raise ValueError(f"{where} has the content {content!r:.60}, not text or a list of parts with text; correct it")
    return content or ""


def _read_part(part: Mapping[str, Any], where: str) -> str:
    kind, text = part.get("type", "text"), part.get("text")
    strangers = sorted(set(part) - {"type", "text"})
    if kind not in TEXT_PARTS or strangers or not isinstance(text, str):
        named = f"of type {kind!r:.40}" if kind not in TEXT_PARTS else f"with {join_names(strangers or part)}"
        raise ValueError(f"{where} has a part {named}; {ONLY_TEXT}; give parts with type and text")
    return text


def _tool_calls(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the calls of a turn. Parses arguments that are JSON text."""
    calls = _value_of(turn.get("tool_calls") or [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} has tool_calls {calls!r:.60}, not a list of calls; correct it")
    legacy = turn.get("function_call")
    return [_parse_arguments(call) for call in calls] + (_calls_in_text(legacy, where) if legacy else [])


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """Unwraps OpenAI's `function` object, if a tool call has one."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    holder = {**function_of(call), "arguments": arguments}
    return {**call, "function": holder} if "function" in call else holder


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    given = function_of(call).get("arguments")
    parsed = _json_or(given, None) if isinstance(given, str) else None
    return _with_arguments(call, parsed) if isinstance(parsed, dict) else call  # a null in JSON text stands for itself


def _calls_in_text(content: Any, where: str) -> list[dict[str, Any]]:
    """Returns calls written as one JSON object or a list of them, each with name and arguments."""
    value = _value_of(content)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"{where} is a function call, but {content!r:.60} is not JSON with name and arguments")
    return [_parse_arguments({"type": "function", "function": {"arguments": {}, **call}}) for call in calls]


def _check_keys(turn: Turn, names: TemplateNames, template: str, where: str) -> None:
    """Drops the harmless keys of a turn that the template does not read. Raises ValueError for other unread keys."""
    for call in turn.get("tool_calls", ()):
        for key, value in (*call.items(), *function_of(call).items()):
            if key not in CALL_KEYS and key not in names.keys and not is_blank(value):
                raise ValueError(f"{where}: {template} does not read {key!r} of a call{OR_LOST}")
    reasoning = any(key in names.keys for key in REASONING_KEYS)
    for key in [key for key in turn if key not in CONTENT_KEYS and key not in names.keys]:
        if key in REASONING_KEYS and reasoning:
            continue  # transformers gives it all of these names
        if key not in HARMLESS_KEYS and not is_blank(turn[key]):
            raise ValueError(f"{where}: {template} does not read {key!r} of a turn{OR_LOST}")
        del turn[key]


def with_parts(turns: Sequence[Turn]) -> list[Turn]:
    """Returns the turns with each content as a list of one part, which templates of multimodal models expect."""
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


def with_text_arguments(turns: Sequence[Turn]) -> list[Turn]:
    """Returns the turns with the arguments of calls as JSON text, which some templates expect."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = function_of(call).get("arguments")
        return _with_arguments(call, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else call

    return [
        {**turn, "tool_calls": [as_text(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn
        for turn in turns
    ]


def without_empty_contents(turns: Sequence[Turn]) -> list[Turn]:
    """Returns the turns without the empty content of calls, which some templates take for an answer."""
    return [
        {key: value for key, value in turn.items() if key != "content"}
        if "tool_calls" in turn and not turn["content"]
        else turn
        for turn in turns
    ]
