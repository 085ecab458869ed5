"""The wheel, the lists of requirements, and the commands that an installation gives."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import lightseq
from lightseq.cli import main
from lightseq.utils import source
from tests.forked import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


def test_the_requirements_are_the_base_matplotlib_and_deepspeed() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    extras = PROJECT["optional-dependencies"]
    assert listed == [*PROJECT["dependencies"], extras["analysis"][0], *extras["deepspeed"]]
    assert extras["analysis"][0].startswith("matplotlib") and set(extras["analysis"]) < set(extras["dev"])


PUBLISHED = ("lightseq", "data_gen", "analysis")  # what commands need
UNINSTALLED = ("llama2", "llama3", "launch")  # scripts of a checkout


def files_of(*folders: str) -> set[str]:
    """Returns the files of the repository in folders, by their paths from its root."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return {str(p.relative_to(ROOT)) for p in paths if p.is_file() and "__pycache__" not in p.parts}


def as_installed(path: str) -> str:
    return f"lightseq/{path}" if path.startswith(("data_gen/", "analysis/")) else path


def test_the_wheel_has_every_file_of_commands_below_one_name() -> None:
    found = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert found == {as_installed(path) for path in files_of(*PUBLISHED)}
    assert {"lightseq/analysis/report.html", "lightseq/analysis/configs/tiny.yaml"} <= found


def test_the_sdist_has_what_runs_uninstalled_and_no_tests(tmp_path: Path) -> None:
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    about = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "constraints.txt", "pyproject.toml"}
    assert found == files_of(*PUBLISHED, *UNINSTALLED) | about | {"PKG-INFO", ".gitignore"}


@pytest.mark.parametrize(
    ("tags", "version"),
    [(["v1.2.3"], r"1\.2\.3"), ([], r"0\.0\.1\.dev1\+g[0-9a-f]+"), (None, r"0\.0\.0")],
    ids=["a tag", "no tag", "no git"],
)
def test_the_version_comes_from_tags(tags: list[str] | None, version: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if tags is not None:
        for words in (
            "init -q",
            "add .",
            "-c user.name=a -c user.email=a@b commit -q -m one",
            *(f"tag {x}" for x in tags),
        ):
            subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    assert re.fullmatch(version, WheelBuilder(str(tmp_path)).metadata.version)


def test_the_version_is_printed_with_the_commit_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source.metadata, "version", {"lightseq-long": "1.2.3"}.__getitem__)
    for commit, printed in ((None, "lightseq 1.2.3\n"), ("abc", "lightseq 1.2.3, checkout at commit abc\n")):
        monkeypatch.setattr(source, "commit", lambda found=commit: found)
        assert main(["--version"]) == 0 and capsys.readouterr().out == printed
    assert lightseq.__version__ == "1.2.3"


def test_workflows_run_scripts_that_are_here_and_publish_without_a_token() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    jobs = {name: yaml.safe_load(text)["jobs"] for name, text in texts.items()}
    steps = [step for file in jobs.values() for job in file.values() for step in job["steps"]]
    scripts = {step["run"].split()[0] for step in steps if step.get("run", "").startswith(".ci/")}
    assert scripts == {".ci/run", ".ci/wheel"} and all(os.access(ROOT / script, os.X_OK) for script in scripts)
    publish = jobs["release"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"]["name"] == "pypi"
    assert "secrets." not in "".join(texts.values())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("lightseq_long-*.whl")
    return wheel


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
    version = run("site/bin/lightseq --version").split()[1]
    assert version == wheel.name.split("-")[1]
    run("-m lightseq data synthetic --kind zipf --documents 8 --length 256 --vocab_size 256 --output data", "none")
    printed = run(
        "-m torch.distributed.run --standalone --nproc_per_node=2 -m lightseq train --model_name_or_path tiny-llama3 "
        "--random_init --data_path data --model_max_length 256 --max_steps 2 --logging_steps 1 --save_strategy no "
        "--output_dir run",
        "none",
    )
    assert "step 2/2" in printed
    assert json.loads((folder / "run" / "run.json").read_text())["versions"]["lightseq-long"] == version
    missing = run("-m lightseq analyze run", "none", status=2)
    assert missing == "analysis: error: matplotlib is not installed; pip install matplotlib\n"
    run("-m lightseq analyze run --output drawn")
    assert list((folder / "drawn").glob("*loss*"))
    run("-m lightseq analyze report . --output page.html")
    assert (folder / "page.html").is_file()


@pytest.mark.slow
def test_an_extra_is_added_without_replacing_the_clone(tmp_path: Path) -> None:
    """Installs as make does, then with an extra as the pages say: the clone's own files are imported both times."""
    clone, prefix = tmp_path / "lightseq", tmp_path / "environment"
    for name in ("lightseq", "data_gen", "analysis"):
        (clone / name).mkdir(parents=True)
        shutil.copy(ROOT / name / "__init__.py", clone / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for what in (".[analysis]", ".[lora]"):
        install = [*PIP, "install", "--no-deps", "--no-build-isolation", "--ignore-installed"]
        subprocess.run([*install, "--prefix", prefix, "-e", what], cwd=clone, check=True)
        (found,) = prefix.rglob("*.pth")
        assert found.read_text().strip() == str(clone) and not list(prefix.rglob("*finder*"))


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
