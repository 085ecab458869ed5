"""Finds the largest model that fits, by bisection over `scaled` models, for weights only or for training steps.

python3 benchmarks/largest.py --nproc_per_node 1 --what weights,training --strategies all,n_layers
python3 benchmarks/largest.py --nproc_per_node 4 --what training --flags "--offload activations"

`weights` allocates bfloat16 parameters on one GPU. `training` takes two steps with FSDP2 over all GPUs. Every size runs
in separate processes and is recorded when it ends. The same command continues an unfinished search.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

import llama3
from benchmarks.command_line import Parser, length, listed, one_of, positive
from benchmarks.processes import Failed, run, torchrun
from benchmarks.records import append, provenance, read_lines
from lightseq.architecture.family import preset_config
from lightseq.architecture.fewer_layers import with_layers
from lightseq.architecture.flops import total_parameters
from lightseq.config.parser import run_command
from lightseq.data.token_directory import write_token_directory
from lightseq.parts.chosen_experts import build_to_train
from lightseq.plan.rates import GIB
from lightseq.training.metrics import METRICS, read_records

WHAT, STRATEGIES = ("weights", "training"), ("all", "n_layers")
WEIGHT_BYTES = 2  # bfloat16
TOKEN_IDS = 32  # different token ids in the data
HOLD = "--hold"  # first argument of a process that allocates one model
MAX_SCALE = 512  # largest scale, beyond any GPU
ENDS = ("out of memory", "killed", "no end within")  # of runs that do not fit; any other reason is an error
FIRST_SCALE = 8


@dataclass(frozen=True)
class Probe:
    """One tried scale. Bytes are the fullest rank's; None if it did not fit."""

    length: int  # the scale, under its key in the records
    fits: bool
    reason: str | None = None
    peak_bytes: int | None = None
    offloaded_bytes: int | None = None
    seconds: float | None = None


def next_scale(known: Mapping[int, bool]) -> int | None:
    """Returns the scale to try next; None when the largest that fits is known."""
    low = max((n for n, fits in known.items() if fits), default=0)
    high = min((n for n, fits in known.items() if not fits), default=None)
    if high is None:
        return 2 * low or FIRST_SCALE
    return None if high - low <= 1 else (low + high) // 2


@lru_cache
def parameters(name: str) -> int:
    """Counts a model's parameters from models of one and two layers, because all layers are equal."""
    config = preset_config(llama3.FAMILY, name)
    one, two = (total_parameters(with_layers(config, layers)) for layers in (1, 2))
    return one + (config.num_hidden_layers - 1) * (two - one)


@dataclass(frozen=True)
class LargestSearch:
    """A search for the largest scale. `gpu_memory` is in GiB; None means all of the GPU's."""

    what: str
    strategy: str
    tokens: int
    flags: str
    gpus: int
    gpu_memory: float | None

    def name(self, scale: int) -> str:
        return f"scaled-{self.strategy}-{scale}"

    def words(self, scale: int) -> list[str]:
        """Returns the training flags for a scale."""
        precision = ["--bf16"] if torch.cuda.is_available() else []
        words = ["--model_name_or_path", self.name(scale), "--random_init", *precision, *shlex.split(self.flags)]
        return [*words, "--model_max_length", str(self.tokens)]

    def attempt(self, scale: int, timeout: float) -> Probe:
        return self.train(scale, timeout) if self.what == "training" else self.hold_weights(scale, timeout)

    def train(self, scale: int, timeout: float) -> Probe:
        """Takes two training steps. Raises ValueError if they fail for any reason other than size."""
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            data, output = Path(folder) / "data", Path(folder) / "run"
            write_token_directory(data, [np.arange(self.tokens) % TOKEN_IDS], TOKEN_IDS, dict)
            paths = ["--data_path", str(data), "--output_dir", str(output)]
            command = [*torchrun(self.gpus), "-m", "lightseq", "train", *self.words(scale), *paths]
            try:
                run([*command, "--max_steps", "2", "--save_strategy", "no"], timeout, Path(folder) / "log.txt")
            except Failed as why:
                if not any(end in str(why).lower() for end in ENDS):
                    raise ValueError(f"{self.describe(scale)}: {why}") from None
                return Probe(scale, False, str(why))
            last = read_records(output / METRICS)[-1]
        peak = last["peak_memory_allocated_bytes"] or last["host_rss_bytes"]  # of the process, without a GPU
        too_much = self.takes_too_much(peak)
        return Probe(scale, too_much is None, too_much, peak, last["offloaded_bytes"], time.monotonic() - begin)

    def hold_weights(self, scale: int, timeout: float) -> Probe:
        taken = WEIGHT_BYTES * parameters(self.name(scale))
        if too_much := self.takes_too_much(taken):
            return Probe(scale, False, too_much)
        if not torch.cuda.is_available():
            return Probe(scale, True, None, taken)  # counted, not measured
        with tempfile.TemporaryDirectory() as folder:
            try:
                run([str(Path(__file__).resolve()), HOLD, self.name(scale)], timeout, Path(folder) / "log.txt")
            except Failed as why:
                if "out of memory" not in str(why).lower():
                    raise ValueError(f"{self.describe(scale)}: {why}") from None
                return Probe(scale, False, "out of memory")
            return Probe(scale, True, None, json.loads((Path(folder) / "log.txt").read_text().splitlines()[-1]))

    def takes_too_much(self, size: float) -> str | None:
        within = self.gpu_memory is None or size <= self.gpu_memory * GIB
        return None if within else f"takes more than {self.gpu_memory:g} GiB"

    def describe(self, scale: int) -> str:
        run = f"{self.what} of {self.name(scale)} {self.flags}".strip()
        return f"{run}, {parameters(self.name(scale)):,} parameters"

    def limit(self, best: Probe | None, worst: Probe | None, probes: int) -> dict[str, Any]:
        return {
            "largest": best.length if best else 0,
            "parameters": parameters(self.name(best.length)) if best else 0,
            "peak_bytes": best.peak_bytes if best else None,
            "too_large": worst.length if worst else None,
            "too_many_parameters": parameters(self.name(worst.length)) if worst else None,
            "reason": worst.reason if worst else None,
            "probes": probes,
        }


def find(search: LargestSearch, flags: argparse.Namespace, about: Mapping[str, Any]) -> None:
    """Continues the search from its records in the file. Appends each tried scale, then the limit."""
    key = asdict(search)
    old = [r for r in read_lines(flags.output) if all(r.get(name) == value for name, value in key.items())]
    found = [r for r in old if r["benchmark"] == "largest"]
    if not found:
        probes = [Probe(**{name: r[name] for name in Probe.__dataclass_fields__}) for r in old]
        while (scale := next_scale({p.length: p.fits for p in probes})) is not None and scale <= MAX_SCALE:
            probes.append(search.attempt(scale, flags.timeout))
            append(flags.output, {"benchmark": "largest-probe", **key, **asdict(probes[-1]), **about})
            print(line(search, probes[-1]), flush=True)
        best = max((p for p in probes if p.fits), key=lambda p: p.length, default=None)
        worst = min((p for p in probes if not p.fits), key=lambda p: p.length, default=None)
        found = [{"benchmark": "largest", **key, **search.limit(best, worst, len(probes)), **about}]
        append(flags.output, found[0])
    scale = found[-1]["largest"]
    print(f"largest that fits: {search.describe(scale) if scale else 'none'}", flush=True)


def line(search: LargestSearch, probe: Probe) -> str:
    ending = f"fits, {probe.peak_bytes / GIB:.2f} GiB per GPU" if probe.fits and probe.peak_bytes else probe.reason
    return f"{search.describe(probe.length)}: {ending}"


def hold(name: str) -> int:
    """Allocates a model's weights on the GPU and prints their bytes."""
    model = build_to_train(preset_config(llama3.FAMILY, name)).to(torch.bfloat16).to_empty(device="cuda")
    torch.cuda.synchronize()
    print(torch.cuda.max_memory_allocated())
    return 0 if next(model.parameters()).is_cuda else 1


def main(words: Sequence[str]) -> int:
    if list(words[:1]) == [HOLD]:
        return hold(words[1])
    return run_command(lambda: run_searches(words))


def run_searches(words: Sequence[str]) -> None:
    flags = parser().parse_args(words)
    if "weights" in flags.what and flags.gpu_memory is None and not torch.cuda.is_available():
        raise ValueError("--what weights fills a GPU, but this host has none; give --gpu_memory, such as 80")
    about = provenance(flags.commit)
    for search in searches_of(flags):
        find(search, flags, about)
    print(f"records  {flags.output}")


def searches_of(flags: argparse.Namespace) -> list[LargestSearch]:
    """Returns a search per combination. `weights` always uses one GPU and no training flags."""
    found = [
        LargestSearch(what, strategy, flags.length, flags.flags, flags.nproc_per_node, flags.gpu_memory)
        for what in flags.what
        for strategy in flags.strategies
    ]
    return [replace(s, tokens=0, flags="", gpus=1) if s.what == "weights" else s for s in found]


def parser() -> Parser:
    out = Parser("benchmarks/largest.py", __doc__)
    out.add_argument("--what", type=listed(one_of(*WHAT), WHAT), default="all", help="weights, training or all")
    out.add_argument(
        "--strategies",
        type=listed(one_of(*STRATEGIES)),
        default="all,n_layers",
        help="dimensions that grow: all, or only the number of layers",
    )
    out.add_argument("--length", type=length, default="4K", metavar="N", help="sequence length in tokens")
    out.add_argument("--flags", default="--torch_compile True", metavar="WORDS", help="training flags")
    gpus = torch.cuda.device_count() or 2
    out.add_argument("--nproc_per_node", type=positive, default=gpus, metavar="N", help="GPUs of this host")
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="limit on the memory of a GPU")
    out.add_argument("--timeout", type=float, default=600.0, metavar="S", help="time limit per scale")
    out.add_output("outputs/largest.jsonl")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
