"""Attention of a model: the modules whose forward pass calls the attention interface of transformers."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from lightseq.attention.operator import ATTENTION_OP
from lightseq.parts.changes import Changes
from lightseq.parts.part import Choices, Part, Ranks
from lightseq.parts.probes import calls_attention_interface
from lightseq.parts.projections import STORED_LINEAR_OP, store_projections

IMPLEMENTATION: Final = "lightseq"  # begins the names under which transformers knows our functions


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules with a place in the layers that call the attention interface. Names do not matter.

    Reads their code, because running it may need weights and inputs that are not there.
    """
    calls = cache(calls_attention_interface)  # for this model: others may have patched classes

    def attends(module: nn.Module) -> bool:
        kind: Any = type(module)
        own = vars(module).get("forward")
        return calls(kind.forward, kind) or (own is not None and calls_attention_interface(own, kind))

    return [module for module in model.modules() if hasattr(module, "layer_idx") and attends(module)]


def attend_with(model: PreTrainedModel, name: str, changes: Changes) -> None:
    """Lets a model attend with a registered function of lightseq until the changes are undone.

    It then attends as before, unless the user has chosen another function since.
    """
    before = model.config._attn_implementation
    # A model whose config an enabled one shares was never plain; None is the default of transformers.
    plain = None if before is not None and before.startswith(IMPLEMENTATION) else before
    changes.call_later(partial(_attend_again, model, plain))
    model.set_attn_implementation(name)


def _attend_again(model: PreTrainedModel, plain: str | None) -> None:
    if model.config._attn_implementation.startswith(IMPLEMENTATION):
        model.set_attn_implementation(plain)  # type: ignore[arg-type]


def _fit(modules: Sequence[nn.Module], choices: Choices, ranks: Ranks, changes: Changes) -> None:
    """Gives attention its ranks and the reaches of its model's mask, and lets projections be stored."""
    if ranks.sequence is not None:
        for attention in (found for module in modules for found in attention_modules(module)):
            changes.set_attribute(attention, "sequence_context", ranks.sequence)
            if choices.reaches:
                changes.set_attribute(attention, "reach_of_mask", choices.reaches[attention.layer_idx])  # type: ignore[index]
    if choices.stores_projections:
        store_projections(modules, changes)


PART = Part(
    name="attention",
    fit=_fit,
    stored=(ATTENTION_OP, STORED_LINEAR_OP),
    backward=torch.ops.lightseq.attention_backward.default,
)
