"""Prints what `make faults` did to runs, and what that cost them: `python3 -m analysis faults FILE...`."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .jsonl import read_lines, readable, say
from .markdown import table_lines

Record = Mapping[str, Any]
HEAD = ("fault", "tried", "survived", "most steps lost", "seen")


def read(paths: Sequence[Path], notes: list[str]) -> list[Record]:
    files = readable(paths, lambda path: read_lines(path, fault, notes), notes)
    return [record for file in files for record in file]


def fault(value: Record) -> Record:
    if "kind" not in value:
        raise ValueError("is no record of a fault; give what make faults wrote")
    return value


def seen(records: Sequence[Record]) -> str:
    """What differed between the faults of one name, counted."""
    if any("taken" in r for r in records):
        return f"{sum(r['refused'] for r in records)} refused, {sum(r['taken'] for r in records)} taken"
    if any("saving" in r for r in records):
        return f"{sum(r['saving'] for r in records)} during a save"
    if any(isinstance(r.get("statuses"), dict) for r in records):
        counts: Counter[str] = sum((Counter(r["statuses"]) for r in records), Counter())
        return f"{counts['status 2']} refused, {counts['status 0']} run, {counts['status 1']} ended by an error of ours"
    if any("seconds" in r for r in records):
        return f"named after {min(r['seconds'] for r in records)} to {max(r['seconds'] for r in records)} s"
    kinds = Counter(str(r.get("how") or r.get("file") or "") for r in records)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind)


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [HEAD]
    for name in dict.fromkeys(r["fault"] for r in records if "fault" in r):
        own = [r for r in records if r.get("fault") == name]
        faults = [r for r in own if r["kind"] == "fault"]
        if why := [r["why"] for r in own if r["kind"] == "skipped"]:
            found.append((name, "0", "-", "-", f"not tried: {why[0]}"))
            continue
        tried, failed = sum(r.get("count", 1) for r in faults), [r for r in own if r["kind"] == "failed"]
        lost = [r["steps_lost"] for r in faults if "steps_lost" in r]
        shown = seen(faults) + ("; FAILED: " + re.sub(r"\s+", " ", failed[0]["why"])[:80] if failed else "")
        found.append((name, str(tried + len(failed)), str(tried), str(max(lost)) if lost else "-", shown))
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="analysis faults",
        usage="python3 -m analysis faults FILE...",
        description="Prints what `make faults` did to runs, and what that cost them.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="what make faults wrote")
    arguments = parser.parse_args(argv)
    notes: list[str] = []
    try:
        records = read(arguments.files, notes)
    except (ValueError, OSError) as error:
        print(f"analysis: error: {error}", file=sys.stderr)
        return 2
    say(notes)
    print("\n".join(table_lines(rows(records))))
    return 0
