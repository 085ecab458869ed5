"""The records of a run: run.json, metrics.jsonl and its mirrors, and the journal that writes them step by step."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.data.batches import PADDING_WARNING_SHARE
from lightseq.distributed.environment import SHUTDOWN_TIMEOUT
from lightseq.training.errors import end_for_skipped_steps, explained_writing
from lightseq.utils.formatting import plural
from lightseq.utils.masking import mask_secrets

if TYPE_CHECKING:
    from lightseq.training.loop import Trainer
    from lightseq.training.step_stats import PendingRecord

RUN, METRICS = "run.json", "metrics.jsonl"
DAMAGED = ".damaged"  # after the name of a file that holds what is no record
UNNAMED = 2**31  # in place of a parameter's number: some gradient is not finite, nobody knows whose
MOST_SKIPPED = 20  # steps in a row without a finite gradient
TELLING_STEPS = 10  # whose padding is taken for that of the run
EVENTS = ".lightseq"  # ends the names of the files for tensorboard: in runs/ other programs have theirs
PACKAGES: Final = (
    *("torch", "transformers", "numpy", "einops", "safetensors", "flash-attn", "flash-attn-4", "deepspeed", "torchao"),
)


@dataclass(frozen=True)
class StepRecord:
    """One logged step. Times and the loss are means over the steps since the last one, memory is the worst rank's.

    Of these steps, the loss is of those that had a target.
    """

    step: int  # optimizer steps done
    loss: float | None  # mean over valid tokens of -log p; None where no step had one
    grad_norm: float  # before clipping, over all parameters
    skipped_steps: int  # since the last record: their gradients were not finite
    steps_without_target: int  # since the last record
    learning_rate: float
    tokens: int  # positions of a step, padding included, all ranks
    padding_percent: float  # of them
    valid_tokens: int  # of them with a target
    training_tokens_percent: float
    step_seconds: float
    data_seconds: float  # of them spent waiting for data
    saving_seconds: float  # in which training waited for checkpoints since the last record; no part of the steps
    slowest_rank: int | None  # at work that is the same on every rank and waits for nobody, up to the step before
    slowest_rank_share: float | None  # 0 to 1: what of its time that rank takes longer than the mean, others waiting
    tokens_per_second: float  # without padding, all ranks
    tokens_per_second_per_gpu: float  # per process where there is no GPU
    model_tflops_per_gpu: float  # without padding, as mfu and hfu
    mfu: float | None  # 0 to 1 of the chip's dense peak, FP8's with --fp8, else bf16's; None where that is not known
    hfu: float | None  # the same, with what is recomputed
    peak_memory_allocated_bytes: int | None  # None without a GPU
    peak_memory_reserved_bytes: int | None
    host_rss_bytes: int
    offloaded_bytes: int  # what layers keep, in host memory, on the rank that has most
    comm_bytes: int  # sent by attention in a step, all ranks
    attention_balance: float | None  # packed documents: mean rank's attention area over the fullest's, worst sequence


class Sink(Protocol):
    """Something that receives every record besides metrics.jsonl."""

    def write(self, record: Mapping[str, Any]) -> None: ...


class MetricsFile:
    """metrics.jsonl: one object a line, flushed line by line. A resumed run continues after its checkpoint's step.

    `notes` say what is not as an earlier run left it; lines that are no records are kept in a file beside it.
    """

    def __init__(self, directory: Path, first_step: int, sinks: tuple[Sink, ...] = (), goes_on: bool = False) -> None:
        """`goes_on`: the run continues the one that wrote there before."""
        self.path, self._sinks = directory / METRICS, sinks
        self.notes: tuple[str, ...] = ()
        if goes_on and not self.path.exists():
            self.notes = (f"warning: {self.path} is missing, and with it what was logged up to step {first_step:,}",)
        damaged = damaged_lines(self.path)
        if damaged:
            self.notes = (_set_damaged_aside(self.path, damaged),)
        kept = [line for line, record in _records(self.path) if record["step"] <= first_step]
        partial = self.path.with_name(f"{METRICS}.partial")  # a run that is killed here has its records still
        partial.write_bytes(b"".join(line + b"\n" for line in kept))
        partial.replace(self.path)
        self._file = self.path.open("a")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()
        for sink in self._sinks:
            sink.write(record)


def _line(record: Mapping[str, Any]) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl, without lines that a killed run or a full disk left damaged."""
    return [record for _, record in _records(path)]


def damaged_lines(path: Path) -> list[bytes]:
    """Returns the lines of a metrics.jsonl that are no records: cut off, garbled, or of another program."""
    return [line for line in _lines(path) if _record(line) is None]


def _records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    return [(line, record) for line in _lines(path) if (record := _record(line)) is not None]


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.is_file() else []


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line, None where it is none: every one has a step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _set_damaged_aside(path: Path, lines: Sequence[bytes]) -> str:
    """Appends the lines to a file beside the metrics, and returns what to say of them."""
    beside = path.with_name(path.name + DAMAGED)
    with beside.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
    are = "line is no record and is" if len(lines) == 1 else "lines are no records and are"
    return f"warning: {path}: {len(lines):,} {are} kept in {beside.name}"


class TensorBoard:
    """Mirrors the records into `runs/` for tensorboard."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "runs"), filename_suffix=EVENTS)  # type: ignore[no-untyped-call]

    def write(self, record: Mapping[str, Any]) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, record["step"])  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]


class WeightsAndBiases:
    """Mirrors the records to a Weights & Biases run."""

    def __init__(self, directory: Path) -> None:
        import wandb

        self._run = wandb.init(dir=str(directory), name=directory.name)

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])


MIRRORS: Final[dict[str, Callable[[Path], Sink]]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_mirror(name: str) -> None:
    """Raises ValueError where the package that --report_to asks for is not installed."""
    try:
        if name != "none":
            version(name)
    except PackageNotFoundError:
        raise ValueError(f"--report_to {name}: the package is not installed; pip install {name}") from None


class Journal:
    """Reports steps in the metrics and on the terminal; ends a run that learns from none any more.

    Every rank reads the same figures, for they end together; the one with `metrics` writes and shows them.
    """

    def __init__(self, trainer: Trainer, metrics: MetricsFile | None, patience_seconds: float | None = None) -> None:
        """`patience_seconds` is how long a launcher waits for the ranks to save and end after a signal."""
        self._metrics, self._terminal, self._world = metrics, trainer.terminal, trainer.world
        self._output_dir, self._last_step = trainer.output_dir, trainer.inputs.total_steps
        self._patience_seconds = patience_seconds
        self._trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        self._scales_loss = trainer.config.fp16  # the scale is halved after each step that it made overflow
        self._suggests_packing = len(trainer.lengths) > 1
        self.losses: list[float] = []
        self._skipped = 0  # steps in a row, up to the last record
        self._steps = self._positions = 0  # recorded
        self._padding = 0.0  # of the positions

    def record(self, pending: PendingRecord | None) -> None:
        """Waits for the device to finish the steps of a record, if there is one, and reports them."""
        if pending is None:
            return
        record = pending.record()
        if record.loss is not None:
            self.losses.append(record.loss)
        self.log(asdict(record))
        self._compare_with_patience(record.step_seconds)
        if record.steps_without_target:
            which = f"{record.steps_without_target:,} of {plural(pending.steps, 'step')} up to step {record.step:,}"
            self._note(f"{which} had no target; in such a step only momentum and weight decay move the weights")
        self._note_padding(record, pending.steps)
        nonfinite = pending.nonfinite_parameters()
        for step in range(record.step - pending.steps + 1, record.step + 1):
            self._skipped = self._skipped + 1 if step in nonfinite else 0
            too_high_a_scale = self._scales_loss and self._skipped < MOST_SKIPPED
            if step not in nonfinite or too_high_a_scale:
                continue
            whose = "a gradient" if nonfinite[step] == UNNAMED else f"the gradient of {self._trained[nonfinite[step]]}"
            what = f"{whose} is not finite"
            self._note(f"step {step}: {what}; the step was skipped")
            if self._skipped >= MOST_SKIPPED:
                end_for_skipped_steps(step, self._skipped, what, self._output_dir, self._world, self._terminal)

    def _note_padding(self, record: StepRecord, steps: int) -> None:
        """Notes once, when enough steps tell it or the run ends, that much of it is padding."""
        self._steps += steps
        self._positions += steps * record.tokens
        self._padding += steps * record.tokens * record.padding_percent / 100
        tells = self._steps >= TELLING_STEPS or record.step == self._last_step
        if self._suggests_packing and tells and self._padding >= PADDING_WARNING_SHARE * self._positions:
            self._suggests_packing = False
            share = f"{100 * self._padding / self._positions:.0f}% of the positions so far are padding"
            self._note(f"{share}; --packing best_fit, with a batch size of 1, fills sequences with whole documents")

    def log(self, record: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            with explained_writing(self._metrics.path, self._world, self._terminal):
                self._metrics.write(record)
            self._terminal.show(record)

    def _compare_with_patience(self, step_seconds: float) -> None:
        """Warns once of steps that take longer than a launcher waits for their end."""
        patience = self._patience_seconds
        if patience is None or step_seconds <= patience:
            return
        self._patience_seconds = None
        self._note(
            f"warning: a step takes {step_seconds:.0f} s, and torch's launcher kills the ranks {patience:.0f} s after "
            f"SIGTERM; before starting it, export a higher {SHUTDOWN_TIMEOUT}"
        )

    def _note(self, line: str) -> None:
        if self._world.is_main:
            self._terminal.note(line)


def write_run(directory: Path, facts: Mapping[str, Any], secrets: Collection[str]) -> None:
    """Writes run.json, whole or not at all, without `secrets` and whatever else looks like one."""
    partial = directory / f"{RUN}.partial"
    partial.write_text(json.dumps(mask_secrets({**facts, "versions": versions()}, secrets), indent=2) + "\n")
    partial.rename(directory / RUN)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return {"device": p.name, "memory_bytes": p.total_memory, "host": platform.node()}
    return {"device": "cpu", "cores": psutil.cpu_count(), "machine": platform.machine(), "host": platform.node()}


def memory(device: torch.device, outside_bytes: int, recorded_bytes: int) -> tuple[int, int, int]:
    """Returns peak allocated, peak reserved (0 on CPU) and host resident bytes of this process.

    `outside_bytes` of device memory are held that torch's allocator does not know of: buffers that peers map. Of what
    it has reserved, recordings hold `recorded_bytes`, which do not count as allocated.
    """
    rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return 0, 0, rss
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return allocated + outside_bytes + recorded_bytes, reserved + outside_bytes, rss


def reduce_over_ranks(sums: list[float | Tensor], worst: list[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns sums and maxima over all ranks, float64 on the device, by two collectives; the host waits for nothing."""
    total = torch.stack([x.double() if isinstance(x, Tensor) else scalar(x, torch.float64, device) for x in sums])
    highest = torch.stack([scalar(x, torch.float64, device) for x in worst])
    dist.all_reduce(total)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return total, highest


def scalar(x: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a number on the device by a kernel: to copy it there, the host would wait for all work before it."""
    return torch.full((), x, dtype=dtype, device=device)
