"""Finds the longest sequence that trains, by rehearsing and bisecting, for every model and set of flags given.

python3 benchmarks/longest.py --models llama3.2-1b,llama3-8b --nproc_per_node 8 --output outputs/longest.jsonl \\
    --flags "--torch_compile" --flags "--torch_compile --offload activations" --host_memory 500,1900

Every rehearsal runs in processes of its own and is written down as it ends: the same command again goes on.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import json
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.flags import Parser, length, listed, positive
from benchmarks.report import commit_here, read_lines
from benchmarks.training.flags import NEEDED
from benchmarks.training.launch import Failed, run
from benchmarks.training.records import Machine, look_at_machine
from benchmarks.training.trials import model_of
from lightseq.config.command_line import parse as parse_training
from lightseq.config.lengths import shown
from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.advice import longest as longest_planned
from lightseq.memory.planner.rates import CHIPS, GIB, chip_of_device
from lightseq.memory.planner.run import Hardware, PlannedRun
from lightseq.tools.plan.rehearsal import RECORD

ENDS = ("out of memory", "killed", "no end within")  # of rehearsals that were too long; anything else is an error
S = TypeVar("S")
FIRST_STEP = 0.05  # of the first guess, about as far as a plan is off; steps double until the limit lies between two


@dataclass(frozen=True)
class Search:
    """One limit to find. Memory in GiB: `gpu_memory` of a GPU, `host_memory` of a host; None is what there is."""

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
    def offloads(self) -> bool:
        return self.config(replace(self, host_memory=None).words).offload in ("activations", "both", "auto")

    def config(self, words: Sequence[str]) -> TrainConfig:
        return parse_training([*NEEDED, *words], "")


@dataclass(frozen=True)
class Probe:
    """One rehearsal. Bytes are those of the rank that took most; None where it ended for lack of them."""

    length: int
    fits: bool
    reason: str | None = None
    peak_bytes: int | None = None
    offloaded_bytes: int | None = None
    seconds: float | None = None


def next_length(known: Mapping[int, bool], guess: int, resolution: float, step: int) -> int | None:
    """The length to rehearse next, a multiple of `step`; None once the limit is known to `resolution` of itself."""
    if not known:
        return max(step, guess // step * step)
    low = max((n for n, fits in known.items() if fits), default=0)
    high = min((n for n, fits in known.items() if not fits), default=None)
    stride = max(step, FIRST_STEP * max(known), 2 * (max(known) - min(known)))
    if high is None:
        return -(-int(low + stride) // step) * step
    if high - low <= max(step, resolution * low):
        return None
    middle = max((low + high) // 2, int(high - stride)) if low == 0 else (low + high) // 2
    return max(step, middle // step * step)


def main(words: Sequence[str]) -> int:
    return run_searches(words, parser(), searches_of, search_of, table)


def searches_of(flags: Any) -> list[Search]:
    """Host memory bounds what layers hand over, and nothing else."""
    found = [
        Search(model, given, flags.nproc_per_node, flags.gpu_memory, host)
        for model in flags.models
        for given in flags.flags or [""]
        for host in flags.host_memory or [None]
    ]
    return list(dict.fromkeys(s if s.offloads else replace(s, host_memory=None) for s in found))


def run_searches(
    words: Sequence[str],
    parser: Parser,
    searches_of: Callable[[Any], Sequence[S]],
    search_of: Callable[[S, Any, Machine], dict[str, Any]],
    table: Callable[[Sequence[Mapping[str, Any]]], Table],
) -> int:
    """A program that searches for limits: every one that the flags ask for, then the table of them."""
    if {"-h", "--help"} & set(words):
        parser.print_help()
        return 0
    try:
        flags = parser.parse_args(words)
        machine = look_at_machine()
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        found = [search_of(search, flags, machine) for search in searches_of(flags)]
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    Console().print(table(found))
    print(f"records  {flags.output}")
    return 0


def parser() -> Parser:
    out = Parser(prog="benchmarks/longest.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    out.add_argument("--models", type=listed(str), default=["llama3.2-1b"], help="presets or local directories")
    out.add_argument("--flags", action="append", metavar="WORDS", help="training flags; several times for several rows")
    out.add_argument(
        "--nproc_per_node", type=positive, default=torch.cuda.device_count() or 2, help="GPUs of this host"
    )
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="take a GPU to have no more")
    out.add_argument("--host_memory", type=listed(float), metavar="GIB,...", help="for what layers keep, all ranks")
    out.add_argument("--first", type=length, metavar="N", help="length to begin with (default: what the plan says)")
    out.add_argument("--step", type=length, default=1024, help="lengths are multiples of it (default: 1K)")
    out.add_argument(
        "--resolution", type=float, default=0.02, help="of the length, that is enough (default: %(default)s)"
    )
    out.add_argument("--timeout", type=float, default=600.0, help="seconds a rehearsal may take (default: 600)")
    out.add_argument("--output", type=Path, default=Path("outputs/longest.jsonl"), metavar="FILE", help="JSONL")
    out.add_argument("--commit", help="what the records name where there is no git to ask")
    return out


def search_of(search: Search, flags: Any, machine: Machine) -> dict[str, Any]:
    """Goes on with what the file knows of this limit; the record of the limit, written once it is found."""
    key = asdict(search)
    old = [r for r in read_lines(flags.output) if all(r.get(name) == value for name, value in key.items())]
    if done := [r for r in old if r["benchmark"] == "longest"]:
        return done[-1]
    names = Probe.__dataclass_fields__
    probes = [Probe(**{name: r[name] for name in names}) for r in old]
    provenance = provenance_of(flags.commit, machine)
    guess = flags.first or planned(search, machine)
    while (tokens := next_length({p.length: p.fits for p in probes}, guess, flags.resolution, flags.step)) is not None:
        probes.append(rehearse(search, tokens, flags.timeout))
        write(flags.output, {"benchmark": "rehearsal", **key, **asdict(probes[-1]), **provenance})
        print(line(search, probes[-1]), flush=True)
        if tokens <= flags.step and not probes[-1].fits:
            break
    found = {"benchmark": "longest", **key, **limit(search, probes), **provenance}
    write(flags.output, found)
    return found


def provenance_of(commit: str | None, machine: Machine) -> dict[str, Any]:
    return {
        "commit": commit or commit_here(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": dict(machine.hardware), "versions": dict(machine.versions),
    }  # fmt: skip


def planned(search: Search, machine: Machine) -> int:
    """Where to begin."""
    _, model = model_of(search.model)
    hardware = hardware_of(machine, search.gpus, search.gpu_memory, search.host_memory)
    return longest_planned(PlannedRun(model, search.config(search.words), hardware)) or 1


def hardware_of(machine: Machine, gpus: int, gpu_memory: float | None, host_memory: float | None = None) -> Hardware:
    """What a plan is made for: one host, with the memory that was asked for in GiB, else what there is."""
    chip = chip_of_device(machine.hardware.get("device") or "") or CHIPS["h200"]
    gpu = chip.memory_bytes if gpu_memory is None else gpu_memory * GIB
    host = psutil.virtual_memory().total if host_memory is None else host_memory * GIB
    return Hardware(chip, gpus, gpus, gpu, host)


def rehearse(search: Search, tokens: int, timeout: float) -> Probe:
    about = f"{search.model} {search.flags} at {shown(tokens)}"
    words = [*search.words, "--model_max_length", str(tokens)]
    return rehearsed(words, tokens, about, search.gpus, search.gpu_memory, timeout)


def rehearsed(
    words: Sequence[str], size: int, about: str, gpus: int, gpu_memory: float | None, timeout: float
) -> Probe:
    """One rehearsal, of a run that is `size` large. Raises ValueError where it ended for anything but that."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node={gpus} -m lightseq rehearse".split()
        try:
            run([*launcher, *words, "--output_dir", folder], timeout, Path(folder) / "log.txt")
        except Failed as why:
            if not any(end in str(why).lower() for end in ENDS):
                raise ValueError(f"{about}: {why}") from None
            return Probe(size, False, str(why))
        record = json.loads((Path(folder) / RECORD).read_text())
    peak = record["peak_bytes"] or sum(record["parts"].values())  # without a GPU, what can be counted
    room = gpu_memory is None or peak <= gpu_memory * GIB
    reason = None if room else f"takes more than {gpu_memory:g} GiB"
    return Probe(size, room, reason, peak, record["offloaded_bytes"], record["seconds"])


def limit(search: Search, probes: Sequence[Probe]) -> dict[str, Any]:
    best = max((p for p in probes if p.fits), key=lambda p: p.length, default=None)
    worst = min((p for p in probes if not p.fits), key=lambda p: p.length, default=None)
    peak = best.peak_bytes if best else None
    host = best.offloaded_bytes * search.gpus if best and best.offloaded_bytes is not None else None
    tokens = best.length if best else 0
    return {
        "longest": tokens,
        "too_long": worst.length if worst else None,
        "reason": worst.reason if worst else None,
        "rehearsals": len(probes),
        "peak_bytes": peak,
        "host_bytes": host,
        "tokens_per_gpu": tokens / search.gpus,
        "tokens_per_gpu_gib": tokens / (search.gpus * peak / GIB) if peak else None,
        "tokens_per_host_gib": tokens / (host / GIB) if host else None,
    }


def write(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def line(search: Search, probe: Probe) -> str:
    ending = f"fits, {probe.peak_bytes / GIB:.2f} GiB a GPU" if probe.fits and probe.peak_bytes else probe.reason
    return f"{search.model} {search.flags} {probe.length:,} tokens: {ending}"


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("model, flags", overflow="fold")
    for name in ("GPUs", "longest", "too\nlong", "GiB a\nGPU", "tokens\na GiB", "GiB of\nhost", "tokens\na GiB"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in found:
        lengths = [shown(n) if n else "-" for n in (row["longest"], row["too_long"])]
        gpu, host = (f"{n / GIB:,.1f}" if n else "-" for n in (row["peak_bytes"], row["host_bytes"]))
        a_gib = [f"{n:,.0f}" if n else "-" for n in (row["tokens_per_gpu_gib"], row["tokens_per_host_gib"])]
        words = f"{row['model']} {row['flags']}".strip()
        out.add_row(words, str(row["gpus"]), *lengths, gpu, a_gib[0], host, a_gib[1])
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
