"""The steps between two records: collected, reduced over the ranks and read without the device ever waiting."""

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
    """What one rank knows of one optimizer step; the tensors stay on the device."""

    loss: Tensor  # this rank's share: the sum over ranks is the loss
    grad_norm: Tensor
    sick: Tensor  # the first parameter without a finite gradient, or -1
    learning_rate: float
    valid_tokens: int  # of this rank's sequence-parallel group
    targets: Tensor  # of all groups, as the device counted them
    positions: int  # of the group too, padding included
    tokens: int  # without padding
    squares: int  # of the lengths of its documents, summed
    imbalance: float  # attention area of the fullest of its ranks over the mean; 0 where that is the schedule's own
    data_seconds: float


@dataclass(frozen=True)
class Work:
    """What tokens cost, the same in every step of a run. Padding does not count as work."""

    model: PreTrainedConfig
    remat: str
    group: int = 1  # layers under one checkpoint
    tiled: bool = False  # layers run over tiles
    adapters: int = 0  # weights of adapters, where these alone train
    fp8: bool = False  # the linear layers ran on FP8 cores, whose peak is then what counts
    again: float = 0.0  # the share of layers that keep their input alone, whatever `remat` says

    def flops(self, tokens: int, squares: int) -> int:
        """FLOPs of steps of so many tokens. `squares` is the sum of the squared lengths of what attends to itself."""
        return model_flops(self.model, tokens, 1, self.adapters, squares / max(1, tokens) ** 2)

    def recomputed(self, tokens: int, squares: int) -> float:
        """FLOPs that the backward passes of such steps repeat."""
        how = (self.group, self.tiled, squares / max(1, tokens) ** 2)
        layers, others = (recompute_flops(self.model, tokens, 1, remat, *how) for remat in ("full", self.remat))
        return self.again * layers + (1 - self.again) * others


@dataclass
class Window:
    """Collects steps, from the moment it is made."""

    world: World
    transport: Transport
    offload: Offload | None = None
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bytes_before = self.transport.bytes_sent
        self._begin = DeviceTimestamp(self.world.device)
        self._pauses: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []
        self.saving: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []  # what of the pauses was for a checkpoint

    @contextmanager
    def paused(self, saves: bool = False) -> Iterator[None]:
        """Evaluation and saving do not count as step time."""
        begin = DeviceTimestamp(self.world.device)
        yield
        pause = begin, DeviceTimestamp(self.world.device)
        (self.saving if saves else self._pauses).append(pause)

    def close(self, step: int, work: Work, speaks_for_group: bool, own_seconds: float) -> "Closed":
        """Ends with `step`. Every rank closes its window; the device has yet to come this far.

        `own_seconds` is what this rank took for work that is the same on every rank and waits for nobody.
        """
        device, end = self.world.device, DeviceTimestamp(self.world.device)
        loss = torch.stack([result.loss for result in self.results]).sum()
        speaking = self.results if speaks_for_group else []
        valid = sum(result.valid_tokens for result in speaking)
        positions, tokens = sum(result.positions for result in speaking), sum(result.tokens for result in speaking)
        squares = sum(result.squares for result in speaking)
        data_seconds = sum(result.data_seconds for result in self.results)
        sent = self.transport.bytes_sent - self._bytes_before
        offloaded = self.offload.memory.allocated_bytes if self.offload else 0
        imbalance = max(result.imbalance for result in self.results)
        slowest = math.floor(own_seconds * 1e9) * self.world.size + self.world.rank  # the time, and whose it is
        taken = memory(device, self.transport.buffer_bytes, self.transport.recorded_bytes)
        worst = [data_seconds, *taken, offloaded, imbalance, slowest]
        sums: list[float | Tensor] = [loss, valid, positions, tokens, squares, sent, own_seconds]
        reduced = reduce_over_ranks(sums, worst, device)
        norm = self.results[-1].grad_norm.to(device, torch.float64, non_blocking=True)
        sick = torch.stack([result.sick for result in self.results]).to(device, torch.float64, non_blocking=True)
        learnt = torch.stack([result.targets for result in self.results]) > 0
        numbers = torch.cat([*reduced, norm.reshape(1), learnt.sum(dtype=torch.float64).reshape(1), sick])
        if device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        pauses, saving = tuple(self._pauses), tuple(self.saving)
        rate = self.results[-1].learning_rate
        return Closed(
            step,
            work,
            self.world,
            len(self.results),
            rate,
            numbers,
            self._begin,
            end,
            pauses,
            saving,
            DeviceTimestamp(device),
        )


@dataclass(frozen=True)
class Closed:
    """A window whose figures are on their way to the host; `arrived` is when they are there."""

    step: int
    work: Work
    world: World
    steps: int
    learning_rate: float
    numbers: Tensor
    begin: DeviceTimestamp
    end: DeviceTimestamp
    pauses: tuple[tuple[DeviceTimestamp, DeviceTimestamp], ...]
    saving: tuple[tuple[DeviceTimestamp, DeviceTimestamp], ...]
    arrived: DeviceTimestamp

    def sick_parameters(self) -> dict[int, int]:
        """Of every skipped step, the first parameter whose gradient was not finite. Once the figures are there."""
        first, found = self.step - self.steps + 1, self.numbers[-self.steps :].tolist()
        return {first + i: int(parameter) for i, parameter in enumerate(found) if parameter >= 0}

    def record(self) -> StepRecord:
        """The record of the last step, alike on every rank. Waits for the device to have finished it."""
        self.begin.seconds_until(self.arrived)
        loss, valid, positions, tokens, squares, sent, own_seconds, data_seconds, *rest = self.numbers.tolist()
        allocated, reserved, rss, offloaded, imbalance, slowest, norm, learnt, *_ = rest
        saving = sum(begin.seconds_until(end) for begin, end in self.saving)
        paused = sum(begin.seconds_until(end) for begin, end in self.pauses) + saving
        seconds = (self.begin.seconds_until(self.end) - paused) / self.steps
        longest, slowest_rank = divmod(int(slowest), self.world.size)
        lost = max(0.0, 1 - own_seconds / self.world.size / (longest / 1e9)) if longest else None
        work, ranks = self.work, self.world.size
        flops = work.flops(round(tokens), round(squares)) / self.steps
        again = work.recomputed(round(tokens), round(squares)) / self.steps
        per_second = tokens / self.steps / seconds
        peak = peak_flops_per_second(hardware(self.world.device)["device"], work.fp8)
        on_gpu = self.world.device.type == "cuda"
        return StepRecord(
            step=self.step,
            loss=loss / learnt if learnt else None,
            grad_norm=norm,
            skipped_steps=len(self.sick_parameters()),
            steps_without_target=self.steps - round(learnt),
            learning_rate=self.learning_rate,
            tokens=round(positions / self.steps),
            padding_percent=100 * (1 - tokens / positions),
            valid_tokens=round(valid / self.steps),
            training_tokens_percent=100 * valid / positions,
            step_seconds=seconds,
            data_seconds=data_seconds / self.steps,
            saving_seconds=saving,
            slowest_rank=slowest_rank if longest else None,
            slowest_rank_share=lost,
            tokens_per_second=per_second,
            tokens_per_second_per_gpu=per_second / ranks,
            model_tflops_per_gpu=flops / seconds / ranks / 1e12,
            mfu=mfu(flops, seconds, ranks, peak),
            hfu=mfu(flops + again, seconds, ranks, peak),
            peak_memory_allocated_bytes=int(allocated) if on_gpu else None,
            peak_memory_reserved_bytes=int(reserved) if on_gpu else None,
            host_rss_bytes=int(rss),
            offloaded_bytes=int(offloaded),
            comm_bytes=round(sent / self.steps),
            attention_balance=1 / imbalance if imbalance else None,
        )
