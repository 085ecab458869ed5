"""Sequences out of a pickle that runs no code: plain lists and numbers, and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightseq.data.tokens import IntArray
from lightseq.words import first_line

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
    """Ids and labels, aligned, of a dict with 'input_ids' and perhaps 'labels': lists of lists of integers.

    An 'attention_mask' may stand beside them, and hide nothing.
    """
    content = load_plain_pickle(path)
    if not isinstance(content, dict) or not isinstance(content.get("input_ids"), list | tuple):
        raise ValueError(f"{path} is not a dict whose 'input_ids' is a list of lists of token ids; write it so")
    sequences, all_labels, masks = content["input_ids"], content.get("labels"), content.get("attention_mask")
    for name, column in (("labels", all_labels), ("attention_mask", masks)):
        if column is not None and (not isinstance(column, list | tuple) or len(column) != len(sequences)):
            raise ValueError(f"{path}: {name!r} is not a list with one entry for each of {len(sequences)} input_ids")
    for index, sequence in enumerate(sequences):
        ids = _integers(sequence, f"{path} sequence {index}")
        labels = ids if all_labels is None else _integers(all_labels[index], f"{path} labels {index}")
        if len(labels) != len(ids):
            raise ValueError(f"{path} sequence {index}: {len(ids)} input_ids but {len(labels)} labels; align them")
        if masks is not None and not _integers(masks[index], f"{path} attention_mask {index}").all():
            raise ValueError(
                f"{path} sequence {index}: its attention_mask hides tokens, as of padding; write it without them"
            )
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
