"""Modules that mix tokens without softmax attention, such as recurrences and short convolutions.

Modules of transformers are recognized (transformers_recurrences.py), others are registered. Softmax attention needs no
entry: it is what calls transformers' attention interface. The plan, FLOPs, checkpoints, compilation and saving read the
layer itself.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.models.decoder import decoder_layers, text_config
from lightseq.parts.attention import attention_modules
from lightseq.parts.changes import Changes
from lightseq.parts.facts import LinearMixer
from lightseq.parts.part import Choices, Part, Ranks
from lightseq.parts.probes import works_on_each_token
from lightseq.parts.transformers_recurrences import distributed_forward, facts, replace_functions, replaced_functions
from lightseq.recurrent.head_exchange import SCAN_HEADS_OP
from lightseq.recurrent.scan import SCAN_OP
from lightseq.recurrent.tree_scan import TREE_SCAN_OP
from lightseq.sequence.halo import TOKENS_BEFORE_OP
from lightseq.utils.versions import OLDEST_FOR_RECURRENCES, check_version


@dataclass(frozen=True)
class MixerKind:
    """Class of modules that mix tokens without softmax attention.

    `forward` replaces the class's forward and gets this rank's part of the sequence; `self.sequence_group` is the group
    of ranks, and `self.recurrent_schedule` how a `scan` spans them. Packed batches also pass `documents`, if the layers
    forward keywords.
    """

    module: type[nn.Module]  # its subclasses are other kinds
    forward: Callable[..., Any]
    facts: Callable[[nn.Module], LinearMixer]  # returns a module's facts for the plan and FLOPs
    functions: tuple[str, ...] = ()  # functions of its modeling file to replace
    plain_forward: Callable[..., Any] | None = None  # original forward of the class, to detect patches


_KINDS: dict[type[nn.Module], MixerKind] = {}


def register_mixer(kind: MixerKind) -> None:
    """Registers a kind of mixer. Raises ValueError if its class has another kind already."""
    if _KINDS.setdefault(kind.module, kind) != kind:
        raise ValueError(f"{kind.module.__name__} is registered already, with another forward or other facts")


def registered_mixers() -> tuple[MixerKind, ...]:
    """Returns the registered kinds, on which facts about a model depend."""
    return tuple(_KINDS.values())


def mixer_modules(model: nn.Module) -> list[tuple[nn.Module, MixerKind]]:
    """Returns the modules of known kinds in a model, in its order."""
    found = ((module, kind_of(type(module))) for module in model.modules())
    return [
        (module, kind) for module, kind in found if kind is not None and not (kind.functions and _calls_own(module))
    ]


def _calls_own(module: nn.Module) -> bool:
    """Returns whether a module stores its kernels as attributes, as older versions of transformers do."""
    return any(isinstance(value, FunctionType | BuiltinFunctionType) for value in vars(module).values())


def kind_of(module: Any) -> MixerKind | None:
    """Returns the kind of a class of modules: registered, or recognized by the functions that its forward calls.

    Raises ValueError if the class is transformers' own, and of a version that is too old.
    """
    plain = getattr(module, "plain_class", module)  # original class of an enabled module
    if (registered := _KINDS.get(plain)) is not None:
        return registered
    functions = replaced_functions(plain)
    if not functions:
        return None
    if not _takes_keywords(plain.forward):
        check_version("transformers", OLDEST_FOR_RECURRENCES, plain.__name__)
    return MixerKind(plain, distributed_forward, facts, functions, plain.forward)


def _takes_keywords(function: Callable[..., Any]) -> bool:
    return any(p.kind is Parameter.VAR_KEYWORD for p in signature(function).parameters.values())


def is_of_hybrids(model_class: Any) -> bool:
    """Returns whether a class's file also defines mixers. A model may use none of them."""
    file = sys.modules.get(model_class.__module__)
    classes = [x for x in vars(file or object).values() if isinstance(x, type) and issubclass(x, nn.Module)]
    return any(x.__module__ == model_class.__module__ and kind_of(x) is not None for x in classes)


def unknown_convolution(model: nn.Module) -> str | None:
    """Returns the name of a convolution outside known mixers, or None. It may need other ranks' tokens.

    transformers' mixers run one that is their own child and has a filter for each channel. One inside a projection
    would see a rank's own tokens. Registered mixers run all that they have.
    """
    known = set[nn.Module]()
    for mixer, kind in mixer_modules(model):
        known.update(filter(_filters_channels, mixer.children()) if kind.functions else mixer.modules())
    found = (name for name, part in model.named_modules() if isinstance(part, nn.Conv1d) and part not in known)
    return next(found, None)


def _filters_channels(part: nn.Module) -> bool:
    return isinstance(part, nn.Conv1d) and part.groups == part.in_channels == part.out_channels


def attending_layers(model: PreTrainedModel) -> int:
    """Returns the number of layers with attention. In hybrid models some layers have another mixer, or none."""
    others = 0
    if mixer_modules(model):
        layers = decoder_layers(model)
        others = sum(not attention_modules(layer) for layer in layers)
    return int(text_config(model.config).num_hidden_layers - others)


def layer_types_of_mixers(config: Any, layers: Iterable[nn.Module]) -> set[str]:
    """Returns the `layer_types` of layers with a mixer, or without any mixing of tokens."""
    found = set[str]()
    for layer, kind in zip(layers, getattr(config, "layer_types", None) or (), strict=False):
        if kind in found:
            continue
        if mixer_modules(layer) or (not attention_modules(layer) and works_on_each_token(layer, config.hidden_size)):
            found.add(kind)
    return found


def _fit(modules: Sequence[nn.Module], _choices: Choices, ranks: Ranks, changes: Changes) -> None:
    """Distributes mixers over the ranks of a sequence."""
    if ranks.sequence is not None:
        for module, kind in (found for each in modules for found in mixer_modules(each)):
            distribute_mixer(module, kind, ranks.sequence, changes)


def distribute_mixer(module: nn.Module, kind: MixerKind, context: SequenceContext, changes: Changes) -> None:
    """Replaces a module's forward by the forward of its kind, over the ranks of the context.

    Raises ValueError for a module whose forward is not its class's.
    """
    if "forward" in vars(module):
        raise ValueError(
            f"a {kind.module.__name__} has a forward of its own, as hooks of accelerate and kernels of the Hub set it; "
            "load the model without device_map and use_kernels"
        )
    if kind.functions:
        replace_functions(kind.module)
    changes.set_attribute(module, "sequence_group", context.sequence)
    changes.set_attribute(module, "recurrent_schedule", context.recurrent_schedule)
    if not hasattr(type(module), "plain_class"):
        changes.set_attribute(module, "__class__", _distributed_class(kind))


@cache
def _distributed_class(kind: MixerKind) -> type[nn.Module]:
    """Returns a subclass with the kind's forward, shared by all modules, so that layers compile to one graph."""
    plain_forward = kind.plain_forward or kind.module.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "sequence_group"):  # disabled, but another library has subclassed it
            return plain_forward(self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    members = {"forward": forward, "plain_class": kind.module, "plain_forward": plain_forward}
    return type(f"Distributed{kind.module.__name__}", (kind.module,), members | {"functions": kind.functions})


PART = Part(
    name="recurrence",
    fit=_fit,
    stored=(SCAN_OP, SCAN_HEADS_OP, TOKENS_BEFORE_OP, TREE_SCAN_OP),
    backward=torch.ops.lightseq.scan_backward.default,
)
