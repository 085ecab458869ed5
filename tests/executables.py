"""Executable scripts for tests, in the place of programs such as srun."""

import shlex
import sys
from pathlib import Path


def write_python_program(path: Path, source: str) -> None:
    """Writes a Python script that runs with this interpreter, whose path may have spaces; a shebang's may not.

    To sh, the second line is a command; to Python, the second and third are a string.
    """
    path.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n{source}")
    path.chmod(0o755)
