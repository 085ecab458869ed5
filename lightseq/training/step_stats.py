"""Statistics of the steps between two records: collected, reduced over ranks, and read without stalling the device."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from lightseq.architecture.flops import mfu, model_flops, peak_flops_per_second, recompute_flops
from lightseq.comm.transport import Transport
from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.distributed.world import World
from lightseq.memory.offload import Offload
from lightseq.training.machine import hardware, process_memory
from lightseq.training.metrics import StepRecord
from lightseq.utils.tensors import scalar


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step on one rank. Tensors stay on the device. Counts are per sequence-parallel group."""

    loss: Tensor  # this rank's share; the sum over ranks is the loss
    metrics: Tensor  # the same, of the objective's other means
    router_loss: Tensor  # the same, without coefficient; 0 if it is not trained with
    grad_norm: Tensor
    nonfinite: Tensor  # index of the first parameter with a non-finite gradient, or -1
    learning_rate: float
    valid_tokens: int
    counted: Tensor  # divisor of the loss, such as the number of targets, over all groups; on the device
    positions: int  # padding included
    tokens: int  # without padding
    attention_area: float  # twice the visible (query, key) pairs in a layer
    imbalance: float  # packing: largest attention area of a rank over the mean; 0 if not packed
    data_seconds: float


@dataclass(frozen=True)
class FlopCounter:
    """FLOP counts of a model under the flags of a run. Padding does not count."""

    model: PreTrainedConfig
    remat: str
    layers_per_checkpoint: int = 1
    tiled: bool = False  # --tile_layers
    adapters: int = 0  # adapter weights if only they are trained, else 0
    fp8: bool = False  # linear layers run in FP8, so MFU refers to the FP8 peak
    recomputed_layers: float = 0.0  # share of layers that store only their input, regardless of `remat`

    def flops(self, tokens: int, area: float) -> int:
        """Returns the FLOPs of `tokens` tokens. `area`: `Architecture.attention_area` of their documents."""
        return model_flops(self.model, tokens, 1, self.adapters, area / max(1, tokens) ** 2)

    def recomputed(self, tokens: int, area: float) -> float:
        """Returns the FLOPs that the backward pass recomputes."""
        whole, by_policy = (
            recompute_flops(
                self.model, tokens, 1, remat, self.layers_per_checkpoint, self.tiled, area / max(1, tokens) ** 2
            )
            for remat in ("full", self.remat)
        )
        return self.recomputed_layers * whole + (1 - self.recomputed_layers) * by_policy


@dataclass
class StepStats:
    """Collector of step results. Timing starts at construction."""

    world: World
    flops: FlopCounter
    transport: Transport
    has_router_loss: bool = False
    offload: Offload | None = None
    metrics: tuple[str, ...] = ()  # names of the objective's means beside the loss
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bytes_before = self.transport.bytes_sent
        self._begin = DeviceTimestamp(self.world.device)
        self._pauses: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []
        self._saving: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []  # pauses for checkpoints

    @contextmanager
    def paused(self, saves: bool = False) -> Iterator[None]:
        """Excludes the block from the step time. Used for evaluation and saving."""
        begin = DeviceTimestamp(self.world.device)
        yield
        pause = begin, DeviceTimestamp(self.world.device)
        (self._saving if saves else self._pauses).append(pause)

    def close(self, step: int, counts_group: bool, own_seconds: float) -> "PendingRecord":
        """Ends collection with `step` and starts the reduction over ranks. All ranks must call it.

        Does not wait for the device. `counts_group`: True on one rank of each sequence-parallel group, because all of
        them have the group's counts. `own_seconds`: this rank's time for work that waits for no other rank.
        """
        device, end, results = self.world.device, DeviceTimestamp(self.world.device), self.results
        counted = results if counts_group else []
        allocated, reserved, rss = process_memory(device, self.transport.buffer_bytes, self.transport.graph_bytes)
        losses = torch.stack([result.loss for result in results])
        sums: dict[str, float | Tensor] = {
            "loss": losses.sum(),
            **dict(zip(self.metrics, torch.stack([result.metrics for result in results]).sum(0), strict=True)),
            "router_loss": torch.stack([result.router_loss for result in results]).sum(),
            "valid_tokens": sum(result.valid_tokens for result in counted),
            "positions": sum(result.positions for result in counted),
            "tokens": sum(result.tokens for result in counted),
            "attention_area": sum(result.attention_area for result in counted),
            "sent_bytes": self.transport.bytes_sent - self._bytes_before,
            "own_seconds": own_seconds,
        }
        worst: dict[str, float] = {
            "data_seconds": sum(result.data_seconds for result in results),
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "rss_bytes": rss,
            "offloaded_bytes": self.offload.memory.allocated_bytes if self.offload else 0,
            "imbalance": max(result.imbalance for result in results),
            # time in nanoseconds and rank in one number, so that the maximum also tells the rank
            "slowest": math.floor(own_seconds * 1e9) * self.world.size + self.world.rank,
        }
        not_finite = losses.isfinite().logical_not().double().unbind()  # one for each step
        totals, worsts = reduce_over_ranks([*sums.values(), *not_finite], [*worst.values()], device)
        norm = results[-1].grad_norm.to(device, torch.float64, non_blocking=True).reshape(1)
        with_target = (torch.stack([result.counted for result in results]) > 0).sum(dtype=torch.float64).reshape(1)
        nonfinite = torch.stack([result.nonfinite for result in results]).to(device, torch.float64, non_blocking=True)
        numbers = torch.cat([totals[: len(sums)], worsts, norm, with_target, totals[len(sums) :], nonfinite])
        if device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        return PendingRecord(
            step=step,
            steps=len(results),
            learning_rate=results[-1].learning_rate,
            world=self.world,
            flops=self.flops,
            has_router_loss=self.has_router_loss,
            metrics=self.metrics,
            names=(*sums, *worst, "grad_norm", "steps_with_target"),
            numbers=numbers,
            begin=self._begin,
            end=end,
            pauses=tuple(self._pauses),
            saving=tuple(self._saving),
            arrived=DeviceTimestamp(device),
        )


@dataclass(frozen=True)
class PendingRecord:
    """Record whose numbers are still being copied to the host. They are valid once `arrived` has passed."""

    step: int
    steps: int
    learning_rate: float
    world: World
    flops: FlopCounter
    has_router_loss: bool
    metrics: tuple[str, ...]  # names of the objective's means
    names: tuple[str, ...]
    # A value per name; then per step, on how many ranks the loss is not finite; then per step, the index of the first
    # parameter with a non-finite gradient.
    numbers: Tensor
    begin: DeviceTimestamp
    end: DeviceTimestamp
    pauses: tuple[tuple[DeviceTimestamp, DeviceTimestamp], ...]
    saving: tuple[tuple[DeviceTimestamp, DeviceTimestamp], ...]
    arrived: DeviceTimestamp

    def nonfinite_parameters(self) -> dict[int, int]:
        """Returns the index of the first parameter with a non-finite gradient, by skipped step. Call `record` first."""
        first, found = self.step - self.steps + 1, self.numbers[-self.steps :].tolist()
        return {first + i: int(parameter) for i, parameter in enumerate(found) if parameter >= 0}

    def nonfinite_losses(self) -> set[int]:
        """Returns the steps whose loss is not finite. Call `record` first."""
        first, found = self.step - self.steps + 1, self.numbers[-2 * self.steps : -self.steps].tolist()
        return {first + i for i, ranks in enumerate(found) if ranks}

    def objective_means(self) -> dict[str, float | None]:
        """Returns the objective's means beside the loss, over the same steps. Call `record` first."""
        x = self._numbers()
        return {name: _mean(x[name], x["steps_with_target"]) for name in self.metrics}

    def _numbers(self) -> dict[str, float]:
        return dict(zip(self.names, self.numbers.tolist(), strict=False))

    def record(self) -> StepRecord:
        """Returns the record of the last step, the same on every rank. Waits for the device to finish the step."""
        self.begin.seconds_until(self.arrived)  # waits for the numbers
        x = self._numbers()
        saving = sum(begin.seconds_until(end) for begin, end in self.saving)
        paused = sum(begin.seconds_until(end) for begin, end in self.pauses) + saving
        seconds, ranks = (self.begin.seconds_until(self.end) - paused) / self.steps, self.world.size
        longest, slowest_rank = divmod(int(x["slowest"]), ranks)
        slowest_rank_share = max(0.0, 1 - x["own_seconds"] / ranks / (longest / 1e9)) if longest else None
        tokens, area = round(x["tokens"]), x["attention_area"]
        flops = self.flops.flops(tokens, area) / self.steps
        recomputed = self.flops.recomputed(tokens, area) / self.steps
        per_second = x["tokens"] / self.steps / seconds
        peak = peak_flops_per_second(hardware(self.world.device)["device"], self.flops.fp8)
        on_gpu = self.world.device.type == "cuda"
        return StepRecord(
            step=self.step,
            loss=_mean(x["loss"], x["steps_with_target"]),
            router_loss=x["router_loss"] / self.steps if self.has_router_loss else None,
            grad_norm=x["grad_norm"],
            skipped_steps=len(self.nonfinite_parameters()),
            steps_without_target=self.steps - round(x["steps_with_target"]),
            learning_rate=self.learning_rate,
            tokens=round(x["positions"] / self.steps),
            padding_percent=100 * (1 - x["tokens"] / x["positions"]),
            valid_tokens=round(x["valid_tokens"] / self.steps),
            training_tokens_percent=100 * x["valid_tokens"] / x["positions"],
            step_seconds=seconds,
            data_seconds=x["data_seconds"] / self.steps,
            saving_seconds=saving,
            slowest_rank=slowest_rank if longest else None,
            slowest_rank_share=slowest_rank_share,
            tokens_per_second=per_second,
            tokens_per_second_per_gpu=per_second / ranks,
            model_tflops_per_gpu=flops / seconds / ranks / 1e12,
            mfu=mfu(flops, seconds, ranks, peak),
            hfu=mfu(flops + recomputed, seconds, ranks, peak),
            peak_memory_allocated_bytes=int(x["allocated_bytes"]) if on_gpu else None,
            peak_memory_reserved_bytes=int(x["reserved_bytes"]) if on_gpu else None,
            host_rss_bytes=int(x["rss_bytes"]),
            offloaded_bytes=int(x["offloaded_bytes"]),
            comm_bytes=round(x["sent_bytes"] / self.steps),
            attention_balance=1 / x["imbalance"] if x["imbalance"] else None,
        )


def _mean(total: float, steps: float) -> float | None:
    return total / steps if steps else None


def reduce_over_ranks(sums: list[float | Tensor], worst: list[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns sums and maxima over all ranks as float64 on the device, with two collectives and no host wait."""
    total = torch.stack([x.double() if isinstance(x, Tensor) else scalar(x, torch.float64, device) for x in sums])
    highest = torch.stack([scalar(x, torch.float64, device) for x in worst])
    dist.all_reduce(total)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return total, highest
