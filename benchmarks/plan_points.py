"""Measures training steps that `python3 -m lightseq plan` is held to: peak by category and phase, seconds by phase.

python3 benchmarks/plan_points.py --gpus 1,2 --output benchmarks/results/plan-2xh200.jsonl --minutes 9

Every point runs in processes of its own. The same command again goes on with the points that the file does not hold.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # and hides no package behind this folder

import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks.flags import Parser, listed, positive
from benchmarks.report import commit_here, read_lines
from benchmarks.training.launch import Failed, run
from benchmarks.training.records import Machine, look_at_machine
from benchmarks.training.trials import ROOT, model_of
from lightseq.commands import refused
from lightseq.config.lengths import shown

WORKER = ROOT / "benchmarks" / "training" / "plan_point.py"


@dataclass(frozen=True)
class Point:
    """One run to measure. `words` are training flags beyond bfloat16, compiled layers, the model and the length."""

    name: str
    gpus: int
    model: str
    length: int
    words: str = ""
    layers: int | None = None  # of the model's, where not all are taken
    warmup: int = 2
    steps: int = 3

    def flags(self, model: str, on_gpu: bool) -> list[str]:
        base = f"--model_name_or_path {model} --random_init --model_max_length {self.length} --learning_rate 1e-5"
        return [*base.split(), *(["--bf16", "--torch_compile"] if on_gpu else []), *shlex.split(self.words)]


K = 2**10
EIGHT_BIT = "--optim adamw_8bit"
AUTO_8BIT = f"--offload auto {EIGHT_BIT}"
BOTH_8BIT = f"--offload both {EIGHT_BIT}"
WITHIN_70 = "--offload auto --device_memory_budget 70"  # a GPU of 80 GB
WITHIN_70_8BIT = f"{WITHIN_70} {EIGHT_BIT}"
LEAST = f"{BOTH_8BIT} --layers_per_checkpoint 4 --remat full --tile_layers True"  # of a GPU
POINTS = (
    Point("1b 32K", 2, "llama3.2-1b", 32 * K, steps=5),
    Point("1b 128K", 2, "llama3.2-1b", 128 * K),
    Point("8b 32K", 2, "llama3-8b", 32 * K),
    Point("8b, 8 layers, 128K", 2, "llama3-8b", 128 * K, layers=8, warmup=1, steps=2),
    Point("1b 128K, eager", 2, "llama3.2-1b", 128 * K, "--torch_compile False", warmup=1),
    Point("1b 128K, offload activations", 2, "llama3.2-1b", 128 * K, "--offload activations", warmup=1),
    Point("1b 32K, remat none", 2, "llama3.2-1b", 32 * K, "--remat none", steps=5),
    Point("llama2-7b 32K", 2, "llama2-7b", 32 * K),
    Point("1b 64K, one GPU", 1, "llama3.2-1b", 64 * K),
    Point("1b 256K", 2, "llama3.2-1b", 256 * K, warmup=1, steps=1),
    Point("3b 64K", 2, "llama3.2-3b", 64 * K),
    Point("8b 128K", 2, "llama3-8b", 128 * K, warmup=1, steps=1),
    Point("1b 128K, remat full", 2, "llama3.2-1b", 128 * K, "--remat full", warmup=1, steps=2),
    Point("1b 32K, two sequences", 2, "llama3.2-1b", 32 * K, "--sequence_parallel_size 1"),
    Point("1b 32K, accumulation 2", 2, "llama3.2-1b", 32 * K, "--gradient_accumulation_steps 2"),
    Point("1b 256K, 4 layers a checkpoint", 2, "llama3.2-1b", 256 * K, "--layers_per_checkpoint 4", None, 1, 1),
    Point("8b, 8 layers, 128K, offload both", 2, "llama3-8b", 128 * K, "--offload both", 8, 1, 2),
    Point("8b, 8 layers, 32K, eager, one GPU", 1, "llama3-8b", 32 * K, "--torch_compile False", 8, 1),
    Point("1b 64K, zigzag", 2, "llama3.2-1b", 64 * K, "--schedule zigzag"),
    Point("1b 16K, ddp", 2, "llama3.2-1b", 16 * K, '--fsdp ""', steps=5),
    Point("8b 128K, everything on the host, one GPU", 1, "llama3-8b", 128 * K, LEAST, None, 1, 1),
    Point("8b 128K, offload both, adamw_8bit, one GPU", 1, "llama3-8b", 128 * K, BOTH_8BIT, None, 1, 1),
    Point("8b 192K, offload auto, adamw_8bit, one GPU", 1, "llama3-8b", 192 * K, AUTO_8BIT, None, 1, 1),
    Point("8b 32K, offload both, adamw_8bit, one GPU", 1, "llama3-8b", 32 * K, BOTH_8BIT, None, 1, 2),
    Point("8b 32K, auto within 70 GiB, adamw_8bit, one GPU", 1, "llama3-8b", 32 * K, WITHIN_70_8BIT, None, 1, 2),
    Point("8b 128K, auto within 70 GiB, adamw_8bit, one GPU", 1, "llama3-8b", 128 * K, WITHIN_70_8BIT, None, 1, 1),
    Point("8b 16K, auto within 70 GiB, one GPU", 1, "llama3-8b", 16 * K, WITHIN_70, None, 1, 2),
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    try:
        flags = parser().parse_args(words)
    except ValueError as error:
        return refused(error)
    done = {record["point"] for record in read_lines(flags.output) if not record["skipped"]}
    machine, begin = look_at_machine(), time.monotonic()
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    with flags.output.open("a", encoding="utf-8") as file:
        for point in POINTS:
            left = 60 * flags.minutes - (time.monotonic() - begin)
            if point.name in done or point.gpus not in flags.gpus or (flags.only and flags.only not in point.name):
                continue
            if left < 60:
                print(f"{point.name}: no time left; the same command again goes on here")
                break
            record = take(point, machine, min(left, flags.timeout), flags.commit)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(line(record), flush=True)
    return 0


def parser() -> Parser:
    out = Parser(prog="benchmarks/plan_points.py", description="Measures the steps that the plan is held to.")
    out.add_argument("--gpus", type=listed(positive), default=[1, 2], help="points of that many GPUs (default: 1,2)")
    out.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL; points in it are not repeated")
    out.add_argument("--only", default="", help="points with these words in their name")
    out.add_argument("--minutes", type=float, default=60.0, help="no point is begun after (default: 60)")
    out.add_argument("--timeout", type=float, default=300.0, help="seconds that a point may take (default: 300)")
    out.add_argument("--commit", help="what the records name where there is no git to ask")
    return out


def take(point: Point, machine: Machine, timeout: float, commit: str | None = None) -> dict[str, Any]:
    """Runs a point; its record says `skipped` where it came to nothing."""
    measured: dict[str, Any] = {}
    skipped: str | None = None
    with tempfile.TemporaryDirectory() as folder:
        flags = point.flags(_model(point, Path(folder)), machine.on_gpu)
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node={point.gpus}".split()
        try:
            run([*launcher, str(WORKER), str(result), str(point.warmup), str(point.steps), *flags], timeout, log)
            measured = json.loads(result.read_text())
        except Failed as why:
            skipped = str(why)
            print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), file=sys.stderr)
    return {
        "benchmark": "plan points",
        "point": point.name,
        **{key: value for key, value in asdict(point).items() if key != "name"},
        "skipped": skipped,
        **measured,
        "commit": commit or commit_here(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": dict(machine.hardware),
        "versions": dict(machine.versions),
    }


def _model(point: Point, folder: Path) -> str:
    """A preset, or a directory with the config of its first layers."""
    if point.layers is None:
        return point.model
    _, config = model_of(point.model)
    config.num_hidden_layers = point.layers
    config.save_pretrained(folder / "model")
    return str(folder / "model")


def line(record: dict[str, Any]) -> str:
    head = f"{record['point']} ({shown(record['length'])} tokens, {record['gpus']} GPUs): "
    if record["skipped"]:
        return f"{head}skipped: {record['skipped']}"
    peak = record.get("peak_memory_allocated_bytes")
    shown_peak = f", peak {peak / 2**30:.2f} GiB" if peak else ""
    return f"{head}{record['step_seconds']:.3f} s a step{shown_peak}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
