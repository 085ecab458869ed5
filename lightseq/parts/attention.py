"""Attention of a model: the modules whose forward pass calls the attention interface of transformers."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.attention.operator import ATTENTION_OP
from lightseq.models.decoder import text_config, text_decoder
from lightseq.parts.changes import Changes
from lightseq.parts.counted_positions import give_global_positions
from lightseq.parts.part import Choices, Part, Ranks
from lightseq.parts.probes import calls_attention_interface
from lightseq.parts.projections import STORED_LINEAR_OP, store_projections
from lightseq.schedule.reach import CHUNK, Reach, sliding

IMPLEMENTATION: Final = "lightseq"  # begins the names under which transformers knows our functions
MASKS: Final = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")  # transformers' functions
LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


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


def rope_types(source: object) -> set[str]:
    """Returns the RoPE types of a config or of a RoPE module.

    Both hold a single type, or a mapping from kind of layer to type (Gemma 3, OLMo 3).
    """
    found = getattr(source, "rope_type", None)
    if isinstance(found, Mapping):
        return {str(kind) for kind in found.values()}
    if found is not None:
        return {str(found)}
    config = text_config(source) if isinstance(source, PreTrainedConfig) else source
    parameters = getattr(config, "rope_parameters", None) or {}
    all_layers = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return {str(each["rope_type"]) for each in all_layers if "rope_type" in each}


def length_dependent_ropes(model: nn.Module) -> list[nn.Module]:
    """Returns the RoPE modules that scale with the length of the sequence."""
    return [m for m in model.modules() if hasattr(m, "rope_type") and rope_types(m) & LENGTH_DEPENDENT_ROPE]


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Returns the sliding window in tokens, the query's own included; None for full attention."""
    text = text_config(config)
    kinds = getattr(text, "layer_types", None)
    asked = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    window = getattr(text, "sliding_window", None) if asked else None
    return None if window is None else int(window)


def caps_scores(config: PreTrainedConfig) -> bool:
    """Returns whether layers softly cap their attention scores. Layers pass the cap to attention."""
    return getattr(text_config(config), "attn_logit_softcapping", None) is not None


def layer_reaches(config: PreTrainedConfig) -> tuple[Reach | None, ...]:
    """Returns the sliding window or the chunk of each layer, None for full attention."""
    text = text_config(config)
    if not (kinds := getattr(text, "layer_types", None)):
        return (sliding(sliding_window(config)),) * int(text.num_hidden_layers)
    reaches = reaches_by_type(config)
    return tuple(reaches.get(kind) for kind in kinds)


def reaches_by_type(config: PreTrainedConfig) -> dict[str, Reach | None]:
    """Returns the reach of attention for each of the `layer_types` that a config can have; None for full attention."""
    found: dict[str, Reach | None] = {"full_attention": None}
    if window := sliding_window(config):
        found["sliding_attention"] = sliding(window)
    if chunk := getattr(text_config(config), "attention_chunk_size", None):
        found["chunked_attention"] = Reach(CHUNK, chunk)
    return found


def reaches_of_masks(model: PreTrainedModel) -> tuple[Reach | None, ...]:
    """Returns the reach of each layer that the model's own code applies with a mask; None for full attention.

    A config may have a leftover window that the code of its model does not read.
    """
    modules = {sys.modules.get(kind.__module__) for kind in type(text_decoder(model)).__mro__}
    config = text_config(model.config)
    if any(hasattr(module, name) for module in modules for name in MASKS):
        return layer_reaches(config)
    return (None,) * int(config.num_hidden_layers)


def attend_with(model: PreTrainedModel, name: str, changes: Changes) -> None:
    """Switches a model to a registered attention function of lightseq until the changes are undone.

    It then attends as before, unless the user has chosen another function since.
    """
    # A model whose config an enabled one shares was never plain; None is the default of transformers.
    plain = None if _attends_with_ours(model) else model.config._attn_implementation
    changes.call_later(partial(_attend_again, model, plain), again=partial(model.set_attn_implementation, name))
    model.set_attn_implementation(name)


def _attend_again(model: PreTrainedModel, plain: str | None) -> None:
    if _attends_with_ours(model):
        model.set_attn_implementation(plain)  # type: ignore[arg-type]


def _attends_with_ours(model: PreTrainedModel) -> bool:
    name = model.config._attn_implementation
    return name is not None and name.startswith(IMPLEMENTATION)


def _fit(modules: Sequence[nn.Module], choices: Choices, ranks: Ranks, changes: Changes) -> None:
    """Gives attention its ranks, global positions and the windows of its model's mask. Marks stored projections."""
    if ranks.sequence is not None:
        attentions = [attention for module in modules for attention in attention_modules(module)]
        give_global_positions(modules, attentions, changes)
        for attention in attentions:
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
