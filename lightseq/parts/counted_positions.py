"""Global positions for attention modules that count the tokens they get (Llama 4's attention temperature).

Such a module adds the tokens of a cache to the count. It gets a cache that says where this rank's tokens are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.parts.changes import Changes
from lightseq.parts.probes import counts_its_tokens

# Keyword that takes positions through a layer to its attention, in a checkpoint's recomputation too.
POSITIONS_KEYWORD: Final = "lightseq_positions"


class _Offsets:
    """Stand-in for a cache, without keys, that tells a module the offset of this rank's tokens."""

    def __init__(self, positions: Tensor) -> None:
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        return self._offsets

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


def give_global_positions(modules: Sequence[nn.Module], attentions: Sequence[nn.Module], changes: Changes) -> None:
    """Gives global positions to attention modules that count their tokens, through the layers around them.

    Rows of a batch must have the same positions.
    """
    found = {module for module in attentions if counts_its_tokens(module)}
    for layer in (layer for module in modules for layer in module.modules()) if found else ():
        counting = [module for module in layer.children() if module in found]
        if counting:
            kinds = [parameter.kind for parameter in signature(type(layer).forward).parameters.values()]
            if Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(
                    f"{type(counting[0]).__name__} counts this rank's tokens, and {type(layer).__name__} passes it no "
                    "keywords; use another model"
                )
            changes.replace_forward(layer, _run_layer)
        for module in counting:
            changes.replace_forward(module, partial(_run_attention, _cache_keyword(module)))


def _cache_keyword(module: nn.Module) -> str:
    names = signature(type(module).forward).parameters
    return next(name for name in ("cache", "past_key_values", "past_key_value") if name in names)


def _run_layer(_layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    positions = kwargs.get("position_ids")
    return forward(*args, **kwargs | {POSITIONS_KEYWORD: None if positions is None else positions[0]})


def _run_attention(cache: str, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    positions = kwargs.pop(POSITIONS_KEYWORD, None)
    if not hasattr(module, "sequence_context"):  # disabled under the wrapper of another library
        return forward(*args, **kwargs)
    if positions is None:
        raise ValueError(f"{type(module).__name__} needs positions, but its layer gets no position_ids; pass them")
    return forward(*args, **kwargs | {cache: _Offsets(positions)})
