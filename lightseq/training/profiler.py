"""Profiling of a range of steps with torch.profiler.

Writes a trace per rank for https://ui.perfetto.dev, with a summary of time, kernels, transfers and memory. With
`--profile_memory`, also writes every GPU allocation for https://pytorch.org/memory_viz.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.world import World
from lightseq.plan.breakdown import Breakdown
from lightseq.profiling.trace import read_trace, summary

MAX_ALLOCATIONS = 1_000_000  # the latest ones are kept; enough for a few steps of large models


class StepProfile:
    """Profiler of the steps `--profile_steps first:last`, counted from 1."""

    def __init__(
        self, config: TrainConfig, output_dir: Path, world: World, parts: Callable[[], Breakdown] | None = None
    ) -> None:
        """Prepares the profiler. `parts` returns the breakdown of the peak memory so far."""
        self._parts = parts
        self._span, self._with_memory, self._device = config.profile_steps, config.profile_memory, world.device
        self._directory, self._rank = output_dir / "profile", world.rank
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Starts profiling if `step` is in the range, also if a resumed run begins inside it."""
        if self._span is not None and self._profiler is None and self._span[0] <= step <= self._span[1]:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=activities)
            if self._with_memory:
                torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
            self._profiler.start()

    def after(self, step: int) -> None:
        if self._profiler is not None and self._span is not None and step == self._span[1]:
            self.close()

    def close(self) -> None:
        """Stops profiling and writes the files, also if the run ends inside the range."""
        if self._profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._profiler.stop()
        profiler, self._profiler = self._profiler, None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(profiler)
        except OSError as error:  # such as a full disk, which should not end a run
            print(f"profile: {self._directory} cannot be written ({error.strerror or error})", file=sys.stderr)
        if self._with_memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: profile) -> None:
        trace = self._directory / f"rank{self._rank}.json.gz"
        try:
            profiler.export_chrome_trace(str(trace))
        except OSError:
            with suppress(OSError):
                trace.unlink()
            raise
        self._summarize(trace)
        if self._with_memory:
            torch.cuda.memory._dump_snapshot(str(self._directory / f"memory-rank{self._rank}.pickle"))

    def _memory(self) -> dict[str, Any]:
        """Returns bytes of GPU memory: the peak by category, this process's, all processes', and the device's."""
        if self._device.type != "cuda" or self._parts is None:
            return {}
        parts, (free, size) = self._parts(), torch.cuda.mem_get_info(self._device)
        own = {"peak": parts.total, "own": torch.cuda.memory_reserved(self._device) + parts.attention_buffers}
        return {"parts": asdict(parts), **own, "all": size - free, "device": size}

    def _summarize(self, trace: Path) -> None:
        try:
            text = json.dumps({**summary(read_trace(trace)), "memory": self._memory()}, indent=1)
        except ValueError as error:  # torch has written invalid traces before, which should not end a run
            print(f"profile: no summary ({error})", file=sys.stderr)
            return
        (self._directory / f"summary-rank{self._rank}.json").write_text(text)
