"""The optimizer step: rates as transformers has them, true global clipping, loss scaling that skips what overflowed."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import program
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq.config.choices import FOLLOW_A_METRIC, LR_SCHEDULES
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import local_part, shard_groups
from lightseq.distributed.world import World, use_host_cores
from lightseq.parts.chosen_experts import build_to_train
from lightseq.training.fsdp_engine import FsdpEngine
from lightseq.training.optimization import (
    LearningRate,
    LocalAdamW,
    LocalSGD,
    LossScaler,
    check_lr_schedule,
    clip,
    gradient_norms,
    make_optimizer,
    step_if_finite,
)
from lightseq.training.weight_decay import without_decay

MOMENTS = ("exp_avg", "exp_avg_sq")
CONFIG = TrainConfig(model_name_or_path="m", data_path="d", output_dir="o", learning_rate=0.1, weight_decay=0.5)


SCHEDULES: dict[str, list[dict[str, Any]]] = {  # settings of each schedule
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 1.25}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"lr_end": 0.01, "power": 2.0}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "cosine_with_min_lr": [{"min_lr": 0.02}, {"min_lr_rate": 0.3, "num_cycles": 1.5}],
    "cosine_warmup_with_min_lr": [{"min_lr": 0.02}, {"min_lr_rate": 0.3, "warmup_lr_rate": 0.5, "num_cycles": 1}],
    "warmup_stable_decay": [
        {"num_decay_steps": 6},
        {"num_decay_steps": 4, "num_stable_steps": 5, "min_lr_ratio": 0.2, "decay_type": "1-sqrt"},
        {"num_decay_steps": 9, "decay_type": "linear", "warmup_type": "cosine", "num_cycles": 0.4},
    ],
}


def test_every_schedule_of_transformers_without_a_metric_may_be_chosen() -> None:
    known = {kind.value for kind in TYPE_TO_SCHEDULER_FUNCTION}
    assert known - set(FOLLOW_A_METRIC) == set(LR_SCHEDULES) == SCHEDULES.keys()


@pytest.mark.parametrize(
    ("name", "kwargs", "line"),
    [
        ("linear", {"power": 2}, "power is unknown; leave it out"),
        ("constant", {"power": 2}, "power is unknown; leave it out"),
        ("polynomial", {"zzz": 2}, "zzz is unknown; choose from lr_end, power"),
        ("polynomial", {"lr_end": 1}, r"lr_end \(1\) must be smaller than initial lr"),
        ("cosine", {"num_cycles": "x"}, "could not convert string to float: 'x'"),
        ("cosine_with_min_lr", {}, "One of min_lr or min_lr_rate should be set"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0.1}, "Only one of min_lr or min_lr_rate"),
        (
            "cosine_with_min_lr",
            {"min_lr": 1},
            r"has a rate of 0\.\d+, outside of 0 to --learning_rate 0\.1; give other",
        ),
        ("cosine_with_min_lr", {"min_lr_rate": 2}, "outside of 0 to --learning_rate"),
        ("warmup_stable_decay", {}, "missing 1 required positional argument: 'num_decay_steps'"),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "sine"}, "sine"),
    ],
)
def test_settings_without_a_schedule_are_refused(name: str, kwargs: dict[str, Any], line: str) -> None:
    config = dataclasses.replace(CONFIG, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)
    with pytest.raises(ValueError, match=f"^--lr_scheduler_type {name} with --lr_scheduler_kwargs .*{line}"):
        check_lr_schedule(config, 20)


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize(("name", "kwargs"), [(name, kwargs) for name in SCHEDULES for kwargs in SCHEDULES[name]])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 3}, {"warmup_ratio": 0.25}])
def test_rates_equal_transformers_and_need_no_history(name: str, kwargs: dict, warmup: dict) -> None:
    if name == "constant" and warmup:
        pytest.skip("constant has no warm-up and refuses one")
    config = dataclasses.replace(CONFIG, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, **warmup)
    optimizer = make_optimizer(nn.Linear(2, 2), config)
    steps = {"warmup_steps": 3, "warmup_ratio": 5}.get(next(iter(warmup), ""), 0)
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = get_scheduler(name, theirs, steps, num_training_steps=20, scheduler_specific_kwargs=kwargs)
    expected = []
    for _ in range(20):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()
    ours = LearningRate(config, total_steps=20)
    for step in reversed(range(20)):  # in any order
        assert ours.apply(optimizer, step) == pytest.approx(expected[step])
        assert all(group["lr"] == pytest.approx(expected[step]) for group in optimizer.param_groups)


# By family, the ends of names of parameters that transformers' Trainer decays and we do not.
EXEMPT_HERE: dict[str, set[str]] = {
    "llama": set(), "gpt2": set(), "qwen3_moe": set(), "deepseek_v3": set(), "laguna": set(), "ernie4_5_moe": set(),
    "cohere": set(), "gemma3_text": set(), "lfm2": set(), "gpt_oss": {"sinks"}, "mimo_v2_flash": {"sinks"},
    "kimi_linear": {"A_log"}, "qwen3_next": {"A_log"}, "qwen3_5_text": {"A_log"}, "olmo_hybrid": {"A_log"},
    "granitemoehybrid": {"A_log", "D"}, "bamba": {"A_log", "D"}, "falcon_h1": {"A_log", "D"}, "zamba2": {"A_log", "D"},
    "nemotron_h": {"A_log", "D", "norm_f.weight"}, "jamba": {"A_log", "D"}, "apertus": {"alpha_p", "alpha_n"},
    "falcon_mamba": {"A_log", "D", "norm_f.weight"},
}  # fmt: skip


@pytest.mark.parametrize("family", EXEMPT_HERE)
def test_weight_decay_is_that_of_transformers_but_for_rates_and_sinks(family: str) -> None:
    changes = {"use_qk_norm": True} if family == "cohere" else {}  # norms of two dimensions
    model = build_to_train(tiny_config(family, **changes))
    decayed, others = make_optimizer(model, CONFIG).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (CONFIG.weight_decay, 0.0)
    decays = {id(p) for p in decayed["params"]}
    ours = {name for name, p in model.named_parameters() if id(p) in decays}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    theirs = trained.intersection(Trainer.get_decay_parameter_names(None, model))
    assert ours <= theirs
    assert {name for name in theirs - ours if not name.endswith(tuple(EXEMPT_HERE[family]))} == set()
    assert all(any(name.endswith(end) for name in theirs - ours) for end in EXEMPT_HERE[family])


def test_a_single_output_decays_and_a_vector_of_any_shape_does_not() -> None:
    model = nn.Module()
    model.gate, model.conv = nn.Linear(8, 1, bias=False), nn.Conv1d(8, 1, 1)
    model.sinks, model.experts = nn.Parameter(torch.ones(1, 8, 1)), nn.Parameter(torch.ones(2, 3, 4))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in without_decay(model)} == {"sinks", "conv.bias"}


def test_a_norm_with_a_weight_for_each_head_does_not_decay_whatever_its_name() -> None:
    model = nn.ModuleDict({"scales_of_heads": nn.LayerNorm((2, 3), bias=False)})
    assert without_decay(model) == {model["scales_of_heads"].weight}


@pytest.mark.parametrize(
    "name, kind, fused",
    [("adamw_torch", LocalAdamW, None), ("adamw_torch_fused", LocalAdamW, True),
     ("sgd", LocalSGD, None)],
)  # fmt: skip
def test_the_optimizer_is_the_one_asked_for(name: str, kind: type, fused: bool | None) -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), dataclasses.replace(CONFIG, optim=name))
    assert type(optimizer) is kind and optimizer.defaults.get("fused") == fused


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("flags", [{"adam_beta1": 0.5}, {"adam_beta2": 0.6}, {"adam_epsilon": 0.3}])
def test_adamw_has_the_betas_and_the_epsilon_of_the_flags(name: str, flags: dict) -> None:
    config = dataclasses.replace(CONFIG, optim=name, weight_decay=0.0, **flags)
    betas = flags.get("adam_beta1", 0.9), flags.get("adam_beta2", 0.999)
    expected = updated(lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.1, betas=betas, eps=flags.get("adam_epsilon", 1e-8), weight_decay=0.0
    ))  # fmt: skip
    torch.testing.assert_close(updated(lambda model: make_optimizer(model, config)), expected)
    plain = dataclasses.replace(CONFIG, optim=name, weight_decay=0.0)
    assert (updated(lambda model: make_optimizer(model, plain)) - expected).abs().max() > 1e-3


def updated(make: Callable[[nn.Module], torch.optim.Optimizer]) -> torch.Tensor:
    """Returns a weight of zeros after three updates with gradients of different sizes."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make(model)
    for size in (1.0, -0.2, 3.0):
        model.weight.grad = torch.tensor([[size, 2 * size], [0.1 * size, -size]])
        optimizer.step()
    return model.weight.detach().clone()


class _UpdatesOfDistributedTensors(TorchDispatchMode):
    """Counts in-place operators on distributed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func._schema.is_mutable and any(isinstance(x, DTensor) for x in pytree.tree_leaves(args))
        return func(*args, **(kwargs or {}))


def _local_update(rank: int, kind: type[torch.optim.AdamW], fused: bool | None) -> tuple[int, list[list[float]]]:
    """Counts calls of DTensor's dispatcher in three steps on a sharded matrix; returns the count and the weight."""
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(20.0).reshape(5, 4)
    weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = kind([weight], lr=0.1, fused=fused)
    with _UpdatesOfDistributedTensors() as updates:
        for step in range(3):
            weight.grad = distribute_tensor((whole + step).sin(), mesh, [Shard(0)])
            optimizer.step()
    state = optimizer.state[weight]
    assert all(isinstance(state[name], DTensor) and state[name].placements == weight.placements for name in MOMENTS)
    return updates.seen, weight.full_tensor().tolist()


@pytest.mark.parametrize("fused", [None, True])
def test_adamw_updates_the_parts_alone_as_torch_updates_distributed_tensors(fused: bool | None) -> None:
    ours = spawn(2, _local_update, LocalAdamW, fused)
    theirs = spawn(2, _local_update, torch.optim.AdamW, fused)
    assert [seen for seen, _ in ours] == [0, 0]
    assert all(seen > 0 for seen, _ in theirs)
    assert ours[0][1] == theirs[0][1]


def _update_of_mixed_tensors(rank: int, kind: type[torch.optim.Optimizer]) -> list[list[float]]:
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(20.0).reshape(5, 4)
    sharded, on_every_rank = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])), nn.Parameter(whole[0].clone())
    optimizer = kind([sharded, on_every_rank], lr=0.1, foreach=True)  # the default on GPUs
    sharded.grad, on_every_rank.grad = distribute_tensor(whole.sin(), mesh, [Shard(0)]), whole[0].sin()
    optimizer.step()
    return [*sharded.full_tensor().tolist(), on_every_rank.tolist()]


@pytest.mark.parametrize("kind", [LocalAdamW, LocalSGD])
def test_parameters_that_every_rank_has_whole_are_updated_beside_sharded_ones(kind: type) -> None:
    """Decays of a recurrence in float32 are such parameters."""
    for rows in spawn(2, _update_of_mixed_tensors, kind):
        assert rows[0] == rows[-1] and rows[1] != rows[0]


def test_the_norm_of_a_large_gradient_on_the_host_is_right() -> None:
    """torch's own adds so many squares to one float32 number that it is 0.2% off here, and more of larger ones."""
    x = torch.full((2**22 + 5,), 0.7)
    (norm,) = spawn(1, _norm_of, x)
    assert norm == pytest.approx(x.double().norm().item(), rel=5e-5)


def _norm_of(rank: int, x: torch.Tensor) -> float:
    return gradient_norms([x], [(dist.group.WORLD,)]).item()


@pytest.mark.parametrize(
    ("device", "threads", "ranks", "wanted"),
    [("cuda:0", 1, 4, [16]), ("cuda:0", 8, 4, []), ("cuda:0", 1, 64, []), ("cpu", 1, 4, [])],
)
def test_an_update_on_the_host_has_a_ranks_share_of_its_cores(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int, ranks: int, wanted: list[int]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(64)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    use_host_cores(World(0, ranks, 0, ranks, torch.device(device)))
    assert asked == wanted


def _norms_over_meshes(rank: int) -> tuple[list[float], list[Any]]:
    """Norms and clipped gradients of tensors on three meshes, two that share a mesh among them, and of a plain one."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    split = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    placed = [
        *((flat, [Shard(0)]), (grid, [Replicate(), Shard(0)]), (flat, [Shard(0)])),
        *((split, [Shard(0), Shard(1)]), (grid, [Replicate(), Shard(0)])),
    ]
    gradients = [distribute_tensor(x, *place) for x, place in zip(_whole_gradients(), placed, strict=False)]
    gradients.append(_whole_gradients()[-1])
    grads = [local_part(x) for x in gradients]
    norms = gradient_norms(grads, [shard_groups(x) for x in gradients])
    clip(grads, norms.norm(), 0.5)
    return norms.tolist(), [(x.full_tensor() if isinstance(x, DTensor) else x).tolist() for x in gradients]


def _whole_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in ((7, 3), (5, 3), (2, 6), (4, 4), (3,), (6,))]


@pytest.mark.compat
def test_norm_and_clipped_gradients_over_several_meshes_equal_one_process() -> None:
    want = _whole_gradients()
    norms = torch.stack([x.norm() for x in want])
    for got, clipped in spawn(4, _norms_over_meshes):
        assert got == pytest.approx(norms.tolist(), rel=1e-6)
        for x, whole in zip(clipped, want, strict=True):
            torch.testing.assert_close(torch.tensor(x), whole * (0.5 / norms.norm()), rtol=1e-5, atol=0)


def test_clipping_leaves_small_gradients_and_a_limit_of_zero_alone() -> None:
    for limit in (10.0, 0.0):
        grads = [torch.tensor([3.0, 4.0])]
        clip(grads, torch.tensor(5.0), limit)
        assert grads[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_a_step_without_a_finite_gradient_changes_nothing(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, dataclasses.replace(CONFIG, optim=name))

    def step(gradient: float) -> list[torch.Tensor]:
        for p in model.parameters():
            p.grad = torch.full_like(p, gradient)
        step_if_finite(optimizer, torch.tensor(gradient))
        state = [x.clone() for held in optimizer.state.values() for x in held.values() if isinstance(x, torch.Tensor)]
        return [*(p.detach().clone() for p in model.parameters()), *state]

    before = step(0.5)
    for nonfinite in (float("nan"), float("inf")):
        assert all(torch.equal(x, y) for x, y in zip(step(nonfinite), before, strict=True))
    assert not torch.equal(step(0.5)[0], before[0])


def test_an_overflow_halves_the_scale_and_forbids_the_step() -> None:
    scaler = LossScaler(scale=1024.0)
    grads = [torch.tensor([1024.0, float("inf")])]
    norm, take = scaler.unscale(grads, torch.tensor(float("inf")))
    assert not take and scaler.scale == 512.0 and scaler.clean_steps == 0 and not torch.isfinite(norm)


def test_clean_steps_unscale_and_in_the_end_double_the_scale() -> None:
    scaler = LossScaler(scale=1024.0, growth_interval=2)
    for expected in (1024.0, 2048.0):
        grads = [torch.tensor([3.0, 4.0]) * scaler.scale]
        norm, take = scaler.unscale(grads, torch.tensor(5.0) * scaler.scale)
        assert take and norm.item() == 5.0 and grads[0].tolist() == [3.0, 4.0]
        assert scaler.scale == expected


def _held_between_batches(rank: int, words: str) -> list[int]:
    """Bytes of gradients that FSDP2 keeps on the device, after the backward pass of every batch."""
    held: list[int] = []
    backward = FsdpEngine.backward

    def watched(self: FsdpEngine, share: torch.Tensor, last: bool) -> None:
        backward(self, share, last)
        units = [module for module in self.loss_model.modules() if isinstance(module, FSDPModule)]
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        parts = [group._partial_reduce_output for group in groups if group is not None]
        held.append(sum(part.nbytes for part in parts if part is not None))

    FsdpEngine.backward = watched  # type: ignore[method-assign]
    done = program(rank, "llama3", words)
    assert done.status == 0, done.err
    return held


@pytest.mark.parametrize("offload", ["none", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_offloaded_gradients_leave_the_device_after_every_batch(offload: str, tmp_path: Path) -> None:
    data = tmp_path / "data.pkl"
    data.write_bytes(pickle.dumps({"input_ids": [list(range(9))] * 6}))
    words = f"--model_name_or_path tiny-llama3 --random_init --data_path {data} --output_dir {tmp_path / 'run'}"
    flags = f"--model_max_length 9 --max_steps 1 --gradient_accumulation_steps 3 --fsdp '' --offload {offload}"
    held = spawn(2, _held_between_batches, f"{words} {flags} --save_strategy no")[0]
    assert [size > 0 for size in held] == [offload == "none"] * 2 + [False]
