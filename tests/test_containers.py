"""Container files: they parse, and the files that they name exist."""

import re
import shlex
import tomllib
from pathlib import Path

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


def test_the_image_copies_files_that_exist_and_ignores_heavy_ones() -> None:
    for rest in arguments("COPY"):
        *sources, _ = rest.split()
        assert all((ROOT / source).exists() for source in sources), rest
    (command,) = arguments("CMD")
    program, script, _ = shlex.split(command.strip("[]").replace(",", " "))
    assert program == "python3" and (ROOT / script).is_file()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "data", "outputs", "logs"} <= set(ignored)


def test_the_image_installs_the_requirements_and_the_gpu_extra_at_tested_versions() -> None:
    (words,) = (shlex.split(rest) for rest in arguments("RUN") if rest.startswith("pip "))
    extra = PYPROJECT["project"]["optional-dependencies"]["gpu"]
    tested = ["--constraint", "constraints.txt", "--requirement", "requirements.txt"]
    assert words == ["pip", "install", "--no-cache-dir", *tested, *extra]


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
