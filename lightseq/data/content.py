"""Hash of all the data of a run, by which a resumed run recognizes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from lightseq.data.examples import Examples, LazyTextExamples, WindowExamples
from lightseq.data.held_out import SelectedExamples
from lightseq.data.mixture import JoinedExamples
from lightseq.data.packing import PackedExamples
from lightseq.data.sequences import IdsAndLabels, SequenceExamples
from lightseq.data.token_directory import META, SHA256, TokenDirectory
from lightseq.utils.files import open_regular


def hash_content(examples: Examples) -> str:
    """Returns the kind and SHA-256 of the data that the examples are drawn from, in its order."""
    if isinstance(examples, PackedExamples):
        kind, _, digest = hash_content(examples.windows).partition(":")
        return f"{kind}:{_hash([digest.encode(), examples.order.tobytes(), examples.offsets.tobytes()])}"
    if isinstance(examples, WindowExamples):
        return _hash_directory(examples.source)
    if isinstance(examples, SequenceExamples):
        return f"sequences:{_hash(part for pair in examples.sequences for part in _parts(pair))}"
    if isinstance(examples, SelectedExamples):
        kind, _, digest = hash_content(examples.source).partition(":")
        return f"{kind}:{_hash([digest.encode(), examples.rows.tobytes()])}"
    if isinstance(examples, JoinedExamples):
        return f"joined:{_hash(hash_content(part).encode() for part in examples.parts)}"
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


def _hash_directory(directory: TokenDirectory) -> str:
    """Takes hashes from meta.json. Reads the files if it has none, or if a file is newer."""
    files = [directory.path / name for name in directory.files]
    recorded = directory.meta.get(SHA256)
    if recorded is None or _edited(directory.path, files):
        recorded = {file.name: _hash_file(file) for file in files}
    ordered = json.dumps({file.name: recorded.get(file.name) for file in files})
    return f"{directory.meta['dtype']} tokens:{hashlib.sha256(ordered.encode()).hexdigest()}"


def _edited(path: Path, files: Iterable[Path]) -> bool:
    """Returns whether a file is newer than meta.json, which is written last."""
    written = (path / META).stat().st_mtime_ns
    return any(file.stat().st_mtime_ns > written for file in files)


def _hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
