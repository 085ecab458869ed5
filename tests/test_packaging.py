"""The wheel, the lists of requirements, and the commands that an installation gives."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.forked import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


def test_the_requirements_are_the_base_matplotlib_and_deepspeed() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    extras = PROJECT["optional-dependencies"]
    assert listed == [*PROJECT["dependencies"], extras["analysis"][0], *extras["deepspeed"]]
    assert extras["analysis"][0].startswith("matplotlib") and set(extras["analysis"]) < set(extras["dev"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel of every folder that might get into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into the folder that it builds
    for path in ROOT.iterdir():
        if path.is_dir() and any(path.glob("*.py")):
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    (wheel,) = folder.glob("lightseq_long-*.whl")
    return wheel


def test_the_wheel_has_one_name_and_every_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"lightseq", f"lightseq_long-{PROJECT['version']}.dist-info"}
    for folder, inside in (("lightseq", ""), ("data_gen", "lightseq/"), ("analysis", "lightseq/")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {f"{inside}{path.relative_to(ROOT)}" for path in files} <= names


@pytest.mark.slow
def test_a_wheel_trains_and_draws_outside_the_repository(wheel: Path) -> None:
    folder = wheel.parent
    subprocess.run([*PIP, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    (folder / "none").mkdir()
    (folder / "none" / "matplotlib.py").write_text("raise ModuleNotFoundError('no matplotlib', name='matplotlib')")
    (folder / "analysis").mkdir()  # the user's own
    (folder / "analysis" / "__init__.py").write_text("raise SystemExit('not this one')")

    def run(command: str, *places: str, status: int = 0) -> str:
        path = os.pathsep.join(str(folder / place) for place in (*places, "site"))
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout

    (folder / "where.py").write_text("import lightseq; print(lightseq.__file__)")
    assert Path(run("where.py").strip()).is_relative_to(folder / "site"), "the repository was imported instead"
    assert "analyze " in run("site/bin/lightseq --help")
    run("-m lightseq data synthetic --kind zipf --documents 8 --length 256 --vocab_size 256 --output data", "none")
    printed = run(
        "-m torch.distributed.run --standalone --nproc_per_node=2 -m lightseq train --model_name_or_path tiny-llama3 "
        "--random_init --data_path data --model_max_length 256 --max_steps 2 --logging_steps 1 --save_strategy no "
        "--output_dir run",
        "none",
    )
    assert "step 2/2" in printed
    missing = run("-m lightseq analyze run", "none", status=2)
    assert missing == "analysis: error: matplotlib is not installed; pip install matplotlib\n"
    run("-m lightseq analyze run --output drawn")
    assert list((folder / "drawn").glob("*loss*"))
    run("-m lightseq analyze report . --output page.html")
    assert (folder / "page.html").is_file()


@pytest.mark.slow
def test_an_extra_is_added_without_replacing_the_clone(tmp_path: Path) -> None:
    """Installs as make does, then with an extra as the pages say: the clone's own files are imported both times."""
    source, prefix = tmp_path / "lightseq", tmp_path / "environment"
    for name in ("lightseq", "data_gen", "analysis"):
        (source / name).mkdir(parents=True)
        shutil.copy(ROOT / name / "__init__.py", source / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for what in (".[analysis]", ".[lora]"):
        install = [*PIP, "install", "--no-deps", "--no-build-isolation", "--ignore-installed"]
        subprocess.run([*install, "--prefix", prefix, "-e", what], cwd=source, check=True)
        (found,) = prefix.rglob("*.pth")
        assert found.read_text().strip() == str(source) and not list(prefix.rglob("*finder*"))


def test_pages_install_extras_without_replacing_the_clone() -> None:
    named = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    named += [ROOT / name for name in ("Makefile", "pyproject.toml", "requirements.txt")]
    lines = [line for path in named for line in path.read_text().splitlines()]
    own = [line for line in lines if re.search(r"""install .*["' ]\.(\[|["'` ]|$)""", line)]
    assert len(own) >= 5 and not [line for line in own if " -e " not in line]


def test_a_clone_runs_its_own_folders_from_any_directory(tmp_path: Path) -> None:
    (tmp_path / "data_gen").mkdir()
    (tmp_path / "data_gen" / "__init__.py").write_text("raise SystemExit('the folder of the user')")
    words = "lightseq data synthetic --kind uniform --documents 2 --length 8 --output made"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", *words.split()], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "made" / "meta.json").is_file()
