"""Times whole training steps of one model at several lengths: lightseq's trainer and what one would use instead.

Every implementation takes every length in processes of its own, so that one that runs out of memory or hangs costs only
itself. All train the same weights on the same tokens, a sequence a step over all ranks, with fused AdamW.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import argparse
import json
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from os.path import relpath
from typing import Any

import torch
from transformers import LlamaConfig

import llama2
import llama3
from benchmarks.command_line import Parser, check_output, length, listed, one_of, positive, seconds
from benchmarks.processes import Failed, run, torchrun
from benchmarks.records import append, provenance
from benchmarks.step_peers.peer import LEARNING_RATE, SEED
from data_gen.synthetic import Synthetic, draw_document
from lightseq.config.command_line import parse as parse_training
from lightseq.config.lengths import shown
from lightseq.config.parser import answered
from lightseq.data.token_directory import write_token_directory
from lightseq.models.family import resolve
from lightseq.models.flops import mfu, model_flops, peak_flops_per_second
from lightseq.models.presets import ModelFamily
from lightseq.training.metrics import METRICS, RUN, read_records

ROOT = Path(__file__).resolve().parent.parent
OURS = "lightseq"
IMPLEMENTATIONS = (OURS, "plain", "accelerate", "deepspeed")
NEEDED = ("--model_name_or_path=m", "--data_path=d", "--output_dir=o")  # by lightseq's trainer, whatever else is given
FACTS = ("schedule", "head_groups", "ulysses_size", "kernel", "transport", "remat", "compile")
MEMORY = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")  # of the worst rank
MEASURED = (
    *("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest", "step_seconds"),
    *("model_tflops_per_gpu", "mfu", *MEMORY, "first_loss", "last_loss", "losses_finite", "first_grad_norm"),
)
EXAMPLES = """examples:
  python3 benchmarks/step.py --model llama3.2-1b --lengths 32K,128K --nproc_per_node 4
  ... --model llama3-8b --layers 8 --lengths 128K --implementations lightseq,plain
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
    what = out.add_argument_group("what").add_argument
    what("--model", default="llama3.2-1b", metavar="NAME", help="preset or directory of a Llama; weights are random")
    what("--layers", type=positive, metavar="N", help="cut the model to that many layers")
    what("--lengths", type=listed(length), default="32K,128K", metavar="N,...", help="tokens of a step's one sequence")
    what(
        "--implementations",
        type=listed(one_of(*IMPLEMENTATIONS), IMPLEMENTATIONS),
        default="all",
        metavar="I,...",
        help=f"all, {', '.join(IMPLEMENTATIONS)}",
    )
    processes = torch.cuda.device_count() or 2
    what("--nproc_per_node", type=positive, default=processes, metavar="N", help="processes, one a GPU")
    how = out.add_argument_group("how").add_argument
    how("--warmup", type=positive, default=3, metavar="N", help="steps before those that count")
    how("--steps", type=positive, default=7, metavar="N", help="steps that count")
    how("--timeout", type=seconds, default=900.0, metavar="S", help="for one implementation at one length")
    more = "one more row of lightseq with these flags of llama3/train.py; may be given several times"
    how("--lightseq_flags", metavar="WORDS", action="append", default=[], help=more)
    out.add_output("outputs/step.jsonl")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the flags. Raises ValueError with one line for what is wrong."""
    flags = parser().parse_args(words)
    if not flags.output.suffix:
        raise ValueError(
            f"--output {flags.output} has no suffix; name it {flags.output}.jsonl, for its logs go beside it"
        )
    check_output(flags)
    if flags.lightseq_flags and OURS not in flags.implementations:
        raise ValueError("--lightseq_flags needs lightseq among the --implementations")
    for given in flags.lightseq_flags:
        try:
            parse_training([*NEEDED, *shlex.split(given)], "")
        except ValueError as error:
            raise ValueError(f"--lightseq_flags {given!r}: {error}") from None
    return flags


# ---- the trials -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Settings that all trials share."""

    flags: argparse.Namespace
    family: ModelFamily
    config: LlamaConfig
    on_gpu: bool  # bfloat16 there, float32 on CPU

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
    """One implementation at one length. `words` are flags of lightseq's trainer beyond the usual ones."""

    setting: Setting
    implementation: str
    length: int
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Returns a name such as `lightseq (remat none, schedule ulysses)`."""
        asked = " ".join(self.words).replace(" --", ", ").removeprefix("--")
        return self.implementation + (f" ({asked})" if asked else "")

    @property
    def head(self) -> str:
        return f"{shown(self.length):>6}  {self.label}"

    @property
    def directory(self) -> Path:
        """Returns where its log is, and what lightseq's trainer leaves behind."""
        return self.setting.workspace / re.sub(r"[^\w.]+", "-", f"{self.label} {shown(self.length)}").strip("-")

    @property
    def result(self) -> Path:
        """Returns where a peer's worker writes what it measured."""
        return self.directory / "result.json"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def command(self) -> list[str]:
        """Returns its command as one would type it in the current directory, `python3` apart."""
        program = self.trainer_words if self.implementation == OURS else self.worker_words
        return [*torchrun(self.setting.flags.nproc_per_node), *program]

    @property
    def trainer_words(self) -> list[str]:
        """Returns lightseq's trainer as README tells people to run it: what is not here is its default."""
        s = self.setting
        return [
            relpath(ROOT / s.family.name / "train.py"),
            *("--model_name_or_path", str(s.model_directory), "--random_init"),
            *("--data_path", str(s.data_directory(self.length)), "--model_max_length", str(self.length)),
            *("--output_dir", str(self.directory), "--overwrite_output_dir"),
            *("--max_steps", str(s.all_steps), "--logging_steps", "1", "--save_strategy", "no"),
            *("--learning_rate", str(LEARNING_RATE), "--lr_scheduler_type", "constant"),
            *("--seed", str(SEED)),
            *(["--bf16", "--torch_compile"] if s.on_gpu else []),
            *self.words,  # the last of two equal flags counts
        ]

    @property
    def worker_words(self) -> list[str]:
        s, flags = self.setting, self.setting.flags
        return [
            relpath(ROOT / "benchmarks" / "step_peers" / "worker.py"),
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
    """Returns the family whose program trains it, and its config. Llama 3's takes what neither of them names."""
    families = (llama2.FAMILY, llama3.FAMILY)
    family = next((f for f in families if f.preset(name) is not None or name in f.aliases), llama3.FAMILY)
    return family, resolve(family, name, random_init=True).config


def trials(setting: Setting) -> list[Trial]:
    """Goes length by length, so that a run cut short compares everybody at the lengths it reached."""
    flags = setting.flags
    rows = [(name, ()) for name in flags.implementations if name != OURS]
    ours = [(OURS, tuple(shlex.split(words))) for words in ("", *flags.lightseq_flags) if OURS in flags.implementations]
    return [Trial(setting, name, tokens, words) for tokens in flags.lengths for name, words in [*ours, *rows]]


def write_inputs(setting: Setting) -> None:
    """Writes the model's config and a document a step for every length: all implementations read the same ones.

    Of one token more than the length: every position then has a target, and no rank has fewer than another.
    """
    setting.config.save_pretrained(setting.model_directory)
    for tokens in setting.flags.lengths:
        spec = Synthetic("zipf", setting.all_steps, tokens + 1, setting.config.vocab_size, SEED)
        documents = [draw_document(spec, index) for index in range(spec.documents)]
        about: dict[str, object] = {"tokenizer": None, "source": "synthetic zipf", "seed": spec.seed, "skipped": {}}
        write_token_directory(setting.data_directory(tokens), documents, spec.vocab_size, about.copy, force=True)


# ---- the records ----------------------------------------------------------------------------------------------------


def take(trial: Trial, about: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a trial. Returns all that is known of it; what was not measured is null, and `skipped` says why."""
    setting, flags = trial.setting, trial.setting.flags
    for earlier in (trial.result, trial.directory / RUN, trial.directory / METRICS):
        earlier.unlink(missing_ok=True)  # of an earlier benchmark, whose numbers must not count
    measured: dict[str, Any] = {}
    skipped: str | None = None
    try:
        run(trial.command, flags.timeout, trial.log)
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
        "trial_command": shlex.join(["python3", *trial.command]),
        **about,
    }


def read_outcome(trial: Trial) -> dict[str, Any]:
    """Returns the numbers of every step, warm-up included. Raises Failed where a trial left too little behind."""
    steps = trial.setting.all_steps
    try:
        outcome = read_run(trial) if trial.implementation == OURS else json.loads(trial.result.read_text())
    except (OSError, ValueError, LookupError) as error:
        raise Failed(f"ended without its numbers ({type(error).__name__})") from error
    if len(outcome["step_seconds"]) != steps:
        raise Failed(f"{len(outcome['step_seconds'])} of {steps} steps recorded; one is to be logged each")
    return outcome


def read_run(trial: Trial) -> dict[str, Any]:
    """Reads what a peer's worker writes from the files of lightseq's trainer; its memory counts all buffers."""
    steps = read_records(trial.directory / METRICS)
    about = json.loads((trial.directory / RUN).read_text())
    return {
        "step_seconds": [step["step_seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        **{name: steps[-1][name] for name in MEMORY},
        "facts": {**about, "compile": about["config"]["torch_compile"]},
        "sequences": steps[-1]["tokens"] // trial.length,
    }


def numbers(trial: Trial, outcome: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Returns medians past the warm-up. One formula counts everybody's operations: lightseq/models/flops.py."""
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
    """Describes one trial as it ends."""
    head = f"{shown(record['length']):>6}  {record['label']}: "
    if record["skipped"]:
        return f"{head}skipped: {record['skipped']}"
    rate = f"{record['tokens_per_second']:,.0f} tokens/s, {record['step_seconds']:.3g} s a step"
    if not record["losses_finite"]:
        return f"{head}{rate}, losses not finite"
    return f"{head}{rate}, loss {record['first_loss']:.4f} → {record['last_loss']:.4f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
