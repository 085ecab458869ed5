"""The program as it is against the program as it was: tests/goldens.py says how the files are made."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from goldens import (
    CHECKPOINTS,
    HERE,
    SAVED_STEP,
    SCHEDULES,
    VARIANTS,
    check_ended,
    every_case,
    flags,
    keys,
    numbers,
    numbers_of_run,
    resumable,
    write_inputs,
)
from programs import Ended, programs
from worlds import spawn

NUMBERS = json.loads((HERE / "numbers.json").read_text())
# What the experiments that this project was asked to cover consist of: tests elsewhere run them.
EXPERIMENTS = {
    "llama2": ("patch.py", "presets.py", "train.py"),
    "llama3": ("patch.py", "presets.py", "train.py"),
    "launch/slurm": (
        "baseline.sbatch", "flash.sbatch", "flash_fsdp.sbatch", "fp8.sbatch", "fsdp.sbatch", "job.sh",
        "neither.sbatch", "one_node.sbatch", "several_nodes.sbatch",
    ),
    "launch/sweeps": (
        "flash.yaml", "fp8.yaml", "fsdp_vs_ddp.yaml", "remat.yaml", "scaling_llama.yaml", "schedules.yaml",
        "tiny.yaml", "weak_strong.yaml",
    ),
    "benchmarks": ("largest.py",),
    "examples/chess": ("README.md",),
}  # fmt: skip


def check(found: dict[str, dict[str, list[float]]]) -> None:
    """Allows 1e-5, as between ranks: processors add in other orders. An AMD EPYC's norms differ by 2e-6."""
    for run, values in found.items():
        for name, expected in NUMBERS[run].items():
            assert values[name] == pytest.approx(expected, rel=1e-5), f"{run} {name}"


@pytest.mark.parametrize(
    ("world", "schedules", "first"),
    [(2, 0, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 0, 3), (4, 6, 0)))],
)
def test_losses_and_gradient_norms_are_as_committed(world: int, schedules: int, first: int) -> None:
    """Each schedule with one variant, and each variant with some schedule; on four ranks those that split heads."""
    variants = list(VARIANTS)
    taken = SCHEDULES[world][schedules:]
    cases = [(s, variants[(first + place) % len(variants)]) for place, s in enumerate(taken)]
    check(numbers(world, cases))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_schedule_with_every_variant_is_as_committed(world: int) -> None:
    check(numbers(world, every_case(world)))


def test_keys_of_files_and_defaults_of_flags_are_as_committed() -> None:
    assert keys() == json.loads((HERE / "keys.json").read_text())


def test_flags_of_programs_are_as_committed() -> None:
    assert flags() == json.loads((HERE / "flags.json").read_text())


def test_files_of_the_original_experiments_are_here() -> None:
    root = HERE.parent.parent
    missing = [
        f"{folder}/{name}"
        for folder, names in EXPERIMENTS.items()
        for name in names
        if not (root / folder / name).is_file()
    ]
    assert not missing


def run_eagerly(rank: int, runs: list[str]) -> list[Ended]:
    """Runs programs without a compiler, which takes long and does the same arithmetic."""
    torch.compiler.set_stance("force_eager")
    return programs(rank, "llama3", runs)


def check_resume(world: int, kinds: list[str], folder: Path) -> None:
    """Resumes the committed checkpoints, which two ranks saved, and compares the step that follows."""
    write_inputs(folder)
    runs = []
    for kind in kinds:
        shutil.unpack_archive(HERE / "checkpoints" / f"{kind}.tar.gz", folder / kind, filter="data")
        saved = folder / kind / f"checkpoint-{SAVED_STEP}"
        runs.append(resumable(folder, kind, kind, f"--resume_from_checkpoint {saved}"))
    check_ended(runs, spawn(world, run_eagerly, runs))
    for kind in kinds:
        expected = json.loads((HERE / "checkpoints" / f"{kind}.json").read_text())
        rel = 1e-4 if kind == "adamw_8bit" else 1e-5
        for name, values in numbers_of_run(folder / kind).items():
            assert values == pytest.approx(expected[name][SAVED_STEP:], rel=rel), f"{kind} {name}"


@pytest.mark.parametrize(("world", "kinds"), [(1, ["lora", "fsdp", "adamw_8bit"]), (2, ["ddp", "deepspeed"])])
def test_checkpoints_that_were_committed_resume(world: int, kinds: list[str], tmp_path: Path) -> None:
    check_resume(world, kinds, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_checkpoints_of_every_kind_resume_on_other_ranks(world: int, tmp_path: Path) -> None:
    """DeepSpeed's only on as many ranks as saved it."""
    check_resume(world, [kind for kind in CHECKPOINTS if kind != "deepspeed" or world == 2], tmp_path)
