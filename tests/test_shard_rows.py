"""Rows that share prefixes in a user's own loop: losses, sums of rows and gradients of the rows one by one."""

from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq import hf
from lightseq.memory.remat import apply_remat

PROMPT = [5, 9, 13, 2, 7, 30, 31, 8, 4, 11, 19, 3]
ROWS = [
    [*PROMPT, 20, 21, 22],
    [*PROMPT, 20, 21, 25, 26, 27, 28],
    [*PROMPT, 33],
    [*PROMPT, 20, 21, 22],  # an equal row
    PROMPT[:6],  # another row's beginning
    [40, 41, 42, 43],
]
WEIGHTS = [[0.0] * 12 + [1.0] * 3, [0.0] * 12 + [-0.5] * 6, [0.25] * 13, [0.0] * 12 + [-1.0] * 3, [1.0] * 6, [2.0] * 4]
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "qwen3_moe", "qwen3")
HYBRIDS = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
    "lfm2",
    "falcon_h1",
    "olmo_hybrid",
)
TOLERANCES = {"qwen3_5_moe_text": 2e-4}  # its decays' gradients: rows one by one differ from float64 by 1.2e-4


def fresh(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def row_by_row(family: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the weighted loss, the log-probabilities of each row's targets summed, and the gradients."""
    model, total, sums = fresh(family), torch.zeros(()), []
    for row, weights in zip(ROWS, WEIGHTS, strict=True):
        ids, factors = torch.tensor([row]), torch.tensor(weights)[1:]
        log_p = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        log_probs = log_p.gather(-1, ids[0, 1:, None])[:, 0]
        total = total - (factors * log_probs).sum()
        sums.append(log_probs[factors != 0].sum().detach())
    count = sum(sum(x != 0 for x in weights[1:]) for weights in WEIGHTS)
    (total / count).backward()
    return (total / count).detach(), torch.stack(sums), gradients_of(model)


def as_trees(rank: int, family: str) -> tuple[Any, Any, dict[str, Any]]:
    model = fresh(family)
    context = hf.enable(model, length=64, packed=True, windows=True)
    batch = hf.shard_rows(context, ROWS, WEIGHTS)
    with torch.no_grad():
        log_probs = hf.token_log_probs(context, model, batch)
        sums = hf.sequence_sums(context, log_probs, batch)
    loss = model(**batch).loss
    loss.backward()
    found = gradients_of(model)
    for x in (loss := loss.detach(), *found.values()):
        dist.all_reduce(x)
    return loss.numpy(), sums.numpy(), {name: x.numpy() for name, x in found.items()}


@pytest.mark.parametrize("world", slow_except([2], (1, 2, 3, 4)))
@pytest.mark.parametrize("family", slow_except(["llama", "gpt_oss", "qwen3_5_text"], FAMILIES + HYBRIDS))
def test_losses_and_gradients_equal_those_of_the_rows_one_by_one(family: str, world: int) -> None:
    loss, sums, gradients = row_by_row(family)
    for found_loss, found_sums, found in spawn(world, as_trees, family):
        torch.testing.assert_close(torch.tensor(found_loss), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(found_sums), sums, rtol=1e-5, atol=1e-5)
        assert_alike(found, {name: want.numpy() for name, want in gradients.items()}, TOLERANCES.get(family, 2e-5))


def whole_rows(context: Any, weights: list[list[float]], routes: list[np.ndarray] | None = None) -> dict[str, Any]:
    """Returns a batch of the rows whole, as packed documents."""
    ids, mask = (torch.tensor([[x for row in rows for x in row]]) for rows in (ROWS, weights))
    edges = [0, *accumulate(map(len, ROWS))]
    chosen = None if routes is None else torch.from_numpy(np.concatenate(routes))[None]
    labels = ids.masked_fill(mask == 0, -100)
    return hf.shard_batch(context, ids, labels=labels, cu_seqlens=edges, routed_experts=chosen)


def assert_alike(found: dict[str, Any], wanted: dict[str, Any], most: float = 2e-5) -> None:
    for name, want in wanted.items():
        error = np.linalg.norm(found[name] - want) / max(np.linalg.norm(want), 1e-6)
        assert error < most, f"{name} differs by {error:.1e}"


VARIANTS = ("adapters", "recomputed", "compiled", "sharded", "all")


def trained_as(rank: int, variant: str, family: str) -> list[tuple[float, dict[str, Any]]]:
    """Returns the loss and the gradients of rows as trees, and of the same rows whole."""
    found = []
    for shares in (True, False):
        model: Any = fresh(family)
        context = hf.enable(model, length=64, packed=True)
        layers, outer = model.model.layers, model
        if variant in ("adapters", "all"):
            adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
            torch.manual_seed(1)
            outer = get_peft_model(model, adapters)
        if variant in ("recomputed", "all"):
            apply_remat(layers, "attention", variant == "all")
        if variant in ("compiled", "all"):
            for layer in layers:
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
        if variant == "sharded":
            for module in (*layers, model):
                fully_shard(module)
        weights = [[float(x != 0) for x in row] for row in WEIGHTS]
        batch = hf.shard_rows(context, ROWS, weights) if shares else whole_rows(context, weights)
        sums = hf.sequence_sums(context, hf.token_log_probs(context, outer, batch), batch)
        loss = (sums[: len(ROWS)] * torch.linspace(-1, 1, len(ROWS))).sum()
        loss.backward()
        gradients = {
            name: p.grad.full_tensor() if variant == "sharded" else p.grad
            for name, p in outer.named_parameters()
            if p.requires_grad
        }
        if variant != "sharded":
            for x in gradients.values():
                dist.all_reduce(x)
        found.append((loss.item(), {name: x.numpy() for name, x in gradients.items()}))
    return found


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", slow_except(["adapters"], VARIANTS))
def test_adapters_shards_and_layers_that_are_compiled_or_recomputed_learn_alike(variant: str, family: str) -> None:
    trees, whole = spawn(2, trained_as, variant, family)[0]
    assert trees[0] == pytest.approx(whole[0], rel=1e-5)
    assert_alike(trees[1], whole[1])


def routes_of(row: list[int]) -> np.ndarray:
    """Returns two of four experts for each token of a row, in both layers; they depend on the row up to the token."""
    places = [sum(row[: place + 1]) for place in range(len(row))]
    return np.array([[[(x + layer) % 4, (x + layer + 1 + x % 3) % 4] for layer in range(2)] for x in places])


def with_experts(rank: int, replays: bool) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Returns losses, router losses and gradients of rows as trees, and of the same rows whole."""
    found = []
    weights = [[float(x != 0) for x in row] for row in WEIGHTS]
    routes = [routes_of(row) for row in ROWS] if replays else None
    for shares in (True, False):
        model = fresh("qwen3_moe")
        context = hf.enable(model, length=64, packed=True)
        trees = partial(hf.shard_rows, context, ROWS, weights, routed_experts=routes)
        batch = trees() if shares else whole_rows(context, weights, routes)
        output = model(**batch, output_router_logits=True)
        output.loss.backward()
        gradients = gradients_of(model)
        losses = output.loss.detach(), output.aux_loss.detach()
        for x in (*losses, *gradients.values()):
            dist.all_reduce(x)
        found.append((*(x.numpy() for x in losses), {name: x.numpy() for name, x in gradients.items()}))
    return found


@pytest.mark.parametrize("world", slow_except([2], (1, 2, 3)))
@pytest.mark.parametrize("replays", slow_except([True], [False, True]))
def test_routers_count_a_prefix_in_each_row_and_take_its_experts(world: int, replays: bool) -> None:
    trees, whole = spawn(world, with_experts, replays)[0]
    np.testing.assert_allclose(trees[:2], whole[:2], rtol=1e-5)
    assert_alike(trees[2], whole[2])


def other_routes(rank: int) -> list[str]:
    context, said = hf.enable(fresh("qwen3_moe"), length=64), []
    routes = [routes_of(row) for row in ROWS]
    changed = [x.copy() for x in routes]
    changed[1][3] = 1 - changed[1][3] % 2
    for given in (changed, routes[:2], [routes[0][:, :1], *routes[1:]]):
        with pytest.raises(ValueError) as error:
            hf.shard_rows(context, ROWS, WEIGHTS, routed_experts=given)
        said.append(str(error.value))
    return said


def test_rows_that_chose_other_experts_for_a_shared_token_are_refused() -> None:
    for first, second, third in spawn(2, other_routes):
        assert first.startswith("routed_experts: rows chose other experts for a token that they share; ")
        assert second.startswith(
            "routed_experts is for rows of [15, 18] tokens, but rows have [15, 18, 13, 15, 6, 4]; "
        )
        assert third.startswith("routed_experts has (1, 2) and (2, 2) (layers, experts of a token) for rows; ")


def refusals(rank: int) -> list[str]:
    said = []
    llama = hf.enable(fresh("llama"), length=64)
    for context, rows, weights in (
        (llama, [[1, 2]], [[1.0]]),
        (llama, [[1, 2]], [[0.0, float("nan")]]),
        (llama, [[1, 2]], []),
        (llama, [[1, 2], []], [[1.0, 1.0], []]),
        (llama, [[1.0, 2.5]], [[1.0, 1.0]]),
        (llama, [1, 2], [1.0, 1.0]),
        (llama, [[[1, 2]]], [[[1.0, 1.0]]]),
        (llama, torch.tensor([[1, 2, -100]]), torch.ones(1, 3)),
        (llama, torch.zeros(0, 3), torch.zeros(0, 3)),
    ):
        with pytest.raises(ValueError) as error:
            hf.shard_rows(context, rows, weights)
        said.append(str(error.value))
    return said


def test_rows_that_cannot_be_learned_are_refused() -> None:
    for said in spawn(2, refusals):
        assert [x.partition(";")[0] for x in said] == [
            "row 0 has 2 tokens, but weights (1,)",
            "row 0 has the weight nan",
            "there are weights for 0 rows, but 1 rows",
            "row 1 has no tokens",
            "row 0 has float64 values, such as 1.0",
            "row 0 is 1",
            "row 0 is of shape (1, 2)",
            "row 0 has the token id -100, which is below 0",
            "there are no rows",
        ]


def as_tensors(rank: int) -> list[float]:
    context = hf.enable(model := fresh("llama"), length=64)
    rows = [[5, 9, 13, 2], [5, 9, 20, 21]]
    tensor, weights = torch.tensor(rows), torch.tensor([[0.0, 1, 1, 1], [0, -0.5, 2, 0]], dtype=torch.bfloat16)
    return [model(**hf.shard_rows(context, *x)).loss.item() for x in ((tensor, weights), (rows, weights.tolist()))]


def test_rows_may_be_tensors_of_any_dtype() -> None:
    for given, lists in spawn(2, as_tensors):
        assert given == lists


def under_ddp(rank: int) -> dict[str, Any]:
    """Trains the same rows in two groups of one rank each, whose gradients DDP averages."""
    model, mesh = fresh("llama"), init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "sequence"))
    context = hf.enable(model, mesh["sequence"], length=64, packed=True)
    outer = nn.parallel.DistributedDataParallel(model)
    outer(**hf.shard_rows(context, ROWS, WEIGHTS)).loss.backward()
    return {name: x.numpy() for name, x in gradients_of(model).items()}


def test_gradients_that_ddp_averages_over_groups_equal_one_group() -> None:
    """Rows share targets here, which count once for each row, so the divisor is not the number of targets."""
    _, _, gradients = row_by_row("llama")
    for found in spawn(2, under_ddp):
        assert_alike(found, {name: want.numpy() for name, want in gradients.items()})


def other_weights(rank: int) -> str:
    model = fresh("llama")
    context = hf.enable(model, length=64, packed=True)
    with pytest.raises(ValueError) as error:
        model(**hf.shard_rows(context, ROWS, [[(1 + rank) * x for x in weights] for weights in WEIGHTS]))
    return str(error.value)


def test_ranks_with_other_weights_are_refused() -> None:
    for said in spawn(2, other_weights):
        assert said.startswith("ranks 0 and 1 share a sequence but got different batches") or "1 and 0" in said
