"""Blocks of experts whose own code runs every expert for every token (Llama 4), changed to run only the chosen ones.

In such a block a token's score multiplies what an expert gets, and is zero for experts that the token did not choose.
Experts have no biases, so they make zeros of zeros.

Shape suffixes: T tokens, K experts of a token, H hidden.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.models.build import build
from lightseq.parts.changes import Changes, changes_of
from lightseq.parts.experts import experts_forward
from lightseq.parts.probes import blocks_running_every_expert


def build_to_train(config: PreTrainedConfig, device: str = "meta") -> PreTrainedModel:
    """Builds a model with new weights in float32, the dtype of master weights, in which only chosen experts run."""
    with torch.device(device):
        model = build(config)
    run_chosen_experts(model, changes_of(model))
    return model


def run_chosen_experts(model: nn.Module, changes: Changes) -> None:
    """Makes blocks of a known form run only the chosen experts. Other blocks do not change."""
    for block in blocks_running_every_expert(model):
        changes.set_attribute(block.experts, "__class__", _chosen_experts(block.experts.__class__))
        changes.set_attribute(block, "__class__", _block_of_chosen(block.__class__))


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
    """Returns a subclass of experts with transformers' dispatching forward and its attributes."""

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
        "is_transposed": False,  # for peft: transformers' own class lacks the attribute
        "is_transposed_without_mark": True,
        "scales_inputs": True,
    }
    return type(f"Chosen{kind.__name__}", (kind,), members)
