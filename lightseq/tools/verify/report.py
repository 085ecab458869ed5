"""Results of verification: a row per check, printed as a table and written as JSONL."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightseq.utils.masking import mask_secrets

T = TypeVar("T")
PASS, FAIL, SKIP = "pass", "FAIL", "-"
STYLES: Final[Mapping[str, str]] = {PASS: "green", FAIL: "bold red", SKIP: "dim"}


@dataclass(frozen=True)
class Row:
    """Result of one check. Status: pass, FAIL or `-` (not run)."""

    check: str
    status: str
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)  # for JSONL; names carry units


def result_row(check: str, wrong: Sequence[str], right: str, figures: Mapping[str, Any] | None = None) -> Row:
    """Returns a FAIL row with the first two errors of `wrong`, or a pass row with the text `right`."""
    if not wrong:
        return Row(check, PASS, right, figures or {})
    more = f"; and {len(wrong) - 2} more" if len(wrong) > 2 else ""
    return Row(check, FAIL, "; ".join(wrong[:2]) + more, {**(figures or {}), "wrong": list(wrong)})


def all_passed(rows: Iterable[Row]) -> bool:
    return all(row.status != FAIL for row in rows)


def table(rows: Iterable[Row]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("check", "", "result"):
        out.add_column(title, overflow="fold", no_wrap=title != "result")
    for row in rows:
        out.add_row(row.check, Text(row.status, STYLES[row.status]), Text(row.detail))
    return out


def write(path: Path, header: Mapping[str, Any], rows: Iterable[Row], secrets: Collection[str]) -> None:
    """Writes JSONL with `secrets` and anything that looks like one masked."""
    lines = [header, *({"check": r.check, "status": r.status, "detail": r.detail, **r.figures} for r in rows)]
    path.write_text("".join(json.dumps(mask_secrets(line, secrets)) + "\n" for line in lines))


def all_gather_object(mine: T) -> list[T]:
    """Returns an object of every rank, ordered by rank, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def relative_error(got: Tensor, want: Tensor, least_norm: float = 1e-30) -> float:
    """Returns the L2 error relative to the norm of `want`, or to `least_norm` if that is larger."""
    wide = want.double()
    return float((got.to(wide.device).double() - wide).norm() / wide.norm().clamp_min(least_norm))
