"""Cells of a notebook, run in order without Jupyter: Python, and lines that begin with ! by a shell."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = re.compile(r"^!((?:.*\\\n)*.*)$", flags=re.M)  # a line that ends with \ goes on in the next


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def code_of(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in cells_of(path) if cell["cell_type"] == "code"]


def as_python(source: str) -> str:
    """Returns a cell whose commands are calls of `shell`, as Jupyter turns them into calls of its own."""
    return COMMAND.sub(lambda found: f"shell({found[1]!r})", source)


@dataclass
class Kernel:
    """Python that runs cells in one namespace, in its process's working directory."""

    environment: Mapping[str, str]
    names: dict[str, Any] = field(default_factory=dict)
    printed: str = ""  # by commands

    def run(self, source: str) -> None:
        """Runs a cell. Raises AssertionError for a command that fails, with what it printed."""
        self.names["shell"] = self.shell
        exec(compile(as_python(source), "<cell>", "exec"), self.names)

    def shell(self, command: str) -> None:
        line = re.sub(r"\{(\w+)\}", lambda found: str(self.names[found[1]]), command)
        done = subprocess.run(line, shell=True, env={**self.environment}, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        self.printed += done.stdout + done.stderr
