"""A Slurm of three programs: sbatch runs a job at once on this machine, srun its tasks, scontrol names hosts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
from executables import write_python_program

ROOT = Path(__file__).resolve().parent.parent

# As Slurm does: from a copy under another name, with options from the first comment lines and the command line.
SBATCH = """
import os, subprocess, sys, tempfile
words, options = sys.argv[1:], {}
script = next((word for word in words if not word.startswith("-")), None)
source = open(script).read() if script else sys.stdin.read()
if not source.startswith("#!"):
    sys.exit("sbatch: error: This does not look like a batch script.")
given = words[: words.index(script)] if script else words
lines = source.splitlines()
comments = lines[: next(i for i, line in enumerate(lines) if line and not line.startswith("#"))]
for option in [line.split(None, 1)[1] for line in comments if line.startswith("#SBATCH ")] + given:
    name, _, value = option.removeprefix("--").partition("=")
    options[name] = value
job = os.environ.get("FAKE_JOB_ID", "4242")
spool = tempfile.NamedTemporaryFile("w", suffix="-slurm_script")
spool.write(source)
spool.flush()
environment = os.environ | {
    "SLURM_JOB_ID": job, "SLURM_JOB_NAME": options.get("job-name", "sbatch"), "SLURM_SUBMIT_DIR": os.getcwd(),
    "SLURM_JOB_NODELIST": "node[01-%02d]" % int(options["nodes"]), "SLURM_JOB_NUM_NODES": options["nodes"],
}
with open(f"slurm-{job}.out", "w") as out:
    arguments = words[words.index(script) + 1 :] if script else []
    status = subprocess.run(["bash", spool.name, *arguments], env=environment, stdout=out, stderr=out).returncode
open(f"slurm-{job}.status", "w").write(str(status))
print("Submitted batch job", job)
"""

# One task a host; the first that fails ends the others. FAKE_ENTER_host is a process whose namespaces are that host's.
SRUN = """
import os, subprocess, sys, time
place = next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:place])
command, hosts = sys.argv[place:], os.environ["FAKE_HOSTS"].split()[: int(options["nodes"])]
tasks = []
for number, host in enumerate(hosts):
    inside = os.environ.get("FAKE_ENTER_" + host)
    enter = ["nsenter", "--target", inside, "--net", "--uts"] if inside else []
    log = open(options["output"].replace("%N", host), "a" if options["open-mode"] == "append" else "w")
    numbers = {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURM_LOCALID": "0"}
    tasks.append(subprocess.Popen(enter + command, stdout=log, stderr=log, env=os.environ | numbers))
failed = 0
while any(task.poll() is None for task in tasks) or (not failed and any(task.poll() for task in tasks)):
    if not failed and (failed := next((code for task in tasks if (code := task.poll())), 0)):
        for task in tasks:
            task.terminate()
    time.sleep(0.05)
sys.exit(abs(failed))
"""

SCONTROL = """
import os, sys
if sys.argv[1] in ("update", "requeue"):
    open(sys.argv[1] + "s", "a").write(" ".join(sys.argv[2:]) + "\\n")
else:
    assert sys.argv[1:3] == ["show", "hostnames"], sys.argv
    count = int(sys.argv[3].removesuffix("]").split("-")[1])
    for host in os.environ["FAKE_HOSTS"].split()[:count]:
        print(host)
"""


class Job(NamedTuple):
    """Outcome of a submission: the job's exit status and the output of the batch script."""

    status: int
    out: str


class Cluster(NamedTuple):
    """A folder of programs, and one to submit from that has this repository's code and nothing that it left behind."""

    programs: Path
    home: Path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "OMP_NUM_THREADS") if name in os.environ}
        return kept | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "FAKE_HOSTS": "localhost 127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "",
            **more,
        }

    def submit(self, command: str, timeout: float = 120, **environment: str) -> Job:
        """Runs a line as typed in the folder to submit from; `sbatch` in it waits for the job to end."""
        (self.home / "slurm-4242.status").unlink(missing_ok=True)
        status, out = self.home / "slurm-4242.status", self.home / "slurm-4242.out"
        with subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.home,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                _, said = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:  # every process of the job, whatever session it is in
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                raise
        assert status.is_file(), said
        return Job(int(status.read_text()), out.read_text())


def make_cluster(directory: Path) -> Cluster:
    cluster = Cluster(directory / "programs", directory / "home")
    for folder in cluster:
        folder.mkdir()
    for name, source in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        write_python_program(cluster.programs / name, source)
    for name in ("launch", "lightseq", "llama2", "llama3"):
        (cluster.home / name).symlink_to(ROOT / name)
    return cluster
