"""Finds the longest sequence that trains, by rehearsing and bisecting, for every model and set of flags given.

python3 benchmarks/longest.py --models llama3.2-1b,llama3-8b --nproc_per_node 8 --output outputs/longest.jsonl \\
    --flags "--torch_compile" --flags "--torch_compile --offload activations" --host_memory 500,1900

Every rehearsal runs in processes of its own and is written down as it ends: the same command again goes on.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benchmarks.command_line import Parser, length, listed
from benchmarks.search import Probe, add_flags, hardware_of, rehearse, run_searches
from benchmarks.step import NEEDED, model_of
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.advice import longest
from lightseq.memory.planner.rates import GIB
from lightseq.memory.planner.run import PlannedRun


@dataclass(frozen=True)
class LongestSearch:
    """The longest sequence. Memory in GiB: `gpu_memory` of a GPU, `host_memory` of a host; None is what there is."""

    benchmark: ClassVar[str] = "longest"
    probe: ClassVar[str] = "rehearsal"
    most: ClassVar[int] = 2**40

    model: str
    flags: str
    gpus: int
    gpu_memory: float | None
    host_memory: float | None

    @property
    def words(self) -> list[str]:
        precision = ["--bf16"] if torch.cuda.is_available() else []
        words = ["--model_name_or_path", self.model, "--random_init", *precision, *shlex.split(self.flags)]
        if self.host_memory is not None:
            words += ["--host_memory_budget", f"{self.host_memory / self.gpus:.9f}"]
        return words

    @property
    def config(self) -> TrainConfig:
        return parse([*NEEDED, *self.words], "")

    @property
    def offloads(self) -> bool:
        return replace(self, host_memory=None).config.offload in ("activations", "both", "auto")

    def planned(self, hardware: Mapping[str, Any]) -> int:
        _, model = model_of(self.model)
        host = hardware_of(hardware, self.gpus, self.gpu_memory, self.host_memory)
        return longest(PlannedRun(model, self.config, host)) or 1

    def attempt(self, size: int, timeout: float) -> Probe:
        words = [*self.words, "--model_max_length", str(size)]
        return rehearse(words, size, self.describe(size), self.gpus, self.gpu_memory, timeout)

    def describe(self, size: int) -> str:
        return f"{self.model} {self.flags} {size:,} tokens"

    def limit(self, best: Probe | None, worst: Probe | None, probes: int) -> dict[str, Any]:
        tokens, peak = (best.length, best.peak_bytes) if best else (0, None)
        host = best.offloaded_bytes * self.gpus if best and best.offloaded_bytes is not None else None
        return {
            "longest": tokens,
            "too_long": worst.length if worst else None,
            "reason": worst.reason if worst else None,
            "rehearsals": probes,
            "peak_bytes": peak,
            "host_bytes": host,
            "tokens_per_gpu": tokens / self.gpus,
            "tokens_per_gpu_gib": tokens / (self.gpus * peak / GIB) if peak else None,
            "tokens_per_host_gib": tokens / (host / GIB) if host else None,
        }

    def summary(self, record: Mapping[str, Any]) -> str:
        gpu, host = (record[f"tokens_per_{which}_gib"] for which in ("gpu", "host"))
        return (
            f"longest that fits: {self.describe(record['longest'])}"
            + (f", {gpu:,.0f} a GiB of GPU memory" if gpu else "")
            + (f", {host:,.0f} a GiB of host memory" if host else "")
        )


def main(words: Sequence[str]) -> int:
    return run_searches(lambda: parser().parse_args(words), searches_of)


def searches_of(flags: argparse.Namespace) -> list[LongestSearch]:
    """Returns a search for every combination. Host memory bounds what layers offload, and nothing else."""
    found = [
        LongestSearch(model, given, flags.nproc_per_node, flags.gpu_memory, host)
        for model in flags.models
        for given in flags.flags or [""]
        for host in flags.host_memory or [None]
    ]
    return list(dict.fromkeys(s if s.offloads else replace(s, host_memory=None) for s in found))


def parser() -> Parser:
    out = Parser("benchmarks/longest.py", __doc__)
    out.add_argument("--models", type=listed(str), default="llama3.2-1b", help="presets or local directories")
    out.add_argument("--flags", action="append", metavar="WORDS", help="training flags; several times for several rows")
    out.add_argument("--host_memory", type=listed(float), metavar="GIB,...", help="for what layers keep, all ranks")
    out.add_argument("--first", type=length, metavar="N", help="length to begin with; the plan's unless given")
    out.add_argument("--step", type=length, default="1K", metavar="N", help="lengths are multiples of it")
    out.add_argument("--resolution", type=float, default=0.02, metavar="X", help="of the length, that is enough")
    add_flags(out, "outputs/longest.jsonl")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
