"""Hash of all the data of a run, by which a resumed run recognizes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from lightseq.data.examples import Examples, LazyTextExamples, WindowExamples
from lightseq.data.packing import PackedExamples
from lightseq.data.sequences import IdsAndLabels, SequenceExamples
from lightseq.data.token_directory import META, SHA256, TokenDirectory
from lightseq.utils.files import open_regular

ALWAYS_READ_BYTES: Final = 1 << 30  # a token directory up to this size is always read, in one or two seconds


def hash_content(examples: Examples) -> str | None:
    """Returns the kind and SHA-256 of the data that the examples are drawn from, in its order.

    Returns None for a token directory that is large and was written without hashes.
    """
    if isinstance(examples, PackedExamples):
        inner = hash_content(examples.windows)
        if inner is None:
            return None
        kind, _, digest = inner.partition(":")
        return f"{kind}:{_hash([digest.encode(), examples.order.tobytes(), examples.offsets.tobytes()])}"
    if isinstance(examples, WindowExamples):
        return _hash_directory(examples.source)
    if isinstance(examples, SequenceExamples):
        return f"sequences:{_hash(part for pair in examples.sequences for part in _parts(pair))}"
    assert isinstance(examples, LazyTextExamples), type(examples)
    return f"texts:{_hash(text.encode() for _, text in examples.texts)}"


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(pair: IdsAndLabels) -> list[bytes]:
    ids, labels = pair
    return [ids.tobytes(), b"" if labels is ids else labels.tobytes()]


def _hash_directory(directory: TokenDirectory) -> str | None:
    """Hashes the files of a token directory, or takes the hashes of meta.json if it is large and was not edited."""
    files = [directory.path / name for name in directory.files]
    recorded: Any = directory.meta.get(SHA256)
    if sum(file.stat().st_size for file in files) <= ALWAYS_READ_BYTES or (recorded and _edited(directory.path, files)):
        recorded = {file.name: _hash_file(file) for file in files}
    if recorded is None:
        return None
    ordered = json.dumps({file.name: recorded.get(file.name) for file in files})
    return f"{directory.meta['dtype']} tokens:{hashlib.sha256(ordered.encode()).hexdigest()}"


def _edited(path: Path, files: Iterable[Path]) -> bool:
    """Returns whether a file is newer than meta.json, which is written last."""
    written = (path / META).stat().st_mtime_ns
    return any(file.stat().st_mtime_ns > written for file in files)


def _hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
