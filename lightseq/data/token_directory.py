"""Token directories, the format of a tokenized corpus on disk: writing and opening.

Files of a token directory:
tokens.bin     all tokens, little-endian uint16 or uint32
documents.bin  int64: the start of each document, and the end of the last
targets.bin    optional, uint8: 1 for a token that is a target, 0 for context; without the file all tokens are targets
rows.bin       optional, int64: the first document of each row; without the file every document is a row
meta.json      dtype, counts, vocabulary, SHA-256 of the other files, tokenizer, source, seed, skipped rows
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightseq.utils.files import read_json
from lightseq.utils.formatting import first_line

IntArray = NDArray[np.integer[Any]]

FORMAT_VERSION = 1
TOKENS, DOCUMENTS, TARGETS, ROWS, META = "tokens.bin", "documents.bin", "targets.bin", "rows.bin", "meta.json"
FILES = frozenset((TOKENS, DOCUMENTS, TARGETS, ROWS, META))
SHA256 = "sha256"  # key of meta.json: the SHA-256 of every other file by name
PARTIAL = ".partial-"  # follows the final name in a directory that is being written
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET_DTYPE: np.dtype[Any] = np.dtype("<i8")
TARGET_DTYPE: np.dtype[Any] = np.dtype("u1")
REQUIRED_META = {"tokens": int, "documents": int, "max_token_id": int, "dtype": str}  # fields of meta.json


@contextmanager
def atomic_write(path: Path, force: bool) -> Iterator[Path]:
    """Yields a temporary path beside `path` for a file or a directory, and renames it to `path` on success."""
    path = path.resolve()
    if path.exists() and not force:
        raise ValueError(f"{path} exists; give another path, or --force to replace it")
    if path.is_dir() and (strangers := {entry.name for entry in path.iterdir()} - FILES):
        raise ValueError(
            f"{path} holds {min(strangers)}, so it is not a token directory and is not replaced; move it away"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A unique folder: in containers, a killed process may have had the same process id.
        folder = Path(mkdtemp(prefix=f".{path.name}{PARTIAL}", dir=path.parent))
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); give another path") from error
    partial, old = folder / "new", folder / "old"
    try:
        yield partial
        if path.exists() and (path.is_dir() or partial.is_dir()):  # a rename cannot replace a directory
            path.rename(old)
        partial.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(folder)


def remove_partials(path: Path) -> None:
    """Removes temporary files that killed processes left beside `path`. No process may be writing `path`."""
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{path.name}{PARTIAL}"):
            shutil.rmtree(entry, ignore_errors=True)  # other users' files are harmless


def write_token_directory(
    path: Path,
    documents: Iterable[IntArray | tuple[IntArray, NDArray[np.bool_] | None]],
    vocab_size: int,
    extra_meta: Callable[[], Mapping[str, object]],
    force: bool = False,
    with_targets: bool = False,
    first_of_rows: Sequence[int] = (),
) -> dict[str, Any]:
    """Streams documents, with or without a mask of targets, to disk and returns meta.json's content.

    After the last document, when their counts are known, `extra_meta` is called, and `first_of_rows`, which may grow
    until then, holds the first document of each row if a row holds several.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    count = tokens = 0
    max_token_id = -1
    with atomic_write(path, force) as partial, ExitStack() as files:
        partial.mkdir()
        names = (TOKENS, DOCUMENTS, TARGETS) if with_targets else (TOKENS, DOCUMENTS)
        hashed = {name: _HashedFile(files.enter_context((partial / name).open("wb"))) for name in names}
        token_file, document_file, target_file = hashed[TOKENS], hashed[DOCUMENTS], hashed.get(TARGETS)
        document_file.write(np.int64(0).astype(OFFSET_DTYPE).tobytes())
        for document in documents:
            ids, targets = document if isinstance(document, tuple) else (document, None)
            if ids.size == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
                raise ValueError(f"document {count}: {_id_range(ids)}, not ids of a vocabulary of {vocab_size}")
            token_file.write(ids.astype(DTYPES[dtype]).tobytes())
            if target_file is not None:
                target_file.write(
                    (np.ones(len(ids), TARGET_DTYPE) if targets is None else targets.astype(TARGET_DTYPE)).tobytes()
                )
            count, tokens, max_token_id = count + 1, tokens + ids.size, max(max_token_id, int(ids.max()))
            document_file.write(np.int64(tokens).astype(OFFSET_DTYPE).tobytes())
        if count == 0:
            raise ValueError(f"no document to write to {path}; give sources that hold text")
        meta = {"format_version": FORMAT_VERSION, "dtype": dtype, "documents": count, "tokens": tokens}
        meta |= {"vocab_size": vocab_size, "max_token_id": max_token_id, "targets": with_targets, **extra_meta()}
        if 0 < len(rows := list(first_of_rows)) < count:
            meta["rows"] = len(rows)
            hashed[ROWS] = _HashedFile(files.enter_context((partial / ROWS).open("wb")))
            hashed[ROWS].write(np.asarray(rows, OFFSET_DTYPE).tobytes())
        meta[SHA256] = {name: file.hexdigest() for name, file in hashed.items()}
        files.close()  # before meta.json is written: a newer file has been edited
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def made_with(path: Path) -> str | None:
    """Returns the name of the tokenizer that made a token directory; None for other data, and if it is not recorded."""
    if not (path / META).is_file():
        return None
    name = read_json(path / META).get("tokenizer")
    return name if isinstance(name, str) else None


def made_with_one(paths: Iterable[str]) -> str | None:
    """Returns the tokenizer that made all of several token directories; None if there are several, or none."""
    names = {made_with(Path(path)) for path in paths}
    return names.pop() if len(names) == 1 else None


class _HashedFile:
    """File that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _id_range(ids: IntArray) -> str:
    return f"ids from {ids.min()} to {ids.max()}" if ids.size else "no token"


@dataclass(frozen=True)
class TokenDirectory:
    """Memory-mapped tokens; document i is tokens[offsets[i] : offsets[i + 1]]."""

    path: Path
    tokens: IntArray
    offsets: NDArray[np.int64]
    meta: Mapping[str, Any]
    targets: IntArray | None = None
    first_of_rows: NDArray[np.int64] | None = None  # the first document of each row; None: every document is a row

    def first(self, documents: int) -> TokenDirectory:
        """Returns the directory cut to its first documents."""
        offsets = self.offsets[: documents + 1]
        tokens = self.tokens[: offsets[-1]]
        counts = {"documents": len(offsets) - 1, "tokens": len(tokens), "max_token_id": int(tokens.max(initial=0))}
        targets = None if self.targets is None else self.targets[: offsets[-1]]
        rows = None if self.first_of_rows is None else self.first_of_rows[self.first_of_rows < documents]
        return TokenDirectory(self.path, tokens, offsets, {**self.meta, **counts}, targets, rows)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files with tokens."""
        return (TOKENS, DOCUMENTS) if self.targets is None else (TOKENS, DOCUMENTS, TARGETS)

    def document(self, index: int) -> IntArray:
        """Returns the tokens of a document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def targets_of(self, index: int) -> IntArray | None:
        """Returns the mask of a document's targets; None if all tokens are targets."""
        return None if self.targets is None else self.targets[self.offsets[index] : self.offsets[index + 1]]


def open_token_directory(path: Path) -> TokenDirectory:
    """Memory-maps a token directory. Raises ValueError if its files do not agree."""
    meta = _read_meta(path / META)
    tokens = _map_numbers(path / TOKENS, DTYPES[meta["dtype"]], meta["tokens"])
    offsets = _map_numbers(path / DOCUMENTS, OFFSET_DTYPE, meta["documents"] + 1)
    if offsets[0] != 0 or offsets[-1] != meta["tokens"] or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"{path / DOCUMENTS} is corrupt: its offsets do not rise from 0 to {meta['tokens']}; make it again"
        )
    targets = _map_numbers(path / TARGETS, TARGET_DTYPE, meta["tokens"]) if meta.get("targets") else None
    rows = _map_numbers(path / ROWS, OFFSET_DTYPE, meta["rows"]) if meta.get("rows") else None
    return TokenDirectory(path, tokens, offsets, meta, targets, rows)


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {META}, so it is not a token directory; make one with lightseq data")
    try:
        meta = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is corrupt: {first_line(error)}; make it again") from error
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} does not have format version {FORMAT_VERSION}; make it again with lightseq data")
    told = all(type(meta.get(key)) is kind for key, kind in REQUIRED_META.items()) and meta["dtype"] in DTYPES
    if not told or min(meta["tokens"], meta["documents"]) < 1 or not 0 <= meta["max_token_id"] < 1 << 32:
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
