"""Checks of a local tokenizer's files before transformers reads them, and errors of its parsers in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightseq.utils.files import JSON_BYTES, open_regular, read_json
from lightseq.utils.formatting import first_line

TOKENIZER_BYTES: Final = 512 << 20
FILES: Final = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # that transformers may open
OBJECTS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "added_tokens.json",
)
MODELS: Final = ("BPE", "Unigram", "WordPiece", "WordLevel")
# Tokenizers may leave ids out, but memory and time grow with the largest one.
GAPS, IDS_PER_TOKEN = 1 << 18, 4


@contextmanager
def readable_tokenizer(name: str) -> Iterator[None]:
    """Checks the files of a local tokenizer. Raises ValueError for them, and for whatever the block's parsers raise."""
    directory = Path(name)
    try:
        if directory.is_dir():
            check_tokenizer(directory)
        yield
    except BaseException as error:  # tokenizers raises Exception, or for a panic a BaseException of its own
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"tokenizer {name}: {first_line(error)}; give a directory, a hub id, or byte") from error


def check_tokenizer(directory: Path) -> None:
    """Raises ValueError or OSError for files that transformers cannot read, or only with unbounded memory."""
    for path in sorted({path for pattern in FILES for path in directory.glob(pattern)}):
        open_regular(path).close()
        limit = TOKENIZER_BYTES if path.suffix in (".model", ".tiktoken") or path.name in OBJECTS else JSON_BYTES
        if path.stat().st_size > limit:
            raise ValueError(f"{path} has more than {limit:,} bytes")
    found = {name: _read_object(directory / name) for name in OBJECTS if (directory / name).exists()}
    vocabulary: dict[str, Any] = {}
    if "tokenizer.json" in found:
        vocabulary = _check_model(directory / "tokenizer.json", found["tokenizer.json"])
    vocabulary = {**found.get("vocab.json", {}), **vocabulary}
    added = _added_ids(directory, found)
    count = len(vocabulary) + len(added)
    for ids in (vocabulary, added):
        _check_ids(directory, ids, GAPS + IDS_PER_TOKEN * count)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path, TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _check_model(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of a tokenizer.json's model by token. Raises ValueError if it has none."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{path} has no model")
    if model.get("type", "BPE") not in MODELS:
        raise ValueError(f"{path}: the model's type {model['type']!r:.80} is unknown; it is one of {', '.join(MODELS)}")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # of Unigram: the id is the place
        return {str(place): place for place in range(len(vocabulary))}
    if not isinstance(vocabulary, dict):
        raise ValueError(f"{path} has no vocabulary")
    return vocabulary


def _added_ids(directory: Path, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the ids of added tokens, which stand in three files, by a name for errors."""
    listed = found.get("tokenizer.json", {}).get("added_tokens") or []
    decoder = found.get("tokenizer_config.json", {}).get("added_tokens_decoder") or {}
    if not isinstance(listed, list) or not all(isinstance(token, dict) for token in listed):
        raise ValueError(f"{directory / 'tokenizer.json'}: added_tokens is not a list of objects")
    if not isinstance(decoder, dict) or not all(key.isascii() and key.isdigit() and len(key) < 20 for key in decoder):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is not an object with ids as keys"
        )
    by_name = {f"added token {place}": token.get("id") for place, token in enumerate(listed)}
    by_name |= {f"added token {key}": int(key) for key in decoder}
    return {**by_name, **found.get("added_tokens.json", {})}


def _check_ids(path: Path, ids: Mapping[str, Any], limit: int) -> None:
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < limit:
            raise ValueError(
                f"{path}: {token!r:.80} has the id {number!r:.80}, not a whole number from 0 to {limit - 1:,}"
            )
