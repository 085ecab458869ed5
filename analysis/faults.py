"""Fault injection: `python3 -m analysis faults FILE...` prints what `make faults` did to runs and what it cost."""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from .drawing import (
    markdown_table,
    print_lines,
)
from .records import Record, print_notes, read_each, read_lines

HEAD = ("fault", "tried", "survived", "most steps lost", "seen")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis faults",
        usage="python3 -m analysis faults FILE...",
        description="Prints what `make faults` did to runs, and what that cost them.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="what make faults wrote")
    arguments = parser.parse_args(argv)
    notes: list[str] = []
    files = read_each(arguments.files, lambda path: read_lines(path, check_record, notes), notes)
    records = list(chain(*files.values()))
    names = dict.fromkeys(r["fault"] for r in records if "fault" in r)
    print_notes(notes)
    rows = [HEAD, *(row(name, [r for r in records if r.get("fault") == name]) for name in names)]
    print_lines(markdown_table(rows))
    return 0


def check_record(record: Record) -> Record:
    if "kind" not in record:
        raise ValueError("is no record of a fault; give what make faults wrote")
    return record


def row(name: str, records: Sequence[Record]) -> tuple[str, ...]:
    """Returns how often a fault was tried, how often the run survived, and what was seen."""
    if skipped := [r["why"] for r in records if r["kind"] == "skipped"]:
        return name, "0", "-", "-", f"not tried: {skipped[0]}"
    faults = [r for r in records if r["kind"] == "fault"]
    failures = [re.sub(r"\s+", " ", r["why"]) for r in records if r["kind"] == "failed"]
    survived = sum(r.get("count", 1) for r in faults)
    lost = [r["steps_lost"] for r in faults if "steps_lost" in r]
    seen = observations(faults) + (f"; FAILED: {failures[0][:80]}" if failures else "")
    return name, str(survived + len(failures)), str(survived), str(max(lost)) if lost else "-", seen


def observations(faults: Sequence[Record]) -> str:
    """Returns counts of what differed between faults of one name."""
    if any("taken" in r for r in faults):
        return f"{sum(r['refused'] for r in faults)} refused, {sum(r['taken'] for r in faults)} taken"
    if any("saving" in r for r in faults):
        return f"{sum(r['saving'] for r in faults)} during a save"
    if any(isinstance(r.get("statuses"), dict) for r in faults):
        counts: Counter[str] = sum((Counter(r["statuses"]) for r in faults), Counter())
        return f"{counts['status 2']} refused, {counts['status 0']} run, {counts['status 1']} ended by an error of ours"
    if any("seconds" in r for r in faults):
        return f"named after {min(r['seconds'] for r in faults)} to {max(r['seconds'] for r in faults)} s"
    kinds = Counter(str(r.get("how") or r.get("file") or "") for r in faults)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind)
