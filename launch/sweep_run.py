"""Execution of cells as Slurm jobs, or as processes on this host that are always ended with the sweep."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from launch.sweep_file import Cell, Settings, Sweep, wrong
from launch.sweep_records import Record, finished, lock
from lightseq.utils.files import read_json_object

LOG: Final = "log.txt"  # output of a cell's processes, which lock it as long as one of them runs
EXIT_SECONDS: Final = 10.0  # for processes to end by themselves
# Variables of launch/slurm/job.sh that describe one run. A cell gives all of them as flags.
OF_ONE_RUN: Final = (
    *("FAMILY", "MODEL", "DATA", "LENGTH", "MAX_STEPS", "OUTPUT_DIR"),
    *("GLOBAL_BATCH", "MICRO_BATCH", "SEQUENCE_PARALLEL", "FLAGS_FILE"),
)
# Patterns of a line that names the cause, the most specific first. Of several matches the first counts, because the
# errors of the other ranks follow from it.
CAUSES: Final = (
    re.compile(r"^(?:\w[\w./]*: )?error: .+"),
    re.compile(r"^.*OutOfMemoryError.*"),
    re.compile(r"^(?:\[rank\d+\]: ?)?(?!.*ChildFailedError)\w[\w.]*(?:Error|Exception)\b.*"),
)


def local_command(cell: Cell) -> list[str]:
    return ["launch/local.sh", "train", *cell.words]


def slurm_command(sweep: Sweep, cell: Cell) -> list[str]:
    """Returns the sbatch command of a cell: one node, or as many whole nodes as the ranks fill."""
    per_node = min(cell.ranks, sweep.gpus_per_node)
    if cell.ranks % per_node:
        problem = f"{cell.ranks} do not fill nodes of {per_node} GPUs; change ranks or gpus_per_node"
        raise wrong(sweep.path, "ranks", problem)
    nodes = cell.ranks // per_node
    script = "one_node" if nodes == 1 else "several_nodes"
    options = (f"--job-name={cell.name}", f"--nodes={nodes}", f"--gpus-per-node={per_node}")
    minutes = f"--time={-(-int(sweep.cell_seconds) // 60)}"
    return ["sbatch", *options, minutes, f"launch/slurm/{script}.sbatch", "train", *cell.words]


def as_typed(cell: Cell) -> str:
    """Returns the local command of a cell as typed in a shell."""
    return f"NPROC={cell.ranks} {shlex.join(local_command(cell))}"


def environment(processes: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment of the launch scripts, without variables that describe another run.

    It names this program's interpreter, unless PYTHON is set or the container has its own, and a cell's own GPUs.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in OF_ONE_RUN}
    python = {} if "CONTAINER" in os.environ else {"PYTHON": sys.executable}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {**python, **inherited, "NPROC": str(processes), **visible}


def make_data(flags: Settings) -> None:
    """Makes the data of the sweep file unless it exists. Raises ValueError if other data is there."""
    output = Path(flags["output"])
    if output.is_file():
        print(f"data: {output} is used as it is; it does not record how it was made")
        return
    if not (output / "meta.json").exists():
        words = [word for key, value in flags.items() for word in (f"--{key}", value)]
        done = subprocess.run([sys.executable, "-m", "data_gen", "synthetic", *words], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"data: {cause(done.stderr) or 'data_gen failed'}")
        print(f"data: {done.stdout.strip()}")
        return
    remedy = "give another output (--set data.output=DIR), or delete it to have it made again"
    meta = read_json_object(output / "meta.json", remedy)
    documents = int(flags["documents"])
    wanted = {
        "documents": documents, "vocab_size": int(flags["vocab_size"]), "seed": int(flags["seed"]),
        "tokens": documents * int(flags["length"]), "source": f"synthetic {flags['kind']}",
    }  # fmt: skip
    for key, value in wanted.items():
        if meta.get(key, value) != value:  # data from before a key was recorded does not say
            raise ValueError(f"data.output {output} was made with {key} {meta[key]} (not {value}); {remedy}")


@dataclass(frozen=True)
class Running:
    """A cell whose processes run, and the GPUs that they have to themselves."""

    cell: Cell
    gpus: tuple[str, ...]
    process: subprocess.Popen[bytes]
    begin: float


def check_ended(cell: Cell) -> None:
    """Raises ValueError for a cell that still runs although the sweep that started it is gone."""
    if (cell.output_dir / LOG).exists():
        lock(cell.output_dir / LOG, "processes of an earlier sweep still run; wait until they end, or end them").close()


def start(cell: Cell, gpus: tuple[str, ...] = ()) -> Running:
    """Starts a cell, which sees `gpus` only; if empty, all that this program sees."""
    with lock(cell.output_dir / LOG, "wait until its processes end") as out:
        out.truncate(0)
        process = subprocess.Popen(
            local_command(cell),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(cell.ranks, gpus),
            start_new_session=True,  # Ctrl-C reaches this program only, which ends them in order
        )
    return Running(cell, gpus, process, time.monotonic())


def ended(running: Running, record: Record, limit: float) -> Record | None:
    """Returns the record of a cell that ended or ran past a limit of seconds; None while it runs."""
    cell, process = running.cell, running.process
    seconds = time.monotonic() - running.begin
    status, error = "failed", None
    if process.poll() is None:
        if seconds <= limit:
            return None
        end(process)
        status, error = "timeout", f"ran past {limit:g} s; raise timeout_seconds or --timeout"
    elif process.returncode:
        log = (cell.output_dir / LOG).read_text(errors="replace")
        error = cause(log) or f"exit status {process.returncode}"
    elif not finished(cell):
        error = "ended without an error, but run.json or steps of metrics.jsonl are missing"
    else:
        status = "done"
    return replace(record, status=status, error=error, seconds=round(seconds, 3), job_id=None)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its workers, which have sessions of their own and are found by the process tree."""
    if process.poll() is not None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave the rest running
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_SECONDS)
        for left in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def cause(said: str) -> str | None:
    """Returns the line of a log that names the cause, else the last one; None for an empty log."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for pattern in CAUSES:
        if found := next((line for line in lines if pattern.match(line)), None):
            return found
    return lines[-1] if lines else None


def submit(sweep: Sweep, cell: Cell, record: Record) -> Record:
    """Submits a cell to Slurm; account, partition and the like come from sbatch's own SBATCH_ variables."""
    words = slurm_command(sweep, cell)
    per_node = min(cell.ranks, sweep.gpus_per_node)
    done = subprocess.run(words, capture_output=True, text=True, env=environment(per_node))
    record = replace(record, command=shlex.join(words))
    job = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or job is None:
        return replace(record, status="failed", error=cause(done.stderr) or f"sbatch: exit status {done.returncode}")
    return replace(record, status="submitted", error=None, job_id=job[1])


def with_job_status(records: Mapping[str, Record]) -> dict[str, Record]:
    """Returns the records; a submitted cell has failed if Slurm no longer has its job."""
    submitted = [record for record in records.values() if record.status == "submitted"]
    if not submitted or shutil.which("squeue") is None:
        return dict(records)
    done = subprocess.run(["squeue", "--noheader", "--me", "--format=%i"], capture_output=True, text=True)
    alive = done.stdout.split()
    if done.returncode:  # Slurm does not answer: nothing is known
        return dict(records)
    gone = {
        record.name: replace(record, status="failed", error=f"job {record.job_id} ended without all steps; see logs/")
        for record in submitted
        if record.job_id not in alive
    }
    return {**records, **gone}
