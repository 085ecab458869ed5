"""Knows which module may import which, and reads the sources to see that they do."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lightseq", "llama2", "llama3", "data_gen", "launch", "analysis")

# A module imports from its own layer or a lower one. Modules of a sub-package (lightseq/kernels/...) take its layer.
LAYERS = {
    "lightseq.layout": 0,
    "lightseq.lengths": 0,
    "lightseq.segments": 0,
    "lightseq.schedule": 0,
    "lightseq.documents": 0,
    "lightseq.gathered": 2,
    "lightseq.placement": 0,
    "lightseq.schedule_cost": 0,
    "lightseq.schedule_load": 0,
    "lightseq.schedule_time": 0,
    "lightseq.schedule_choice": 0,
    "lightseq.calibration": 0,
    "lightseq.plan_layers": 0,
    "lightseq.policies": 0,
    "lightseq.schedule_proof": 0,
    "lightseq.schedule_render": 0,
    "lightseq.kernels": 1,
    "lightseq.comm": 1,
    "lightseq.symmetric": 1,
    "lightseq.transports": 1,
    "lightseq.attention": 2,
    "lightseq.context": 2,
    "lightseq.executor": 2,
    "lightseq.accumulate": 2,
    "lightseq.bundles": 2,
    "lightseq.passes": 2,
    "lightseq.program": 2,
    "lightseq.remat": 2,
    "lightseq.low_rank": 2,
    "lightseq.trace": 0,
    "lightseq.trace_host": 0,
    "lightseq.traffic": 0,
    "lightseq.keeping": 1,
    "lightseq.mlp": 2,
    "lightseq.projections": 2,
    "lightseq.pinned": 1,
    "lightseq.offload": 2,
    "lightseq.mesh": 2,
    "lightseq.environment": 2,
    "lightseq.meeting": 2,
    "lightseq.architecture": 3,
    "lightseq.adapters": 3,
    "lightseq.stopwatch": 2,
    "lightseq.garbage": 2,
    "lightseq.masking": 2,
    "lightseq.parallelize": 3,
    "lightseq.hf": 3,
    "lightseq.tiled": 3,
    "lightseq.weights": 3,
    "lightseq.data": 3,
    "lightseq.packing": 3,
    "lightseq.tokens": 3,
    "lightseq.tokenizer": 3,
    "lightseq.examples": 3,
    "lightseq.pickles": 3,
    "lightseq.lazy_texts": 3,
    "lightseq.rows": 3,
    "lightseq.samples": 3,
    "lightseq.corpus": 3,
    "lightseq.progress": 3,
    "lightseq.loss": 3,
    "lightseq.flops": 3,
    "lightseq.fp8": 3,
    "lightseq.deepspeed_config": 3,
    "lightseq.config_checks": 3,
    "lightseq.config": 3,
    "lightseq.command_line": 3,
    "lightseq.family": 3,
    "lightseq.presets": 0,
    "lightseq.hub": 3,
    "lightseq.optimization": 3,
    "lightseq.trainer": 4,
    "lightseq.training": 4,
    "lightseq.watched": 4,
    "lightseq.engine": 4,
    "lightseq.deepspeed_engine": 4,
    "lightseq.prepare": 4,
    "lightseq.window": 4,
    "lightseq.profiling": 4,
    "lightseq.terminal": 4,
    "lightseq.checkpoint": 4,
    "lightseq.merge": 4,
    "lightseq.saver": 4,
    "lightseq.saving": 4,
    "lightseq.sharding": 4,
    "lightseq.endings": 4,
    "lightseq.journal": 4,
    "lightseq.run_facts": 4,
    "lightseq.disk": 4,
    "lightseq.manifest": 3,
    "lightseq.source": 3,
    "lightseq.randomness": 3,
    "lightseq.staging": 3,
    "lightseq.state_files": 3,
    "lightseq.metrics": 4,
    "lightseq.planner": 4,
    "lightseq.plan": 4,
    "lightseq.plan_attention": 4,
    "lightseq.plan_cli": 4,
    "lightseq.plan_memory": 4,
    "lightseq.plan_rates": 4,
    "lightseq.plan_report": 4,
    "lightseq.plan_run": 4,
    "lightseq.plan_time": 4,
    "lightseq.plan_training": 4,
    "lightseq.memory": 4,
    "lightseq.watchdog": 4,
    "lightseq.preemption": 4,
    "lightseq.rehearsal": 4,
    "lightseq.perplexity": 4,
    "lightseq.evaluate": 4,
    "lightseq.evaluation_tasks": 4,
    "lightseq.needle": 4,
    "lightseq.retrieval": 4,
    "lightseq.verify": 4,
    "lightseq.verify_kernels": 4,
    "lightseq.verify_machines": 4,
    "lightseq.verify_model": 4,
    "lightseq.verify_plain": 4,
    "lightseq.verify_report": 4,
    "lightseq.verify_transport": 4,
    "lightseq.cli": 5,
    "lightseq.__init__": 5,
    "lightseq.__main__": 5,
    "llama2": 5,
    "llama3": 5,
    "data_gen": 5,
    "launch": 5,
    "analysis": 5,
}

# The only places that may look at the environment.
READ_ENVIRONMENT = ("lightseq.environment", "lightseq.mesh", "launch")


@dataclass(frozen=True)
class Module:
    """A source file under the name it is imported by; packages keep their `.__init__`."""

    name: str
    source: str

    @property
    def unit(self) -> str:
        """The row of LAYERS this module belongs to."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if parts[0] == "lightseq" else parts[0]


def modules() -> Iterator[Module]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield Module(name, path.read_text(encoding="utf-8"))


def imports(module: Module) -> set[str]:
    """Every dotted name the module imports, at its top or inside a function, relative or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from lightseq import data` imports a module, `from lightseq.data import Batch` a name inside one.
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def unit_of(imported: str) -> str:
    """The row of LAYERS that an import reaches; a bare name of the package comes from its `__init__`."""
    package, _, rest = imported.partition(".")
    if package != "lightseq":
        return package
    unit = f"lightseq.{rest.split('.')[0]}"
    path = ROOT / unit.replace(".", "/")
    exists = rest != "" and (unit in LAYERS or path.is_dir() or path.with_suffix(".py").exists())
    return unit if exists else "lightseq.__init__"


def units(module: Module) -> set[str]:
    """The rows of LAYERS that a module imports from, its own apart."""
    return {unit for name in imports(module) if (unit := unit_of(name)) != module.unit}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def reads_environment(module: Module) -> bool:
    tree = ast.parse(module.source)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool({"environ", "getenv"} & attributes) or bool({"os.environ", "os.getenv"} & imports(module))


def code_lines(source: str) -> set[str]:
    """The lines that do something: no imports, docstrings or tables of facts, nor what makes a file a script."""
    tree = ast.parse(source)
    dropped = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) or is_docstring(node)]
    dropped += [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    dropped += [node for node in tree.body if re.search(r"__name__|sys\.path", ast.unparse(node))]
    numbers = {number for node in dropped for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = {line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in numbers}
    return {line for line in lines if len(line) > 25 and not line.startswith("#")}


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def texts() -> Iterator[tuple[Path, str]]:
    """Every text a person wrote in this repository, by path; what runs and tools leave behind is skipped."""
    made = re.compile(r"^(data|outputs|logs|build|dist|shared|__pycache__|.*\.egg-info|\.(?!ci$).*)$")
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.is_dir():
                pending += [] if made.match(path.name) else [path]
            elif not path.is_symlink() and path.stat().st_size < 2**20:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="ignore")


def test_every_module_has_a_layer() -> None:
    missing = {module.unit for module in modules()} - LAYERS.keys()
    assert not missing, f"add {sorted(missing)} to LAYERS in tests/test_layering.py, in the layer the module belongs to"


def test_imports_point_down_or_sideways() -> None:
    upward = [
        f"{module.name} (layer {LAYERS[module.unit]}) imports {unit} (layer {LAYERS[unit]})"
        for module in modules()
        if module.unit in LAYERS
        for unit in sorted(units(module))
        if unit in LAYERS and LAYERS[unit] > LAYERS[module.unit]
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("llama2", "llama3"),
        ("llama3", "llama2"),
        ("lightseq.kernels", "lightseq.comm"),
        ("lightseq.comm", "lightseq.kernels"),
        ("analysis", "launch"),
        ("analysis", "lightseq.trainer"),
        ("analysis", "lightseq.training"),
        ("analysis", "torch"),
    ],
)
def test_some_modules_never_meet(importer: str, imported: str) -> None:
    met = [
        f"{module.name} imports {name}"
        for module in modules()
        if module.unit == importer
        for name in sorted(imports(module))
        if within(name, imported)
    ]
    assert not met, "\n".join(met)


def test_layer_0_knows_no_process_group() -> None:
    for module in modules():
        if LAYERS.get(module.unit) == 0:
            used = {ast.unparse(node) for node in ast.walk(ast.parse(module.source)) if isinstance(node, ast.Attribute)}
            assert not [name for name in used | imports(module) if within(name, "torch.distributed")], module.name


def test_the_environment_is_read_where_it_may_be() -> None:
    readers = [module.name for module in modules() if reads_environment(module) and module.unit not in READ_ENVIRONMENT]
    assert not readers, f"pass what these modules read from the environment in as an argument: {readers}"


def test_no_file_points_outside_the_repository() -> None:
    # Put together here so that this file does not find itself.
    outside = ("/".join(("..", "shared")), "/" + "work" + "/")
    found = [f"{path}: {word}" for path, text in texts() for word in outside if word in text]
    assert not found, "\n".join(found)


def test_llama2_and_llama3_share_no_line_of_code() -> None:
    lines = {
        family: set().union(*(code_lines(module.source) for module in modules() if module.unit == family))
        for family in ("llama2", "llama3")
    }
    shared = sorted(lines["llama2"] & lines["llama3"])
    assert not shared, "these lines stand in both families and belong in lightseq/:\n" + "\n".join(shared)


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "import torch.distributed as dist\ndef f():\n    from .comm import send\n    from lightseq import data\n"
    module = Module("lightseq.trainer", source)
    assert imports(module) == {"torch.distributed", "lightseq.comm.send", "lightseq.data"}
    assert units(module) == {"torch", "lightseq.comm", "lightseq.data"}
    inside = Module("lightseq.kernels.cudnn", "from ..comm import send\nfrom .base import Kernel\n")
    assert units(inside) == {"lightseq.comm"}
    assert units(Module("lightseq.data", "from lightseq import __version__\nimport lightseq\n")) == {
        "lightseq.__init__"
    }


def test_code_lines_leave_out_imports_docstrings_and_tables() -> None:
    source = (
        '"""A module of which this is the docstring."""\n'
        "from lightseq.family import Family, resolve\n"
        'TABLE = {"num_hidden_layers_of_it": 1}\n'
        "def patch(model):\n"
        '    """A function of which this is the docstring."""\n'
        "    from lightseq.hf import patch_the_model\n"
        "    return patch_the_model(model, TABLE)\n"
    )
    assert code_lines(source) == {"return patch_the_model(model, TABLE)"}


def test_both_ways_to_read_the_environment_are_seen() -> None:
    assert reads_environment(Module("lightseq.data", "import os\nos.environ['RANK']\n"))
    assert reads_environment(Module("lightseq.data", "from os import getenv\n"))
    assert not reads_environment(Module("lightseq.data", "import os\nos.path.join('a', 'b')\n"))
