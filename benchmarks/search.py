"""Search for the largest size that fits in memory, by bisection; what was tried is in a file and not tried again."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psutil
import torch

from benchmarks.command_line import Parser, positive
from benchmarks.processes import Failed, run, torchrun
from benchmarks.records import append, provenance, read_lines
from lightseq.config.parser import answered
from lightseq.memory.planner.rates import CHIPS, GIB, chip_of_device
from lightseq.memory.planner.run import Hardware
from lightseq.tools.plan.rehearsal import RECORD

ENDS = ("out of memory", "killed", "no end within")  # of rehearsals that were too large; anything else is an error
FIRST_STEP = 0.05  # of the first guess, about as far as a plan is off; steps double until the limit lies between two


@dataclass(frozen=True)
class Probe:
    """One size that was tried. Bytes are those of the rank that took most; None where it ended for lack of them."""

    length: int
    fits: bool
    reason: str | None = None
    peak_bytes: int | None = None
    offloaded_bytes: int | None = None
    seconds: float | None = None


class Search(Protocol):
    """One limit to find: a frozen dataclass whose fields tell it from others in the file.

    `benchmark` and `probe` name the records of the limit and of one size.
    """

    benchmark: ClassVar[str]
    probe: ClassVar[str]
    most: ClassVar[int]  # searches end beyond

    def planned(self, hardware: Mapping[str, Any]) -> int:
        """Returns the size to begin with."""
        ...

    def attempt(self, size: int, timeout: float) -> Probe: ...

    def describe(self, size: int) -> str: ...

    def limit(self, best: Probe | None, worst: Probe | None, probes: int) -> dict[str, Any]:
        """Returns the record of the largest size that fits, and of the smallest that does not."""
        ...

    def summary(self, record: Mapping[str, Any]) -> str: ...


def next_size(known: Mapping[int, bool], guess: int, resolution: float, step: int) -> int | None:
    """Returns the size to try next, a multiple of `step`; None once the limit is known to `resolution` of itself."""
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


def add_flags(out: Parser, output: str) -> None:
    """Adds the flags of every search."""
    gpus = torch.cuda.device_count() or 2
    out.add_argument("--nproc_per_node", type=positive, default=gpus, metavar="N", help="GPUs of this host")
    out.add_argument("--gpu_memory", type=float, metavar="GIB", help="take a GPU to have no more")
    out.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one size")
    out.add_output(output)


def run_searches(parse: Callable[[], Any], searches_of: Callable[[Any], Sequence[Search]]) -> int:
    """Finds every limit that the flags ask for."""

    def work() -> None:
        flags = parse()
        about = provenance(flags.commit)
        for search in searches_of(flags):
            find(search, flags, about)
        print(f"records  {flags.output}")

    return answered(work)


def find(search: Search, flags: Any, about: Mapping[str, Any]) -> None:
    """Goes on with what the file holds of this limit, and writes each size that it tries, then the limit."""
    key = asdict(search)  # type: ignore[call-overload]
    resolution, step = getattr(flags, "resolution", 0.0), getattr(flags, "step", 1)
    old = [r for r in read_lines(flags.output) if all(r.get(name) == value for name, value in key.items())]
    found = [r for r in old if r["benchmark"] == search.benchmark]
    if not found:
        probes = [Probe(**{name: r[name] for name in Probe.__dataclass_fields__}) for r in old]
        first = flags.first or search.planned(about["hardware"])
        while (size := next_size({p.length: p.fits for p in probes}, first, resolution, step)) is not None:
            if size > search.most:
                break
            probes.append(search.attempt(size, flags.timeout))
            append(flags.output, {"benchmark": search.probe, **key, **asdict(probes[-1]), **about})
            print(line(search, probes[-1]), flush=True)
        best = max((p for p in probes if p.fits), key=lambda p: p.length, default=None)
        worst = min((p for p in probes if not p.fits), key=lambda p: p.length, default=None)
        found = [{"benchmark": search.benchmark, **key, **search.limit(best, worst, len(probes)), **about}]
        append(flags.output, found[0])
    print(search.summary(found[-1]), flush=True)


def line(search: Search, probe: Probe) -> str:
    ending = f"fits, {probe.peak_bytes / GIB:.2f} GiB a GPU" if probe.fits and probe.peak_bytes else probe.reason
    return f"{search.describe(probe.length)}: {ending}"


def hardware_of(
    found: Mapping[str, Any], gpus: int, gpu_memory: float | None, host_memory: float | None = None
) -> Hardware:
    """Returns what a plan is made for: one host, with the memory that was asked for in GiB, else what there is."""
    chip = chip_of_device(found.get("device") or "") or CHIPS["h200"]
    gpu = chip.memory_bytes if gpu_memory is None else gpu_memory * GIB
    host = psutil.virtual_memory().total if host_memory is None else host_memory * GIB
    return Hardware(chip, gpus, gpus, gpu, host)


def rehearse(words: Sequence[str], size: int, about: str, gpus: int, gpu_memory: float | None, timeout: float) -> Probe:
    """Rehearses a run that is `size` large. Raises ValueError where it ended for anything but its size."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(gpus), "-m", "lightseq", "rehearse", *words, "--output_dir", folder]
        try:
            run(command, timeout, Path(folder) / "log.txt")
        except Failed as why:
            if not any(end in str(why).lower() for end in ENDS):
                raise ValueError(f"{about}: {why}") from None
            return Probe(size, False, str(why))
        record = json.loads((Path(folder) / RECORD).read_text())
    peak = record["peak_bytes"] or sum(record["parts"].values())  # without a GPU, what can be counted
    room = gpu_memory is None or peak <= gpu_memory * GIB
    reason = None if room else f"takes more than {gpu_memory:g} GiB"
    return Probe(size, room, reason, peak, record["offloaded_bytes"], record["seconds"])
