"""Traces a span of steps with torch.profiler, one file a rank, to be opened in https://ui.perfetto.dev, and beside each
a summary: where the time went, which kernels took it, what moved how fast.

With `--profile_memory` also every allocation of the GPU, for https://pytorch.org/memory_viz.
"""

import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lightseq.config import TrainConfig
from lightseq.mesh import World
from lightseq.trace import read, summary

MOST_ALLOCATIONS = 1_000_000  # that are kept, the last ones: some steps of large models


class StepProfile:
    """Starts before the first and ends after the last step of `--profile_steps first:last` (counted from 1)."""

    def __init__(self, config: TrainConfig, output_dir: Path, world: World) -> None:
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

    def _summarize(self, trace: Path) -> None:
        try:
            text = json.dumps(summary(read(trace)), indent=1)
        except ValueError as error:  # torch has written traces that no parser takes: no reason to end a run
            print(f"profile: no summary ({error})", file=sys.stderr)
            return
        (self._directory / f"summary-rank{self._rank}.json").write_text(text)
