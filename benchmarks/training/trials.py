"""The trials of a benchmark of whole steps: who trains at which length, and the command that makes it do so."""

import argparse
import re
import shlex
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path

from transformers import LlamaConfig

import llama2
import llama3
from data_gen.synthetic import Synthetic, draw_document
from lightseq.config.lengths import shown
from lightseq.data.token_directory import write_token_directory
from lightseq.models.family import resolve
from lightseq.models.presets import ModelFamily

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = "lightseq"


@dataclass(frozen=True)
class Setting:
    """What is the same in every trial."""

    name: str  # of the model, as typed
    family: ModelFamily
    config: LlamaConfig
    world: int
    warmup: int
    steps: int
    timeout: float
    learning_rate: float
    seed: int
    compile: bool
    on_gpu: bool  # bfloat16 there, float32 on CPU
    workspace: Path

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps

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
    words: tuple[str, ...] = field(default=())

    @property
    def label(self) -> str:
        """`lightseq (remat none, schedule ulysses)`."""
        asked = " ".join(self.words).replace(" --", ", ").removeprefix("--")
        return self.implementation + (f" ({asked})" if asked else "")

    @property
    def directory(self) -> Path:
        """Its log, and what lightseq's trainer leaves behind."""
        return self.setting.workspace / re.sub(r"[^\w.]+", "-", f"{self.label} {shown(self.length)}").strip("-")

    @property
    def result(self) -> Path:
        """Where a peer's worker writes what it measured."""
        return self.directory / "result.json"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def command(self) -> list[str]:
        """As one would type it in the current directory, `python3` apart."""
        program = _trainer_words(self) if self.implementation == OURS else _worker_words(self)
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node={self.setting.world}".split()
        return [*launcher, *program]

    @property
    def shown_command(self) -> str:
        return shlex.join(["python3", *self.command])


def _trainer_words(trial: Trial) -> list[str]:
    """lightseq as README tells people to run it: what is not here is its default."""
    s = trial.setting
    return [
        relpath(ROOT / s.family.name / "train.py"),
        *("--model_name_or_path", str(s.model_directory), "--random_init"),
        *("--data_path", str(s.data_directory(trial.length)), "--model_max_length", str(trial.length)),
        *("--output_dir", str(trial.directory), "--overwrite_output_dir"),
        *("--max_steps", str(s.all_steps), "--logging_steps", "1", "--save_strategy", "no"),
        *("--learning_rate", str(s.learning_rate), "--lr_scheduler_type", "constant", "--seed", str(s.seed)),
        *(["--bf16"] if s.on_gpu else []),
        *("--torch_compile", str(s.compile)),
        *trial.words,  # the last of two equal flags counts
    ]


def _worker_words(trial: Trial) -> list[str]:
    s = trial.setting
    return [
        relpath(ROOT / "benchmarks" / "training" / "worker.py"),
        *(trial.implementation, "--model", str(s.model_directory), "--data", str(s.data_directory(trial.length))),
        *("--length", str(trial.length), "--steps", str(s.all_steps), "--learning_rate", str(s.learning_rate)),
        *("--seed", str(s.seed), "--timeout", str(s.timeout), "--result", str(trial.result)),
        *([] if s.compile else ["--no_compile"]),
    ]


def setting_of(flags: argparse.Namespace, on_gpu: bool) -> Setting:
    family, config = model_of(flags.model)
    if flags.layers is not None:
        config.num_hidden_layers = flags.layers
    return Setting(
        flags.model, family, config, flags.nproc_per_node, flags.warmup, flags.steps, flags.timeout,
        flags.learning_rate, flags.seed, not flags.no_compile, on_gpu, flags.output.with_suffix(""),
    )  # fmt: skip


def model_of(name: str) -> tuple[ModelFamily, LlamaConfig]:
    """The family whose program trains it, and the architecture. Llama 3's takes what neither of them names."""
    families = (llama2.FAMILY, llama3.FAMILY)
    family = next((f for f in families if f.preset(name) is not None or name in f.aliases), llama3.FAMILY)
    return family, resolve(family, name, random_init=True).config


def trials(flags: argparse.Namespace, setting: Setting) -> list[Trial]:
    """Length by length, so that a run cut short compares everybody at the lengths it reached."""
    rows = [(name, ()) for name in flags.implementations if name != OURS]
    ours = [(OURS, tuple(shlex.split(words))) for words in ("", *flags.lightseq_flags) if OURS in flags.implementations]
    return [Trial(setting, name, length, words) for length in flags.lengths for name, words in [*ours, *rows]]


def write_inputs(setting: Setting, lengths: list[int]) -> None:
    """The model's config and a document a step for every length: all implementations read the same ones.

    Of one token more than the length: every position then has a target, and no rank has fewer than another.
    """
    setting.config.save_pretrained(setting.model_directory)
    for length in lengths:
        spec = Synthetic("zipf", setting.all_steps, length + 1, setting.config.vocab_size, setting.seed)
        documents = [draw_document(spec, index) for index in range(spec.documents)]
        about: dict[str, object] = {"tokenizer": None, "source": "synthetic zipf", "seed": spec.seed, "skipped": {}}
        write_token_directory(setting.data_directory(length), documents, spec.vocab_size, about.copy, force=True)
