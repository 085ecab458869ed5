"""Files of runs, benchmarks and traces, with numbers that a test chose."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

GIB = 2**30
CONFIG: dict[str, Any] = {
    "model_name_or_path": "tiny-llama3", "data_path": "data/zipf", "output_dir": "", "model_max_length": 4096,
    "max_steps": 40, "logging_steps": 1, "seed": 42, "fsdp": "full_shard", "schedule": "auto", "bf16": False,
    "save_steps": 500, "learning_rate": 0.001, "remat": None,
}  # fmt: skip


def record(step: int, gpu: bool = False, **changes: Any) -> dict[str, Any]:
    """One logged step; the first takes twenty times as long, as one that compiles does."""
    seconds = 10.0 if step == 1 else 0.5
    return {
        "step": step, "loss": 6.0 - 0.01 * step, "grad_norm": 1.25, "learning_rate": 0.001, "tokens": 4096,
        "valid_tokens": 3994, "training_tokens_percent": 97.5, "step_seconds": seconds,
        "tokens_per_second": 4096 / seconds, "model_tflops_per_gpu": 0.5, "mfu": 0.4 if gpu else None,
        "peak_memory_allocated_bytes": 3 * GIB if gpu else None,
        "peak_memory_reserved_bytes": 4 * GIB if gpu else None, "host_rss_bytes": 2 * GIB,
    } | changes  # fmt: skip


def about(gpu: bool = False, config: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A run.json."""
    return {
        "command": "llama3/train.py --model_name_or_path tiny-llama3 --fsdp full_shard --max_steps=40",
        "commit": "0123abcd",
        "schedule": "zigzag", "kernel": "fa4" if gpu else "cpu", "transport": "gloo", "remat": "attention",
        "world_size": 2, "data_ranks": 1, "sequence_ranks": 2, "total_steps": 40, "notes": [],
        "hardware": {"device": "NVIDIA H200" if gpu else "cpu", "host": "here"},
        "versions": {"python": "3.12.3", "torch": "2.11.0"}, "config": CONFIG | (config or {}),
        "model_config": {"hidden_size": 256},
    } | changes  # fmt: skip


def write_run(
    directory: Path, records: list[dict[str, Any]], facts: dict[str, Any] | None = None, tail: str = ""
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(value) + "\n" for value in records) + tail)
    if facts is not None:
        (directory / "run.json").write_text(json.dumps(facts))
    return directory


def write_lines(path: Path, values: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def event(name: str, start_ms: float, ms: float, category: str = "kernel", launch: int = 0) -> dict[str, Any]:
    """An event of a trace. `launch` connects a kernel with the call that launched it."""
    arguments = {"correlation": launch} if launch else {}
    return {"ph": "X", "cat": category, "name": name, "ts": start_ms * 1e3, "dur": ms * 1e3, "args": arguments}


def two_steps() -> list[dict[str, Any]]:
    """Each: 2 ms of forward attention, a collective of 3 ms beside its second half, 1 ms of nothing, 4 ms of update."""
    events = []
    for i, begin in enumerate((0.0, 9.0)):
        first = 10 * i
        events += [
            event(f"step {i + 4}", begin, 0.9, "user_annotation"),
            event("forward", begin, 0.4, "user_annotation"),
            event("update", begin + 0.5, 0.3, "user_annotation"),
            event("cudaLaunchKernel", begin + 0.1, 0.01, "cuda_runtime", first + 1),
            event("cudaLaunchKernel", begin + 0.2, 0.01, "cuda_runtime", first + 2),
            event("cudaLaunchKernel", begin + 0.6, 0.01, "cuda_runtime", first + 3),
            event("flash_fwd_kernel", begin, 2, launch=first + 1),
            event("ncclDevKernel_AllGather", begin + 1, 3, launch=first + 2),
            event("FusedAdam", begin + 5, 4, launch=first + 3),
        ]
    return events


def copy(name: str, size: int, ms: float) -> dict[str, Any]:
    """A copy of `size` bytes in a trace."""
    return event(f"Memcpy {name} (a -> b)", 0, ms, "gpu_memcpy") | {"args": {"bytes": size}}


def attention_point(
    implementation: str, request: str, length: int, tflops: float | None, **changes: Any
) -> dict[str, Any]:
    """A point whose slowest repeat took a tenth longer than the median, the fastest a twentieth less."""
    world = 1 if implementation == "single-gpu" else 4
    seconds = 3.5 * 4 * length**2 * 4096 / 2 / world / tflops / 1e12 if tflops else None
    times = {"min": 0.95, "median": 1.0, "max": 1.1}
    return {
        "length": length, "world": world, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "batch": 1,
        "implementation": implementation, "request": request, "kernel": "fa4", "transport": None,
        **{f"seconds_{which}": seconds and seconds * share for which, share in times.items()},
        "tflops_per_gpu": tflops, "peak_memory_bytes": 3 * 2**30 if tflops else None,
        "exposed_communication_seconds": None, "skipped": None if tflops else "out of memory",
    } | changes  # fmt: skip


def step_point(label: str, length: int, measured: tuple[float, float] | None, **changes: Any) -> dict[str, Any]:
    """A point whose slowest step took a tenth longer than the median, the fastest a twentieth less."""
    rate, gib = measured or (None, None)
    return {
        "benchmark": "step", "implementation": label.split()[0], "label": label, "model": "llama3.2-1b", "layers": 16,
        "length": length, "world": 4, "dtype": "bfloat16", "tokens_per_second": rate,
        "tokens_per_second_lowest": rate and rate / 1.1, "tokens_per_second_highest": rate and rate / 0.95,
        "mfu": rate and rate / 250_000, "model_tflops_per_gpu": rate and rate / 250,
        "peak_memory_allocated_bytes": gib and int(gib * GIB),
        "first_loss": rate and 11.9, "last_loss": rate and 11.8 + length / 1e7, "losses_finite": rate and True,
        "skipped": None if rate else "out of memory", "hardware": {"device": "NVIDIA H200"},
    } | changes  # fmt: skip


SEARCH: dict[str, Any] = {
    "what": "weights", "strategy": "all", "tokens": 0, "flags": "", "gpus": 1, "gpu_memory": None, "commit": "154d5c1",
    "hardware": {"device": "NVIDIA H200", "memory_bytes": 150_000_000_000}, "versions": {"torch": "2.11.0"},
}  # fmt: skip


def probe(scale: int, fits: bool, **changes: Any) -> dict[str, Any]:
    tried = {"benchmark": "largest-probe", "length": scale, "fits": fits, "peak_bytes": scale * 2**30 if fits else None}
    return SEARCH | tried | changes


def limit(parameters: int, above: int | None, **changes: Any) -> dict[str, Any]:
    found = {"benchmark": "largest", "largest": 21, "parameters": parameters, "peak_bytes": 134 * 2**30}
    too_large, reason = (22, "out of memory") if above else (None, None)
    return SEARCH | found | {"too_large": too_large, "too_many_parameters": above, "reason": reason} | changes


def axes_of(benchmark: Any, file: Path) -> list[Axes]:
    """Returns the axes of the one picture that a benchmark draws of a file."""
    (table,) = benchmark.group(benchmark.read(file, []))
    picture = table.figure()
    assert picture is not None
    return picture.axes  # type: ignore[no-any-return]
