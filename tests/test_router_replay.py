"""Layers take a rollout's choice of experts, and weigh it by their own scores, on any number of ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from worlds import spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq import hf
from lightseq.models.decoder import decoder_layers
from lightseq.parts.experts import experts_modules

LENGTH, EXPERTS, CHOSEN = 21, 4, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},  # chooses groups of experts first
}


def make(family: str) -> Any:
    torch.manual_seed(0)
    return plain_model(tiny_config(family, **OPTIONS[family]))


def choice(layers: int) -> Tensor:
    """Two different experts for each of a batch's tokens and layers."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(2, LENGTH, layers, EXPERTS, generator=generator).topk(CHOSEN, -1).indices


def tokens() -> Tensor:
    return torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def own_scores(router: Any, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a router does, with given experts: softmax (Qwen 3), or sigmoid times a factor (DeepSeek V3)."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float())
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    scores = (logits.sigmoid() if is_sigmoid else logits.softmax(-1)).gather(1, chosen)
    if router.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores * router.routed_scaling_factor if is_sigmoid else scores, chosen


def reference(family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns logits and gradients of the plain model, whose routers are written out."""
    model, layers = make(family), None
    layers = decoder_layers(model)
    chosen = choice(len(layers))
    for number, layer in enumerate(layers):
        for name, _ in experts_modules(layer):
            block: Any = layer.get_submodule(name.rpartition(".")[0])
            given = chosen[:, :, number].flatten(0, 1)
            block.gate.forward = lambda hidden, gate=block.gate, given=given: own_scores(gate, hidden, given)
    logits = model(tokens(), use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def replayed(rank: int, family: str, checkpoints: bool, packs: bool) -> tuple[Any, dict[str, Any]]:
    model = make(family)
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.train()
    context = hf.enable(model)
    ids, chosen = tokens(), choice(len(decoder_layers(model)))
    if packs:
        ids, chosen = ids.reshape(1, -1), chosen.reshape(1, 2 * LENGTH, *chosen.shape[2:])
    edges = [0, LENGTH, 2 * LENGTH] if packs else None
    batch = hf.shard_batch(context, ids, cu_seqlens=edges, routed_experts=chosen.to(torch.int16))
    logits = hf.gather_tokens(context, model(**batch, use_cache=False).logits, batch)
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
    return logits.detach().reshape(2, LENGTH, -1).numpy(), {name: x.numpy() for name, x in gradients.items()}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family, checkpoints, packs",
    [
        ("qwen3_moe", True, False),
        pytest.param("qwen3_moe", False, True, marks=pytest.mark.slow),
        ("deepseek_v3", False, True),
    ],
)
def test_a_rollouts_experts_are_taken_with_the_models_own_scores(
    family: str, checkpoints: bool, packs: bool, world: int
) -> None:
    want, gradients = reference(family)
    assert not torch.allclose(want, make(family)(tokens(), use_cache=False).logits, atol=1e-3), "another choice"
    for logits, found in spawn(world, replayed, family, checkpoints, packs):
        torch.testing.assert_close(torch.from_numpy(logits), want, rtol=1e-5, atol=1e-5)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (torch.from_numpy(found[name]) - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def refusals(rank: int) -> list[str]:
    model = make("qwen3_moe")
    context = hf.enable(model)
    good, lines = choice(2), []
    alone = good.clone()
    alone[0, 0, 0, 0] = EXPERTS  # a token of one rank
    for wrong in (good[:, :-1], good.float(), good[:, :, :1], alone, good[..., :1]):
        try:
            model(**hf.shard_batch(context, tokens(), routed_experts=wrong), use_cache=False)
        except ValueError as error:
            lines.append(str(error))
    return lines


def test_a_choice_that_does_not_fit_is_refused_on_every_rank() -> None:
    for shape, dtype, layers, expert, count in spawn(2, refusals):
        assert shape.startswith(f"routed_experts is for (2, {LENGTH - 1}) tokens (batch, length), but input_ids are ")
        assert "of torch.float32; give whole numbers" in dtype
        assert layers.startswith("routed_experts has 1 layers, but the model 2; ")
        assert expert.startswith(f"routed_experts names expert {EXPERTS}; layers have experts 0 to {EXPERTS - 1}, and ")
        assert f"did not choose 1 of {EXPERTS} experts by topk" in count
