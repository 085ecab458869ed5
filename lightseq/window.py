"""The steps between two records: collected without waiting for the device, then reduced over the ranks at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig

from lightseq.flops import mfu, model_flops, peak_flops_per_second, recompute_flops
from lightseq.mesh import World
from lightseq.metrics import StepRecord, hardware, memory, reduce_over_ranks


@dataclass(frozen=True)
class StepResult:
    """What one rank knows of one optimizer step; the tensors stay on the device."""

    loss: Tensor  # this rank's share: the sum over ranks is the loss
    grad_norm: Tensor
    learning_rate: float
    valid_tokens: int  # of this rank's sequence-parallel group
    data_seconds: float


@dataclass(frozen=True)
class Work:
    """What a step amounts to, the same for every step of a run."""

    model: LlamaConfig
    length: int
    sequences: int
    remat: str


@dataclass
class Window:
    """Collects steps. `bytes_before` is what the transport had sent when it was opened."""

    bytes_before: int
    results: list[StepResult] = field(default_factory=list)
    _begin: float = field(default_factory=time.perf_counter)
    _excluded: float = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation and saving do not count as step time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - begin

    def record(self, step: int, work: Work, world: World, bytes_sent: int, speaks_for_group: bool) -> StepRecord:
        """The record of `step`, alike on every rank. The only place where a step waits for the device."""
        count = len(self.results)
        loss = torch.stack([result.loss for result in self.results]).sum()
        valid = sum(result.valid_tokens for result in self.results) if speaks_for_group else 0
        data_seconds = sum(result.data_seconds for result in self.results)
        sums, worst = reduce_over_ranks(
            [loss, valid, bytes_sent - self.bytes_before], [data_seconds, *memory(world.device)], world.device
        )
        seconds = (time.perf_counter() - self._begin - self._excluded) / count
        tokens = work.sequences * work.length
        flops = model_flops(work.model, work.length, work.sequences)
        repeated = recompute_flops(work.model, work.length, work.sequences, work.remat)
        peak = peak_flops_per_second(hardware(world.device)["device"])
        on_gpu = world.device.type == "cuda"
        return StepRecord(
            step=step,
            loss=sums[0] / count,
            grad_norm=float(self.results[-1].grad_norm),
            learning_rate=self.results[-1].learning_rate,
            tokens=tokens,
            valid_tokens=round(sums[1] / count),
            training_tokens_percent=100 * sums[1] / count / tokens,
            step_seconds=seconds,
            data_seconds=worst[0] / count,
            tokens_per_second=tokens / seconds,
            tokens_per_second_per_gpu=tokens / seconds / world.size,
            model_tflops_per_gpu=flops / seconds / world.size / 1e12,
            mfu=mfu(flops, seconds, world.size, peak),
            hfu=mfu(flops + repeated, seconds, world.size, peak),
            peak_memory_allocated_bytes=int(worst[1]) if on_gpu else None,
            peak_memory_reserved_bytes=int(worst[2]) if on_gpu else None,
            host_rss_bytes=int(worst[3]),
            comm_bytes=round(sums[2] / count),
        )
