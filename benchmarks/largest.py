"""Finds the largest model that fits, by bisection over `scaled` models: its weights alone, or whole training steps.

python3 benchmarks/largest.py --nproc_per_node 1 --what weights,training --strategies all,n_layers
python3 benchmarks/largest.py --nproc_per_node 4 --what training --flags "--offload activations"

`weights` holds bfloat16 parameters on one GPU and nothing else; `training` rehearses a step under FSDP2 over all
GPUs. Every size runs in processes of its own and is written down as it ends: the same command again goes on.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import argparse
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

import llama3
from benchmarks.command_line import Parser, length, listed, one_of, positive
from benchmarks.processes import Failed, run
from benchmarks.search import Probe, add_flags, hardware_of, next_size, rehearse, run_searches
from benchmarks.step import NEEDED
from lightseq.config.command_line import parse
from lightseq.memory.planner.plan import make_plan
from lightseq.memory.planner.rates import GIB
from lightseq.memory.planner.run import PlannedRun
from lightseq.models.architecture import with_layers
from lightseq.models.family import preset_config
from lightseq.models.flops import total_parameters
from lightseq.models.weights import build_on_meta

WHAT, STRATEGIES = ("weights", "training"), ("all", "n_layers")
WEIGHT_BYTES = 2  # bfloat16
HOLD = "--hold"  # begins the words of a process that holds one model


@lru_cache
def parameters(name: str) -> int:
    """Counts a model all of whose layers are alike: two of them tell what hundreds have."""
    config = preset_config(llama3.FAMILY, name)
    one, two = (total_parameters(with_layers(config, layers)) for layers in (1, 2))
    return one + (config.num_hidden_layers - 1) * (two - one)


@dataclass(frozen=True)
class LargestSearch:
    """The largest scale. `gpu_memory` in GiB; None is what there is."""

    benchmark: ClassVar[str] = "largest"
    probe: ClassVar[str] = "largest-probe"
    most: ClassVar[int] = 512  # beyond any GPU

    what: str
    strategy: str
    tokens: int
    flags: str
    gpus: int
    gpu_memory: float | None

    def name(self, scale: int) -> str:
        return f"scaled-{self.strategy}-{scale}"

    def words(self, scale: int) -> list[str]:
        """Returns the flags of a training run of the model."""
        precision = ["--bf16"] if torch.cuda.is_available() else []
        words = ["--model_name_or_path", self.name(scale), "--random_init", *precision, *shlex.split(self.flags)]
        return [*words, "--model_max_length", str(self.tokens)]

    def planned(self, hardware: Mapping[str, Any]) -> int:
        """Returns the largest scale that should fit, by the same search with the plan for an answer."""
        host = hardware_of(hardware, self.gpus, self.gpu_memory)

        def fits(scale: int) -> bool:
            if self.what == "weights":
                return WEIGHT_BYTES * parameters(self.name(scale)) <= host.gpu_memory
            config = parse([*NEEDED, *self.words(scale)], "")
            return make_plan(PlannedRun(preset_config(llama3.FAMILY, self.name(scale)), config, host)).fits

        known: dict[int, bool] = {}
        while (scale := next_size(known, 8, 0.0, 1)) is not None and scale <= self.most:
            known[scale] = fits(scale)
        return max((scale for scale, fitting in known.items() if fitting), default=1)

    def attempt(self, size: int, timeout: float) -> Probe:
        if self.what == "training":
            return rehearse(self.words(size), size, self.describe(size), self.gpus, self.gpu_memory, timeout)
        taken = WEIGHT_BYTES * parameters(self.name(size))
        if self.gpu_memory is not None and taken > self.gpu_memory * GIB:
            return Probe(size, False, f"takes more than {self.gpu_memory:g} GiB")
        if not torch.cuda.is_available():
            return Probe(size, True, None, taken)  # what can be counted
        with tempfile.TemporaryDirectory() as folder:
            try:
                run([str(Path(__file__).resolve()), HOLD, self.name(size)], timeout, Path(folder) / "log.txt")
            except Failed as why:
                if "out of memory" not in str(why).lower():
                    raise ValueError(f"{self.describe(size)}: {why}") from None
                return Probe(size, False, "out of memory")
            return Probe(size, True, None, json.loads((Path(folder) / "log.txt").read_text().splitlines()[-1]))

    def describe(self, size: int) -> str:
        run = f"{self.what} of {self.name(size)} {self.flags}".strip()
        return f"{run}, {parameters(self.name(size)):,} parameters"

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

    def summary(self, record: Mapping[str, Any]) -> str:
        return f"largest that fits: {self.describe(record['largest']) if record['largest'] else 'none'}"


def hold(name: str) -> int:
    """Puts one model's weights on the GPU, and prints the bytes that they take."""
    model = build_on_meta(preset_config(llama3.FAMILY, name)).to(torch.bfloat16).to_empty(device="cuda")
    torch.cuda.synchronize()
    print(torch.cuda.max_memory_allocated())
    return 0 if next(model.parameters()).is_cuda else 1


def main(words: Sequence[str]) -> int:
    if list(words[:1]) == [HOLD]:
        return hold(words[1])
    return run_searches(lambda: parser().parse_args(words), searches_of)


def searches_of(flags: argparse.Namespace) -> list[LargestSearch]:
    """Returns a search for every combination. Weights alone are one GPU's, whatever the flags of training are."""
    found = [
        LargestSearch(what, strategy, flags.length, flags.flags, flags.nproc_per_node, flags.gpu_memory)
        for what in flags.what
        for strategy in flags.strategies
    ]
    return [replace(s, tokens=0, flags="", gpus=1) if s.what == "weights" else s for s in found]


def parser() -> Parser:
    out = Parser("benchmarks/largest.py", __doc__)
    out.add_argument("--what", type=listed(one_of(*WHAT), WHAT), default="all", help="weights, training or both")
    out.add_argument(
        "--strategies", type=listed(one_of(*STRATEGIES), STRATEGIES), default="all,n_layers", help="what grows"
    )
    out.add_argument("--length", type=length, default="4K", metavar="N", help="tokens of the sequence")
    out.add_argument("--flags", default="--torch_compile True", metavar="WORDS", help="training flags")
    out.add_argument("--first", type=positive, metavar="S", help="scale to begin with; the plan's unless given")
    add_flags(out, "outputs/largest.jsonl")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
