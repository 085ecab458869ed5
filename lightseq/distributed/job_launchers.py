"""Ranks that srun, mpirun, Ray or torch's launcher has started: their variables, translated to torch's."""

import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from lightseq.distributed.environment import REFUSED, refuse_variable, whole_number_in


class _Launcher(NamedTuple):
    """Variables in which a launcher tells a process its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str | None
    job: str  # equal for all ranks of a job, and for no other job on the host


SRUN = _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None, "SLURM_JOB_ID")
MPIRUN = (
    _Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
)  # fmt: skip


def adopt_launcher() -> bool:
    """Returns whether a launcher started this process as one of its ranks.

    Translates the variables of srun and mpirun to torch's. A job of one task is not their rank, and neither is a batch
    script of Slurm: they may start ranks.
    """
    if "RANK" in os.environ:
        return True
    for launcher in (SRUN, *MPIRUN):
        if launcher is SRUN and _in_batch_script():
            continue
        if launcher.rank in os.environ and _size(launcher) > 1:
            _translate(launcher)
            return True
    return "RAY_JOB_ID" in os.environ


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment whose process starts its own ranks, although a launcher may have started this one."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_JOB_ID"}
    ours |= {launcher.rank for launcher in (SRUN, *MPIRUN)}
    return {name: value for name, value in environment.items() if name not in ours}


def _in_batch_script() -> bool:
    """Returns whether a script of sbatch started this process: it has the variables of a task, but no step."""
    return "SLURM_STEP_ID" not in os.environ and os.environ.get("SLURM_TASK_PID", str(os.getpid())) != str(os.getpid())


def _size(launcher: _Launcher) -> int:
    """Returns the number of ranks; a step of a Slurm job may have fewer tasks than the job."""
    size = whole_number_in(launcher.size, 1, least=1)
    return whole_number_in("SLURM_STEP_NUM_TASKS", size, least=1) if launcher is SRUN else size


def _translate(launcher: _Launcher) -> None:
    size, local_rank = _size(launcher), whole_number_in(launcher.local_rank, 0)
    if launcher is SRUN:
        tasks = re.match(
            r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE", ""))
        )
        hosts = whole_number_in("SLURM_STEP_NUM_NODES", whole_number_in("SLURM_NNODES", 1, least=1), least=1)
        local_size = int(tasks.group()) if tasks else -(-size // hosts)
    else:
        local_size = whole_number_in(launcher.local_size or "", size, least=1)
    found = {
        "RANK": str(whole_number_in(launcher.rank, 0)),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    if launcher.job in os.environ or local_size == size:
        # Differs between jobs that share a host. mpirun is the parent process of its ranks.
        job = os.environ.get(launcher.job, str(os.getppid()))
        found["MASTER_PORT"] = str(20000 + zlib.crc32(job.encode()) % 20000)
    if local_size == size:
        found["MASTER_ADDR"] = "127.0.0.1"
    elif launcher is SRUN:
        found["MASTER_ADDR"] = _first_host(
            os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
        )
    for name, value in found.items():
        os.environ.setdefault(name, value)
    for name, meaning in {"MASTER_ADDR": "the name of the first", "MASTER_PORT": "a free port there"}.items():
        if name not in os.environ:
            print(f"error: {name} is not set; with mpirun on several hosts, export {meaning}", file=sys.stderr)
            raise SystemExit(REFUSED)


def _first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list, such as node01 of node[01-04]."""
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    names = done.stdout.split()
    if not names:
        refuse_variable("SLURM_JOB_NODELIST", "is not a list of hosts that scontrol knows; set MASTER_ADDR")
    return names[0]
