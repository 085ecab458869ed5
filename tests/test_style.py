"""Docstrings that begin as the guide for contributors asks."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Folders and files whose docstrings have been rewritten; the aim is all of lightseq, llama2, llama3 and data_gen.
DONE = (
    *("data_gen", "llama2", "llama3"),
    *(f"lightseq/{name}" for name in ("checkpoint", "data", "distributed", "models", "utils")),
    *(f"lightseq/modules/{name}.py" for name in ("__init__", "fp8", "loss", "low_rank", "mlp", "projections")),
    "lightseq/memory/*.py",
)
RIDDLE = re.compile(r"(What|Of|Whether|Where|Which|How|That|As)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def files_of(pattern: str) -> list[Path]:
    return [file for path in ROOT.glob(pattern) for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def riddles(source: str) -> list[str]:
    """Returns the first lines of docstrings that begin with a relative clause instead of a verb or a noun."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Documented))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text.splitlines()[0] for text in texts if RIDDLE.match(text)]


@pytest.mark.parametrize("pattern", DONE)
def test_docstrings_begin_with_a_verb_or_a_noun(pattern: str) -> None:
    files = files_of(pattern)
    assert files, f"{pattern} matches no file"
    found = [f"{path.relative_to(ROOT)}: {line}" for path in files for line in riddles(path.read_text())]
    assert not found, "\n".join(found)


def test_a_riddle_is_found() -> None:
    assert riddles('"""Modules."""\ndef f():\n    """Of what it says."""\nclass A:\n    """Whatever."""\n') == [
        "Of what it says."
    ]
