"""Rows of token ids, with masks, padding and packed documents in their other columns."""

from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from lightseq.data.columns import DOCUMENT_COLUMNS, IDS, MASK_COLUMNS, check_columns, check_masked, is_blank
from lightseq.data.samples import EMPTY, NO_ANSWER, Sample
from lightseq.data.sources import Row, get_column
from lightseq.data.token_directory import IntArray
from lightseq.data.tokenizer import TargetMask, Tokenizer
from lightseq.utils.tensors import IGNORE_INDEX

PACKED: Final = "a packed row is split into its documents, which --packing best_fit packs again"


def read_ids(row: Row, where: str, _: Tokenizer, *, masked: bool) -> list[Sample]:
    """Reads a tokenized row, without its padding on the right, as one sample per packed document."""
    made_from = check_columns(row, IDS, ("input_ids",), where)
    ids = _integers(row, "input_ids", where)
    masks = [_target_mask(row, name, ids, where) for name in MASK_COLUMNS if row.get(name) is not None]
    if len(ids):
        check_masked(row, masked, where)
    if row.get("token_type_ids") is not None and _integers(row, "token_type_ids", where).any():
        raise ValueError(f"{where}: 'token_type_ids' are not all zero; remove them if the model does not use them")
    real = _real_tokens(row, len(ids), where)
    if not real:
        return [Sample(skipped=EMPTY)]
    targets = np.logical_and.reduce(masks) if masks else None
    if targets is not None and targets[real:].any():
        raise ValueError(f"{where} has targets in its padding; mask them")
    borders = _document_borders(row, real, len(ids), where)
    remarks = frozenset([PACKED]) if len(borders) > 2 else frozenset()
    found = []
    for start, end in pairwise(borders):
        mask = None if targets is None else targets[start:end]
        if mask is not None and not mask[1:].any():
            found.append(Sample(skipped=NO_ANSWER, remarks=remarks))
        else:
            found.append(Sample(ids=ids[start:end], targets=mask, remarks=remarks))
    return [replace(found[0], padding=len(ids) - real, ignored=tuple(made_from)), *found[1:]]


def _target_mask(row: Row, name: str, ids: IntArray, where: str) -> TargetMask:
    """Returns the mask of targets in a column: labels, or zeros and ones."""
    values = _integers(row, name, where)
    if name == "labels" and (values.shape != ids.shape or bool(((values != ids) & (values != IGNORE_INDEX)).any())):
        raise ValueError(f"{where}: 'labels' differ from input_ids; give each target its id, and other tokens -100")
    if values.shape != ids.shape or (name != "labels" and not np.isin(values, (0, 1)).all()):
        raise ValueError(
            f"{where}: {name!r} is {row[name]!r:.40}, not a 0 or 1 for each of the {len(ids):,} input_ids; correct it"
        )
    return np.asarray(values != IGNORE_INDEX if name == "labels" else values == 1)


def _document_borders(row: Row, real: int, count: int, where: str) -> list[int]:
    """Returns the start of each packed document, and the end of the last. Raises ValueError if columns differ."""
    found: dict[str, list[int]] = {}
    for name in (name for name in DOCUMENT_COLUMNS if not is_blank(row.get(name))):
        values = _integers(row, name, where)
        per_token = name in ("position_ids", "seq_idx") and len(values) == count
        starts = _document_starts(name, values[:real] if per_token else values, real if per_token else count)
        if starts is None:
            raise ValueError(
                f"{where}: {name!r} is {row[name]!r:.60}, which does not divide {count:,} input_ids into documents; "
                "correct or remove it"
            )
        found[name] = [start for start in starts if start < real]
    if len({tuple(starts) for starts in found.values()}) > 1:
        raise ValueError(f"{where}: {' and '.join(found)} differ in where documents begin; correct or remove one")
    return [*next(iter(found.values()), [0]), real]


def _document_starts(name: str, values: IntArray, count: int) -> list[int] | None:
    """Returns the first token of each document by one of DOCUMENT_COLUMNS; None if its values are inconsistent."""
    if name in ("seq_lengths", "cu_seqlens"):
        ends = np.cumsum(values) if name == "seq_lengths" else values[1:]
        begins = np.concatenate([[0], ends[:-1]]) if name == "seq_lengths" else values[:-1]
        valid = len(begins) > 0 and begins[0] == 0 and ends[-1] == count and bool((begins < ends).all())
        return begins.tolist() if valid else None
    if len(values) != count or values[0] != 0:
        return None
    steps = np.diff(values)
    if name == "position_ids":
        valid = bool(((steps == 1) | (values[1:] == 0)).all())
        return [0, *(np.flatnonzero(values[1:] == 0) + 1).tolist()] if valid else None
    return [0, *(np.flatnonzero(steps) + 1).tolist()] if bool(np.isin(steps, (0, 1)).all()) else None


def _integers(row: Row, name: str, where: str) -> IntArray:
    """Returns a column that is a list of integers or booleans; null counts as empty."""
    values = get_column(row, name, where)
    try:
        found = np.asarray(values if values is not None else [], dtype=np.int64 if not values else None)
    except (ValueError, OverflowError):  # ragged lists, or a number beyond 64 bits
        found = np.empty((0, 0))
    if found.dtype == np.bool_ and name != "input_ids":
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind != "i":
        raise ValueError(f"{where}: {name!r} is {values!r:.40}, not a list of integers")
    return found


def _real_tokens(row: Row, count: int, where: str) -> int:
    """Returns the number of tokens before the padding. Raises ValueError unless padding is on the right."""
    if row.get("attention_mask") is None:
        return count
    mask = _integers(row, "attention_mask", where)
    real = int(np.count_nonzero(mask))
    if len(mask) != count:
        fault = f"has {len(mask):,} values for {count:,} input_ids"
    elif not np.isin(mask, (0, 1)).all():
        fault = "has values beside 0 and 1"
    elif not (mask[:real] == 1).all():
        fault = "has holes" if mask[0] else "has padding on the left"
    else:
        return real
    raise ValueError(
        f"{where}: 'attention_mask' {row['attention_mask']!r:.40} {fault}; pad on the right, or not at all"
    )
