"""Breakdown of a traced step on a CPU: every millisecond counts once, for the innermost operator.

The kind of work follows from that operator and those around it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightseq.profiling.trace import IDLE, PHASES, StepBreakdown

PATH_SEPARATOR: Final = " > "  # between the names of operators, outermost first
# Kinds of operators by the first pattern that matches their path.
HOST_KINDS: Final[tuple[tuple[str, str], ...]] = (
    ("attention's exchange", r"lightseq(::|_)attention\w*$|lightseq::attention.* c10d::\w+$"),
    ("attention, backward", r"lightseq::attention_backward"),
    ("attention, forward", r"lightseq::attention"),
    ("matrix products", r"aten::(mm|addmm|bmm|baddbmm)$"),
    ("collectives", r"(c10d|FSDP)::[^>]*$"),
    ("weights: cast and join", r"FSDP::"),
    ("loss", r"CrossEntropy"),
    ("optimizer, norm, clip", r"(?i)optimizer|adam|foreach|norm_out$|clip|^update\b"),
    ("other operators", PATH_SEPARATOR),
    (IDLE, ""),  # no operator: Python code
)
STEP: Final = re.compile(r"step \d+")


@dataclass(frozen=True)
class OperatorInterval:
    """An interval of one thread with the same stack of operators."""

    us: float
    path: tuple[str, ...]  # of operators, outermost first; phases are among them
    begins: bool  # the innermost operator is called at the interval's start


def host_breakdown(events: Sequence[Mapping[str, Any]]) -> StepBreakdown:
    """Returns the breakdown of a trace. Raises ValueError for one without a step."""
    annotations = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    steps = [e for e in annotations if STEP.fullmatch(e["name"])]
    if not steps:
        raise ValueError("the trace has no training step; train with --profile_steps 10:12")
    breakdown = StepBreakdown(len(steps), sum(e["dur"] for e in steps) / len(steps) / 1e3)
    own = [e for e in events if e.get("ph") == "X" and e.get("tid") == steps[0].get("tid") and _counts(e)]
    for moment in operator_intervals(own):
        if not moment.path or not STEP.fullmatch(moment.path[0]):
            continue
        phase = next((name for name in moment.path if name in PHASES), "")
        kind = kind_of(moment.path[1:])
        ms = moment.us / breakdown.steps / 1e3
        breakdown.spent[kind, phase] += ms
        breakdown.launches[kind] += moment.begins
        breakdown.names[moment.path[-1]] += ms if kind != IDLE else 0.0
    return breakdown


def _counts(event: Mapping[str, Any]) -> bool:
    """Returns whether an event ran on the thread that recorded it: some of gloo's ran on another."""
    name = event["name"]
    if event.get("cat") == "user_annotation":
        return name in PHASES or name.startswith(("FSDP::", "Optimizer.")) or STEP.fullmatch(name) is not None
    return event.get("cat") == "cpu_op"


def operator_intervals(events: Iterable[Mapping[str, Any]]) -> Iterator[OperatorInterval]:
    """Yields intervals without gaps while any event lasts."""
    stack: list[tuple[str, float]] = []  # name and end
    now, fresh = 0.0, False
    for event in [*sorted(events, key=lambda e: (e["ts"], -e["dur"])), None]:
        until = float("inf") if event is None else event["ts"]
        while stack and stack[-1][1] <= until:
            yield OperatorInterval(max(0.0, stack[-1][1] - now), tuple(name for name, _ in stack), fresh)
            now, fresh = max(now, stack.pop()[1]), False
        if event is None:
            return
        if stack:
            yield OperatorInterval(until - now, tuple(name for name, _ in stack), fresh)
        now, fresh = until, True
        stack.append((event["name"], event["ts"] + event["dur"]))


def kind_of(path: Sequence[str]) -> str:
    """Returns the kind of a path, which begins with the phase if there is one."""
    joined = PATH_SEPARATOR.join(path)
    return next(kind for kind, pattern in HOST_KINDS if re.search(pattern, joined))
