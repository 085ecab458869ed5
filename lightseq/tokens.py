"""What a corpus is on disk, a token directory, and the tokenizers that make one of text.

A token directory:
tokens.bin     every token, little-endian uint16 or uint32
documents.bin  int64: where each document starts, and the end of the last
targets.bin    uint8, perhaps: 1 for a token that is a target, 0 for one that is only read; without it all are
meta.json      dtype, counts, vocabulary, tokenizer, source, seed, what was skipped
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]

FORMAT_VERSION = 1
TOKENS, DOCUMENTS, TARGETS, META = "tokens.bin", "documents.bin", "targets.bin", "meta.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET: np.dtype[Any] = np.dtype("<i8")
FLAG: np.dtype[Any] = np.dtype("u1")

Turns = list[dict[str, Any]]
Part = tuple[str, bool]  # of a text, and whether it is a target
Targets = NDArray[np.bool_]


@dataclass(frozen=True)
class Reading:
    """How rows are read that are not tokens yet."""

    text_column: str = "text"
    limit: int | None = None  # rows; None: all
    cache: Path = field(default_factory=lambda: Path("~/.cache/lightseq/tokens").expanduser())


class Tokenizer(Protocol):
    """Text to ids; a document's beginning and end are part of what `encode` returns, and not of `encode_part`.

    `encode_parts` makes ids of texts in parts, and says which of them are targets. A chat template writes turns as
    text, with what asks for an answer at the end or without.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def begin(self) -> tuple[int, ...]: ...

    @property
    def end(self) -> tuple[int, ...]: ...

    @property
    def chat_template(self) -> Callable[[Turns, bool], str] | None: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def special_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> IntArray: ...

    def encode_part(self, text: str) -> IntArray: ...

    def encode_batch(self, texts: list[str], whole: bool) -> list[IntArray]: ...

    def encode_parts(self, texts: list[tuple[Part, ...]]) -> list[tuple[IntArray, Targets]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document."""

    name: str = "byte"
    vocab_size: int = 257
    end_of_document: int = 256
    begin: tuple[int, ...] = ()
    chat_template: Callable[[Turns, bool], str] | None = None
    fingerprint: str = "byte"

    @property
    def end(self) -> tuple[int, ...]:
        return (self.end_of_document,)

    @property
    def special_ids(self) -> tuple[int, ...]:
        return (self.end_of_document,)

    def encode(self, text: str) -> IntArray:
        return np.append(self.encode_part(text), np.uint16(self.end_of_document))

    def encode_part(self, text: str) -> IntArray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str], whole: bool) -> list[IntArray]:
        return [self.encode(text) if whole else self.encode_part(text) for text in texts]

    def encode_parts(self, texts: list[tuple[Part, ...]]) -> list[tuple[IntArray, Targets]]:
        return [_joined([(self.encode_part(text), target) for text, target in parts]) for parts in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A Hugging Face tokenizer; its end-of-sequence id ends every document, whether or not it adds one itself."""

    name: str
    vocab_size: int
    backend: Any

    @property
    def begin(self) -> tuple[int, ...]:
        first = self.backend.bos_token_id
        return (first,) if first is not None and self.backend("a")["input_ids"][:1] == [first] else ()

    @property
    def end(self) -> tuple[int, ...]:
        return (self.backend.eos_token_id,) if self.backend.eos_token_id is not None else ()

    @property
    def chat_template(self) -> Callable[[Turns, bool], str] | None:
        return self._render if getattr(self.backend, "chat_template", None) else None

    def _render(self, turns: Turns, asks: bool) -> str:
        return str(self.backend.apply_chat_template(turns, tokenize=False, add_generation_prompt=asks))

    @property
    def fingerprint(self) -> str:
        """Of all that decides what a text becomes, whatever the tokenizer's name."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        words = fast.to_str() if fast is not None else json.dumps(self.backend.get_vocab(), sort_keys=True)
        made = (words, self.begin, self.end, str(getattr(self.backend, "chat_template", None)))
        return hashlib.sha256(repr(made).encode()).hexdigest()

    @property
    def special_ids(self) -> tuple[int, ...]:
        return tuple(self.backend.all_special_ids)

    def encode_part(self, text: str) -> IntArray:
        return self.encode_batch([text], whole=False)[0]

    def encode(self, text: str) -> IntArray:
        return self.encode_batch([text], whole=True)[0]

    def encode_batch(self, texts: list[str], whole: bool) -> list[IntArray]:
        """Whole documents, or parts of one; a fast tokenizer takes all cores for them."""
        if not texts:
            return []
        found = self.backend(texts, add_special_tokens=whole, verbose=False)["input_ids"]
        closed = [ids if not whole or tuple(ids[-1:]) == self.end else [*ids, *self.end] for ids in found]
        return [np.asarray(ids, dtype=np.int64) for ids in closed]

    def encode_parts(self, texts: list[tuple[Part, ...]]) -> list[tuple[IntArray, Targets]]:
        """As if in one piece, as readers of a prompt get it; an id that reaches into a target is one."""
        if not texts:
            return []
        if not self.backend.is_fast:
            return [_joined([(self.encode_part(text), target) for text, target in parts]) for parts in texts]
        whole = ["".join(text for text, _ in parts) for parts in texts]
        found = self.backend(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            (np.asarray(ids, dtype=np.int64), _reaching(np.asarray(spans).reshape(-1, 2), parts))
            for ids, spans, parts in zip(found["input_ids"], found["offset_mapping"], texts, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))


def _joined(pieces: list[tuple[IntArray, bool]]) -> tuple[IntArray, Targets]:
    ids = np.concatenate([ids for ids, _ in pieces])
    return ids, np.concatenate([np.full(len(ids), target) for ids, target in pieces])


def _reaching(spans: NDArray[np.integer[Any]], parts: tuple[Part, ...]) -> Targets:
    """Which of the ids, by their characters, reach into a part that is a target."""
    found, end = np.zeros(len(spans), dtype=np.bool_), 0
    for text, target in parts:
        start, end = end, end + len(text)
        if target:
            found |= (spans[:, 1] > start) & (spans[:, 0] < end)
    return found


def load_tokenizer(name: str) -> Tokenizer:
    """`byte`, or whatever AutoTokenizer knows: a local directory or a hub id. Code that ships with it is never run."""
    if name == "byte":
        return ByteTokenizer()
    from transformers import AutoTokenizer  # seconds to import, and not needed for bytes

    try:
        backend: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"tokenizer {name}: {first_line(error)}; give a directory, a hub id, or byte") from error
    # not len(backend): ids may have gaps
    return PretrainedTokenizer(name, max(backend.get_vocab().values()) + 1, backend)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def is_plain_name(name: object) -> bool:
    """Whether a name stays in the directory in which it is looked up."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


@contextmanager
def written_whole(path: Path, force: bool) -> Iterator[Path]:
    """Gives a temporary sibling to write, a file or a directory; it takes the name `path` when all went well."""
    path = path.resolve()
    if path.exists() and not force:
        raise ValueError(f"{path} exists; give another path, or --force to replace it")
    if path.is_dir() and (strangers := {entry.name for entry in path.iterdir()} - {TOKENS, DOCUMENTS, TARGETS, META}):
        raise ValueError(
            f"{path} holds {min(strangers)}, so it is no token directory and is not replaced; move it away"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (path.with_name(f".{path.name}.{word}-{os.getpid()}") for word in ("partial", "old"))
    try:
        yield partial
        if path.exists() and (path.is_dir() or partial.is_dir()):  # a directory is never renamed over another
            path.rename(old)
        partial.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        for leftover in (partial, old):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)


def write_token_directory(
    path: Path,
    documents: Iterable[IntArray | tuple[IntArray, NDArray[np.bool_] | None]],
    vocab_size: int,
    about: Callable[[], Mapping[str, object]],
    force: bool = False,
    with_targets: bool = False,
) -> dict[str, Any]:
    """Streams documents to disk; `about` adds to the meta data after the last one, when counts are known.

    A document may bring along which of its tokens are targets.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    count = tokens = 0
    max_token_id = -1
    with written_whole(path, force) as partial, ExitStack() as files:
        partial.mkdir()
        token_file, document_file = (files.enter_context((partial / name).open("wb")) for name in (TOKENS, DOCUMENTS))
        target_file = files.enter_context((partial / TARGETS).open("wb")) if with_targets else None
        document_file.write(np.int64(0).astype(OFFSET).tobytes())
        for document in documents:
            ids, targets = document if isinstance(document, tuple) else (document, None)
            if ids.size == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
                raise ValueError(f"document {count}: {_extent(ids)}, not ids of a vocabulary of {vocab_size}")
            token_file.write(ids.astype(DTYPES[dtype]).tobytes())
            if target_file is not None:
                target_file.write((np.ones(len(ids), FLAG) if targets is None else targets.astype(FLAG)).tobytes())
            count, tokens, max_token_id = count + 1, tokens + ids.size, max(max_token_id, int(ids.max()))
            document_file.write(np.int64(tokens).astype(OFFSET).tobytes())
        if count == 0:
            raise ValueError(f"no document to write to {path}; the sources hold no text")
        meta = {"format_version": FORMAT_VERSION, "dtype": dtype, "documents": count, "tokens": tokens}
        meta |= {"vocab_size": vocab_size, "max_token_id": max_token_id, "targets": with_targets, **about()}
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        files.close()
    return meta


def _extent(ids: IntArray) -> str:
    return f"ids from {ids.min()} to {ids.max()}" if ids.size else "no token"


@dataclass(frozen=True)
class TokenDirectory:
    """Memory-mapped tokens; document i is tokens[offsets[i] : offsets[i + 1]]."""

    path: Path
    tokens: IntArray
    offsets: NDArray[np.int64]
    meta: Mapping[str, Any]
    targets: IntArray | None = None

    def document(self, index: int) -> IntArray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def targets_of(self, index: int) -> IntArray | None:
        """For every token of a document, whether it is a target; None: all are."""
        return None if self.targets is None else self.targets[self.offsets[index] : self.offsets[index + 1]]


def open_token_directory(path: Path) -> TokenDirectory:
    """Maps a token directory after checking that its three files agree."""
    meta = _read_meta(path / META)
    tokens = _map_numbers(path / TOKENS, DTYPES[meta["dtype"]], meta["tokens"])
    offsets = _map_numbers(path / DOCUMENTS, OFFSET, meta["documents"] + 1)
    if offsets[0] != 0 or offsets[-1] != meta["tokens"] or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"{path / DOCUMENTS} is corrupt: its borders do not rise from 0 to {meta['tokens']}; make it again"
        )
    targets = _map_numbers(path / TARGETS, FLAG, meta["tokens"]) if meta.get("targets") else None
    return TokenDirectory(path, tokens, offsets, meta, targets)


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {META}, so it is no token directory; make one with python3 -m data_gen")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt: {first_line(error)}; make it again") from error
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is not of format version {FORMAT_VERSION}; make it again with python3 -m data_gen")
    counts_hold = all(isinstance(meta.get(key), int) and meta[key] > 0 for key in ("tokens", "documents"))
    if not counts_hold or not isinstance(meta.get("max_token_id"), int) or meta.get("dtype") not in DTYPES:
        raise ValueError(
            f"{path} is corrupt: dtype, tokens, documents or max_token_id is missing or wrong; make it again"
        )
    return meta


def _map_numbers(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    size_bytes = path.stat().st_size if path.is_file() else 0
    if size_bytes != count * dtype.itemsize:
        raise ValueError(
            f"{path} is corrupt: {size_bytes} bytes where {META} says {count * dtype.itemsize}; make it again"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
