"""Experts: their products, the choice that a checkpoint stores, and routers that stay in float32."""

import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from programs import refusal
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from worlds import spawn

from benchmarks.command_line import NEEDED
from benchmarks.tiny_models import LENGTH, ids, plain_model, tiny_config
from lightseq import hf
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.context import release
from lightseq.cli import main
from lightseq.config.command_line import parse
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.memory.remat import apply_remat
from lightseq.models import weights
from lightseq.models.decoder import float32_parameters
from lightseq.parallelize import parallelize
from lightseq.parts.changes import Changes
from lightseq.parts.chosen_experts import build_to_train, run_chosen_experts
from lightseq.parts.experts import IMPLEMENTATION, experts_modules, sort_by_expert
from lightseq.parts.fit import fit
from lightseq.parts.part import Ranks, choices_of_policy
from lightseq.training.setup_checks import check_layers
from lightseq.utils import versions

KINDS = {
    "qwen3_moe": "gate and up in one weight",
    "gpt_oss": "biases, transposed weights, its own gate",
    "aria_text": "transposed weights",
    "nemotron_h": "no gate",
    "muse_spark": "a norm after the experts",
}

MUSE = {
    "num_local_experts": 4, "moe_hidden_size": 16, "moe_intermediate_size": 8, "hidden_act": "silu",
    "post_norm_eps": 1e-6,
}  # fmt: skip


def experts_of(model_type: str) -> Any:
    """Returns a module of experts in float64 with random weights."""
    if model_type == "muse_spark":  # no tiny model of it can be built
        found = MuseSparkExperts(SimpleNamespace(**MUSE)).double()
    else:
        model = build_to_train(tiny_config(model_type))
        found = next(experts for _, experts in experts_modules(model)).to_empty(device="cpu").double()
    torch.manual_seed(0)
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return found


@pytest.mark.parametrize("model_type", KINDS, ids=KINDS.values())
def test_experts_equal_those_of_transformers(model_type: str) -> None:
    experts, tokens, chosen = experts_of(model_type), 11, 3
    hidden = torch.randn(tokens, experts.down_proj.shape[2 if experts.is_transposed else 1], dtype=torch.float64)
    choices = torch.stack([torch.randperm(experts.num_experts)[:chosen] for _ in range(tokens)])
    choices[choices == 1] = 0  # an expert without tokens, and tokens that choose one twice
    scores = torch.rand(tokens, chosen, dtype=torch.float64)

    def run(implementation: str) -> list[Tensor]:
        experts.config._experts_implementation = implementation
        experts.zero_grad()
        x, w = hidden.clone().requires_grad_(), scores.clone().requires_grad_()
        out = experts(x, choices, w)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        return [out.detach(), x.grad, w.grad, *(p.grad for p in experts.parameters())]

    error = 1e-5 if experts.has_post_expert_norm else 1e-12  # that norm computes in float32
    for got, want in zip(run(IMPLEMENTATION), run("eager"), strict=True):
        torch.testing.assert_close(got, want, rtol=error, atol=error)


def test_rows_are_sorted_by_expert_and_keep_their_order() -> None:
    routes = sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 2]]), 5)
    assert routes.experts_R.tolist() == [0, 0, 2, 2, 2, 3] and routes.ends_E.tolist() == [2, 2, 5, 6, 6]
    assert routes.order_R.tolist() == [1, 2, 0, 4, 5, 3]
    assert routes.order_R[routes.places_R].tolist() == [*range(6)]


# ---- blocks whose own code runs every expert for every token ---------------------------------------------------------


def moe_block() -> tuple[PreTrainedModel, Any]:
    """Returns a tiny Llama 4 in float64, by transformers' code, and its first block of experts."""
    model = plain_model(tiny_config("llama4_text")).double()
    return model, model.model.layers[1].feed_forward


def test_only_chosen_experts_run_with_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    model, block = moe_block()
    hidden = torch.randn(1, 11, 32, dtype=torch.float64)
    hidden[0, :4] *= 1e5  # scores that are 0 or 1 for several experts

    def run() -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        block.zero_grad()
        out, logits = block(x)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        return [out.detach(), logits.detach(), x.grad, *(p.grad for p in block.parameters())]

    want = run()
    run_chosen_experts(model, Changes())
    monkeypatch.setattr(torch, "bmm", None)  # transformers' products
    for got, right in zip(run(), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_a_changed_block_keeps_its_own_code() -> None:
    model, block = moe_block()
    block.experts.register_forward_hook(lambda *_: None)
    run_chosen_experts(model, Changes())
    assert [name for name, _ in experts_modules(model)] == ["model.layers.2.feed_forward.experts"]


def test_facts_count_the_chosen_experts_and_the_shared_one() -> None:
    config = tiny_config("llama4_text")
    dense, sparse, *_ = inspect_architecture(config).layers
    attention, router, expert = 32 * 32 * 2 + 2 * 32 * 16, 4 * 32, 3 * 32 * 48
    assert dense.experts is None and dense.active == attention + expert
    assert sparse.experts is not None and (sparse.experts.weights, sparse.experts.active) == (4 * expert, 2 * expert)
    assert sparse.active == attention + router + expert + 2 * expert


# ---- recomputation ---------------------------------------------------------------------------------------------------


class _Unsteady(nn.Module):
    """Layer whose scores all but tie, and that prefers another expert each time it runs."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts, self.runs = experts, count()  # None: it never differs
        self.scores = nn.Parameter(torch.zeros(experts.num_experts, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        tied = self.scores
        if self.runs is not None:
            tied = tied + 1e-30 * nn.functional.one_hot(torch.tensor(next(self.runs)), len(tied))
        values, chosen = tied.expand(len(x), -1).topk(2, dim=-1)
        return x + self.experts(x, chosen, values.exp())


def gradients_of(layer: _Unsteady, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    layer(x).square().sum().backward()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("policy", ["full", "attention", "attention+mlp"])
def test_a_recomputed_layer_chooses_the_same_experts(policy: str) -> None:
    experts = experts_of("qwen3_moe")
    experts.config._experts_implementation = IMPLEMENTATION
    layer = _Unsteady(experts)
    x = torch.randn(5, experts.down_proj.shape[1], dtype=torch.float64, requires_grad=True)
    want = gradients_of(layer, x)
    layer.runs = count()
    if policy == "attention+mlp":
        fit([layer], choices_of_policy(policy, ends_with_mlp=False), Ranks(), Changes())
    apply_remat([layer], policy)
    for got, right in zip(gradients_of(layer, x), want, strict=True):
        torch.testing.assert_close(got, right)
    assert next(layer.runs) == 2, "the layer was not recomputed"


@pytest.mark.parametrize(("policy", "products"), [("full", 7), ("attention", 7), ("attention+mlp", 6)])
def test_a_compiled_layer_repeats_no_choice_and_no_stored_product(policy: str, products: int) -> None:
    experts = experts_of("qwen3_moe")
    experts.config._experts_implementation = IMPLEMENTATION
    layer, ran = _Unsteady(experts), list[str]()
    layer.runs = None
    if policy == "attention+mlp":
        fit([layer], choices_of_policy(policy, ends_with_mlp=False), Ranks(), Changes())
    apply_remat([layer], policy, compiled=True)

    def note(graph: fx.GraphModule, _inputs: Any) -> Any:
        ran.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    gradients_of(layer, torch.randn(5, experts.down_proj.shape[1], dtype=torch.float64, requires_grad=True))
    assert ran.count("aten.topk.default") == 1
    grouped = [name for name in ran if name.startswith("lightseq.grouped")]
    assert len(grouped) == products, grouped  # two forward, four backward, and the first again unless it is stored


# ---- routers in float32 ----------------------------------------------------------------------------------------------


def _routers_train_in_float32(rank: int, state: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Returns the routers' gradients of a step in bfloat16."""
    run = parse([*NEEDED, "--model_max_length", str(LENGTH), "--bf16"], "")
    world = World(rank, dist.get_world_size(), rank, dist.get_world_size(), torch.device("cpu"))
    model = build_to_train(copy.deepcopy(config)).eval()
    parallel = parallelize(model, run, parallel_dims(world), MemorySettings())
    weights.materialize(model, torch.device("cpu"), dtype=torch.bfloat16)
    for name, parameter in weights.base_parameters(model).items():
        weights.fill(parameter, state[name].__getitem__)
    seen = set[torch.dtype]()
    for name in parallel.whole:
        router = model.get_submodule(name.rpartition(".")[0])
        router.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    batch = hf.shard_batch(parallel.context, ids(), ids())
    loss = parallel.loss_model(batch["input_ids"], batch["position_ids"], batch["labels"]) / batch["num_items_in_batch"]
    loss.backward()
    release(parallel.context)
    assert seen == {torch.float32}, seen
    for name in parallel.whole:
        dist.all_reduce(model.get_parameter(name).grad)
    return {name: model.get_parameter(name).grad.numpy() for name in parallel.whole}


def test_routers_that_a_model_keeps_in_float32_compute_and_train_in_it() -> None:
    config = tiny_config("glm4_moe")
    want = plain_model(config)
    (found, _) = spawn(2, _routers_train_in_float32, {k: x.clone() for k, x in want.state_dict().items()}, config)
    want(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    right = {name: parameter.grad for name, parameter in float32_parameters(want).items()}
    assert found.keys() == right.keys() and found
    for name, gradient in found.items():  # all else is in bfloat16; a rank's share alone would be off by half
        assert (torch.from_numpy(gradient) - right[name]).norm() < 0.1 * right[name].norm(), name


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "flag", "line"),
    [
        ("llama", "--expert_parallel_size", "ForCausalLM has no"),
        ("qwen3_moe", "--layers_per_checkpoint", "--layers_per_checkpoint 2 does not work with experts"),
    ],
)
def test_flags_that_do_not_fit_the_layers_are_refused(model_type: str, flag: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        check_layers(parse([*NEEDED, flag, "2"], ""), inspect_architecture(tiny_config(model_type)))


@pytest.mark.parametrize(
    ("gpus", "size", "line"),
    [
        ("--gpus 3", 2, "--expert_parallel_size 2 does not divide the 3 ranks of a host; use 1 or 3"),
        ("--gpus 4 --gpus_per_host 2", 4, "--expert_parallel_size 4 does not divide the 2 ranks of a host; use 1 or 2"),
        ("--gpus 6 --gpus_per_host 6", 2, "a rank's 2 experts and their weights do not split over 3 ranks; use 1"),
        ("--gpus 6 --gpus_per_host 6", 3, "3 does not divide the 4 experts of Qwen3MoeForCausalLM"),
    ],
)
def test_the_plan_refuses_expert_parallel_sizes_as_training_does(
    gpus: str, size: int, line: str, tmp_path: Path
) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    words = f"--model_name_or_path {tmp_path} --bf16 --model_max_length 256 {gpus} --expert_parallel_size {size}"
    assert line in refusal(main, "plan", *words.split())


def test_experts_of_an_old_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect_architecture(tiny_config("qwen3_moe"))
    older = replace(inspect_architecture(tiny_config("llama")), outside_linears=("0.mlp.experts.gate_up_proj",))
    monkeypatch.setattr(versions, "version", lambda _: "5.19.0")
    for architecture in (found, older):
        with pytest.raises(ValueError, match=r"transformers 5.19.0 is too old for the experts of .*; install 5.20"):
            check_layers(parse(NEEDED, ""), architecture)
    check_layers(parse(NEEDED, ""), inspect_architecture(tiny_config("llama")))


def test_deepspeed_is_refused_where_a_router_stays_in_float32(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    flags = [*NEEDED, "--deepspeed", str(tmp_path / "zero.json")]
    architecture = inspect_architecture(tiny_config("glm4_moe"))
    check_layers(parse(flags, ""), architecture)  # all weights are in float32
    with pytest.raises(ValueError, match=r"computes all weights in bfloat16, but Glm4MoeForCausalLM keeps .*gate.we"):
        check_layers(parse([*flags, "--bf16"], ""), architecture)


@pytest.mark.parametrize(("model_type", "noise"), [("phimoe", {}), ("mixtral", {"router_jitter_noise": 0.1})])
def test_layers_that_draw_random_numbers_are_refused(model_type: str, noise: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="draws random numbers in its layers"):
        inspect_architecture(tiny_config(model_type, **noise))
