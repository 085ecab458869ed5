"""A plan as a person reads it, and as a line of JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.breakdown import GIB
from lightseq.memory.planner.plan import Plan, placement_words
from lightseq.memory.planner.remedies import Remedy
from lightseq.memory.planner.run import PlannedRun


def record(plan: Plan, longest: int | None, remedies: Sequence[Remedy]) -> dict[str, Any]:
    run, hardware = plan.run, plan.run.hardware
    changes = [
        {"change": remedy.words, "peak_bytes": remedy.plan.parts.total, "step_seconds": remedy.plan.step_seconds}
        for remedy in remedies
    ]
    return {
        "plan": "training",
        "fits": plan.fits,
        "lacks": list(plan.lacks),
        "peak_bytes": plan.parts.total,
        "peak_when": plan.when,
        "parts": asdict(plan.parts),
        "usable_gpu_bytes": int(plan.usable_gpu_bytes),
        "host_bytes": int(plan.host_bytes),
        "host_bytes_per_rank": int(plan.host_bytes / hardware.ranks_per_host),
        "step_seconds": plan.step_seconds,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "placement": list(plan.placement.layers),
        "state_on_host": run.state_on_host,
        "layers_with_state_on_gpu": run.state_stays if run.state_on_host else run.layers,
        "longest_length": longest,
        "to_fit": [] if plan.fits else changes,
        "faster": changes if plan.fits else [],
        "schedule": run.choice.schedule,
        "head_groups": run.choice.head_groups,
        "ulysses_size": run.choice.ulysses_size,
        "transport": run.transport,
        "hardware": {**asdict(hardware), "host_memory": finite(hardware.host_memory)},
        "config": changed_flags(run.config),
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def changed_flags(config: TrainConfig) -> dict[str, Any]:
    """What was asked for beyond the defaults, but for files, which a plan neither reads nor writes."""
    defaults = {name: field.default for name, field in TrainConfig.__dataclass_fields__.items()}
    files = ("data_path", "output_dir")
    return {name: value for name, value in config.to_json().items() if value != defaults[name] and name not in files}


def shown(plan: Plan, longest: int | None, remedies: Sequence[Remedy], notes: Sequence[str] = ()) -> RenderableType:
    return Group(*(x for x in (_facts(plan, longest), _memory(plan), _time(plan), _remedies(plan, remedies)) if x),
                 *(f"note: {note}" for note in notes))  # fmt: skip


def _facts(plan: Plan, longest: int | None) -> RenderableType:
    run, hardware = plan.run, plan.run.hardware
    hosts = hardware.gpus // hardware.ranks_per_host
    asked = run.config.model_max_length
    verdict = "fits" if plan.fits else f"does not fit: too little {' and '.join(plan.lacks)}"
    rows = {
        "model": f"{run.config.model_name}, {asked:,} tokens, {run.sequences_per_step} a step",
        "hardware": f"{hardware.gpus} x {hardware.chip.device} on {hosts} host{'s' * (hosts > 1)}, "
        f"{run.sequence_ranks} a sequence: {run.tokens:,} tokens a GPU",
        "schedule": _schedule(run),
        "layers": placement_words(plan),
        "verdict": verdict,
        "longest": f"{longest:,} tokens fit" if longest else "no length fits",
        "step": f"{seconds(plan.step_seconds)} s, {plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}",
    }
    return _grid(rows.items())


def _schedule(run: PlannedRun) -> str:
    if run.sequence_ranks == 1:
        return "none: every GPU has sequences of its own"
    turns = run.choice.head_groups or 1
    return f"{run.choice.schedule}, {f'heads in {turns} turns' if turns > 1 else 'all heads at once'}, {run.transport}"


def _memory(plan: Plan) -> Table:
    hardware = plan.run.hardware
    out = _table(f"a GPU at its peak ({plan.when})", "GiB")
    for name, size in sorted(asdict(plan.parts).items(), key=lambda part: -part[1]):
        out.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    out.add_section()
    out.add_row("together", f"{plan.parts.total / GIB:.2f}")
    out.add_row("usable", f"{plan.usable_gpu_bytes / GIB:.2f}")
    room = f" of {hardware.host_memory / GIB:,.0f}" if math.isfinite(hardware.host_memory) else ""
    ranks = hardware.ranks_per_host
    out.add_row(f"a host, {ranks} rank{'s' * (ranks > 1)}", f"{plan.host_bytes / GIB:.2f}{room}")
    return out


def _time(plan: Plan) -> Table:
    out = _table("a step", "ms", "%")
    for name, part in sorted(plan.seconds.items(), key=lambda part: -part[1]):
        if part > 0:
            out.add_row(name, f"{1e3 * part:,.1f}", f"{100 * part / plan.step_seconds:.1f}")
    return out


def _remedies(plan: Plan, remedies: Sequence[Remedy]) -> Table | str | None:
    if plan.fits and not remedies:
        return None
    if not remedies:
        return "to fit: nothing that the plan knows of; take a smaller model or larger GPUs"
    out = _table("faster, any of" if plan.fits else "to fit, any of", "GiB a GPU", "GiB a host", "s a step")
    for remedy in remedies:
        found = remedy.plan
        sizes = (f"{found.parts.total / GIB:.1f}", f"{found.host_bytes / GIB:,.0f}", seconds(found.step_seconds))
        out.add_row(remedy.words, *sizes)
    return out


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    out = Table.grid(padding=(0, 2))
    for name, value in rows:
        out.add_row(f"  {name}", value)
    return out


def _table(title: str, *columns: str) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column(title)
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    return out
