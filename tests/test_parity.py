"""Whole-model parity: training across ranks equals plain transformers on one process, losses and gradients alike.

The reference is `LlamaForCausalLM` on the raw, unpadded sequences with its own loss and its own shift of the labels.
"""

import math
import pickle
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from schedules import fitting
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import NCCL_WORLDS, gpu_of, spawn

import llama2
import llama3
from lightseq.architecture.family import preset_config
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import permutation
from lightseq.distributed.world import World
from lightseq.memory import offload
from lightseq.models import random_weights, weights
from lightseq.parts import adapters, loss, mlp
from lightseq.parts.chosen_experts import build_to_train
from lightseq.schedule import head_slices
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.training.build import build_engine
from lightseq.training.engine import Update
from lightseq.training.inputs import prepare
from lightseq.training.trainer import Trainer

LENGTH = 61  # divides by no number of chunks
# With the shorter ones padded, ranks hold very different numbers of valid tokens, the last one often none.
SIZES = (61, 9, 40, 3, 61, 22, 2, 55)
BINS = 5  # sequences that all of them fill, packed
LORA_RANK = 4
LONGER = 16384  # several tiles of an MLP, several chunks of the loss, and what lookups do with many tokens
# AdamW makes whole steps of what rounding leaves of a gradient near zero: at 1e-3 ten of them drifted apart by 1.3e-5.
LEARNING_RATE, CLIP, STEPS = 3e-4, 0.5, 10
CPU = torch.device("cpu")
TORCH_COMPILE = torch.compile
_runs = count()  # each into a directory of its own
FAMILIES = {"tiny-llama2": llama2.FAMILY, "tiny-llama3": llama3.FAMILY}


class Case(NamedTuple):
    model: str
    schedule: str
    data_ranks: int
    accumulation: int
    remat: str = "attention"
    fsdp: str = "full_shard"
    tile_tokens: int = mlp.TILE_TOKENS
    offload: str = "none"
    layers_per_checkpoint: int = 1
    tile_layers: bool = False
    chunk_tokens: int = loss.CHUNK_TOKENS
    compiled: bool = False  # as the compiler traces it, run by torch's own operators
    packed: bool = False  # all documents in one step
    adapters: bool = False


class Result(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping


def _sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 512, size) for size in SIZES]


def _plain(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    model = build_to_train(config)
    weights.materialize(model, device)
    random_weights.initialize(model, seed=42)
    assert isinstance(model, LlamaForCausalLM)
    return model


def reference(
    model_name: str, sequences_per_step: int, with_adapters: bool, steps: int, device: torch.device = CPU
) -> Result:
    """One process, one sequence after the other, no padding, nothing of ours but the initial weights and the order."""
    model, data = _plain(preset_config(FAMILIES[model_name], model_name), device), _sequences()
    if with_adapters:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=targets), model
        )
        adapters.initialize(model, seed=42)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        places = range(step * sequences_per_step, (step + 1) * sequences_per_step)
        picked = [data[permutation(len(data), 42, p // len(data))[p % len(data)]] for p in places]
        targets = sum(len(ids) - 1 for ids in picked)
        total = 0.0
        for ids in picked:
            batch = torch.from_numpy(ids)[None].to(device)
            share = model(input_ids=batch, labels=batch).loss * ((len(ids) - 1) / targets)
            share.backward()
            total += share.item()
        losses.append(total)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        norms.append(torch.nn.utils.clip_grad_norm_(trained, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, gradients)


def make_trainer(
    rank: int, folder: str, model: str, device: torch.device, length: int = LENGTH, **flags: Any
) -> Trainer:
    """The product's own, on the ranks of a test."""
    config = TrainConfig(
        model_name_or_path=model, random_init=True, data_path=f"{folder}/data.pkl",
        output_dir=f"{folder}/{next(_runs)}", model_max_length=length, overwrite_output_dir=True,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=CLIP, **flags,
    )  # fmt: skip
    world_size = dist.get_world_size()
    world = World(rank, world_size, rank, world_size, device)
    inputs = prepare(config, FAMILIES.get(model, llama2.FAMILY), world)
    return Trainer(config, inputs, world, build_engine(config, inputs, world))


def train(rank: int, folder: str, case: Case, steps: int, device: torch.device) -> Result:
    mlp.TILE_TOKENS, loss.CHUNK_TOKENS, offload.MIN_BYTES = case.tile_tokens, case.chunk_tokens, 0
    head_slices.MIN_COLUMNS = 1
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:  # the compiler's own code is torch's to test, and takes minutes to make
        patch.setattr(torch, "compile", lambda f, **words: TORCH_COMPILE(f, backend="aot_eager"))
        return _train(rank, folder, case, steps, device)


def _train(rank: int, folder: str, case: Case, steps: int, device: torch.device) -> Result:
    trainer = make_trainer(
        rank, folder, case.model, device,
        max_steps=steps, gradient_accumulation_steps=case.accumulation, schedule=case.schedule, remat=case.remat,
        sequence_parallel_size=dist.get_world_size() // case.data_ranks, fsdp=case.fsdp, offload=case.offload,
        layers_per_checkpoint=case.layers_per_checkpoint, tile_layers=case.tile_layers, torch_compile=case.compiled,
        per_device_train_batch_size=1 if case.accumulation > 1 else 2, packing="best_fit" if case.packed else "none",
        lora_rank=LORA_RANK if case.adapters else None, save_strategy="no",
    )  # fmt: skip
    gradients: dict[str, Tensor] = {}
    update = trainer.engine.update

    def remember() -> Update:
        if not gradients:
            parameters = ((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad)
            gradients.update({n: p.grad.to(device).full_tensor().clone() for n, p in parameters})
        return update()

    trainer.engine.update = remember  # type: ignore[method-assign]
    losses, norms = [], []
    for step in range(steps):
        result = trainer.step(step)
        total = result.loss.clone()
        dist.all_reduce(total)
        losses.append(total.item())
        norms.append(result.grad_norm.item())
    return Result(losses, norms, gradients)


def compare(rank: int, folder: str, cases: list[Case], steps: int, device_type: str) -> list[str]:
    """Returns the differences as readable lines; empty when all is well."""
    device = gpu_of(rank) if device_type == "cuda" else CPU
    wrong: list[str] = []
    references: dict[tuple[str, int, bool], Result] = {}
    for case in cases:
        got = train(rank, folder, case, steps, device)
        if rank:
            continue
        sequences = case.data_ranks * case.accumulation * (1 if case.accumulation > 1 else 2)
        key = (case.model, len(SIZES) if case.packed else sequences, case.adapters)
        want = references.setdefault(key, None) or reference(*key, steps, device)
        references[key] = want
        label = f"{case} on {dist.get_world_size()} ranks"
        for name, expected in want.gradients.items():
            apart, size = (got.gradients[name] - expected).norm().item(), expected.norm().item()
            if not apart < 1e-5 * size and (apart or size):  # an adapter's A has none while its B is zero
                error = apart / size if size else math.inf
                wrong.append(f"{label}: gradient of {name} off by {error:.1e}")
        for what, mine, theirs in (("loss", got.losses, want.losses), ("gradient norm", got.norms, want.norms)):
            error = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
            if not error < 1e-5:
                wrong.append(f"{label}: {what} off by {error:.1e}: {mine} against {theirs}")
    return wrong


def _write_data(folder: Path) -> None:
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": [ids.tolist() for ids in _sequences()]}))


def _run(tmp_path: Path, world: int, cases: list[Case], steps: int, device_type: str = "cpu") -> None:
    _write_data(tmp_path)
    wrong = spawn(world, compare, str(tmp_path), cases, steps, device_type, device=device_type)[0]
    assert not wrong, "\n".join(wrong)


def _fitting(model: str, ranks: int) -> list[str]:
    """The schedules that can run a model on that many ranks of a sequence."""
    config = preset_config(FAMILIES[model], model)
    return fitting(ranks, config.num_attention_heads, config.num_key_value_heads)


def _everything(world: int) -> list[Case]:
    meshes = [d for d in range(1, world + 1) if world % d == 0]
    return [
        Case(model, schedule, data_ranks, accumulation)
        for model in FAMILIES
        for data_ranks in meshes
        for schedule in _fitting(model, world // data_ranks)
        for accumulation in (1, 3)
    ]


def _each_schedule(world: int, data_ranks: int) -> list[Case]:
    """Each schedule once, the models in turn; where it does not fit the mesh, on all ranks of one sequence."""
    cases = []
    for i, schedule in enumerate(SCHEDULES):
        model = "tiny-llama3" if i % 2 else "tiny-llama2"
        meshes = [d for d in (data_ranks, 1) if schedule in _fitting(model, world // d)]
        cases += [Case(model, schedule, d, 1) for d in meshes[:1]]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_model_schedule_mesh_and_accumulation_equals_one_process(world: int, tmp_path: Path) -> None:
    _run(tmp_path, world, _everything(world), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ten_steps_of_every_schedule_equal_one_process(world: int, tmp_path: Path) -> None:
    cases = [Case(m, s, 1, 3 if s == "prefix" else 1) for m in FAMILIES for s in _fitting(m, world)]
    _run(tmp_path, world, [*cases, Case("tiny-llama2", "zigzag", world, 1)], STEPS)


def _keeping(world: int) -> list[Case]:
    """Cases of storing, tiling, compiling and offloading layers, with packed documents and with adapters."""
    return [
        Case("tiny-llama3", "zigzag", world, 3, remat="full", fsdp="hybrid_shard"),
        Case("tiny-llama2", "balanced", 1, 3, remat="none", fsdp=""),
        Case("tiny-llama3", "ulysses" if world == 2 else "prefix", 1, 3, remat="none", compiled=True),
        Case("tiny-llama3", "prefix", 1, 1, tile_tokens=7, offload="both"),
        Case("tiny-llama2", "zigzag", world, 3, remat="full", offload="activations"),
        Case("tiny-llama3", "ring", 1, 3, remat="none", fsdp="", offload="activations"),
        Case("tiny-llama3", "zigzag", 1, 3, offload="activations", layers_per_checkpoint=3),
        Case("tiny-llama2", "prefix", world, 1, remat="full", layers_per_checkpoint=2),
        Case("tiny-llama3", "prefix", 1, 1, tile_tokens=7, tile_layers=True, offload="activations"),
        Case("tiny-llama2", "zigzag", 1, 3, tile_tokens=16, tile_layers=True, remat="full", layers_per_checkpoint=3),
        Case("tiny-llama3", "zigzag", world, 3, tile_layers=True, fsdp=""),
        Case("tiny-llama3", "zigzag", 1, 3, tile_tokens=7, remat="attention+mlp", offload="activations"),
        Case("tiny-llama2", "prefix", world, 1, remat="attention+mlp", layers_per_checkpoint=2),
        Case("tiny-llama3", "zigzag", 1, 3, remat="attention+linears", offload="activations"),
        Case("tiny-llama2", "prefix", world, 1, adapters=True, remat="attention+linears", layers_per_checkpoint=2),
        Case("tiny-llama3", "ring", 1, 3, compiled=True, remat="attention+linears", offload="both"),
        Case("tiny-llama3", "prefix", 1, 3, chunk_tokens=5, compiled=True, offload="both"),
        Case("tiny-llama2", "zigzag", 1, 3, tile_tokens=7, tile_layers=True, compiled=True, layers_per_checkpoint=2),
        Case("tiny-llama3", "zigzag", 1, BINS, packed=True, tile_layers=True, remat="full", offload="both"),
        Case("tiny-llama2", "ring", 1, BINS, packed=True, remat="attention+mlp", fsdp="", layers_per_checkpoint=2),
        Case("tiny-llama2", "prefix", world, 3, adapters=True, tile_tokens=7, tile_layers=True, offload="both"),
        Case("tiny-llama3", "zigzag", 1, 3, adapters=True, layers_per_checkpoint=2, offload="activations", fsdp=""),
        Case("tiny-llama2", "ulysses" if world in (2, 4) else "balanced", 1, 3, tile_tokens=7, tile_layers=True),
    ]


def _eager(world: int) -> list[Case]:
    return [case for case in _keeping(world) if not case.compiled]


def test_training_equals_one_process(tmp_path: Path) -> None:
    """Each schedule of two ranks with another way to store layers, and a data x sequence mesh."""
    cases = [
        Case("tiny-llama2", "balanced", 1, 2, remat="none", fsdp=""),
        Case("tiny-llama3", "prefix", 1, 1, tile_tokens=7, tile_layers=True, offload="both"),
        Case("tiny-llama3", "ulysses", 1, 2, layers_per_checkpoint=3, remat="attention+mlp", offload="activations"),
        Case("tiny-llama2", "striped", 1, 1, adapters=True, remat="attention+linears", layers_per_checkpoint=2),
        Case("tiny-llama2", "zigzag", 1, BINS, packed=True, remat="attention+mlp", fsdp="", layers_per_checkpoint=2),
        Case("tiny-llama3", "ring", 1, 1),
    ]
    assert {case.schedule for case in cases} == {*_fitting("tiny-llama3", 2)}
    _run(tmp_path, 2, [*cases, Case("tiny-llama3", "ring", 2, 1, remat="full", fsdp="hybrid_shard")], steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_equals_one_process_under_every_way_to_store_layers(world: int, tmp_path: Path) -> None:
    _run(tmp_path, world, _eager(world), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_compiled_training_equals_one_process(world: int, tmp_path: Path) -> None:
    _run(tmp_path, world, [case for case in _keeping(world) if case.compiled], steps=1)


@pytest.mark.parametrize("world", NCCL_WORLDS)
def test_training_on_gpus_equals_one_process(world: int, tmp_path: Path) -> None:
    """In float32, where the kernel is the plain one: everything around it."""
    cases = [*_each_schedule(world, 2), *_each_schedule(world, 1)[::2]]
    cases += [Case("tiny-llama3", "zigzag", 1, 3, fsdp=""), Case("tiny-llama3", "zigzag", 2, 3, offload="both")]
    _run(tmp_path, world, cases, steps=1, device_type="cuda")


def step_without_waiting(rank: int, folder: str) -> float:
    """The loss of a third step, in which torch raises wherever the host would wait for the device."""
    device = torch.device("cuda", rank)
    trainer = make_trainer(
        rank, folder, f"{folder}/model", device, LONGER, max_steps=3, gradient_accumulation_steps=2, bf16=True,
        optim="adamw_torch_fused", save_strategy="no",
    )  # fmt: skip
    for step in range(2):  # kernels are compiled, the optimizer's state is made, positions are looked at once
        trainer.step(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = trainer.step(2)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):  # it would have been seen
            result.loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return result.loss.item()


@pytest.mark.gpu(1)
def test_the_host_never_waits_for_the_device_in_a_step(tmp_path: Path) -> None:
    _write_data(tmp_path)
    LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGER,
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    [loss] = spawn(1, step_without_waiting, str(tmp_path), device="cuda")
    assert loss == pytest.approx(math.log(512), rel=0.05)
