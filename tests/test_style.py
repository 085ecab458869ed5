"""Rules of style that a program can check: how docstrings begin, and how many parameters a function has."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lightseq", "llama2", "llama3", "data_gen", "launch", "analysis", "benchmarks", "examples")
MAX_PARAMETERS = 8
RIDDLE = re.compile(r"(What|Of|Whether|Where|Which|How|That|As)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> list[tuple[Path, list[Documented]]]:
    """Returns the modules, classes and functions of each file."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT), documented(path.read_text(encoding="utf-8"))) for path in paths]


def documented(source: str) -> list[Documented]:
    return [*inside(ast.parse(source))]


def inside(node: ast.AST) -> Iterator[Documented]:
    """Yields a node and what its statements define, without a look at expressions, which are most of the nodes."""
    if isinstance(node, Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from inside(child)


def riddles(nodes: list[Documented]) -> list[str]:
    """Returns the first lines of docstrings that begin with a relative clause instead of a verb or a noun."""
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text.splitlines()[0] for text in texts if RIDDLE.match(text)]


def parameters(function: ast.FunctionDef) -> int:
    """Returns the number of parameters without self, cls or the ctx of an autograd function."""
    names = [x.arg for x in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def is_triton_kernel(function: ast.FunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [f"{path}: {line}" for path, nodes in sources() for line in riddles(nodes)]
    assert not found, "\n".join(found)


def test_functions_have_few_parameters() -> None:
    """All but Triton kernels, and functions that replace another one and so have its parameters."""
    found = [
        f"{path}:{node.lineno} {node.name} has {parameters(node)} parameters; pass an object"
        for path, nodes in sources()
        for node in nodes
        if isinstance(node, ast.FunctionDef) and parameters(node) > MAX_PARAMETERS
        if not is_triton_kernel(node) and not (ast.get_docstring(node) or "").startswith("Replaces ")
    ]
    assert not found, "\n".join(found)


def test_commands_are_spelled_as_users_type_them() -> None:
    """`lightseq NAME`, which pip installs; only the log and the entry point say `-m lightseq`."""
    typed = re.compile(r"python3? -m lightseq\b")
    paths = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths = [path for path in [*paths, *ROOT.glob("*.md")] if path.suffix in (".py", ".md", ".sh", ".yaml", ".html")]
    found = [path for path in paths if typed.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in found] == ["lightseq/__main__.py"]


def test_tensors_are_gathered_by_one_function() -> None:
    """DTensor.full_tensor raises KeyError on the mesh of experts in torch before 2.13; whole_tensor does not."""
    paths = [path for path, _ in sources() if "full_tensor()" in (ROOT / path).read_text(encoding="utf-8")]
    assert not paths, f"{', '.join(map(str, paths))}: use lightseq.distributed.parallel_dims.whole_tensor"
