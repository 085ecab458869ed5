"""Output of a training plan as tables and as a JSON object."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from lightseq.architecture.flops import describe_experts, describe_recurrences
from lightseq.architecture.recurrent_schedule import chosen_recurrent_schedule
from lightseq.config.train_config import TrainConfig
from lightseq.plan.advice import Change
from lightseq.plan.breakdown import GIB
from lightseq.plan.plan import Plan, usable_gpu_bytes
from lightseq.plan.run import PlannedRun


def record(plan: Plan, longest: int | None, changes: Sequence[Change]) -> dict[str, Any]:
    run, hardware = plan.run, plan.run.hardware
    host_memory = hardware.host_memory if math.isfinite(hardware.host_memory) else None
    suggested = [
        {"change": change.text, "peak_bytes": change.plan.parts.total, "step_seconds": change.plan.step_seconds}
        for change in changes
    ]
    return {
        "plan": "training",
        "fits": plan.fits,
        "lacks": list(plan.shortages),
        "peak_bytes": plan.parts.total,
        "peak_when": plan.when,
        "parts": asdict(plan.parts),
        "usable_gpu_bytes": int(usable_gpu_bytes(run)),
        "host_bytes": int(plan.host_bytes),
        "host_bytes_per_rank": int(plan.host_bytes / hardware.ranks_per_host),
        "step_seconds": plan.step_seconds,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "memory_plan": plan.to_json(),
        "placement": list(plan.placement.layers),
        "state_on_host": run.state_on_host,
        "layers_with_state_on_gpu": run.layers_with_state_on_gpu if run.state_on_host else len(run.layers),
        "longest_length": longest,
        "to_fit": [] if plan.fits else suggested,
        "faster": suggested if plan.fits else [],
        "schedule": run.choice.schedule,
        "head_groups": run.choice.head_groups,
        "ulysses_size": run.choice.ulysses_size,
        "transport": run.transport,
        "hardware": {**asdict(hardware), "host_memory": host_memory},
        "config": _changed_flags(run.config),
    }


def _changed_flags(config: TrainConfig) -> dict[str, Any]:
    """Returns the flags that differ from their defaults, without the paths, which a plan does not use."""
    defaults = {name: field.default for name, field in TrainConfig.__dataclass_fields__.items()}
    paths = ("data_path", "output_dir")
    return {name: value for name, value in config.to_json().items() if value != defaults[name] and name not in paths}


def tables(plan: Plan, longest: int | None, changes: Sequence[Change], notes: Sequence[str]) -> RenderableType:
    suggestions = [found] if (found := _changes(plan, changes)) else []
    return Group(_facts(plan, longest), _memory(plan), _time(plan), *suggestions, *(f"note: {note}" for note in notes))


def _facts(plan: Plan, longest: int | None) -> Table:
    run, hardware = plan.run, plan.run.hardware
    hosts = hardware.gpus // hardware.ranks_per_host
    facts = {
        "model": f"{run.config.model_name}, {run.config.model_max_length:,} tokens, {run.sequences_per_step} a step",
        **_parts(run),
        "hardware": f"{hardware.gpus} x {hardware.chip.device} on {hosts} host{'s' * (hosts > 1)}, "
        f"{run.sequence_ranks} a sequence: {run.tokens:,} tokens a GPU",
        "schedule": _schedule(run),
        **_documents(run),
        "memory plan": str(plan),
        "verdict": "fits" if plan.fits else f"does not fit: too little {' and '.join(plan.shortages)}",
        "longest": f"{longest:,} tokens fit" if longest else "no length fits",
        "step": f"{_seconds(plan.step_seconds)} s, {plan.tokens_per_second:,.0f} tokens/s, MFU {plan.mfu:.1%}",
    }
    out = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        out.add_row(f"  {name}", value)
    return out


def _parts(run: PlannedRun) -> dict[str, str]:
    """Returns lines on experts and recurrent layers, if the model has some."""
    requested, layout = run.config.recurrent_schedule, run.schedule.layout
    tokens = layout.padded_length(run.config.model_max_length) // layout.world
    schedule = chosen_recurrent_schedule(run.model, requested, layout, tokens)
    experts, recurrent = describe_experts(run.model, run.config.expert_ranks), describe_recurrences(run.model, schedule)
    return ({"experts": experts} if experts else {}) | ({"recurrent": recurrent} if recurrent else {})


def _schedule(run: PlannedRun) -> str:
    if run.sequence_ranks == 1:
        return "none: each rank has its own sequences"
    groups = run.choice.head_groups or 1
    heads = f"{groups} head groups" if groups > 1 else "all heads at once"
    return f"{run.choice.schedule}, {heads}, {run.transport}"


def _documents(run: PlannedRun) -> dict[str, str]:
    if run.documents is None:
        return {}
    share = f"attention needs {run.attention_share:.1%} of full rows"
    return {"documents": f"mean {run.documents.mean_tokens:,.0f} tokens; {share}"}


def _memory(plan: Plan) -> Table:
    hardware = plan.run.hardware
    out = _table(f"peak memory per GPU ({plan.when})", "GiB")
    for name, size in _largest_first(asdict(plan.parts)):
        out.add_row(name.replace("_", " "), f"{size / GIB:.2f}")
    out.add_section()
    out.add_row("total", f"{plan.parts.total / GIB:.2f}")
    out.add_row("usable", f"{usable_gpu_bytes(plan.run) / GIB:.2f}")
    room = f" of {hardware.host_memory / GIB:,.0f}" if math.isfinite(hardware.host_memory) else ""
    ranks = hardware.ranks_per_host
    out.add_row(f"per host, {ranks} rank{'s' * (ranks > 1)}", f"{plan.host_bytes / GIB:.2f}{room}")
    return out


def _time(plan: Plan) -> Table:
    is_long = plan.step_seconds >= 10
    out = _table("step time", "s" if is_long else "ms", "%")
    for name, part in _largest_first(plan.seconds):
        if part > 0:
            shown = f"{part:,.2f}" if is_long else f"{1e3 * part:,.1f}"
            out.add_row(name, shown, f"{100 * part / plan.step_seconds:.1f}")
    return out


def _changes(plan: Plan, changes: Sequence[Change]) -> Table | str | None:
    if not changes:
        return None if plan.fits else "to fit: the planner knows no flags that help; use a smaller model or larger GPUs"
    out = _table("faster" if plan.fits else "to fit, any of", "GiB per GPU", "GiB per host", "s per step")
    for change in changes:
        found = change.plan
        sizes = (f"{found.parts.total / GIB:.1f}", f"{found.host_bytes / GIB:,.0f}", _seconds(found.step_seconds))
        out.add_row(change.text, *sizes)
    return out


def _largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(title: str, *columns: str) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column(title)
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    return out
