"""Execution of a sweep's cells on this host or by Slurm, and their records in sweep.jsonl."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from analysis.records import check_cell, print_notes, read_lines
from analysis.runs import read_run
from data_gen.__main__ import make_synthetic
from launch.sweep_file import PROGRAM, Cell, Sweep
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.job_launchers import without_rank
from lightseq.distributed.rank_launcher import gpus_here, prepare_rank
from lightseq.utils.files import read_json_object
from lightseq.utils.formatting import plural

FILE: Final = "sweep.jsonl"
FAILED: Final = ("failed", "timeout")
LOG: Final = "log.txt"  # output of a cell's processes
POLL_SECONDS: Final = 0.25
# Variables of launch/slurm/job.sh that describe one run. Cells give them as flags, and NPROC to sbatch.
OF_ONE_RUN: Final = (
    *("FAMILY", "MODEL", "DATA", "LENGTH", "MAX_STEPS", "OUTPUT_DIR", "NPROC"),
    *("GLOBAL_BATCH", "MICRO_BATCH", "SEQUENCE_PARALLEL", "FLAGS_FILE"),
)
# Patterns of a line that names the cause, the most specific first. Of several matches the first counts, because the
# errors of the other ranks follow from it.
CAUSES: Final = (
    r"^(?:\w[\w./]*: )?error: .+",
    r"^.*OutOfMemoryError.*",
    r"^(?:\[rank\d+\]: ?)?\w[\w.]*(?:Error|Exception)\b.*",
)


# ---- records --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A line of sweep.jsonl."""

    name: str
    status: str  # done, failed, timeout, stopped, submitted or pending
    seconds: float | None  # from the start of its processes to their end
    error: str | None  # the line of its log that names the cause
    job_id: str | None
    output_dir: str
    command: str  # as typed in the repository root
    ranks: int
    flags: Mapping[str, str]


def local_command(cell: Cell) -> list[str]:
    """Returns the arguments of the interpreter that runs a cell on this host."""
    return ["-m", "lightseq", "train", "--nproc_per_node", str(cell.ranks), *cell.words]


def pending(cell: Cell) -> Record:
    """Returns the record of a cell that has not run."""
    command = shlex.join(["python3", *local_command(cell)])
    return Record(cell.name, "pending", None, None, None, str(cell.output_dir), command, cell.ranks, cell.flags)


def write_records(directory: Path, records: Iterable[Record]) -> None:
    """Replaces the file at once: a reader sees the old file or the new one."""
    beside = directory / f".{FILE}"
    beside.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8")
    os.replace(beside, directory / FILE)


def current_records(sweep: Sweep) -> dict[str, Record]:
    """Returns the present records of all cells, and the records of other sweep files in the same directory.

    Raises ValueError for a file without any record, so that a foreign file is not overwritten.
    """
    path, notes, found = sweep.output_dir / FILE, list[str](), dict[str, Record]()
    for line in read_lines(path, check_cell, notes) if path.is_file() else []:
        values: dict[str, Any] = {field.name: line.get(field.name) for field in fields(Record)}
        found[line["name"]] = Record(**values)
    print_notes(notes, PROGRAM)
    found |= {cell.name: current_record(cell, found.get(cell.name)) for cell in sweep.cells}
    mark_ended_jobs(found)
    return found


def current_record(cell: Cell, noted: Record | None) -> Record:
    """Returns a cell's present record: by its files, else by an earlier record with the same flags and ranks."""
    fresh = pending(cell)
    if noted is None or (noted.flags, noted.ranks) != (cell.flags, cell.ranks):
        noted = fresh
    if finished(cell):
        return replace(noted if noted.status in ("done", "submitted") else fresh, status="done")
    return fresh if noted.status == "done" else noted  # its files are gone, or other flags wrote them


def finished(cell: Cell) -> bool:
    """Returns whether the cell's directory holds a finished run of exactly these flags."""
    try:
        run = read_run(cell.output_dir, cell.name)
        same = comparable(run.info["config"]) == comparable(cell.config.to_json())
        return same and run.info["world_size"] == cell.ranks and run.is_finished
    except (OSError, ValueError, LookupError, TypeError):
        return False


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config without its directory, launcher, and where it resumed, because a requeued job resumes.

    Flags that are newer than the run have their defaults.
    """
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    ignored = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "max_restarts", "nproc_per_node")
    return {key: value for key, value in {**defaults, **config}.items() if key not in ignored}


# ---- a whole sweep --------------------------------------------------------------------------------------------------


def counted(chosen: Sequence[Cell], records: dict[str, Record]) -> str:
    """Returns the number of cells by status, such as `2 done, 1 failed`."""
    counts = Counter(records[cell.name].status for cell in chosen)
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def run_or_submit(sweep: Sweep, chosen: Sequence[Cell], records: dict[str, Record], arguments: Namespace) -> int:
    """Runs or submits the cells that are left, and records each outcome as it comes. Returns the exit status."""
    leave = {"done", "submitted"} | (set() if arguments.retry_failed else {*FAILED})
    devices = () if arguments.submit else gpus_here().devices
    left = [cell for cell in chosen if records[cell.name].status not in leave]
    todo = [cell for cell in left if not devices or cell.ranks <= len(devices)]
    # Before any is submitted, because it refuses a cell that fits no job.
    jobs = [(cell, slurm_command(sweep, cell)) for cell in todo] if arguments.submit else []
    skipped = leave.intersection(FAILED, (records[cell.name].status for cell in chosen))
    hint = "; --retry-failed runs failed cells again" if skipped else ""
    print(f"{counted(chosen, records)}; {len(todo)} to run{hint}")
    if len(left) > len(todo):
        print(f"{len(left) - len(todo)} need more than the {plural(len(devices), 'GPU')} here")
    write_records(sweep.output_dir, records.values())
    if sweep.data is not None and any(cell.config.data_path == str(sweep.data.output) for cell in todo):
        make_data(sweep.data)

    def note(record: Record) -> None:
        records[record.name] = record
        write_records(sweep.output_dir, records.values())
        took = "" if record.seconds is None else f" in {record.seconds:,.0f} s"
        job = f" as job {record.job_id}" if record.job_id else ""
        why = f": {record.error}" if record.error else ""
        print(f"{record.name}  {record.status}{took}{job}{why}; {counted(chosen, records)}", flush=True)

    for cell, command in jobs:
        note(submit(cell, command))
    if not arguments.submit:
        run_here(sweep, todo, arguments.at_once, devices if arguments.at_once > 1 else (), note)
    print(f"{counted(chosen, records)}; records in {sweep.output_dir / FILE}")
    return int(any(records[cell.name].status in FAILED for cell in chosen))


def make_data(spec: Namespace) -> None:
    """Makes the data of the sweep file unless it exists. Raises ValueError if other data is there."""
    if not spec.output.exists():
        print(f"data: {make_synthetic(spec)}")
        return
    remedy = "give another output (--set data.output=DIR), or delete it to have it made again"
    # A .pkl file does not record how it was made.
    meta = read_json_object(spec.output / "meta.json", remedy) if spec.output.is_dir() else {}
    wanted = {key: getattr(spec, key) for key in ("documents", "vocab_size", "seed")}
    wanted["source"] = f"synthetic {spec.kind}"
    if spec.shortest is None:
        wanted["tokens"] = spec.documents * spec.length
    for key, value in wanted.items():
        if meta.get(key, value) != value:  # data from before a key was recorded does not say
            raise ValueError(f"data.output {spec.output} was made with {key} {meta[key]} (not {value}); {remedy}")


# ---- on this host ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A cell whose processes run, and the GPUs that they have to themselves."""

    cell: Cell
    gpus: Sequence[str]
    process: subprocess.Popen[bytes]
    begin: float


def run_here(sweep: Sweep, todo: list[Cell], at_once: int, gpus: Sequence[str], note: Callable[[Record], None]) -> None:
    """Runs cells in their order, except that a cell may overtake one that waits for more GPUs.

    Each cell gets its own of the `gpus`; if there are none, a cell sees the GPUs that this program sees. Calls `note`
    with the record of each cell that ended, or that is stopped with this program.
    """
    waiting, running = list(todo), list[Running]()
    try:
        while waiting or running:
            free = [gpu for gpu in gpus if not any(gpu in one.gpus for one in running)]
            fits = (cell for cell in waiting if not gpus or cell.ranks <= len(free))
            if len(running) < at_once and (cell := next(fits, None)):
                waiting.remove(cell)
                running.append(start(cell, free[: cell.ranks]))
                continue
            time.sleep(POLL_SECONDS)
            for one in [*running]:
                if record := ended(one, sweep.cell_seconds):
                    running.remove(one)
                    note(record)
    finally:
        for one in running:
            end(one.process)
            note(replace(pending(one.cell), status="stopped"))


def start(cell: Cell, gpus: Sequence[str]) -> Running:
    """Starts a cell, which sees `gpus` only; if empty, all that this program sees."""
    log = cell.output_dir / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    print(f"{cell.name} runs; its log is {log}", flush=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [os.environ.get("PYTHON") or sys.executable, *local_command(cell)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**without_rank(os.environ), **visible},
            start_new_session=True,  # Ctrl-C reaches this program only
            preexec_fn=prepare_rank,  # the kernel ends it with this program, as it ends the ranks with it
        )
    return Running(cell, gpus, process, time.monotonic())


def ended(running: Running, limit: float) -> Record | None:
    """Returns the record of a cell that ended or ran past a limit of seconds; None while it runs."""
    cell, status = running.cell, running.process.poll()
    seconds = time.monotonic() - running.begin
    record = replace(pending(cell), status="failed", seconds=round(seconds, 3))
    if status is None and seconds <= limit:
        return None
    if status is None:
        end(running.process)
        return replace(record, status="timeout", error=f"ran past {limit:g} s; raise timeout_seconds or --timeout")
    if status:
        log = (cell.output_dir / LOG).read_text(errors="replace")
        return replace(record, error=cause(log) or f"exit status {status}")
    if not finished(cell):
        return replace(record, error="ended without an error, but run.json or steps of metrics.jsonl are missing")
    return replace(record, status="done")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a cell's processes: its ranks end with their launcher. PYTHON may be a script that runs an interpreter."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cause(said: str) -> str | None:
    """Returns the line of a log that names the cause, else the last one; None for an empty log."""
    for pattern in CAUSES:
        if found := re.search(pattern, said, re.MULTILINE):
            return found[0].strip()
    return said.strip().rpartition("\n")[2] or None


# ---- on Slurm -------------------------------------------------------------------------------------------------------


def slurm_command(sweep: Sweep, cell: Cell) -> list[str]:
    """Returns the sbatch command of a cell: one node, or as many whole nodes as the ranks fill."""
    per_node = min(cell.ranks, sweep.gpus_per_node)
    if cell.ranks % per_node:
        raise ValueError(f"ranks: {cell.ranks} do not fill nodes of {per_node} GPUs; change ranks or gpus_per_node")
    nodes = cell.ranks // per_node
    options = (f"--job-name={cell.name}", f"--nodes={nodes}", f"--gpus-per-node={per_node}")
    minutes = f"--time={math.ceil(sweep.cell_seconds / 60)}"
    return ["sbatch", *options, minutes, "launch/slurm/several_nodes.sbatch", "train", *cell.words]


def submit(cell: Cell, command: Sequence[str]) -> Record:
    """Submits a cell by its sbatch command. Account, partition and the like come from sbatch's SBATCH_ variables."""
    # A job runs with this program's interpreter, unless PYTHON is set or the container has its own.
    python = {} if "CONTAINER" in os.environ else {"PYTHON": sys.executable}
    inherited = {name: value for name, value in os.environ.items() if name not in OF_ONE_RUN}
    done = subprocess.run(command, capture_output=True, text=True, env={**python, **inherited})
    record = replace(pending(cell), command=shlex.join(command))
    job = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or job is None:
        return replace(record, status="failed", error=cause(done.stderr) or f"sbatch: exit status {done.returncode}")
    return replace(record, status="submitted", job_id=job[1])


def mark_ended_jobs(records: dict[str, Record]) -> None:
    """Marks submitted cells as failed if Slurm answers and no longer has their jobs."""
    submitted = [record for record in records.values() if record.status == "submitted"]
    if not submitted or shutil.which("squeue") is None:
        return
    done = subprocess.run(["squeue", "--noheader", "--me", "--format=%i"], capture_output=True, text=True)
    for record in submitted:
        if done.returncode == 0 and record.job_id not in done.stdout.split():
            why = f"job {record.job_id} ended too early; see logs/"
            records[record.name] = replace(record, status="failed", error=why)
