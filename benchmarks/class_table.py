"""Table of what became of every class of transformers, and short forms of refusals."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers


@dataclass(frozen=True)
class Outcome:
    """Result of training a class in one way: `kind` is exact, refused, wrong, raised or not built."""

    model_type: str
    model_class: str
    way: str  # loop, loop packed, loop checkpointed, train, train packed, or an option of the config
    kind: str
    line: str


# Columns of the table by way of training.
WAYS = {
    "loop": "own loop",
    "loop packed": "own loop, packed",
    "train": "lightseq train",
    "train packed": "lightseq train, packed",
}
# Short forms of refusals: a pattern of the line, and the reason in the table.
REASONS = {
    "attention interface": "no attention interface of transformers",
    "both directions": "bidirectional attention",
    "own attention mask": "attention with its own mask",
    r"(?:got|passes) (\w+)": r"attention with \1",
    "calls of attention|layers and calls": "a layer or its attention runs more than once",
    "that a plan cannot run": "has layers that a plan cannot run on text alone",
    r"has (\w+) layers": r"\1 layers",
    "inputs other than text": "inputs other than text, and no plain text decoder",
    "single number of attention heads": "heads differ between layers",
    "buffers": "buffers that cannot be recomputed",
    "different attention": "attention differs between layers",
    r"c_attn\.weight": "weights in Conv1D, not linear layers",
    "outside linear layers": "weights outside linear layers and known experts",
    "random numbers": "random numbers in its layers",
    r"exceeds the (\d+) positions": r"\1 positions",
    r"has (\w*drop\w*) ([\d.]+)|has dropout \((\w+) ([\d.]+)": r"\1\3 \2\4: set it to 0 in config.json",
    "cannot be built": "not a plain causal language model",
    "does not consist": "not embeddings, layers, norm and linear head",
    "router_logits": "mixture of experts",
    "changes its logits": "logits that are neither scaled nor softly capped",
    "packed documents|document boundaries": "documents do not reach attention",
}


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.kind in ("wrong", "raised", "not built"):
            yield f"{outcome.kind}: {outcome.model_class} ({outcome.model_type}), {outcome.way}: {outcome.line}"
    counts = {
        kind: sum(o.kind == kind for o in outcomes) for kind in ("exact", "refused", "wrong", "raised", "not built")
    }
    yield ", ".join(f"{count} {kind}" for kind, count in counts.items())


def write_csv(file: Path, rows: Iterable[Sequence[str]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened, lineterminator="\n").writerows(rows)


def table(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """Yields a heading and a row for each class: exact, refused or not run in each way, and the reason."""
    classes: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        classes.setdefault(outcome.model_class, {}).setdefault(outcome.way, outcome)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    yield ["class", *WAYS.values(), f"reason ({versions})"]
    for name, ways in sorted(classes.items(), key=lambda entry: entry[0].lower()):
        kinds = [ways[way].kind if way in ways else "not run" for way in WAYS]
        others = [ways[way] for way in WAYS if way in ways and ways[way].kind != "exact"]
        reason = reason_of(others[0]) if others else ""
        yield [name, *("not run" if kind == "not built" else kind for kind in kinds), reason]


def reason_of(outcome: Outcome) -> str:
    """Returns the short form of a refusal, or the whole error of a class that is not built."""
    if outcome.kind != "refused":
        return outcome.line
    return short_reason(outcome.line.removeprefix(f"{outcome.model_class} "))


def short_reason(line: str) -> str:
    """Returns the short form of a refusal, or else its line without the remedy."""
    for pattern, reason in REASONS.items():
        if found := re.search(pattern, line):
            return found.expand(reason)
    return line.split("; ")[0]
