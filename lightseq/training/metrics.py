"""What a run leaves behind to be read: run.json, metrics.jsonl, and mirrors of the latter."""

import json
import math
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.config.masking import masked

RUN, METRICS = "run.json", "metrics.jsonl"
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
    valid_tokens: int  # of them with a target
    training_tokens_percent: float
    step_seconds: float
    data_seconds: float  # of them spent waiting for data
    saving_seconds: float  # in which training waited for checkpoints since the last record; no part of the steps
    slowest_rank: int | None  # at work that is the same on every rank and waits for nobody, up to the step before
    slowest_rank_share: float | None  # 0 to 1: what of its time that rank takes longer than the mean, others waiting
    tokens_per_second: float
    tokens_per_second_per_gpu: float  # per process where there is no GPU
    model_tflops_per_gpu: float
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
    """metrics.jsonl: one object a line, flushed line by line. A resumed run continues after its checkpoint's step."""

    def __init__(self, directory: Path, first_step: int, sinks: tuple[Sink, ...] = ()) -> None:
        self.path, self._sinks = directory / METRICS, sinks
        kept = [r for r in read_records(self.path) if r["step"] <= first_step] if first_step else []
        partial = self.path.with_suffix(".partial")  # a run that is killed here has its records still
        partial.write_text("".join(_line(record) for record in kept))
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
    """The whole lines of a metrics.jsonl; a last line that a killed run left unfinished is passed over.

    So is one that a full disk or two writers garbled, and that is said: what comes after it is as good as before.
    """
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as why:
            print(f"{path} line {number} is not JSON ({why.msg}); it is left out", file=sys.stderr)
    return found


class TensorBoard:
    """Mirrors the records into `runs/` for tensorboard."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "runs"))  # type: ignore[no-untyped-call]

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


def write_run(directory: Path, facts: Mapping[str, Any], secrets: Collection[str]) -> None:
    """run.json, whole or not at all, without `secrets` and whatever else looks like one."""
    partial = directory / f"{RUN}.partial"
    partial.write_text(json.dumps(masked({**facts, "versions": versions()}, secrets), indent=2) + "\n")
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
    """Peak allocated, peak reserved (0 on CPU) and host resident bytes of this process.

    `outside_bytes` of device memory are held that torch's allocator does not know of: buffers that peers map. Of what
    it has reserved, recordings hold `recorded_bytes`, which do not count as allocated.
    """
    rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return 0, 0, rss
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return allocated + outside_bytes + recorded_bytes, reserved + outside_bytes, rss


def reduce_over_ranks(sums: list[float | Tensor], worst: list[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums and maxima over all ranks, float64 on the device: two collectives, and the host waits for nothing."""
    total = torch.stack([x.double() if isinstance(x, Tensor) else scalar(x, torch.float64, device) for x in sums])
    highest = torch.stack([scalar(x, torch.float64, device) for x in worst])
    dist.all_reduce(total)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return total, highest


def scalar(x: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on the device by way of a kernel: to copy it there, the host would wait for all work before it."""
    return torch.full((), x, dtype=dtype, device=device)
