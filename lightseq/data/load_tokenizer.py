"""Loading of a tokenizer, with checks of its files before transformers reads them, and errors of one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightseq.data.chat_template import find_names
from lightseq.data.tokenizer import BYTE_VOCABULARY, ByteTokenizer, PretrainedTokenizer, Tokenizer
from lightseq.models.hub import hub_error
from lightseq.models.tokenizer_files import VOCABULARY_FILES, named_files
from lightseq.utils.files import JSON_BYTES, open_regular, read_json, read_json_object, read_text
from lightseq.utils.formatting import first_line

GENERATION_CONFIG, CONFIG = "generation_config.json", "config.json"
TOKENIZER_BYTES: Final = 512 << 20
BYTE_TOKENIZER_BYTES: Final = 2**16  # largest tokenizer.json that may belong to the byte tokenizer
FILES: Final = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # that transformers may open
OBJECTS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "added_tokens.json",
)
# Tokenizers may leave ids out, but memory and time grow with the largest one.
MOST_ID: Final = 2**31 - 1
GAPS, IDS_PER_TOKEN = 1 << 18, 4


def load_tokenizer(name: str, chat_template: str | None = None) -> Tokenizer:
    """Loads `byte`, or a local directory or hub id with AutoTokenizer, without running its code.

    `chat_template`, a file or a template, replaces the tokenizer's. Raises ValueError if either cannot be used.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    if name == "byte":
        if template is not None:
            raise ValueError("--chat_template needs a tokenizer with tokens that end a turn, not byte; give another")
        return ByteTokenizer()
    if not Path(name).exists() and (reason := hub_error(name, "tokenizer_config.json")):
        raise ValueError(
            f"tokenizer {name} is not a local directory and cannot be fetched from the hub ({reason}); check the id "
            "and the network, or give a directory, or byte"
        )
    if template is None and _is_byte_tokenizer(Path(name)):
        return ByteTokenizer(name)
    from transformers import AutoTokenizer  # takes seconds to import; `byte` does not need it

    with readable_tokenizer(name):
        backend: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if template is not None:
        _replace_chat_template(backend, template)
    # Not len(backend), because ids may have gaps.
    vocab_size = max(backend.get_vocab().values()) + 1
    return PretrainedTokenizer(name, vocab_size, backend, template is not None, read_end_ids(name))


def _is_byte_tokenizer(directory: Path) -> bool:
    """Returns whether a directory holds the files of `ByteTokenizer.as_transformers()`."""
    file = directory / "tokenizer.json"
    if not file.is_file() or file.stat().st_size > BYTE_TOKENIZER_BYTES:
        return False
    try:
        model = json.loads(read_text(file))["model"]
        return model["vocab"] == BYTE_VOCABULARY and not model["merges"]
    except (ValueError, LookupError, TypeError, OSError):
        return False  # damaged files are refused by their own parser


def _replace_chat_template(backend: Any, template: str) -> None:
    """Sets the template of a tokenizer. Raises ValueError if Jinja cannot parse it."""
    from jinja2 import TemplateSyntaxError

    try:
        find_names(template)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"--chat_template is not a Jinja template (line {error.lineno}: {first_line(error)}); correct it"
        ) from error
    except RecursionError as error:
        raise ValueError("--chat_template nests too deeply for Jinja; simplify it") from error
    backend.chat_template = template


def read_chat_template(given: str) -> str:
    """Returns the Jinja template of --chat_template: the text of a file, or the value itself if it is a template.

    Raises ValueError if it is neither.
    """
    if "{{" in given or "{%" in given:
        return given
    try:
        return read_text(Path(given).expanduser())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ValueError(
            f"--chat_template {given!r:.200} cannot be read ({reason}); give a file, or a Jinja template"
        ) from error


def has_tokenizer(name: str) -> bool:
    """Returns whether a name is `byte`, or a directory or a hub id with the files of a tokenizer."""
    if name == "byte":
        return True
    if Path(name).exists():
        directory = Path(name)
        common = any((directory / file).is_file() for file in VOCABULARY_FILES)
        return common or any((directory / file).is_file() for file in named_files(directory))
    return not hub_error(name, "tokenizer_config.json")


@contextmanager
def readable_tokenizer(name: str) -> Iterator[None]:
    """Checks the files of a local tokenizer. Turns all errors, also those of the block's parsers, into ValueError."""
    directory = Path(name)
    try:
        if directory.is_dir():
            check_tokenizer(directory)
        yield
    except BaseException as error:  # tokenizers raises Exception, and after a panic its own BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        remedy = (
            "copy its files again, or give another" if directory.is_dir() else "give a directory, a hub id, or byte"
        )
        raise ValueError(f"tokenizer {name}: {kind}{first_line(error)}; {remedy}") from error


def read_end_ids(name: str) -> tuple[int, ...]:
    """Returns the stop ids of a model's generation settings, which lie beside its tokenizer.

    Raises ValueError for settings that cannot be read.
    """
    for file in (GENERATION_CONFIG, CONFIG):
        path = _file_of(name, file)
        if path is None:
            continue
        settings = read_json_object(path, "correct it, or copy it again")
        inner = settings.get("text_config")
        given = settings.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        ids = given if isinstance(given, list) else [given]
        if any(found is not None and (type(found) is not int or found > MOST_ID) for found in ids):
            raise ValueError(f"{path}: eos_token_id is {given!r:.80}, not an id or a list of ids; correct it")
        if found := tuple(one for one in ids if one is not None and one >= 0):  # as -1 for none
            return found
    return ()


def _file_of(name: str, file: str) -> Path | None:
    """Returns a file of a local directory or of a hub repository; None if there is none."""
    if Path(name).exists():
        return Path(name) / file if (Path(name) / file).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return Path(found) if found is not None else None


def check_tokenizer(directory: Path) -> None:
    """Raises ValueError or OSError for files that transformers cannot read, or only with unbounded memory."""
    for path in sorted({path for pattern in FILES for path in directory.glob(pattern)}):
        open_regular(path).close()
        limit = TOKENIZER_BYTES if path.suffix in (".model", ".tiktoken") or path.name in OBJECTS else JSON_BYTES
        if path.stat().st_size > limit:
            raise ValueError(f"{path} has more than {limit:,} bytes")
    found = {name: _read_object(directory / name) for name in OBJECTS if (directory / name).exists()}
    ids = _ids(found)
    limit = GAPS + IDS_PER_TOKEN * len(ids)
    for token, number in ids:
        if type(number) is not int or not 0 <= number < limit:
            raise ValueError(
                f"{directory}: {token!r:.80} has the id {number!r:.80}, not a whole number from 0 to {limit - 1:,}"
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path, TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _ids(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the tokens and ids of all files. Values of other types are left to the parsers."""
    tokenizer = found.get("tokenizer.json", {})
    model, listed = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: the id is the place
        vocabulary = {str(place): place for place in range(len(vocabulary))}
    decoder = found.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    ids = [*found.get("vocab.json", {}).items(), *found.get("added_tokens.json", {}).items()]
    if isinstance(vocabulary, dict):
        ids += vocabulary.items()
    if isinstance(listed, list):
        ids += [(f"added token {i}", token.get("id")) for i, token in enumerate(listed) if isinstance(token, dict)]
    if isinstance(decoder, dict):
        ids += [(f"added token {key}", int(key) if key.isdecimal() else key) for key in decoder]
    return ids
