"""Traces a span of steps with torch.profiler, one file a rank, to be opened in https://ui.perfetto.dev."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lightseq.mesh import World


class StepProfile:
    """Starts before the first and ends after the last step of `--profile_steps first:last` (counted from 1)."""

    def __init__(self, span: tuple[int, int] | None, output_dir: Path, world: World) -> None:
        self._span, self._device = span, world.device
        self._path = output_dir / "profile" / f"rank{world.rank}.json.gz"
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Starts also where a run that resumes begins inside the span."""
        if self._span is not None and self._profiler is None and self._span[0] <= step <= self._span[1]:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=activities)
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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None
