"""Breakdown of a traced step on a GPU: every millisecond counts once, by the kind of work.

Reads files of torch.profiler without importing torch.
"""

import bisect
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from lightseq.profiling.transfers import transfers_by_kind

# Kinds of kernels by the first pattern that matches their name. If kernels run side by side, the earlier row counts, so
# communication counts only while nothing else runs, which is its cost.
KINDS: tuple[tuple[str, str], ...] = (
    ("attention, backward", r"FlashAttentionBackward|flash_bwd|fmha.*bwd|sdpa.*(bprop|bwd)|bprop"),
    ("attention, forward", r"FlashAttentionForward|flash_fwd|fmha|sdpa.*(fprop|fwd)|fprop"),
    ("matrix products", r"nvjet|gemm|gemv|cutlass|cublas|splitKreduce|xmma|addmm|^mm$"),
    ("loss", r"^_cross_entropy"),
    ("experts' rows", r"^_(copy_to_rows|sum_rows)$"),
    ("MLP's product", r"^_(forward|backward)$"),
    ("optimizer, norm, clip", r"adam|LpNorm|multi_tensor(?!.*Copy)|foreach"),
    ("compiled layers' glue", r"^triton_"),
    ("weights: cast and join", r"chunk_cat|split_with_sizes|multi_tensor.*Copy"),
    ("other kernels", r"^(?!nccl|.*symmetric_memory|Mem|_copy$|_add$|_merge$)"),
    ("attention's exchange", r"symmetric_memory|Memcpy (PtoP|DtoD)|^_copy$|^_add$|^_merge$"),
    ("collectives", r"nccl"),
    ("host copies", r"Memcpy|Memset"),
)
IDLE = "nothing runs"
PHASES = ("forward", "backward", "update")
ON_HOST: Final = "host"  # the kind of all work of a CPU
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    """A kernel, copy or memset on the device, in microseconds."""

    kind: int  # its row of KINDS
    phase: str
    start: float
    end: float


@dataclass
class StepBreakdown:
    """Milliseconds of a step. `spent` counts each once; `hidden` is work that ran beside other work."""

    steps: int
    step_ms: float
    spent: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # by kind and phase
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by kind


def read_trace(path: Path) -> list[Mapping[str, Any]]:
    """Reads the events of a trace. Raises ValueError for an incomplete file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; train with --profile_steps 10:12 first")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        try:
            events = json.load(file)["traceEvents"]
        except (OSError, ValueError, LookupError, TypeError, EOFError, RecursionError, zlib.error) as error:
            raise ValueError(f"{path} is not a complete trace ({error}); profile again") from error
    return events


def gpu_breakdown(events: Sequence[Mapping[str, Any]]) -> StepBreakdown:
    """Returns the breakdown of a trace. Raises ValueError for a trace without GPU events."""
    spans, steps = device_spans(events)
    if not spans:
        raise ValueError("the trace has no GPU events; open a CPU trace in https://ui.perfetto.dev")
    begin, end = spans[0].start, max(span.end for span in spans)
    breakdown = StepBreakdown(steps, (end - begin) / steps / 1e3)
    for span in spans:
        breakdown.hidden[KINDS[span.kind][0]] += (span.end - span.start) / steps / 1e3
    for us, busy, phase in busy_intervals(spans):
        kind = KINDS[busy.kind][0] if busy else IDLE
        breakdown.spent[kind, phase] += us / steps / 1e3
        if busy:
            breakdown.hidden[kind] -= us / steps / 1e3
    return breakdown


def device_spans(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], int]:
    """Returns the spans of the device in order of time, and the number of steps."""
    launched: dict[int, float] = {}
    phases: list[tuple[float, float, str]] = []
    device: list[Mapping[str, Any]] = []
    steps: set[str] = set()
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X":
            continue
        if category in DEVICE_EVENTS:
            device.append(event)
        elif category in ("cuda_runtime", "cuda_driver"):
            launched[event.get("args", {}).get("correlation", -1)] = event["ts"]
        elif category == "user_annotation" and name in PHASES:
            phases.append((event["ts"], event["ts"] + event["dur"], name))
        elif category == "user_annotation" and re.fullmatch(r"step \d+", name):
            steps.add(name)
    phases.sort()
    starts = [phase[0] for phase in phases]

    def phase_of(event: Mapping[str, Any]) -> str:
        at = launched.get(event.get("args", {}).get("correlation", -1), event["ts"])
        i = bisect.bisect_right(starts, at) - 1
        return phases[i][2] if i >= 0 and at <= phases[i][1] else ""

    spans = [Span(kind_of(e["name"]), phase_of(e), e["ts"], e["ts"] + e["dur"]) for e in device]
    return sorted(spans, key=lambda span: span.start), max(1, len(steps))


def kind_of(name: str) -> int:
    return next(i for i, (_, pattern) in enumerate(KINDS) if re.search(pattern, name, re.IGNORECASE))


def busy_intervals(spans: Sequence[Span]) -> Iterable[tuple[float, Span | None, str]]:
    """Yields (microseconds, span, phase) without gaps; None if idle. Of spans side by side the first kind counts."""
    edges = sorted(
        [(span.start, 1, i) for i, span in enumerate(spans)] + [(span.end, 0, i) for i, span in enumerate(spans)]
    )
    running: set[int] = set()
    before = edges[0][0]
    for at, starts, i in edges:
        if at > before:
            busy = min((spans[j] for j in running), key=lambda span: span.kind, default=None)
            # Idle time belongs to the phase of the next span.
            yield at - before, busy, busy.phase if busy else spans[i].phase
            before = at
        if starts:
            running.add(i)
        else:
            running.discard(i)


def summary(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarises a trace: milliseconds per step by kind and phase, bytes and GB/s of transfers.

    A CPU trace gives only the phases.
    """
    try:
        breakdown = gpu_breakdown(events)
    except ValueError:
        breakdown = phase_breakdown(events)
    spent = [{"kind": kind, "phase": phase, "ms": ms} for (kind, phase), ms in breakdown.spent.items()]
    moved = [
        {
            "kind": name, "calls": len(kind.sizes) / breakdown.steps, "bytes": sum(kind.sizes) / breakdown.steps,
            "seconds": sum(kind.seconds) / breakdown.steps, "gb_per_second": median(kind.rates) / 1e9,
            "highest_gb_per_second": max(kind.rates) / 1e9,
        }
        for name, kind in transfers_by_kind(events).items()
    ]  # fmt: skip
    return {
        "steps": breakdown.steps, "step_ms": breakdown.step_ms, "spent": spent, "hidden_ms": dict(breakdown.hidden),
        "moved": moved,
    }  # fmt: skip


def phase_breakdown(events: Sequence[Mapping[str, Any]]) -> StepBreakdown:
    """Returns the breakdown by the phases that the program annotates. Raises ValueError for a trace without a step."""
    annotations = [e for e in events if e.get("cat") == "user_annotation" and e.get("ph") == "X"]
    steps = [e for e in annotations if re.fullmatch(r"step \d+", e["name"])]
    if not steps:
        raise ValueError("the trace has no training step; train with --profile_steps 10:12")
    count = len({e["name"] for e in steps})
    breakdown = StepBreakdown(count, sum(e["dur"] for e in steps) / count / 1e3)
    for e in annotations:
        if e["name"] in PHASES:
            breakdown.spent[ON_HOST, e["name"]] += e["dur"] / count / 1e3
    return breakdown
