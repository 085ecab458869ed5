"""What a corpus is on disk: a token directory, a pickle or a text file, and the tokenizers between them.

A token directory:
tokens.bin     every token, little-endian uint16 or uint32
documents.bin  int64: where each document starts, and the end of the last
meta.json      dtype, counts, vocabulary, tokenizer, source, seed, what was skipped
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]

FORMAT_VERSION = 1
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.bin", "meta.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET: np.dtype[Any] = np.dtype("<i8")
TEXT_SUFFIXES = (".jsonl", ".parquet")


class Tokenizer(Protocol):
    """Text to ids; a document's beginning and end are part of what `encode` returns, and not of `encode_part`."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def begin(self) -> tuple[int, ...]: ...

    @property
    def special_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> IntArray: ...

    def encode_part(self, text: str) -> IntArray: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document."""

    name: str = "byte"
    vocab_size: int = 257
    end_of_document: int = 256
    begin: tuple[int, ...] = ()

    @property
    def special_ids(self) -> tuple[int, ...]:
        return (self.end_of_document,)

    def encode(self, text: str) -> IntArray:
        return np.append(self.encode_part(text), np.uint16(self.end_of_document))

    def encode_part(self, text: str) -> IntArray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

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
    def special_ids(self) -> tuple[int, ...]:
        return tuple(self.backend.all_special_ids)

    def encode_part(self, text: str) -> IntArray:
        ids = self.backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def encode(self, text: str) -> IntArray:
        ids = self.backend(text, verbose=False)["input_ids"]
        end = self.backend.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))


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


def iterate_texts(path: Path, column: str = "text") -> Iterator[str]:
    """The texts of a JSONL or Parquet file in order; a null counts as an empty text."""
    assert path.suffix in TEXT_SUFFIXES, path
    return _iterate_jsonl(path, column) if path.suffix == ".jsonl" else _iterate_parquet(path, column)


def _iterate_jsonl(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} line {number} is not JSON: {first_line(error)}") from error
            if not isinstance(row, dict) or column not in row:
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{path} line {number} has no column {column!r}; it has: {found}")
            if not isinstance(row[column], str | None):
                raise ValueError(f"{path} line {number}: {column!r} is {row[column]!r:.40}, not text")
            yield row[column] or ""


def _iterate_parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise ValueError(f"it has no column {column!r}; it has: {', '.join(schema.names)}")
            if not (
                pa.types.is_string(schema.field(column).type) or pa.types.is_large_string(schema.field(column).type)
            ):
                raise ValueError(f"its column {column!r} is {schema.field(column).type}, not text")
            for rows in file.iter_batches(batch_size=1024, columns=[column]):
                yield from (text or "" for text in rows.column(0).to_pylist())
    except (ValueError, OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


MALFORMED = (  # what an unpickler raises for bytes that are no pickle
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, MemoryError, RecursionError),
)


class PlainUnpickler(pickle.Unpickler):
    """Builds plain containers and numbers only: with no name looked up there is nothing a pickle could call.

    Code it cannot run, but a hostile file can still ask for more memory than there is.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it asks to build {module}.{name}, and only plain lists, dicts and numbers are read"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it asks for an object outside the file, and only plain lists and dicts are read")


def load_plain_pickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return PlainUnpickler(file).load()
    except (*MALFORMED, ImportError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a pickle: {first_line(error)}; write it again as plain lists"
        ) from error


def read_pickle(path: Path) -> Iterator[tuple[IntArray, IntArray]]:
    """Ids and labels, aligned, of a dict with 'input_ids' and perhaps 'labels': lists of lists of integers."""
    content = load_plain_pickle(path)
    if not isinstance(content, dict) or not isinstance(content.get("input_ids"), list | tuple):
        raise ValueError(f"{path} is not a dict whose 'input_ids' is a list of lists of token ids; write it so")
    sequences, all_labels = content["input_ids"], content.get("labels")
    if all_labels is not None and (not isinstance(all_labels, list | tuple) or len(all_labels) != len(sequences)):
        raise ValueError(f"{path}: 'labels' is not a list with one entry for each of {len(sequences)} input_ids")
    for index, sequence in enumerate(sequences):
        ids = _integers(sequence, f"{path} sequence {index}")
        labels = ids if all_labels is None else _integers(all_labels[index], f"{path} labels {index}")
        if len(labels) != len(ids):
            raise ValueError(f"{path} sequence {index}: {len(ids)} input_ids but {len(labels)} labels; align them")
        yield ids, labels


def _integers(numbers: Any, where: str) -> IntArray:
    try:
        array = np.asarray(numbers) if isinstance(numbers, list | tuple) else None
    except (ValueError, OverflowError):
        array = None
    if array is not None and array.shape == (0,):
        return np.zeros(0, np.int64)
    if array is None or array.ndim != 1 or array.dtype.kind != "i":
        raise ValueError(f"{where} is not a list of integers; write it as one")
    return array


@contextmanager
def written_whole(path: Path, force: bool) -> Iterator[Path]:
    """Gives a temporary sibling to write, a file or a directory; it takes the name `path` when all went well."""
    path = path.resolve()
    if path.exists() and not force:
        raise ValueError(f"{path} exists; give another path, or --force to replace it")
    if path.is_dir() and (strangers := {entry.name for entry in path.iterdir()} - {TOKENS, DOCUMENTS, META}):
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
    documents: Iterable[IntArray],
    vocab_size: int,
    about: Callable[[], Mapping[str, object]],
    force: bool = False,
) -> dict[str, Any]:
    """Streams documents to disk; `about` adds to the meta data after the last one, when counts are known."""
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    count = tokens = 0
    max_token_id = -1
    with written_whole(path, force) as partial:
        partial.mkdir()
        with (partial / TOKENS).open("wb") as token_file, (partial / DOCUMENTS).open("wb") as document_file:
            document_file.write(np.int64(0).astype(OFFSET).tobytes())
            for ids in documents:
                if ids.size == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
                    raise ValueError(f"document {count}: {_extent(ids)}, not ids of a vocabulary of {vocab_size}")
                token_file.write(ids.astype(DTYPES[dtype]).tobytes())
                count, tokens, max_token_id = count + 1, tokens + ids.size, max(max_token_id, int(ids.max()))
                document_file.write(np.int64(tokens).astype(OFFSET).tobytes())
        if count == 0:
            raise ValueError(f"no document to write to {path}; the sources hold no text")
        meta = {"format_version": FORMAT_VERSION, "dtype": dtype, "documents": count, "tokens": tokens}
        meta |= {"vocab_size": vocab_size, "max_token_id": max_token_id, **about()}
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
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

    def document(self, index: int) -> IntArray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def open_token_directory(path: Path) -> TokenDirectory:
    """Maps a token directory after checking that its three files agree."""
    meta = _read_meta(path / META)
    tokens = _map_numbers(path / TOKENS, DTYPES[meta["dtype"]], meta["tokens"])
    offsets = _map_numbers(path / DOCUMENTS, OFFSET, meta["documents"] + 1)
    if offsets[0] != 0 or offsets[-1] != meta["tokens"] or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"{path / DOCUMENTS} is corrupt: its borders do not rise from 0 to {meta['tokens']}; make it again"
        )
    return TokenDirectory(path, tokens, offsets, meta)


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
