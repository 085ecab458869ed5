"""Traces a span of steps with torch.profiler, one file a rank, to be opened in https://ui.perfetto.dev, and beside each
a summary: where the time went, which kernels took it, what moved how fast, and what the memory was for.

With `--profile_memory` also every allocation of the GPU, for https://pytorch.org/memory_viz.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import World
from lightseq.memory.planner.breakdown import Breakdown
from lightseq.profiling.trace import read_trace, summary

MOST_ALLOCATIONS = 1_000_000  # that are kept, the last ones: some steps of large models


class StepProfile:
    """Starts before the first and ends after the last step of `--profile_steps first:last` (counted from 1)."""

    def __init__(
        self, config: TrainConfig, output_dir: Path, world: World, parts: Callable[[], Breakdown] | None = None
    ) -> None:
        """`parts` says what the peak of the memory so far was made of."""
        self._parts = parts
        self._span, self._with_memory, self._device = config.profile_steps, config.profile_memory, world.device
        self._directory, self._rank = output_dir / "profile", world.rank
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Starts also where a run that resumes begins inside the span."""
        if self._span is not None and self._profiler is None and self._span[0] <= step <= self._span[1]:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=activities)
            if self._with_memory:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
            self._profiler.start()

    def after(self, step: int) -> None:
        if self._profiler is not None and self._span is not None and step == self._span[1]:
            self.close()

    def close(self) -> None:
        """Writes what was traced, also where the run ends inside the span."""
        if self._profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._directory / f"rank{self._rank}.json.gz"
        self._profiler.export_chrome_trace(str(trace))
        self._profiler = None
        self._summarize(trace)
        if self._with_memory:
            torch.cuda.memory._dump_snapshot(str(self._directory / f"memory-rank{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _memory(self) -> dict[str, Any]:
        """Returns bytes on this rank's GPU: the peak by category, what this process holds, what all hold together."""
        if self._device.type != "cuda" or self._parts is None:
            return {}
        parts, (free, size) = self._parts(), torch.cuda.mem_get_info(self._device)
        own = {"peak": parts.total, "own": torch.cuda.memory_reserved(self._device) + parts.attention_buffers}
        return {"parts": asdict(parts), **own, "all": size - free, "device": size}

    def _summarize(self, trace: Path) -> None:
        try:
            text = json.dumps({**summary(read_trace(trace)), "memory": self._memory()}, indent=1)
        except ValueError as error:  # torch has written traces that no parser takes: no reason to end a run
            print(f"profile: no summary ({error})", file=sys.stderr)
            return
        (self._directory / f"summary-rank{self._rank}.json").write_text(text)
