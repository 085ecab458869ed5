"""A process that starts over runs the same command again, with its launch, attempt and memory limit."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import os, sys
from lightseq.distributed.start_over import attempt, launch_id, memory_limit, start_over
print(os.getpid(), sys.argv[1:], attempt(), launch_id(), memory_limit(), os.environ["MASTER_PORT"], flush=True)
if attempt() < 2:
    start_over("one", 2e9 / (1 + attempt()))
"""


def test_a_process_starts_over_with_its_command_launch_and_memory_limit(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"PYTHONPATH": str(ROOT), "MASTER_PORT": "65534"}
    done = subprocess.run(
        [sys.executable, f"{tmp_path}/program.py", "a b"], env=environment, capture_output=True, text=True, timeout=60
    )
    process = done.stdout.split()[0]
    assert (done.stdout.splitlines(), done.stderr) == (
        [
            f"{process} ['a b'] 0 None inf 65534",
            f"{process} ['a b'] 1 one 2000000000.0 65535",  # the old port may not be free at once
            f"{process} ['a b'] 2 one 1000000000.0 65534",
        ],
        "",
    )
