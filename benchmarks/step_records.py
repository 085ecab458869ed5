"""Runs of the trials of benchmarks/step.py, and their records."""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from benchmarks.processes import Failed, run
from benchmarks.records import append, provenance
from benchmarks.step_peers import OURS
from benchmarks.step_trials import Trial, setting_of, trials, write_inputs
from lightseq.architecture.flops import count_adapter_parameters, mfu, model_flops, peak_flops_per_second
from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.lengths import format_tokens
from lightseq.models.decoder import text_config
from lightseq.training.metrics import METRICS, RUN, read_records

FACTS = ("schedule", "head_groups", "ulysses_size", "kernel", "transport", "remat", "placement", "compile", "note")
MEMORY = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")  # of the fullest rank
HOST_MEMORY = ("host_rss_bytes", "offloaded_bytes")  # of lightseq
MEASURED = (
    *("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest", "step_seconds"),
    *(
        "model_tflops_per_gpu",
        "mfu",
        *MEMORY,
        *HOST_MEMORY,
        "first_loss",
        "last_loss",
        "losses_finite",
        "first_grad_norm",
    ),
)


def compare(flags: argparse.Namespace, words: Sequence[str]) -> None:
    """Runs all trials and appends their records to the output. `words` are the flags as given."""
    about = {"command": f"python3 benchmarks/step.py {shlex.join(words)}", **provenance(flags.commit)}
    setting = setting_of(flags, about["hardware"]["device"] != "cpu")
    write_inputs(setting)
    for trial in trials(setting):
        print(f"{trial.head}: started at {datetime.now():%H:%M:%S}, log {trial.log}", flush=True)
        record = take(trial, about)
        append(flags.output, record)
        print(line(record), flush=True)
    print(f"records  {flags.output}")


# ---- the records ----------------------------------------------------------------------------------------------------


def take(trial: Trial, about: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a trial and returns its record. Missing numbers are null, and `skipped` has the reason."""
    setting, flags = trial.setting, trial.setting.flags
    for earlier in (trial.result, trial.directory / RUN, trial.directory / METRICS):
        earlier.unlink(missing_ok=True)  # left by an earlier run
    measured: dict[str, Any] = {}
    skipped: str | None = None
    try:
        run(trial.command, flags.timeout, trial.log, trial.environment, trial.python or sys.executable)
        measured = numbers(trial, read_outcome(trial), about["hardware"]["device"])
    except Failed as why:
        skipped = str(why)
    return {
        "benchmark": "step",
        "implementation": trial.implementation,
        "label": trial.label,
        "model": flags.model,
        "layers": text_config(setting.config).num_hidden_layers,
        "length": trial.length,
        "world": flags.nproc_per_node,
        "packed_rows": flags.packed_rows,
        "lora_rank": flags.lora_rank,
        "load_in_4bit": flags.load_in_4bit,
        "dtype": "bfloat16" if setting.on_gpu else "float32",
        **dict.fromkeys((*MEASURED, *FACTS)),
        **measured,
        "warmup": flags.warmup,
        "steps": flags.steps,
        "skipped": skipped,
        "trial_command": shlex.join([trial.python or "python3", *trial.command]),
        **about,
    }


def read_outcome(trial: Trial) -> dict[str, Any]:
    """Returns the numbers of every step, including warm-up. Raises Failed if a step is missing."""
    steps = trial.setting.all_steps
    try:
        outcome = read_run(trial) if trial.implementation == OURS else json.loads(trial.result.read_text())
    except (OSError, ValueError, LookupError) as error:
        raise Failed(f"ended without results ({type(error).__name__})") from error
    if len(outcome["step_seconds"]) != steps:
        raise Failed(f"{len(outcome['step_seconds'])} of {steps} steps were logged; every step must be")
    return outcome


def read_run(trial: Trial) -> dict[str, Any]:
    """Reads the result of lightseq's trainer in the format of a peer's result. Memory includes all buffers."""
    steps = read_records(trial.directory / METRICS)
    about = json.loads((trial.directory / RUN).read_text())
    return {
        "step_seconds": [step["step_seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        **{name: steps[-1][name] for name in (*MEMORY, *HOST_MEMORY)},
        "facts": {**about, "compile": bool((about["memory_plan"] or about["config"])["torch_compile"])},
        "sequences": steps[-1]["tokens"] // trial.length,
    }


def numbers(trial: Trial, outcome: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Returns medians after warm-up. lightseq/architecture/flops.py counts the model FLOPs of all implementations."""
    flags, config, sequences = trial.setting.flags, trial.setting.config, outcome.get("sequences", 1)
    seconds = outcome["step_seconds"][flags.warmup :]
    median, world = statistics.median(seconds), flags.nproc_per_node
    tokens, document = sequences * trial.length, flags.packed_rows or trial.length
    share = trial.length / document * inspect_architecture(config).attention_area(document) / trial.length**2
    adapters = count_adapter_parameters(trial.setting.lora, config)
    flops = model_flops(config, trial.length, sequences, adapters, attention_share=share)
    losses, norm = [value if math.isfinite(value) else None for value in outcome["losses"]], outcome["grad_norms"][0]
    return {
        "tokens_per_second": tokens / median,
        "tokens_per_second_lowest": tokens / max(seconds),
        "tokens_per_second_highest": tokens / min(seconds),
        "step_seconds": median,
        "model_tflops_per_gpu": flops / median / world / 1e12,
        "mfu": mfu(flops, median, world, peak_flops_per_second(device)),
        **{name: outcome.get(name) for name in (*MEMORY, *HOST_MEMORY)},
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses_finite": None not in losses,
        "first_grad_norm": norm if math.isfinite(norm) else None,
        **{name: outcome["facts"].get(name) for name in FACTS},
    }


def line(record: Mapping[str, Any]) -> str:
    """Describes a finished trial in one line."""
    head = f"{format_tokens(record['length']):>6}  {record['label']}: "
    if record["skipped"]:
        return f"{head}skipped: {record['skipped']}"
    rate = f"{record['tokens_per_second']:,.0f} tokens/s, {record['step_seconds']:.3g} s per step"
    if not record["losses_finite"]:
        return f"{head}{rate}, losses not finite"
    return f"{head}{rate}, loss {record['first_loss']:.4f} → {record['last_loss']:.4f}"
