"""The notebook for two small GPUs: its cells run on the CPU with a tiny model, and it is stored without results."""

import ast
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from byte_level import VOCABULARY, byte_level
from executables import write_python_program
from notebooks import Kernel, as_python, cells_of, code_of
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import tiny_config

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "two_small_gpus.ipynb"
# What stands in the cells for what they say: small modules, and a model that reads bytes.
TINY = {
    '"Qwen/Qwen3-0.6B"': '"model"',
    '"16K"': '"1K"',
    "STEPS = 60": "STEPS = 4",
    "--eval_steps 20": "--eval_steps 2",
    "lightseq train": "lightseq train --nproc_per_node 2",
    "2_000 < len(source) < 50_000": "len(source) < 1_500",
    '"100"': '"5"',
}


def tiny_cells() -> list[str]:
    cells = code_of(NOTEBOOK)
    for words, tiny in TINY.items():
        assert any(words in cell for cell in cells), f"no cell says {words}"
        cells = [cell.replace(words, tiny) for cell in cells]
    return cells


def test_the_notebook_holds_short_cells_without_results() -> None:
    cells = cells_of(NOTEBOOK)
    assert len({cell["id"] for cell in cells}) == len(cells) > 15
    for cell in cells:
        assert len(cell["source"]) <= 40 and max(map(len, cell["source"])) <= 121, cell["id"]
        if cell["cell_type"] == "code":
            ast.parse(as_python("".join(cell["source"])))
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        else:
            for link in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
                assert (NOTEBOOK.parent / link).exists(), link


def test_the_notebook_installs_the_distribution_with_extras_that_it_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = (cell for cell in code_of(NOTEBOOK) if "pip install" in cell)
    name, extras = re.findall(r'LIGHTSEQ = "(\S+)"', install), re.findall(r"\[([\w,]+)\]", install)
    assert name == [project["name"]] and {*extras[0].split(",")} <= {*project["optional-dependencies"]}


def test_the_notebook_makes_chats_of_modules_that_are_not_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / f"module{number}.py").write_text(f'"""Holds {number}.\n\nMore of it."""\n\nx = {number}\n')
    (tmp_path / "bare.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    (cell,) = (cell for cell in tiny_cells() if "def chats" in cell)
    Kernel(os.environ).run(cell.replace('sysconfig.get_path("stdlib")', '"."'))
    parts = [
        [[turn["content"] for turn in json.loads(line)["messages"]] for line in (tmp_path / name).open()]
        for name in ("chats.jsonl", "held-out.jsonl")
    ]
    assert [len(part) for part in parts] == [4, 16]
    question = "Write the docstring of this module.\n\nx = {}"
    assert {tuple(turns) for part in parts for turns in part} == {
        (question.format(number), f"Holds {number}.") for number in range(20)
    }


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--load_in_4bit True"], ids=["float16", "four-bits"])
def test_every_cell_of_the_notebook_runs_on_two_cpu_processes(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    write_python_program(programs / "lightseq", "from lightseq.__main__ import run\nraise SystemExit(run())\n")
    write_python_program(programs / "pip", "")  # everything is installed
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 4096}
    AutoModelForCausalLM.from_config(tiny_config("qwen3", vocab_size=VOCABULARY, **sizes)).save_pretrained(
        tmp_path / "model"
    )
    byte_level().backend.save_pretrained(tmp_path / "model")
    changed = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for name, value in {**changed, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    display = ModuleType("IPython.display")
    display.Image = shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    kernel = Kernel(os.environ)
    for cell in tiny_cells():
        kernel.run(cell.replace('MORE = ""', f'MORE = "{more}"'))
    assert "2 (1 data x 2 sequence)" in kernel.printed and "float16 compute" in kernel.printed
    assert ("NF4" in kernel.printed) == bool(more)
    assert [Path(path).is_file() for path in shown] == [True]
    assert kernel.names["model"].config.model_type == "qwen3"
