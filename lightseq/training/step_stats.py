"""Statistics of the steps between two records: collected, reduced over ranks, read without the device waiting."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lightseq.comm.transport import Transport
from lightseq.distributed.mesh import World
from lightseq.distributed.stopwatch import DeviceTimestamp
from lightseq.memory.offload import Offload
from lightseq.models.flops import mfu, model_flops, peak_flops_per_second, recompute_flops
from lightseq.training.metrics import StepRecord, hardware, memory, reduce_over_ranks


@dataclass(frozen=True)
class StepResult:
    """Facts of one optimizer step that one rank knows; the tensors stay on the device."""

    loss: Tensor  # this rank's share: the sum over ranks is the loss
    grad_norm: Tensor
    nonfinite: Tensor  # the first parameter without a finite gradient, or -1
    learning_rate: float
    valid_tokens: int  # of this rank's sequence-parallel group
    targets: Tensor  # of all groups, as the device counted them
    positions: int  # of the group too, padding included
    tokens: int  # without padding
    squares: int  # of the lengths of its documents, summed
    imbalance: float  # attention area of the fullest of its ranks over the mean; 0 where that is the schedule's own
    data_seconds: float


@dataclass(frozen=True)
class FlopCounter:
    """FLOPs of tokens, the same in every step of a run. Padding does not count as work."""

    model: PreTrainedConfig
    remat: str
    layers_per_checkpoint: int = 1
    tiled: bool = False  # layers run over tiles
    adapters: int = 0  # weights of adapters, where these alone train
    fp8: bool = False  # the linear layers run on FP8 cores, whose peak is then what counts
    recomputed_layers: float = 0.0  # share of layers that keep their input alone, whatever `remat` says

    def flops(self, tokens: int, squares: int) -> int:
        """Returns the FLOPs of steps of so many tokens.

        `squares` is the sum of the squared lengths of what attends to itself.
        """
        return model_flops(self.model, tokens, 1, self.adapters, squares / max(1, tokens) ** 2)

    def recomputed(self, tokens: int, squares: int) -> float:
        """Returns the FLOPs that the backward passes of such steps repeat."""
        whole, by_policy = (
            recompute_flops(
                self.model, tokens, 1, remat, self.layers_per_checkpoint, self.tiled, squares / max(1, tokens) ** 2
            )
            for remat in ("full", self.remat)
        )
        return self.recomputed_layers * whole + (1 - self.recomputed_layers) * by_policy


@dataclass
class StepStats:
    """Collects steps, from the moment it is made."""

    world: World
    flops: FlopCounter
    transport: Transport
    offload: Offload | None = None
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bytes_before = self.transport.bytes_sent
        self._begin = DeviceTimestamp(self.world.device)
        self._pauses: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []
        self._saving: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []  # the pauses for checkpoints

    @contextmanager
    def paused(self, saves: bool = False) -> Iterator[None]:
        """Keeps evaluation and saving out of the step time."""
        begin = DeviceTimestamp(self.world.device)
        yield
        pause = begin, DeviceTimestamp(self.world.device)
        (self._saving if saves else self._pauses).append(pause)

    def close(self, step: int, speaks_for_group: bool, own_seconds: float) -> "PendingRecord":
        """Ends with `step`. Every rank closes its stats; the device has yet to come this far.

        `own_seconds` is what this rank took for work that is the same on every rank and waits for nobody.
        """
        device, end, results = self.world.device, DeviceTimestamp(self.world.device), self.results
        speaking = results if speaks_for_group else []
        allocated, reserved, rss = memory(device, self.transport.buffer_bytes, self.transport.recorded_bytes)
        sums: dict[str, float | Tensor] = {
            "loss": torch.stack([result.loss for result in results]).sum(),
            "valid_tokens": sum(result.valid_tokens for result in speaking),
            "positions": sum(result.positions for result in speaking),
            "tokens": sum(result.tokens for result in speaking),
            "squares": sum(result.squares for result in speaking),
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
            # the time, and the rank that took it
            "slowest": math.floor(own_seconds * 1e9) * self.world.size + self.world.rank,
        }
        reduced = reduce_over_ranks([*sums.values()], [*worst.values()], device)
        norm = results[-1].grad_norm.to(device, torch.float64, non_blocking=True).reshape(1)
        learnt = (torch.stack([result.targets for result in results]) > 0).sum(dtype=torch.float64).reshape(1)
        nonfinite = torch.stack([result.nonfinite for result in results]).to(device, torch.float64, non_blocking=True)
        numbers = torch.cat([*reduced, norm, learnt, nonfinite])
        if device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        return PendingRecord(
            step=step,
            steps=len(results),
            learning_rate=results[-1].learning_rate,
            world=self.world,
            flops=self.flops,
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
    """A record whose figures are on their way to the host; they are there once `arrived` has passed."""

    step: int
    steps: int
    learning_rate: float
    world: World
    flops: FlopCounter
    names: tuple[str, ...]
    numbers: Tensor  # by name, and then of each step the first parameter without a finite gradient
    begin: DeviceTimestamp
    end: DeviceTimestamp
    pauses: tuple[tuple[DeviceTimestamp, DeviceTimestamp], ...]
    saving: tuple[tuple[DeviceTimestamp, DeviceTimestamp], ...]
    arrived: DeviceTimestamp

    def nonfinite_parameters(self) -> dict[int, int]:
        """Returns, by skipped step, the first parameter whose gradient was not finite. Once the figures are there."""
        first, found = self.step - self.steps + 1, self.numbers[-self.steps :].tolist()
        return {first + i: int(parameter) for i, parameter in enumerate(found) if parameter >= 0}

    def record(self) -> StepRecord:
        """Returns the record of the last step, alike on every rank. Waits for the device to have finished it."""
        self.begin.seconds_until(self.arrived)
        x = dict(zip(self.names, self.numbers.tolist(), strict=False))
        saving = sum(begin.seconds_until(end) for begin, end in self.saving)
        paused = sum(begin.seconds_until(end) for begin, end in self.pauses) + saving
        seconds, ranks = (self.begin.seconds_until(self.end) - paused) / self.steps, self.world.size
        longest, slowest_rank = divmod(int(x["slowest"]), ranks)
        lost = max(0.0, 1 - x["own_seconds"] / ranks / (longest / 1e9)) if longest else None
        tokens, squares = round(x["tokens"]), round(x["squares"])
        flops = self.flops.flops(tokens, squares) / self.steps
        again = self.flops.recomputed(tokens, squares) / self.steps
        per_second = x["tokens"] / self.steps / seconds
        peak = peak_flops_per_second(hardware(self.world.device)["device"], self.flops.fp8)
        on_gpu = self.world.device.type == "cuda"
        return StepRecord(
            step=self.step,
            loss=x["loss"] / x["steps_with_target"] if x["steps_with_target"] else None,
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
            slowest_rank_share=lost,
            tokens_per_second=per_second,
            tokens_per_second_per_gpu=per_second / ranks,
            model_tflops_per_gpu=flops / seconds / ranks / 1e12,
            mfu=mfu(flops, seconds, ranks, peak),
            hfu=mfu(flops + again, seconds, ranks, peak),
            peak_memory_allocated_bytes=int(x["allocated_bytes"]) if on_gpu else None,
            peak_memory_reserved_bytes=int(x["reserved_bytes"]) if on_gpu else None,
            host_rss_bytes=int(x["rss_bytes"]),
            offloaded_bytes=int(x["offloaded_bytes"]),
            comm_bytes=round(x["sent_bytes"] / self.steps),
            attention_balance=1 / x["imbalance"] if x["imbalance"] else None,
        )
