"""Trains a small model until it retrieves needles, and records its retrieval accuracy over the steps.

One GPU trains with each seed, side by side where there are several GPUs; then all GPUs share every sequence, with the
first seed. The curves should agree: sequence parallelism changes no result.

A document is hay with a key and its value at a random depth, and the key again at the end. Only the value after it is a
target. Lengths from --shortest to --length are packed into rows of --length, so that the short documents, which are
easy, teach the model what the long ones need. Accuracy is measured on held-out documents of the full --length.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # instead of this folder, whose modules would hide packages

import argparse
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from os.path import relpath
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.command_line import Parser, check_output, length, listed, positive, seconds
from benchmarks.processes import Failed, run, torchrun
from benchmarks.records import append, provenance
from data_gen.__main__ import main as data_gen
from lightseq.config.parser import run_command
from lightseq.training.metrics import METRICS, read_records

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 256  # half of it hay, half keys and values
HEAD_DIM = 64
ROPE_THETA = 1e6  # some dimensions barely rotate over a long sequence, so attention to the needle ignores its distance
TRAINING_SEED, HELD_OUT_SEED = 0, 1  # of the documents
EXAMPLES = """examples:
  python3 benchmarks/needle.py --length 32K --nproc_per_node 2
  python3 benchmarks/needle.py --length 2K --steps 300 --held_out 48 --timeout 1800      (on CPUs)
  python3 -m analysis needle outputs/needle.jsonl"""


def main(words: Sequence[str]) -> int:
    return run_command(lambda: compare(words))


def compare(words: Sequence[str]) -> None:
    flags = parse(words)
    about = {"command": f"python3 benchmarks/needle.py {shlex.join(words)}", **provenance(flags.commit)}
    on_gpu = about["hardware"]["device"] != "cpu"
    write_inputs(flags)
    alone = [Training(flags, seed, 1, index, on_gpu) for index, seed in enumerate(flags.seeds)]
    together = Training(flags, flags.seeds[0], flags.nproc_per_node, 0, on_gpu)
    with ThreadPoolExecutor(flags.nproc_per_node if on_gpu else 1) as pool:
        for record in pool.map(lambda training: take(training, about), alone):
            append(flags.output, record)
    if flags.nproc_per_node > 1:
        append(flags.output, take(together, about))
    print(f"records  {flags.output}")


# ---- the command line -----------------------------------------------------------------------------------------------


def parser() -> Parser:
    out = Parser("benchmarks/needle.py", __doc__, EXAMPLES)
    what = out.add_argument_group("documents").add_argument
    what("--length", type=length, default="32K", metavar="N", help="tokens per row, and per held-out document")
    what(
        "--shortest",
        type=length,
        default="64",
        metavar="N",
        help="shortest document; --length must be N times a power of two",
    )
    what("--rows", type=positive, default=600, metavar="N", help="rows of training data, on average")
    what("--held_out", type=positive, default=100, metavar="N", help="held-out documents")
    how = out.add_argument_group("training").add_argument
    how("--hidden_size", type=positive, default=128, metavar="N", help=f"width of the model, heads of {HEAD_DIM}")
    how("--layers", type=positive, default=2, metavar="N", help="layers of the model")
    how("--steps", type=positive, default=500, metavar="N", help="optimizer steps")
    # A row of long documents has few targets and a noisy gradient; a mean over several rows weighs all targets alike.
    how("--rows_per_step", type=positive, default=4, metavar="N", help="rows per step, one after the other")
    how("--eval_steps", type=positive, default=25, metavar="N", help="steps between evaluations")
    how("--learning_rate", type=float, default=3e-3, metavar="R", help="peak of the cosine schedule")
    how("--seeds", type=listed(int), default="1,2", metavar="N,...", help="seeds of weights and order, one run each")
    processes = torch.cuda.device_count() or 2
    how("--nproc_per_node", type=positive, default=processes, metavar="N", help="processes, one per GPU")
    how("--timeout", type=seconds, default=170.0, metavar="S", help="time limit for one run")
    out.add_output("outputs/needle.jsonl")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    flags = parser().parse_args(words)
    check_output(flags, logs_beside=True)
    if flags.hidden_size % HEAD_DIM:
        raise ValueError(f"--hidden_size {flags.hidden_size} is not a multiple of {HEAD_DIM}, the size of a head")
    if flags.length % flags.shortest or (flags.length // flags.shortest).bit_count() != 1:
        raise ValueError(f"--length {flags.length} is not --shortest {flags.shortest} times a power of two; change one")
    if min(flags.seeds) < 0:
        raise ValueError(f"--seeds {min(flags.seeds)} is negative; give numbers from 0 on")
    if not 0 < flags.learning_rate < math.inf:
        raise ValueError(f"--learning_rate {flags.learning_rate} must be a positive number")
    if flags.eval_steps > flags.steps:
        raise ValueError(f"--eval_steps {flags.eval_steps} exceeds --steps {flags.steps}, so nothing is evaluated")
    return flags


# ---- the runs -------------------------------------------------------------------------------------------------------


def workspace(flags: argparse.Namespace) -> Path:
    """Returns the directory of the model's config, the data and the runs."""
    return Path(flags.output.with_suffix(""))


def write_inputs(flags: argparse.Namespace) -> None:
    """Writes the model's config and the documents. Raises ValueError if their lengths do not fit together."""
    folder = workspace(flags)
    config_of(flags).save_pretrained(folder / "model")
    doublings = max(1, flags.length // flags.shortest).bit_length() - 1
    tokens_per_document = flags.shortest * (doublings + 1) / (2 - 0.5**doublings)
    documents = round(flags.rows * flags.length / tokens_per_document)
    mixed = f"--documents {documents} --length {flags.length} --shortest {flags.shortest} --seed {TRAINING_SEED}"
    long = f"--documents {flags.held_out} --length {flags.length} --seed {HELD_OUT_SEED}"
    for name, which in (("training", mixed), ("held-out", long)):
        kind = f"synthetic --kind needle --targets answer --vocab_size {VOCABULARY}"
        if data_gen([*kind.split(), *which.split(), "--output", str(folder / name), "--force"]):
            raise ValueError(f"data_gen {kind} {which} refuses, as said above")


def config_of(flags: argparse.Namespace) -> LlamaConfig:
    heads = flags.hidden_size // HEAD_DIM
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=flags.hidden_size,
        intermediate_size=2 * flags.hidden_size,
        num_hidden_layers=flags.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=flags.length,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


@dataclass(frozen=True)
class Training:
    """One run. `device` is the GPU of a run on one GPU."""

    flags: argparse.Namespace
    seed: int
    world: int
    device: int
    on_gpu: bool

    @property
    def label(self) -> str:
        one, several = ("GPU", "GPUs") if self.on_gpu else ("process", "processes")
        return f"{self.world} {one if self.world == 1 else several}, seed {self.seed}"

    @property
    def directory(self) -> Path:
        return workspace(self.flags) / f"{self.world}-seed-{self.seed}"

    @property
    def command(self) -> list[str]:
        """Arguments after `python3`, relative to the current directory."""
        f, folder = self.flags, workspace(self.flags)
        return [
            *(torchrun(self.world) if self.world > 1 else []),
            relpath(ROOT / "llama3" / "train.py"),
            *("--model_name_or_path", str(folder / "model"), "--random_init", "--torch_compile", "False"),
            *("--data_path", str(folder / "training"), "--eval_data_path", str(folder / "held-out")),
            *("--model_max_length", str(f.length), "--packing", "best_fit", "--remat", "none", "--offload", "none"),
            *("--gradient_accumulation_steps", str(f.rows_per_step)),
            *("--max_steps", str(f.steps), "--eval_strategy", "steps", "--eval_steps", str(f.eval_steps)),
            *("--learning_rate", str(f.learning_rate), "--lr_scheduler_type", "cosine", "--warmup_ratio", "0.05"),
            *("--weight_decay", "0.1", "--save_strategy", "no", "--logging_steps", str(f.eval_steps)),
            *("--seed", str(self.seed), "--output_dir", str(self.directory), "--overwrite_output_dir"),
            *(["--bf16"] if self.on_gpu else []),
        ]

    @property
    def environment(self) -> dict[str, str]:
        if not self.on_gpu or self.world > 1:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.flags.nproc_per_node)))
        names = visible.split(",")
        return {"CUDA_VISIBLE_DEVICES": names[self.device % len(names)]}


# ---- the records ----------------------------------------------------------------------------------------------------


def take(training: Training, about: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a training and returns its record, with a point per evaluation. `skipped` has the reason of a failure."""
    flags, log, begin = training.flags, training.directory / "log.txt", time.perf_counter()
    print(f"{training.label}: started at {datetime.now():%H:%M:%S}, log {log}", flush=True)
    (training.directory / METRICS).unlink(missing_ok=True)  # left by an earlier run
    skipped: str | None = None
    try:
        run(training.command, flags.timeout, log, training.environment)
    except Failed as why:
        skipped = str(why)
    wall = time.perf_counter() - begin
    records = read_records(training.directory / METRICS)  # those before a failure too
    points = [record for record in records if "eval_accuracy" in record]
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    result = f"retrieves {points[-1]['eval_accuracy']:.1%} after {points[-1]['step']} steps" if points else "no result"
    print(f"{training.label}: {result}, {wall:.0f} s{f'; {skipped}' if skipped else ''}", flush=True)
    return {
        "benchmark": "needle",
        "label": training.label,
        "world": training.world,
        "seed": training.seed,
        **{key: getattr(flags, key) for key in ("length", "shortest", "held_out", "hidden_size", "layers", "steps")},
        "rows_per_step": flags.rows_per_step,
        "learning_rate": flags.learning_rate,
        "chance": 2 / VOCABULARY,
        "points": [{"step": p["step"], "accuracy": p["eval_accuracy"], "loss": p["eval_loss"]} for p in points],
        "tokens_per_second": median(rates) if rates else None,
        "seconds": wall,
        "skipped": skipped,
        "trial_command": shlex.join(["python3", *training.command]),
        **about,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
