"""Blocks of experts whose own code runs every expert for every token (Llama 4), changed to run only the chosen ones.

In such a block a token's score multiplies what an expert gets, and is zero for experts that the token did not choose.
Experts have no biases, so they make zeros of zeros.

Shape suffixes: T tokens, K experts of a token, E experts, H hidden, I intermediate.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.models.build import build
from lightseq.parts.changes import Changes, changes_of
from lightseq.parts.experts import experts_forward
from lightseq.parts.probes import change_of, is_known_code, twin_forward

TOKENS = 5


def build_to_train(config: PreTrainedConfig, device: str = "meta") -> PreTrainedModel:
    """Builds a model with new weights in float32, the dtype of master weights, in which only chosen experts run."""
    with torch.device(device):
        model = build(config)
    run_chosen_experts(model, changes_of(model))
    return model


def run_chosen_experts(model: nn.Module, changes: Changes) -> None:
    """Lets every block that is of the known form run only the chosen experts. Others stay as they are."""
    known: dict[tuple[type, ...], bool] = {}
    for block in model.modules():
        if not _has_known_parts(block):
            continue
        experts, router = cast(Any, block.experts), block.router
        kinds = type(block), type(experts), type(router)
        if kinds not in known:
            known[kinds] = _runs_every_expert(block)
        if known[kinds]:
            changes.set_attribute(experts, "__class__", _chosen_experts(cast(Hashable, type(experts))))
            changes.set_attribute(block, "__class__", _block_of_chosen(cast(Hashable, type(block))))


def _has_known_parts(block: Any) -> bool:
    """Returns whether a module has the parts of such a block, each with the forward of a class of transformers."""
    parts = [block, *(getattr(block, name, None) for name in ("experts", "router"))]
    if not all(isinstance(x, nn.Module) for x in (*parts, getattr(block, "shared_expert", None))):
        return False
    dimensions = {name: weight.ndim for name, weight in block.experts.named_parameters()}
    if dimensions != {"gate_up_proj": 3, "down_proj": 3} or hasattr(block.experts, "is_transposed"):
        return False
    return not any(map(change_of, parts)) and all(
        is_known_code(type(part).forward, ("torch", "transformers")) for part in parts
    )


def _runs_every_expert(block: Any) -> bool:
    """Returns whether a block computes what `_block_of_chosen` does, found by running its own code on numbers."""
    experts, (count, hidden, _) = block.experts, block.experts.gate_up_proj.shape
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") - 0.5

    x_TH, router_EH = draw(TOKENS, hidden), draw(count, hidden)
    first_EHI, last_EIH = draw(count, hidden, 2), draw(count, 1, hidden)
    children = {
        "router": lambda x: functional_call(block.router, {"weight": router_EH}, (x,)),
        "experts": lambda x: functional_call(experts, {"gate_up_proj": first_EHI, "down_proj": last_EIH}, (x,)),
        "shared_expert": lambda x: 2 * x,
    }
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found, found_logits = twin_forward(block, children, x_TH[None])
            scores, logits = children["router"](x_TH)
            scores_TK, chosen_TK = scores.topk(block.router.top_k, dim=-1)
            inputs_TKH = x_TH[:, None] * scores_TK[..., None]
            gate, up = torch.einsum("tkh,tkhi->tki", inputs_TKH, first_EHI[chosen_TK]).chunk(2, dim=-1)
            routed_TH = torch.einsum("tki,tkih->th", up * experts.act_fn(gate), last_EIH[chosen_TK])
    except Exception:  # the model's code may raise anything
        return False
    return torch.equal(found_logits, logits) and torch.allclose(found, 2 * x_TH + routed_TH, rtol=1e-5, atol=1e-6)


@cache
def _block_of_chosen(kind: Any) -> Any:
    """Returns a subclass of a block's class that gives its experts the tokens, their choices and their scores."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x_TH)
        scores_TK, chosen_TK = torch.topk(scores, self.router.top_k, dim=-1)
        routed_TH = self.experts(x_TH, chosen_TK, scores_TK)
        return self.shared_expert(x_TH) + routed_TH, logits

    return type(f"Chosen{kind.__name__}", (kind,), {"forward": forward})


@cache
def _chosen_experts(kind: Any) -> Any:
    """Returns a subclass of experts with the forward and the marks of those that transformers itself dispatches."""

    def apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)  # type: ignore[no-any-return]

    members = {
        "forward": experts_forward,
        "_apply_gate": apply_gate,
        "_is_expert_parallel": False,
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,  # peft reads it, and adapters also have to fit transformers' own class, which lacks it
        "is_transposed_without_mark": True,
        "scales_inputs": True,
    }
    return type(f"Chosen{kind.__name__}", (kind,), members)
