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
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from rich import box
from rich.table import Table

import llama3
from benchmarks.flags import Parser, length, listed, one_of, positive
from benchmarks.longest import Probe, hardware_of, next_length, provenance_of, rehearsed, run_searches, write
from benchmarks.report import read_lines
from benchmarks.training.flags import NEEDED
from benchmarks.training.launch import Failed, run
from benchmarks.training.records import Machine
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
MOST = 512  # of a scale: beyond any GPU, and searches end


@dataclass(frozen=True)
class Search:
    """One limit to find. `gpu_memory` in GiB; None is what there is."""

    what: str
    strategy: str
    tokens: int
    flags: str
    gpus: int
    gpu_memory: float | None

    def name(self, scale: int) -> str:
        return f"scaled-{self.strategy}-{scale}"

    def words(self, scale: int) -> list[str]:
        """Of the rehearsal of a model."""
        precision = ["--bf16"] if torch.cuda.is_available() else []
        words = ["--model_name_or_path", self.name(scale), "--random_init", *precision, *shlex.split(self.flags)]
        return [*words, "--model_max_length", str(self.tokens)]


@lru_cache
def parameters(name: str) -> int:
    """Of a model all of whose layers are alike: two of them tell what hundreds have."""
    config = preset_config(llama3.FAMILY, name)
    one, two = (total_parameters(with_layers(config, layers)) for layers in (1, 2))
    return one + (config.num_hidden_layers - 1) * (two - one)


def main(words: Sequence[str]) -> int:
    if list(words[:1]) == ["--hold"]:
        return hold(words[1])
    return run_searches(words, parser(), searches_of, search_of, table)


def searches_of(flags: argparse.Namespace) -> list[Search]:
    """Weights alone are one GPU's, whatever the flags of training are."""
    found = [
        Search(what, strategy, flags.length, flags.flags, flags.nproc_per_node, flags.gpu_memory)
        for what in flags.what
        for strategy in flags.strategies
    ]
    return [replace(s, tokens=0, flags="", gpus=1) if s.what == "weights" else s for s in found]


def parser() -> Parser:
    out = Parser(prog="benchmarks/largest.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    gpus = torch.cuda.device_count() or 2
    out.add_argument("--what", type=listed(one_of(WHAT), WHAT), default=list(WHAT), help="weights, training or both")
    out.add_argument(
        "--strategies", type=listed(one_of(STRATEGIES), STRATEGIES), default=list(STRATEGIES), help="what grows"
    )
    out.add_argument("--length", type=length, default=4096, metavar="N", help="tokens of the sequence (default: 4K)")
    out.add_argument("--flags", default="--torch_compile True", metavar="WORDS", help="training flags")
    out.add_argument("--nproc_per_node", type=positive, default=gpus, metavar="N", help="GPUs of this host")
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="take a GPU to have no more")
    out.add_argument("--first", type=positive, metavar="S", help="scale to begin with (default: what the plan says)")
    out.add_argument("--timeout", type=float, default=600.0, help="seconds one size may take (default: 600)")
    out.add_argument("--output", type=Path, default=Path("outputs/largest.jsonl"), metavar="FILE", help="JSONL")
    out.add_argument("--commit", help="what the records name where there is no git to ask")
    return out


def search_of(search: Search, flags: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Goes on with what the file knows of this limit; the record of the limit, written once it is found."""
    key, provenance = asdict(search), provenance_of(flags.commit, machine)
    old = [r for r in read_lines(flags.output) if all(r.get(name) == value for name, value in key.items())]
    if done := [r for r in old if r["benchmark"] == "largest"]:
        return done[-1]
    probes = [Probe(**{name: r[name] for name in Probe.__dataclass_fields__}) for r in old]
    first = flags.first or planned(search, machine)
    while (scale := next_length({p.length: p.fits for p in probes}, first, 0.0, 1)) is not None:
        if scale > MOST or any(p.length == 1 and not p.fits for p in probes):
            break
        probes.append(try_out(search, scale, flags.timeout))
        write(flags.output, {"benchmark": "largest-probe", **key, **asdict(probes[-1]), **provenance})
        print(line(search, probes[-1]), flush=True)
    found = {"benchmark": "largest", **key, **limit(search, probes), **provenance}
    write(flags.output, found)
    return found


def planned(search: Search, machine: Machine) -> int:
    """Where to begin: the largest scale that should fit, by the same search with the plan for an answer."""
    hardware = hardware_of(machine, search.gpus, search.gpu_memory)

    def fits(scale: int) -> bool:
        if search.what == "weights":
            return WEIGHT_BYTES * parameters(search.name(scale)) <= hardware.gpu_memory
        config = parse([*NEEDED, *search.words(scale)], "")
        return make_plan(PlannedRun(preset_config(llama3.FAMILY, search.name(scale)), config, hardware)).fits

    known: dict[int, bool] = {}
    while (scale := next_length(known, 8, 0.0, 1)) is not None and scale <= MOST:
        known[scale] = fits(scale)
    return max((scale for scale, fitting in known.items() if fitting), default=1)


def try_out(search: Search, scale: int, timeout: float) -> Probe:
    """Whether a model of that scale fits. `Probe.length` is the scale."""
    if search.what == "training":
        return rehearsed(search.words(scale), scale, search.name(scale), search.gpus, search.gpu_memory, timeout)
    taken = WEIGHT_BYTES * parameters(search.name(scale))
    if search.gpu_memory is not None and taken > search.gpu_memory * GIB:
        return Probe(scale, False, f"takes more than {search.gpu_memory:g} GiB")
    if not torch.cuda.is_available():
        return Probe(scale, True, None, taken)  # what can be counted
    with tempfile.TemporaryDirectory() as folder:
        try:
            run([str(Path(__file__).resolve()), "--hold", search.name(scale)], timeout, Path(folder) / "log.txt")
        except Failed as why:
            if "out of memory" not in str(why).lower():
                raise ValueError(f"{search.name(scale)}: {why}") from None
            return Probe(scale, False, "out of memory")
        held = json.loads((Path(folder) / "log.txt").read_text().splitlines()[-1])
    return Probe(scale, True, None, held["peak_bytes"])


def hold(name: str) -> int:
    """A process of its own: puts one model's weights on the GPU, and says in JSON what that took."""
    model = build_on_meta(preset_config(llama3.FAMILY, name)).to(torch.bfloat16).to_empty(device="cuda")
    torch.cuda.synchronize()
    print(json.dumps({"peak_bytes": torch.cuda.max_memory_allocated(), "tensors": len(list(model.parameters()))}))
    return 0


def limit(search: Search, probes: Sequence[Probe]) -> dict[str, Any]:
    best = max((p for p in probes if p.fits), key=lambda p: p.length, default=None)
    worst = min((p for p in probes if not p.fits), key=lambda p: p.length, default=None)
    return {
        "largest": best.length if best else 0,
        "parameters": parameters(search.name(best.length)) if best else 0,
        "peak_bytes": best.peak_bytes if best else None,
        "too_large": worst.length if worst else None,
        "too_many_parameters": parameters(search.name(worst.length)) if worst else None,
        "reason": worst.reason if worst else None,
        "probes": len(probes),
    }


def line(search: Search, probe: Probe) -> str:
    ending = f"fits, {probe.peak_bytes / GIB:.2f} GiB a GPU" if probe.fits and probe.peak_bytes else probe.reason
    return (
        f"{search.what} of {search.name(probe.length)}, {parameters(search.name(probe.length)):,} parameters: {ending}"
    )


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    numbers = ("GPUs", "scale", "parameters", "GiB a GPU", "too large")
    for name in ("what grows, flags", *numbers):
        out.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in numbers)
    for row in found:
        peak = f"{row['peak_bytes'] / GIB:.2f}" if row["peak_bytes"] else "-"
        above = f"{row['too_many_parameters']:,}" if row["too_many_parameters"] else "-"
        cells = [f"{row['what']} {row['strategy']} {row['flags']}".strip(), str(row["gpus"]), str(row["largest"])]
        out.add_row(*cells, f"{row['parameters']:,}", peak, above)
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
