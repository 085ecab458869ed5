"""Help of every program answers within a second, because it imports nothing that takes longer."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.__main__ import COMMANDS as ANALYSES
from benchmarks.step import parser
from lightseq.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
SLOW = ("torch", "transformers", "matplotlib")
PROGRAMS = (
    *("lightseq", *(f"lightseq {name}" for name in COMMANDS), "llama2/train.py", "llama3/train.py"),
    *("benchmarks/step.py", "benchmarks/attention.py", "benchmarks/plan_attention.py"),
)
# These take a tenth of a second longer for rich.
PROGRAMS_WITH_TABLES = (
    *("launch.sweep", "data_gen", "data_gen synthetic", "data_gen text", "lightseq data", "lightseq analyze"),
    *("analysis", *(f"analysis {name}" for name in ANALYSES)),
)
# One process runs programs one after the other, because starting Python for each would take seconds.
SHOW_HELP = """import json, runpy, sys
programs, slow = map(json.loads, sys.argv[1:])
for words in programs:
    program, *rest = words.split()
    sys.argv = [program, *rest, "--help"]
    try:
        (runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"{words} --help exits with {end.code}"
    imported = [name for name in slow if name in sys.modules]
    assert not imported, f"{words} --help imports {imported[0]}"
"""


def show_help(programs: tuple[str, ...], slow: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SHOW_HELP, json.dumps(programs), json.dumps(slow)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


def test_help_imports_nothing_slow() -> None:
    for programs, slow in ((PROGRAMS, (*SLOW, "rich")), (PROGRAMS_WITH_TABLES, SLOW)):
        done = show_help(programs, slow)
        assert done.returncode == 0, done.stderr.splitlines()[-1]
        assert done.stdout.count("usage: ") == len(programs)


def test_a_wheel_names_the_commands_that_it_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data_gen", "analysis"):
        installed = importlib.util.spec_from_file_location(f"lightseq.{name}", ROOT / name / "__init__.py")
        assert installed is not None and installed.loader is not None
        module = importlib.util.module_from_spec(installed)
        monkeypatch.setitem(sys.modules, f"lightseq.{name}", module)
        installed.loader.exec_module(module)
    drawing = importlib.import_module("lightseq.analysis.__main__")
    assert sys.modules["lightseq.data_gen"].PROGRAM == "lightseq data"
    assert drawing.parser("curves").prog == "lightseq analyze"
    for name in [name for name in sys.modules if name.startswith("lightseq.analysis.")]:
        monkeypatch.delitem(sys.modules, name)


def test_help_of_benchmarks_names_a_default_once_and_only_if_there_is_one() -> None:
    text = parser().format_help()
    assert "(default: None)" not in text and "(default: [])" not in text and ") (default:" not in " ".join(text.split())
    assert "timed steps (default: 7)" in text


def test_commands_that_start_ranks_list_the_flags_for_it() -> None:
    starts = [f"lightseq {name}" for name, command in COMMANDS.items() if command.on_ranks]
    assert {"lightseq train", "lightseq verify", "lightseq evaluate"} == set(starts)
    shown = show_help((*starts, "llama3/train.py", "lightseq plan"), ()).stdout
    assert shown.count("  --nproc_per_node N") == shown.count("  --max_restarts N") == len(starts)
