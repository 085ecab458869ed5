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
from typing import Any, Final

import psutil

from launch.sweep_cells import Cell
from launch.sweep_file import Settings, Sweep
from launch.sweep_lock import LOG, open_log
from launch.sweep_records import Record, finished
from lightseq.utils.files import read_json
from lightseq.utils.formatting import first_line

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


@dataclass(frozen=True)
class Ended:
    """Outcome of a cell's processes."""

    status: str
    seconds: float
    error: str | None = None


def local_command(cell: Cell) -> list[str]:
    return ["launch/local.sh", cell.family, *cell.words]


def slurm_command(sweep: Sweep, cell: Cell) -> list[str]:
    """Returns the sbatch command of a cell: one node, or as many whole nodes as the ranks fill."""
    per_node = min(cell.ranks, sweep.gpus_per_node)
    if cell.ranks % per_node:
        raise sweep.wrong("ranks", f"{cell.ranks} do not fill nodes of {per_node} GPUs; change ranks or gpus_per_node")
    nodes = cell.ranks // per_node
    script = "one_node" if nodes == 1 else "several_nodes"
    options = (f"--job-name={cell.name}", f"--nodes={nodes}", f"--gpus-per-node={per_node}")
    minutes = f"--time={-(-int(sweep.timeout_seconds) // 60)}"
    return ["sbatch", *options, minutes, f"launch/slurm/{script}.sbatch", cell.family, *cell.words]


def as_typed(cell: Cell, command: Sequence[str]) -> str:
    """Returns a command as typed in a shell."""
    return shlex.join(command) if command[0] == "sbatch" else f"NPROC={cell.ranks} {shlex.join(command)}"


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
    if (output / "meta.json").exists():
        check_data(output, flags)
        return
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    done = subprocess.run([sys.executable, "-m", "data_gen", "synthetic", *words], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"data: {cause(done.stderr) or 'data_gen failed'}")
    print(f"data: {done.stdout.strip()}")


def check_data(output: Path, flags: Settings) -> None:
    """Raises ValueError if a token directory records other flags. Flags that it does not record are not checked."""
    remedy = "give another output (--set data.output=DIR), or delete it to have it made again"
    try:
        recorded = made_with(read_json(output / "meta.json"))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = first_line(error)
        raise ValueError(f"data.output {output}: its meta.json cannot be read ({reason}); {remedy}") from error
    wanted = {key: word.replace("_", "") for key, word in flags.items()}  # 1_000 is 1000
    wrong = [f"{key} {word} (not {flags[key]})" for key, word in recorded.items() if word != wanted[key]]
    if wrong:
        raise ValueError(f"data.output {output} was made with {', '.join(wrong)}; {remedy}")


def made_with(meta: Mapping[str, Any]) -> Settings:
    """Returns the flags of `data_gen synthetic` that its meta.json records."""
    found = {key: meta.get(key) for key in ("documents", "vocab_size", "seed")}
    if "tokens" in meta and "documents" in meta:
        found["length"] = meta["tokens"] // meta["documents"]  # of each document
    if "source" in meta:
        found["kind"] = meta["source"].removeprefix("synthetic ")
    return {key: str(value) for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Running:
    """A cell whose processes run, and the GPUs that they have to themselves."""

    cell: Cell
    gpus: tuple[str, ...]
    process: subprocess.Popen[bytes]
    begin: float


def start(cell: Cell, gpus: tuple[str, ...] = ()) -> Running:
    """Starts a cell, which sees `gpus` only; if empty, all that this program sees."""
    with open_log(cell) as out:
        process = subprocess.Popen(
            local_command(cell),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(cell.ranks, gpus),
            start_new_session=True,  # Ctrl-C reaches this program only, which ends them in order
        )
    return Running(cell, gpus, process, time.monotonic())


def ended(running: Running, timeout_seconds: float) -> Ended | None:
    """Returns the outcome of a cell that ended or took too long; None while it runs."""
    cell, process = running.cell, running.process
    seconds = time.monotonic() - running.begin
    if process.poll() is None:
        if seconds <= timeout_seconds:
            return None
        end(process)
        return Ended("timeout", seconds, f"ran past {timeout_seconds:g} s; raise timeout_seconds or --timeout")
    if process.returncode:
        log = (cell.output_dir / LOG).read_text(errors="replace")
        return Ended("failed", seconds, cause(log) or f"exit status {process.returncode}")
    if not finished(cell):
        return Ended("failed", seconds, "ended without an error, but run.json or steps of metrics.jsonl are missing")
    return Ended("done", seconds)


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
    job = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or job is None:
        error = cause(done.stderr) or f"sbatch gave exit status {done.returncode}"
        return replace(record, status="failed", error=error, command=as_typed(cell, words))
    return replace(record, status="submitted", error=None, job_id=job[1], command=as_typed(cell, words))


def with_job_status(records: Mapping[str, Record]) -> dict[str, Record]:
    """Returns the records; a submitted cell has failed if Slurm no longer has its job."""
    jobs = [record.job_id for record in records.values() if record.status == "submitted" and record.job_id]
    squeue = shutil.which("squeue")
    if not jobs or squeue is None:
        return dict(records)
    command = [squeue, "--noheader", "--me", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:  # Slurm does not answer: nothing is known
        return dict(records)
    alive = set(done.stdout.split())

    def follow(record: Record) -> Record:
        if record.status != "submitted" or record.job_id in alive:
            return record
        return replace(record, status="failed", error=f"job {record.job_id} ended without all steps; see logs/")

    return {name: follow(record) for name, record in records.items()}
