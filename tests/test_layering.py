"""Knows which module may import which, and reads the sources to see that they do."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from lightseq.kernels.recurrent.scan_kernel_choice import MODULES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lightseq", "llama2", "llama3", "data_gen", "launch", "analysis")

# From the ground up. A package imports from the floors below its own, and from no other package on its own floor.
FLOORS = (
    ("lightseq.utils",),
    ("lightseq.profiling", "lightseq.schedule", "lightseq.comm"),
    ("lightseq.sequence",),
    ("lightseq.distributed", "lightseq.kernels"),
    ("lightseq.config",),
    ("lightseq.attention", "lightseq.recurrent"),
    ("lightseq.models",),
    ("lightseq.parts",),
    ("lightseq.architecture",),
    ("lightseq.data",),
    ("lightseq.memory", "lightseq.objectives", "lightseq.sequence_parallel"),
    ("lightseq.hf", "lightseq.plan"),
    ("lightseq.checkpoint", "lightseq.parallelize", "lightseq.integrations"),
    ("lightseq.training",),
    ("lightseq.tools",),
    ("llama2", "llama3"),
    ("lightseq.cli",),
    ("lightseq.__main__", "data_gen", "analysis"),
    ("launch",),
)
FLOOR = {package: number for number, row in enumerate(FLOORS) for package in row}

# Modules that a package loads only when a user asks for a name of theirs. The package does not depend on them, so they
# may stand on any floor. Nothing else of ours passes a whole name to `import_module`.
LATE_IMPORTS = {
    "lightseq.__init__": {"lightseq.utils.source"},  # __version__
    "lightseq.hf.__init__": {"lightseq.plan.make_plan"},  # hf.plan_memory
}

# The only places that may look at the environment.
READ_ENVIRONMENT = (
    *("lightseq.distributed.environment", "lightseq.distributed.start", "lightseq.distributed.start_over"),
    *("lightseq.distributed.world", "lightseq.distributed.rank_launcher", "lightseq.distributed.job_launchers"),
    "launch",
)


# The only files that set a forward or a class of a module themselves: wrappers of whole layers, and the head, which
# gets its own forward back after each pass. Others record what they change (`parts/changes.py`).
SET_FORWARDS = {
    *("lightseq.memory.remat", "lightseq.memory.offload", "lightseq.memory.recomputation"),
    *("lightseq.integrations.split_model", "lightseq.parts.head"),
}


@dataclass(frozen=True)
class Module:
    """A source file under the name it is imported by; packages keep their `.__init__`."""

    name: str
    source: str

    @property
    def package(self) -> str:
        return package_of(self.name)


@cache
def modules(names: tuple[str, ...] = PACKAGES) -> tuple[Module, ...]:
    found = [path for package in names for path in sorted((ROOT / package).rglob("*.py"))]
    dotted = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found]
    return tuple(Module(name, path.read_text(encoding="utf-8")) for name, path in zip(dotted, found, strict=True))


@cache
def nodes(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


@cache
def imports(module: Module) -> set[str]:
    """Every dotted name the module imports, at its top or inside a function, relative or not."""
    found: set[str] = set()
    for node in nodes(module.source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from lightseq import data` imports a module, `from lightseq.data.batches import Batch` a name inside one.
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def late_imports(module: Module) -> set[str]:
    """Returns lightseq's modules that calls of `import_module` name."""
    calls = [node for node in nodes(module.source) if isinstance(node, ast.Call)]
    named = [call.args[0] for call in calls if ast.unparse(call.func).endswith("import_module")]
    found = {node.value for node in named if isinstance(node, ast.Constant)}
    return {name for name in found if within(str(name), "lightseq")}


def kernels_by_name() -> set[tuple[str, str]]:
    """Returns the modules, and classes inside them, that lightseq's kernels import by name ('' for a whole module)."""
    calls = [node for module in modules() for node in nodes(module.source) if isinstance(node, ast.Call)]
    found = {
        (f"lightseq.kernels.attention.{call.args[0].value}", str(call.args[1].value))
        for call in calls
        if ast.unparse(call.func) == "_class" and all(isinstance(arg, ast.Constant) for arg in call.args)
    }
    fused = [call for call in calls if ast.unparse(call.func) == "fused_kernels"]
    names = {call.args[1].value for call in fused if len(call.args) > 1} | {"copies"}
    found |= {(f"lightseq.kernels.fused.{name}", "") for name in names}
    return found | {(f"lightseq.kernels.recurrent.{module}", kind) for module, kind in MODULES.values()}


def package_of(name: str) -> str:
    """Returns the package that a module or a name inside one is in: below lightseq its first folder or file."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "lightseq" else parts[0]


def packages(module: Module) -> set[str]:
    """Returns the packages that a module imports from, its own apart."""
    return {package for name in imports(module) if (package := package_of(name)) != module.package}


def circles(files: list[Module]) -> list[list[str]]:
    """Returns the groups of files that reach each other by imports (strongly connected components)."""
    names = {file.name for file in files}
    reached = {
        file.name: {name for x in imports(file) if (name := file_of(x, names)) not in (None, file.name)}
        for file in files
    }
    while True:  # the transitive closure
        more = {name: near.union(*(reached[x] for x in near)) for name, near in reached.items()}
        if more == reached:
            break
        reached = more
    groups = {tuple(sorted(x for x in reached[name] if name in reached[x])) for name in names if name in reached[name]}
    return sorted(map(list, groups))


def by_folder(files: Iterable[Module]) -> list[Module]:
    """Returns a module for each folder, which imports the folders that its files import from."""
    names, found = {file.name for file in files}, dict[str, set[str]]()
    for file in files:
        targets = {target for name in imports(file) if (target := file_of(name, names)) is not None}
        found.setdefault(folder_of(file.name), set()).update(map(folder_of, targets))
    return [Module(name, "\n".join(f"import {target}" for target in sorted(to - {name}))) for name, to in found.items()]


def folder_of(name: str) -> str:
    """Returns the folder of a file; a file that stands in `lightseq` itself is a package of its own."""
    above = name.rpartition(".")[0]
    return above if "." in above or not name.startswith("lightseq.") else name


def file_of(name: str, files: set[str]) -> str | None:
    """Returns the file that an imported name is, or is defined in; None for other packages."""
    above = name.rpartition(".")[0]
    return next((found for found in (name, f"{name}.__init__", above, f"{above}.__init__") if found in files), None)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def reads_environment(module: Module) -> bool:
    tree = ast.parse(module.source)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool({"environ", "getenv"} & attributes) or bool({"os.environ", "os.getenv"} & imports(module))


def texts() -> Iterator[tuple[Path, str]]:
    """Every text a person wrote in this repository, by path; what runs and tools leave behind is skipped."""
    made = re.compile(r"^((data|outputs|logs|build|dist|shared)|(.*/)?(__pycache__|[^/]*\.egg-info|\.(?!ci$)[^/]*))$")
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.is_dir():
                pending += [] if made.match(path.relative_to(ROOT).as_posix()) else [path]
            elif path.name != ".git" and not path.is_symlink() and path.stat().st_size < 2**20:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="ignore")


def test_every_package_has_a_floor() -> None:
    missing = {m.package for m in modules() if m.package not in FLOOR and m.name != "lightseq.__init__"}
    assert not missing, f"add {missing} to FLOORS in tests/test_layering.py"


def test_packages_import_from_floors_below() -> None:
    """Imports inside functions and under TYPE_CHECKING count too; so no packages import each other in a circle."""
    upward = [
        f"{module.name} imports {package}, which is not below it"
        for module in modules()
        for package in sorted(packages(module))
        if FLOOR.get(package, -1) >= FLOOR.get(module.package, 0)
    ]
    assert not upward, "\n".join(upward)


def test_only_the_listed_modules_are_imported_late() -> None:
    found = {module.name: late for module in modules() if (late := late_imports(module))}
    assert found == LATE_IMPORTS


def test_modules_that_only_a_gpu_imports_exist() -> None:
    """Kernels are imported by name when a tensor is on a GPU, so a module that was renamed fails nowhere else."""
    named = kernels_by_name()
    assert {"lightseq.kernels.fused.copies", "lightseq.kernels.attention.flash_attn"} <= {name for name, _ in named}
    sources = {module.name: module.source for module in modules()}
    for name, kind in sorted(named):
        assert name in sources, f"{name} is imported by name and does not exist"
        defined = {node.name for node in nodes(sources[name]) if isinstance(node, ast.ClassDef)}
        assert not kind or kind in defined, f"{name} defines no {kind}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    found = circles(list(modules((*PACKAGES, "benchmarks"))))
    assert not found, "; ".join(" and ".join(circle) for circle in found)


def test_no_folders_import_each_other_in_a_circle() -> None:
    """A folder inside another counts as one of its own."""
    found = circles(by_folder(modules()))
    assert not found, "; ".join(" and ".join(circle) for circle in found)


def test_a_circle_of_folders_is_found() -> None:
    below = Module("lightseq.kernels.fused.launches", "from lightseq.kernels.transform import Transform")
    above = Module("lightseq.kernels.transform", "")
    user = Module("lightseq.kernels.fragment_convolution", "from lightseq.kernels.fused import launches")
    assert circles(by_folder((below, above))) == []
    assert circles(by_folder((below, above, user))) == [["lightseq.kernels", "lightseq.kernels.fused"]]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("lightseq.kernels", "lightseq.comm"),
        ("lightseq.hf", "lightseq.config"),
        ("analysis", "lightseq.training"),
        ("analysis", "torch"),
        ("lightseq", "matplotlib"),  # needed when something is drawn, not when a model is trained
    ],
)
def test_packages_that_must_not_import_each_other_do_not(importer: str, imported: str) -> None:
    met = [
        f"{module.name} imports {name}"
        for module in modules()
        if within(module.name, importer)
        for name in sorted(imports(module))
        if within(name, imported)
    ]
    assert not met, "\n".join(met)


def test_schedules_know_no_process_group() -> None:
    for module in modules():
        if module.package == "lightseq.schedule":
            used = {ast.unparse(node) for node in ast.walk(ast.parse(module.source)) if isinstance(node, ast.Attribute)}
            assert not [name for name in used | imports(module) if within(name, "torch.distributed")], module.name


def test_the_environment_is_read_where_it_may_be() -> None:
    readers = [
        module.name
        for module in modules()
        if reads_environment(module) and not any(within(module.name, place) for place in READ_ENVIRONMENT)
    ]
    assert not readers, f"pass what these modules read from the environment in as an argument: {readers}"


def test_changes_of_modules_are_recorded() -> None:
    setters = set()
    for module in modules():
        assigned = [node.targets for node in nodes(module.source) if isinstance(node, ast.Assign)]
        names = {part.attr for targets in assigned for x in targets for part in ast.walk(x) if hasattr(part, "attr")}
        if names & {"forward", "__class__"}:
            setters.add(module.name)
    assert setters == SET_FORWARDS, "change modules through lightseq.parts.changes.Changes, which can undo it"


def test_no_file_points_outside_the_repository() -> None:
    # Put together here so that this file does not find itself.
    outside = ("/".join(("..", "shared")), "/" + "work" + "/")
    found = [f"{path}: {word}" for path, text in texts() for word in outside if word in text]
    assert not found, "\n".join(found)


def test_imports_are_found_anywhere_in_a_file() -> None:
    source = "import torch.distributed as dist\ndef f():\n    from .world import World\n    from lightseq import data\n"
    module = Module("lightseq.distributed.watchdog", source)
    assert imports(module) == {"torch.distributed", "lightseq.distributed.world.World", "lightseq.data"}
    assert packages(module) == {"torch", "lightseq.data"}
    inside = Module("lightseq.kernels.cudnn", "from ..comm import send\nfrom .base import Kernel\n")
    assert packages(inside) == {"lightseq.comm"}
    typing = "if TYPE_CHECKING:\n    from lightseq.training.loop import Trainer\n"
    assert packages(Module("lightseq.checkpoint.saver", typing)) == {"lightseq.training"}
