"""The wheel, the lists of requirements, and the command that an installation gives."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.forked import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_requirements_are_the_base_and_deepspeed() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert listed == [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["deepspeed"]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel and installs it, without its requirements, into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = folder / "source"  # a build writes into the folder that it builds
    for name in ("lightseq", "llama2", "llama3", "data_gen", "analysis"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    (wheel,) = folder.glob("lightseq_long-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder


@pytest.mark.slow
def test_a_wheel_trains_outside_the_repository(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed / "site"), "OMP_NUM_THREADS": "1"}

    def run(command: str) -> str:
        words = [sys.executable, *command.split()]
        done = subprocess.run(words, cwd=installed, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (installed / "where.py").write_text("import lightseq, llama3, analysis; print(lightseq.__file__)")
    assert Path(run("where.py").strip()).is_relative_to(installed / "site"), "the repository was imported instead"
    assert "plan " in run("site/bin/lightseq --help")
    run("-m data_gen synthetic --kind zipf --documents 8 --length 256 --vocab_size 256 --output data")
    printed = run(
        "-m torch.distributed.run --standalone --nproc_per_node=2 -m lightseq train --model_name_or_path tiny-llama3 "
        "--random_init --data_path data --model_max_length 256 --max_steps 2 --logging_steps 1 --save_strategy no "
        "--output_dir run"
    )
    assert "step 2/2" in printed
    assert (installed / "run" / "metrics.jsonl").is_file()


def test_an_extra_is_added_without_replacing_the_clone(tmp_path: Path) -> None:
    """Installs as make does, then with an extra as the pages say: the clone's own files are imported both times."""
    source, prefix = tmp_path / "lightseq", tmp_path / "environment"
    for name in ("lightseq", "llama2", "llama3", "data_gen", "analysis"):
        (source / name).mkdir(parents=True)
        shutil.copy(ROOT / name / "__init__.py", source / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps"]
    for what in (".", ".[lora]"):
        words = [*pip, "--no-build-isolation", "--ignore-installed", "--prefix", str(prefix), "-e", what]
        subprocess.run(words, cwd=source, check=True)
        (found,) = prefix.rglob("*.pth")
        assert found.read_text().strip() == str(source) and not list(prefix.rglob("*finder*"))


def test_pages_install_extras_without_replacing_the_clone() -> None:
    named = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    named += [ROOT / name for name in ("Makefile", "pyproject.toml", "requirements.txt")]
    lines = [line for path in named if path.name != "log.md" for line in path.read_text().splitlines()]
    own = [line for line in lines if re.search(r"""install .*["' ]\.(\[|["'` ]|$)""", line)]
    assert len(own) >= 5 and not [line for line in own if " -e " not in line]
