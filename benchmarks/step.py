"""Times whole training steps of one model at several lengths, with lightseq's trainer and its alternatives.

Every implementation runs every length in separate processes, so running out of memory affects only one measurement. All
train the same weights on the same tokens, one sequence per step over all ranks, with fused AdamW. Implementations that
cannot do what --packed_rows and --lora_rank ask for are recorded as skipped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # instead of this folder, whose modules would hide packages

import argparse
import json
import math
import shlex
import shutil
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch

from benchmarks.command_line import Parser, check_output, length, listed, one_of, positive, seconds
from benchmarks.processes import Failed, run
from benchmarks.records import append, provenance
from benchmarks.step_trials import OURS, Trial, setting_of, trials, write_inputs
from lightseq.config.command_line import parse as parse_training
from lightseq.config.lengths import shown
from lightseq.config.parser import answered
from lightseq.models.adapters import count_adapter_parameters
from lightseq.models.flops import mfu, model_flops, peak_flops_per_second
from lightseq.training.metrics import METRICS, RUN, read_records

IMPLEMENTATIONS = (OURS, "plain", "accelerate", "deepspeed", "autosp", "trl", "unsloth")
NEEDED = ("--model_name_or_path=m", "--data_path=d", "--output_dir=o")  # required by lightseq's trainer
FACTS = ("schedule", "head_groups", "ulysses_size", "kernel", "transport", "remat", "compile", "note")
MEMORY = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")  # of the fullest rank
MEASURED = (
    *("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest", "step_seconds"),
    *("model_tflops_per_gpu", "mfu", *MEMORY, "first_loss", "last_loss", "losses_finite", "first_grad_norm"),
)
EXAMPLES = """examples:
  python3 benchmarks/step.py --model llama3.2-1b --lengths 32K,128K --nproc_per_node 4
  ... --model llama3-8b --layers 8 --lengths 128K --implementations lightseq,plain
  ... --model llama3-8b --lengths 32K --packed_rows 8K --lora_rank 16 --implementations lightseq,trl --nproc_per_node 1
  ... --lightseq_flags "--remat none --schedule ulysses" --lightseq_flags "--remat full"
  python3 -m analysis step outputs/step.jsonl"""


def main(words: Sequence[str]) -> int:
    return answered(lambda: compare(words))


def compare(words: Sequence[str]) -> None:
    flags = parse(words)
    about = {"command": f"python3 benchmarks/step.py {shlex.join(words)}", **provenance(flags.commit)}
    setting = setting_of(flags, about["hardware"]["device"] != "cpu")
    write_inputs(setting)
    for trial in trials(setting):
        print(f"{trial.head}: started at {datetime.now():%H:%M:%S}, log {trial.log}", flush=True)
        record = take(trial, about)
        append(flags.output, record)
        print(line(record), flush=True)
    print(f"records  {flags.output}")


# ---- the command line -----------------------------------------------------------------------------------------------


def parser() -> Parser:
    out = Parser("benchmarks/step.py", __doc__, EXAMPLES)
    what = out.add_argument_group("training").add_argument
    what("--model", default="llama3.2-1b", metavar="NAME", help="Llama preset or directory; weights are random")
    what("--layers", type=positive, metavar="N", help="use only the first N layers")
    what(
        "--lengths",
        type=listed(length),
        default="32K,128K",
        metavar="N,...",
        help="sequence lengths in tokens; a step has one sequence",
    )
    what(
        "--implementations",
        type=listed(one_of(*IMPLEMENTATIONS), IMPLEMENTATIONS),
        default="all",
        metavar="I,...",
        help=f"all, {', '.join(IMPLEMENTATIONS)}",
    )
    what(
        "--packed_rows",
        type=length,
        metavar="N",
        help="pack documents of N tokens into each row of --lengths (default: one document per row)",
    )
    what("--lora_rank", type=positive, metavar="N", help="train LoRA adapters of this rank (default: all weights)")
    processes = torch.cuda.device_count() or 2
    what("--nproc_per_node", type=positive, default=processes, metavar="N", help="processes, one per GPU")
    how = out.add_argument_group("measurement").add_argument
    how("--warmup", type=positive, default=3, metavar="N", help="untimed steps before the measurement")
    how("--steps", type=positive, default=7, metavar="N", help="timed steps")
    how("--timeout", type=seconds, default=900.0, metavar="S", help="time limit for one implementation at one length")
    more = "also measure lightseq with these flags of llama3/train.py; may be repeated"
    how("--lightseq_flags", metavar="WORDS", action="append", default=[], help=more)
    python = "python with unsloth, which needs older transformers and TRL than trl; if not given, this one"
    how("--unsloth_python", metavar="PATH", help=python)
    out.add_output("outputs/step.jsonl")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    flags = parser().parse_args(words)
    if flags.unsloth_python and shutil.which(flags.unsloth_python) is None:
        raise ValueError(f"--unsloth_python {flags.unsloth_python} is not a program; give the path of a python")
    if not flags.output.suffix:
        raise ValueError(
            f"--output {flags.output} has no suffix; write {flags.output}.jsonl, because logs go to {flags.output}/"
        )
    check_output(flags)
    for tokens in flags.lengths:
        if flags.packed_rows and tokens % flags.packed_rows:
            raise ValueError(f"--packed_rows {flags.packed_rows} does not divide --lengths {tokens}")
    if flags.lightseq_flags and OURS not in flags.implementations:
        raise ValueError("--lightseq_flags needs lightseq among the --implementations")
    for given in flags.lightseq_flags:
        try:
            parse_training([*NEEDED, *shlex.split(given)], "")
        except ValueError as error:
            raise ValueError(f"--lightseq_flags {given!r}: {error}") from None
    return flags


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
        "layers": setting.config.num_hidden_layers,
        "length": trial.length,
        "world": flags.nproc_per_node,
        "packed_rows": flags.packed_rows,
        "lora_rank": flags.lora_rank,
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
        **{name: steps[-1][name] for name in MEMORY},
        "facts": {**about, "compile": bool((about["memory_plan"] or about["config"])["torch_compile"])},
        "sequences": steps[-1]["tokens"] // trial.length,
    }


def numbers(trial: Trial, outcome: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Returns medians after warm-up. lightseq/models/flops.py counts the model FLOPs of all implementations."""
    flags, config, sequences = trial.setting.flags, trial.setting.config, outcome.get("sequences", 1)
    seconds = outcome["step_seconds"][flags.warmup :]
    median, world = statistics.median(seconds), flags.nproc_per_node
    tokens, share = sequences * trial.length, (flags.packed_rows or trial.length) / trial.length
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
        **{name: outcome[name] for name in MEMORY},
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses_finite": None not in losses,
        "first_grad_norm": norm if math.isfinite(norm) else None,
        **{name: outcome["facts"].get(name) for name in FACTS},
    }


def line(record: Mapping[str, Any]) -> str:
    """Describes a finished trial in one line."""
    head = f"{shown(record['length']):>6}  {record['label']}: "
    if record["skipped"]:
        return f"{head}skipped: {record['skipped']}"
    rate = f"{record['tokens_per_second']:,.0f} tokens/s, {record['step_seconds']:.3g} s per step"
    if not record["losses_finite"]:
        return f"{head}{rate}, losses not finite"
    return f"{head}{rate}, loss {record['first_loss']:.4f} → {record['last_loss']:.4f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
