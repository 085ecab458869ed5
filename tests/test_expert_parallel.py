"""Expert parallelism: losses, weights and resumed runs equal those of one process, on every mesh."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from worlds import spawn

from benchmarks.tiny_models import ids, plain_model, tiny_config
from lightseq.cli import BOTH
from lightseq.models.weights import WEIGHTS
from lightseq.training.train import train

# Adam's first steps move a weight whose gradient is all but zero by the whole rate, so a high one magnifies rounding.
FLAGS = "--max_steps 4 --save_strategy steps --save_steps 2 --learning_rate 3e-3 --lr_scheduler_type constant"
ROWS = 8


def write_inputs(folder: Path, model_type: str, **changes: Any) -> None:
    """Writes a tiny checkpoint and rows of tokens."""
    plain_model(tiny_config(model_type, **changes)).save_pretrained(folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            file.write(json.dumps({"input_ids": ids()[0].roll(row).tolist()}) + "\n")


def _train(_rank: int, folder: Path, runs: dict[str, tuple[int, str]]) -> None:
    """Trains with the flags of each run, which meets at its own port and writes to the folder of its name."""
    dist.destroy_process_group()
    for name, (port, flags) in runs.items():
        os.environ["MASTER_PORT"] = str(port)
        given = ["--model_name_or_path", str(folder / "model"), "--data_path", str(folder / "rows.jsonl")]
        given += ["--model_max_length", str(ids().shape[1]), "--output_dir", str(folder / name)]
        train(BOTH, [*given, *FLAGS.split(), *flags.split()], "test")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the caller ends


def train_all(world: int, folder: Path, runs: dict[str, str]) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    spawn(world, _train, folder, {name: (store.port, runs[name]) for name, store in zip(runs, stores, strict=True)})


def losses_of(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def check_equal(run: Path, reference: Path) -> None:
    """Compares losses, and the weights that the run began with and those it ended with."""
    expected, found = losses_of(reference), losses_of(run)
    assert found == pytest.approx(expected[-len(found) :], abs=1e-5), run.name
    want, got = (load_file(folder / "checkpoint-4" / WEIGHTS) for folder in (reference, run))
    assert want.keys() == got.keys()
    for name, weight in want.items():
        assert (got[name] - weight).norm() <= 1e-4 * weight.norm(), (run.name, name)


def test_ranks_with_different_sequences_share_experts(tmp_path: Path) -> None:
    write_inputs(tmp_path, "qwen3_moe")
    train_all(1, tmp_path, {"one": "--gradient_accumulation_steps 2"})
    train_all(2, tmp_path, {"two": "--sequence_parallel_size 1 --expert_parallel_size 2"})
    check_equal(tmp_path / "two", tmp_path / "one")


# Ranks, those that share a sequence, those with different experts, and accumulated passes: four sequences a step.
MESHES = [(2, 2, 2, 4), (2, 1, 2, 2), (4, 2, 2, 2), (4, 4, 2, 4), (4, 2, 4, 2), (4, 1, 4, 1), (3, 3, 1, 4)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_every_mesh_equals_one_process_and_resumes_on_another(model_type: str, tmp_path: Path) -> None:
    write_inputs(tmp_path, model_type)
    train_all(1, tmp_path, {"one": "--gradient_accumulation_steps 4"})
    previous = "one"
    for world in (2, 3, 4):
        runs = {}
        for ranks, sequence, experts, passes in MESHES:
            flags = f"--sequence_parallel_size {sequence} --expert_parallel_size {experts}"
            flags += f" --gradient_accumulation_steps {passes}"
            name = f"{ranks}-{sequence}-{experts}"
            if ranks == world:
                resume = f" --resume_from_checkpoint {tmp_path / previous / 'checkpoint-2'}"
                runs |= {name: flags, f"{name}-resumed": flags + resume}
                previous = name
        train_all(world, tmp_path, runs)
        for name in runs:
            check_equal(tmp_path / name, tmp_path / "one")
