"""Results of verification: a row for every check, drawn as a table and written as JSONL."""

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
PASS, FAIL, WARN, SKIP = "pass", "FAIL", "warn", "-"
STYLES: Final[Mapping[str, str]] = {PASS: "green", FAIL: "bold red", WARN: "yellow", SKIP: "dim"}


@dataclass(frozen=True)
class Row:
    """One check and its result: pass, FAIL, warn (worth a look, no failure) or `-` (not run, and why)."""

    check: str
    status: str
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)  # for JSONL; names carry units


def verdict(check: str, wrong: Sequence[str], right: str, figures: Mapping[str, Any] | None = None) -> Row:
    """Returns FAIL with the first two of what is wrong, or else pass with what was checked."""
    if not wrong:
        return Row(check, PASS, right, figures or {})
    more = f"; and {len(wrong) - 2} more" if len(wrong) > 2 else ""
    return Row(check, FAIL, "; ".join(wrong[:2]) + more, {**(figures or {}), "wrong": list(wrong)})


def passed(rows: Iterable[Row]) -> bool:
    return all(row.status != FAIL for row in rows)


def table(rows: Iterable[Row]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("check", "", "what was seen"):
        out.add_column(title, overflow="fold", no_wrap=title != "what was seen")
    for row in rows:
        out.add_row(row.check, Text(row.status, STYLES[row.status]), Text(row.detail))
    return out


def write(path: Path, header: Mapping[str, Any], rows: Iterable[Row], secrets: Collection[str]) -> None:
    """Writes JSONL without `secrets` and whatever looks like one."""
    lines = [header, *({"check": r.check, "status": r.status, "detail": r.detail, **r.figures} for r in rows)]
    path.write_text("".join(json.dumps(mask_secrets(line, secrets)) + "\n" for line in lines))


def gathered(mine: T) -> list[T]:
    """Gathers an object of every rank, by rank, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def off(got: Tensor, want: Tensor, least_norm: float = 1e-30) -> float:
    """Returns the relative L2 error, relative to at least `least_norm`."""
    wide = want.double()
    return float((got.to(wide.device).double() - wide).norm() / wide.norm().clamp_min(least_norm))


def span(values: Sequence[float], digits: int = 1) -> str:
    """Returns the lowest and the highest value: `1.0 to 2.5`."""
    low, high = (f"{x:,.{digits}f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
