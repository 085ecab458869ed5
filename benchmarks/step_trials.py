"""Trials of benchmarks/step.py: what each trains on, and the command that starts it."""

import argparse
import os
import re
import shlex
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path

from transformers import PreTrainedConfig

from benchmarks.processes import torchrun
from benchmarks.step_models import model_of
from benchmarks.step_peers import OURS
from benchmarks.step_peers.peer import LEARNING_RATE, SEED
from data_gen.synthetic import Synthetic, draw_document
from lightseq.cli import BOTH
from lightseq.config.lengths import format_tokens
from lightseq.config.train_config import TrainConfig
from lightseq.data.token_directory import write_token_directory
from lightseq.models.decoder import ids_of_text, text_config
from lightseq.models.presets import ModelFamily
from lightseq.parts.adapters import Lora, lora_from_config

ROOT = Path(__file__).resolve().parent.parent
# On one process they run without a launcher, which accelerate takes as a sign to wrap the model in DDP.
TRAINERS = ("trl", "lightseq-sft", "unsloth")


@dataclass(frozen=True)
class Setting:
    """Settings that all trials share."""

    flags: argparse.Namespace
    family: ModelFamily
    config: PreTrainedConfig
    on_gpu: bool  # bfloat16 on GPU, float32 on CPU
    lora: Lora | None  # None: all weights are trained

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
        return self.workspace / f"data-{format_tokens(length)}"


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
        return f"{format_tokens(self.length):>6}  {self.label}"

    @property
    def directory(self) -> Path:
        """Directory of the log and of lightseq's output."""
        return self.setting.workspace / re.sub(r"[^\w.]+", "-", f"{self.label} {format_tokens(self.length)}").strip("-")

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
        found = {}
        if self.implementation in TRAINERS and self.setting.flags.nproc_per_node == 1:
            found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if self.implementation == "unsloth":  # it writes code, by default into the current directory
            found["UNSLOTH_COMPILE_LOCATION"] = str(self.directory.resolve() / "unsloth_compiled_cache")
            if self.setting.flags.nproc_per_node > 1:
                found["UNSLOTH_FSDP2"] = "1"  # its own sharding; without it, every GPU would hold all weights
        return found

    @property
    def trainer_words(self) -> list[str]:
        """Arguments of lightseq's trainer, as in the README; all other flags have their defaults."""
        s = self.setting
        program = ["-m", "lightseq", "train"] if s.family is BOTH else [relpath(ROOT / s.family.name / "train.py")]
        return [
            *program,
            *("--model_name_or_path", str(s.model_directory), "--random_init"),
            *("--data_path", str(s.data_directory(self.length)), "--model_max_length", str(self.length)),
            *("--output_dir", str(self.directory), "--overwrite_output_dir"),
            *("--max_steps", str(s.all_steps), "--logging_steps", "1", "--save_strategy", "no"),
            *("--learning_rate", str(LEARNING_RATE), "--lr_scheduler_type", "constant"),
            *("--seed", str(SEED)),
            *(["--bf16"] if s.on_gpu else []),
            *(["--packing", "best_fit"] if s.flags.packed_rows else []),
            *(["--lora_rank", str(s.lora.rank)] if s.lora else []),
            *(["--load_in_4bit", "True"] if s.flags.load_in_4bit else []),
            *self.words,  # a repeated flag replaces the earlier one
        ]

    @property
    def worker_words(self) -> list[str]:
        s, flags = self.setting, self.setting.flags
        return [
            relpath(ROOT / "benchmarks" / "step_peers" / "worker.py"),
            *(self.implementation, "--model", str(s.model_directory), "--data", str(s.data_directory(self.length))),
            *("--length", str(self.length), "--steps", str(s.all_steps)),
            *("--timeout", str(flags.timeout), "--result", str(self.result)),
            *(["--packed_rows", str(flags.packed_rows)] if flags.packed_rows else []),
            *(["--lora_rank", str(s.lora.rank)] if s.lora else []),
            *(["--load_in_4bit"] if flags.load_in_4bit else []),
        ]


def setting_of(flags: argparse.Namespace, on_gpu: bool) -> Setting:
    family, config = model_of(flags.model, flags.layers)
    asked = TrainConfig(model_name_or_path=flags.model, data_path="", output_dir="", lora_rank=flags.lora_rank)
    lora = lora_from_config(asked, config)
    return Setting(flags, family, config, on_gpu, lora)


def trials(setting: Setting) -> list[Trial]:
    """Returns trials by length, so that an interrupted run compares all implementations at finished lengths."""
    flags = setting.flags
    as_typed = [""] if OURS in flags.implementations else []
    ours = [(OURS, tuple(shlex.split(words))) for words in [*as_typed, *flags.lightseq_flags]]
    others: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in flags.implementations if name != OURS]
    return [Trial(setting, name, tokens, words) for tokens in flags.lengths for name, words in [*ours, *others]]


def write_inputs(setting: Setting) -> None:
    """Writes the model's config and the documents of every length. All implementations read the same ones.

    Without packed rows there is a document per step, with one token more than the length, so every position has a
    target. With packed rows the documents fill the steps' rows, and the last token of each has no target.
    """
    setting.config.save_pretrained(setting.model_directory)
    ids, vocab_size = ids_of_text(setting.config), text_config(setting.config).vocab_size
    packed = setting.flags.packed_rows
    for tokens in setting.flags.lengths:
        size, count = (packed, setting.all_steps * tokens // packed) if packed else (tokens + 1, setting.all_steps)
        spec = Synthetic("zipf", count, size, len(ids), SEED)
        documents = [ids[draw_document(spec, index)] for index in range(spec.documents)]
        about: dict[str, object] = {"tokenizer": None, "source": "synthetic zipf", "seed": spec.seed, "skipped": {}}
        write_token_directory(setting.data_directory(tokens), documents, vocab_size, about.copy, force=True)
