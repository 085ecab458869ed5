"""Expert parallelism: losses, weights and resumed runs equal those of one process, on every mesh."""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from worlds import spawn

from benchmarks.tiny_models import ids, plain_model, tiny_config
from lightseq.cli import BOTH
from lightseq.distributed.parallel_dims import parallel_dims, whole_tensor
from lightseq.distributed.world import World
from lightseq.memory import offload
from lightseq.models.weight_files import WEIGHTS
from lightseq.parts.changes import Changes
from lightseq.parts.expert_parallel import EXPERT, EXPERT_DATA, expert_group, shard_experts
from lightseq.parts.experts import experts_modules
from lightseq.parts.fit import fit
from lightseq.parts.part import Choices, Ranks
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
    offload.MIN_BYTES = 0
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


@pytest.mark.compat("5.20")
def test_ranks_with_different_sequences_share_experts(tmp_path: Path) -> None:
    write_inputs(tmp_path, "qwen3_moe")
    train_all(1, tmp_path, {"one": "--gradient_accumulation_steps 2"})
    flags = "--sequence_parallel_size 1 --expert_parallel_size 2"
    resumed = f"--gradient_accumulation_steps 2 --resume_from_checkpoint {tmp_path / 'two' / 'checkpoint-2'}"
    train_all(2, tmp_path, {"two": flags, "offloaded": f"{flags} --offload activations", "on another mesh": resumed})
    for name in ("two", "offloaded", "on another mesh"):
        check_equal(tmp_path / name, tmp_path / "one")


def gather_on_the_mesh_of_experts(rank: int, expert_size: int) -> None:
    """Also on one whose ranks do not ascend where its axes are joined: [[0, 2], [1, 3]]."""
    world = World(rank, dist.get_world_size(), rank, dist.get_world_size(), torch.device("cpu"))
    mesh = parallel_dims(world, expert_size=expert_size).expert_mesh
    assert mesh is not None
    whole = torch.arange(24.0 * 24 * 2).view(24, 24, 2)
    for placements in product((Shard(0), Shard(1), Replicate()), repeat=2):
        part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        assert torch.equal(whole_tensor(part), whole), placements
    ones = DTensor.from_local(torch.ones(3), mesh, (Partial(), Partial()), run_check=False)
    assert whole_tensor(ones).tolist() == [world.size] * 3
    assert whole_tensor(whole) is whole


@pytest.mark.compat
@pytest.mark.parametrize(("world", "expert_size"), [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_tensors_are_gathered_whole_on_every_mesh_of_experts(world: int, expert_size: int) -> None:
    spawn(world, gather_on_the_mesh_of_experts, expert_size)


def saved_by_sharded_experts(_rank: int, gathers_again: bool, count: int) -> dict[str, int]:
    """Returns the number of saved whole weights of experts that two ranks share, and the bytes that are offloaded."""
    model, plain = (plain_model(tiny_config("qwen3_moe", num_experts=count)) for _ in range(2))
    with torch.no_grad():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=(EXPERT, EXPERT_DATA))
        group = expert_group(mesh, torch.float32, gathers_again)
        fit([model], Choices(groups_experts=True), Ranks(experts=group), Changes())
        shard_experts(model, mesh)
        for name, weight in plain.named_parameters():
            if isinstance(part := model.get_parameter(name), DTensor):
                part.to_local().copy_(distribute_tensor(weight, mesh, part.placements).to_local())
    shapes, saved = set[torch.Size](), list[torch.Size]()
    for _, experts in experts_modules(plain):
        shapes |= {weight.shape for weight in experts.parameters()}
    with saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        model(input_ids=ids(), labels=ids(), use_cache=False)
    offload.MIN_BYTES = 0
    host = offload.Offload(torch.device("cpu"), offload.HostBufferPool(float("inf"), pinned=False))
    host.wrap(model.model.layers, model.model.norm)
    model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    plain(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    for name, weight in plain.named_parameters():
        grad: Any = model.get_parameter(name).grad
        if isinstance(grad, DTensor):  # of two ranks with the same tokens
            grad = whole_tensor(grad) / 2
        assert (grad - weight.grad).norm() <= 1e-5 * weight.grad.norm(), name
    return {"saved": sum(shape in shapes for shape in saved), "offloaded": host.offloaded_bytes}


@pytest.mark.parametrize("count", [4, 3])  # split by expert, and by the second dimension
def test_gathered_experts_wait_for_the_backward_pass_only_if_asked_to(count: int) -> None:
    again, kept = (spawn(2, saved_by_sharded_experts, gathers_again, count)[0] for gathers_again in (True, False))
    assert again["saved"] == 0
    assert kept["saved"] == 4  # two weights in each of two layers
    assert 0 < kept["offloaded"] == again["offloaded"]  # weights stay on the device


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
