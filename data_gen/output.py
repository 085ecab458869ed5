"""Output of data_gen: a token directory, or a pickle of lists if the path ends in .pkl."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightseq.data.token_directory import IntArray, atomic_write, write_token_directory
from lightseq.utils.formatting import plural


def limit_tokens(max_tokens: int | None, documents: Iterable[IntArray]) -> Iterator[IntArray]:
    """Yields documents up to exactly `max_tokens` tokens; the last one is cut."""
    left = max_tokens
    for ids in documents:
        yield ids if left is None else ids[:left]
        if left is not None and (left := left - len(ids)) <= 0:
            return


def write(
    path: Path,
    documents: Iterable[IntArray],
    vocab_size: int,
    extra_meta: Callable[[], Mapping[str, object]],
    extra: Mapping[str, object],
    force: bool,
    targets: Callable[[IntArray], NDArray[np.bool_]] | None = None,
) -> str:
    """Writes documents and returns the closing line. `extra` goes into either format, `extra_meta` into meta.json.

    `targets` returns the mask of a document's targets, for a token directory. None: all tokens are targets.
    """
    if path.suffix == ".pkl":
        count, tokens = write_pickle(path, documents, extra, force)
        kind = "lists"
    else:
        masked = documents if targets is None else ((ids, targets(ids)) for ids in documents)
        meta = write_token_directory(
            path, masked, vocab_size, lambda: {**extra_meta(), **extra}, force, with_targets=targets is not None
        )
        count, tokens, kind = meta["documents"], meta["tokens"], meta["dtype"]
    return f"{plural(count, 'document')}, {plural(tokens, 'token')} ({kind}) in {path}"


def write_pickle(
    path: Path, documents: Iterable[IntArray], extra: Mapping[str, object], force: bool
) -> tuple[int, int]:
    """Writes `{'input_ids': [[...], ...]}`, the format of the original experiments, and counts documents and tokens.

    All documents are held in memory.
    """
    with atomic_write(path, force) as partial:
        input_ids = [ids.tolist() for ids in documents]
        if not input_ids:
            raise ValueError(f"no document to write to {path}; the sources contain no text")
        with partial.open("wb") as file:
            pickle.dump({"input_ids": input_ids, **extra}, file)
    return len(input_ids), sum(map(len, input_ids))
