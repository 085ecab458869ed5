"""Attention of a model: the modules whose forward pass calls the attention interface of transformers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from lightseq.attention.operator import ATTENTION_OP
from lightseq.parts.changes import Changes
from lightseq.parts.part import Choices, Part, Ranks
from lightseq.parts.probes import functions_inside
from lightseq.parts.projections import STORED_LINEAR_OP, store_projections

IMPLEMENTATION: Final = "lightseq"  # begins the names under which transformers knows our functions
INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"  # its name in transformers
LIBRARY_CLASSES: Final = frozenset({*nn.Module.__mro__, *PreTrainedModel.__mro__})  # whose methods do not attend


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules with a place in the layers that call the attention interface. Names do not matter.

    Reads their code, because running it may need weights and inputs that are not there.
    """
    known: dict[type, bool] = {}
    found = []
    for module in model.modules():
        if not hasattr(module, "layer_idx"):
            continue
        kind = type(module)
        if kind not in known:
            known[kind] = _calls_interface(kind.forward, kind)
        if known[kind] or ("forward" in vars(module) and _calls_interface(module.forward, kind)):
            found.append(module)
    return found


def _calls_interface(forward: Callable[..., Any], kind: type) -> bool:
    """Returns whether a forward pass of a class, its methods or functions of the same file refer to the interface."""
    pending, seen = [forward], set[int]()
    while pending:
        for function in functions_inside(pending.pop()):
            if not isinstance(function, FunctionType) or id(function) in seen:
                continue
            seen.add(id(function))
            names = set(_names(function.__code__))
            values = [function.__globals__.get(name) for name in names]
            if INTERFACE in names or any(isinstance(value, AttentionInterface) for value in values):
                return True
            pending += [x for x in values if isinstance(x, FunctionType) and x.__globals__ is function.__globals__]
            pending += _methods(kind, names)
    return False


def names_in_forward(module: nn.Module) -> set[str]:
    """Returns the names of globals and attributes that a module's own forward pass uses."""
    functions = functions_inside(type(module).forward)
    return {name for function in functions if isinstance(function, FunctionType) for name in _names(function.__code__)}


def _methods(kind: type, names: set[str]) -> Iterator[Any]:
    """Yields the methods of these names that a class defines or inherits, those that others override included."""
    for owner in kind.__mro__:
        if owner not in LIBRARY_CLASSES:
            yield from (vars(owner)[name] for name in names & vars(owner).keys())


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that a function's code uses, with the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


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
