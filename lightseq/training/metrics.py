"""Records of a run: run.json, metrics.jsonl and experiment trackers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightseq.training.machine import versions
from lightseq.training.trackers import Tracker
from lightseq.utils.files import RECORDS_BYTES, parse_json, read_bytes, read_json
from lightseq.utils.formatting import plural
from lightseq.utils.masking import mask_secrets

RUN, METRICS, SAMPLES = "run.json", "metrics.jsonl", "samples.jsonl"
DAMAGED = ".damaged"  # suffix of the file with invalid lines of metrics.jsonl


@dataclass(frozen=True)
class StepRecord:
    """One logged step. Times and loss are means over the steps since the last record; memory is the worst rank's.

    The loss excludes steps without a target.
    """

    step: int  # optimizer steps done
    loss: float | None  # mean of -log p over valid tokens; None if no step had one
    router_loss: float | None  # load-balancing loss of a pass, without coefficient; None if it is not trained with
    grad_norm: float  # global norm before clipping
    skipped_steps: int  # since the last record, because of non-finite gradients
    steps_without_target: int  # since the last record
    learning_rate: float
    tokens: int  # positions per step over all ranks, padding included
    padding_percent: float  # share of `tokens` that is padding
    valid_tokens: int  # tokens with a target
    training_tokens_percent: float  # targets of all rows per 100 `tokens`: above 100 where rows share targets
    step_seconds: float
    data_seconds: float  # part of step_seconds spent waiting for data
    saving_seconds: float  # waiting for checkpoints since the last record; not part of step_seconds
    slowest_rank: int | None  # rank with the longest work that waits for no other rank, up to the previous step
    slowest_rank_share: float | None  # 0 to 1: share of that time by which it exceeds the mean of all ranks
    tokens_per_second: float  # over all ranks, without padding
    tokens_per_second_per_gpu: float  # per process on CPU
    model_tflops_per_gpu: float  # without padding and recomputation
    mfu: float | None  # 0 to 1 of the chip's dense peak (FP8 with --fp8, else bf16); None if the peak is unknown
    hfu: float | None  # mfu with recomputation
    peak_memory_allocated_bytes: int | None  # None without a GPU
    peak_memory_reserved_bytes: int | None
    host_rss_bytes: int
    offloaded_bytes: int  # activations in host memory on the rank with the most
    comm_bytes: int  # sent by attention per step, over all ranks
    attention_balance: float | None  # packing: mean attention area per rank over the largest, in the worst sequence


class MetricsFile:
    """Writer of metrics.jsonl, or of another file with an object per line, flushed after each.

    A resumed run drops later steps.

    Invalid lines of an earlier run are moved to another file. `notes` reports that, and a missing file.
    """

    def __init__(
        self,
        directory: Path,
        first_step: int,
        trackers: tuple[Tracker, ...] = (),
        resumes: bool = False,
        name: str = METRICS,
    ) -> None:
        """Opens the file. `resumes`: the run resumes the one that wrote into this directory."""
        self.path, self._trackers = directory / name, trackers
        self.notes: tuple[str, ...] = ()
        if resumes and not self.path.exists():
            self.notes = (f"warning: {self.path} is missing; the metrics up to step {first_step:,} are lost",)
        damaged = damaged_lines(self.path)
        if damaged:
            self.notes = (_set_damaged_aside(self.path, damaged),)
        kept = [x for x in _lines(self.path) if (record := _record(x)) is not None and record["step"] <= first_step]
        partial = self.path.with_name(f"{name}.partial")  # no record is lost if the run is killed here
        partial.write_bytes(b"".join(line + b"\n" for line in kept))
        partial.replace(self.path)
        self._file = self.path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(record)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()


def _line(record: Mapping[str, Any]) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl. Skips lines damaged by a killed run or a full disk."""
    return [record for record in map(_record, _lines(path)) if record is not None]


def damaged_lines(path: Path) -> list[bytes]:
    """Returns the lines of a metrics.jsonl that are not records: truncated, garbled, or from another program."""
    return [line for line in _lines(path) if _record(line) is None]


def _lines(path: Path) -> list[bytes]:
    content = read_bytes(path, RECORDS_BYTES) if path.exists() else b""
    return [line for line in content.split(b"\n") if line.strip()]


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line, or None if it is not a JSON object with a step."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _set_damaged_aside(path: Path, lines: Sequence[bytes]) -> str:
    """Appends the lines to a file next to the metrics. Returns a warning."""
    target = path.with_name(path.name + DAMAGED)
    with target.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
    return f"warning: {path}: moved {plural(len(lines), 'damaged line')} to {target.name}"


def write_run(directory: Path, facts: Mapping[str, Any], secrets: Collection[str]) -> None:
    """Writes run.json atomically, with `secrets` and anything that looks like one masked."""
    _write_json(directory, mask_secrets({**facts, "versions": versions()}, secrets))


def _write_json(directory: Path, facts: Mapping[str, Any]) -> None:
    partial = directory / f"{RUN}.partial"
    try:
        partial.write_text(json.dumps(facts, indent=2) + "\n")
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.rename(directory / RUN)


def write_end(directory: Path, reason: str, step: int) -> None:
    """Adds to run.json why and after which step the run ended."""
    facts = read_run(directory)
    if facts:
        _write_json(directory, {**facts, "ended": {"reason": reason, "step": step}})


def earlier_plan(checkpoint: Path | None) -> dict[str, Any]:
    """Returns the memory plan of the run that saved a checkpoint; empty if there is none."""
    plan = read_run(checkpoint.parent).get("memory_plan") if checkpoint is not None else None
    return plan if isinstance(plan, dict) else {}


def read_run(directory: Path) -> dict[str, Any]:
    """Returns the content of a run.json; empty if it is missing or damaged."""
    try:
        about = read_json(directory / RUN)
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
