"""Trials of benchmarks/step.py: their commands, their runs and their records."""

import argparse
import json
import math
import os
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from os.path import relpath
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

import llama2
import llama3
from benchmarks.processes import Failed, run, torchrun
from benchmarks.records import append, provenance
from benchmarks.step_flags import OURS
from benchmarks.step_peers.peer import LEARNING_RATE, SEED
from data_gen.synthetic import Synthetic, draw_document
from lightseq.config.lengths import shown
from lightseq.data.token_directory import write_token_directory
from lightseq.models.family import resolve
from lightseq.models.flops import mfu, model_flops, peak_flops_per_second
from lightseq.models.presets import ModelFamily
from lightseq.training.metrics import METRICS, RUN, read_records

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("trl", "unsloth")  # on one process, accelerate takes a launcher as a sign to wrap the model in DDP
FACTS = ("schedule", "head_groups", "ulysses_size", "kernel", "transport", "remat", "compile", "note")
MEMORY = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")  # of the fullest rank
MEASURED = (
    *("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest", "step_seconds"),
    *("model_tflops_per_gpu", "mfu", *MEMORY, "first_loss", "last_loss", "losses_finite", "first_grad_norm"),
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


# ---- the trials -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Settings that all trials share."""

    flags: argparse.Namespace
    family: ModelFamily
    config: LlamaConfig
    on_gpu: bool  # bfloat16 on GPU, float32 on CPU

    @property
    def all_steps(self) -> int:
        return self.flags.warmup + self.flags.steps

    @property
    def workspace(self) -> Path:
        return self.flags.output.with_suffix("")

    @property
    def model_directory(self) -> Path:
        return self.workspace / "model"

    def data_directory(self, length: int) -> Path:
        return self.workspace / f"data-{shown(length)}"


@dataclass(frozen=True)
class Trial:
    """One implementation at one length. `words` are extra flags of lightseq's trainer."""

    setting: Setting
    implementation: str
    length: int
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Label such as `lightseq (remat none, schedule ulysses)`."""
        asked = " ".join(self.words).replace(" --", ", ").removeprefix("--")
        return self.implementation + (f" ({asked})" if asked else "")

    @property
    def head(self) -> str:
        return f"{shown(self.length):>6}  {self.label}"

    @property
    def directory(self) -> Path:
        """Directory of the log and of lightseq's output."""
        return self.setting.workspace / re.sub(r"[^\w.]+", "-", f"{self.label} {shown(self.length)}").strip("-")

    @property
    def result(self) -> Path:
        """File in which a peer's worker writes its measurements."""
        return self.directory / "result.json"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def python(self) -> str | None:
        """Interpreter, or None for the one that runs this program."""
        return self.setting.flags.unsloth_python if self.implementation == "unsloth" else None

    @property
    def command(self) -> list[str]:
        """Arguments after `python3`, relative to the current directory."""
        program, processes = self.worker_words, self.setting.flags.nproc_per_node
        if self.implementation == OURS:
            program = self.trainer_words
        return [*([] if self.implementation in TRAINERS and processes == 1 else torchrun(processes)), *program]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the command. A Trainer in one process would take all GPUs that it sees."""
        if self.implementation not in TRAINERS or self.setting.flags.nproc_per_node > 1:
            return {}
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}

    @property
    def trainer_words(self) -> list[str]:
        """Arguments of lightseq's trainer, as in the README; all other flags have their defaults."""
        s = self.setting
        return [
            relpath(ROOT / s.family.name / "train.py"),
            *("--model_name_or_path", str(s.model_directory), "--random_init"),
            *("--data_path", str(s.data_directory(self.length)), "--model_max_length", str(self.length)),
            *("--output_dir", str(self.directory), "--overwrite_output_dir"),
            *("--max_steps", str(s.all_steps), "--logging_steps", "1", "--save_strategy", "no"),
            *("--learning_rate", str(LEARNING_RATE), "--lr_scheduler_type", "constant"),
            *("--seed", str(SEED)),
            *(["--bf16"] if s.on_gpu else []),
            *self.words,  # a repeated flag replaces the earlier one
        ]

    @property
    def worker_words(self) -> list[str]:
        s, flags = self.setting, self.setting.flags
        worker = "unsloth_worker.py" if self.implementation == "unsloth" else "worker.py"
        return [
            relpath(ROOT / "benchmarks" / "step_peers" / worker),
            *(self.implementation, "--model", str(s.model_directory), "--data", str(s.data_directory(self.length))),
            *("--length", str(self.length), "--steps", str(s.all_steps)),
            *("--timeout", str(flags.timeout), "--result", str(self.result)),
        ]


def setting_of(flags: argparse.Namespace, on_gpu: bool) -> Setting:
    family, config = model_of(flags.model)
    if flags.layers is not None:
        config.num_hidden_layers = flags.layers
    return Setting(flags, family, config, on_gpu)


def model_of(name: str) -> tuple[ModelFamily, LlamaConfig]:
    """Returns a model's family and config. The family is Llama 3 if neither family knows the name."""
    families = (llama2.FAMILY, llama3.FAMILY)
    family = next((f for f in families if f.preset(name) is not None or name in f.aliases), llama3.FAMILY)
    return family, resolve(family, name, random_init=True).config


def trials(setting: Setting) -> list[Trial]:
    """Returns trials by length, so that an interrupted run compares all implementations at finished lengths."""
    flags = setting.flags
    rows = [(name, ()) for name in flags.implementations if name != OURS]
    ours = [(OURS, tuple(shlex.split(words))) for words in ("", *flags.lightseq_flags) if OURS in flags.implementations]
    return [Trial(setting, name, tokens, words) for tokens in flags.lengths for name, words in [*ours, *rows]]


def write_inputs(setting: Setting) -> None:
    """Writes the model's config and, for every length, a document per step. All implementations read the same ones.

    Documents have one token more than the length, so every position has a target.
    """
    setting.config.save_pretrained(setting.model_directory)
    for tokens in setting.flags.lengths:
        spec = Synthetic("zipf", setting.all_steps, tokens + 1, setting.config.vocab_size, SEED)
        documents = [draw_document(spec, index) for index in range(spec.documents)]
        about: dict[str, object] = {"tokenizer": None, "source": "synthetic zipf", "seed": spec.seed, "skipped": {}}
        write_token_directory(setting.data_directory(tokens), documents, spec.vocab_size, about.copy, force=True)


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
    tokens, flops = sequences * trial.length, model_flops(config, trial.length, sequences)
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
