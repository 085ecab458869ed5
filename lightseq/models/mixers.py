"""Kinds of layers that let tokens read others, beside softmax attention: how each is found and split across ranks.

Softmax attention needs no entry here: it is what calls transformers' attention interface. A recurrence or a short
convolution registers a `MixerKind`. Everything else, the plan, FLOPs, checkpoints, compilation and saving, reads the
layer itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightseq.models.attention_modules import attention_modules
from lightseq.models.decoder import decoder_layers
from lightseq.models.layers import LinearMixer
from lightseq.sequence.group import SequenceGroup


@dataclass(frozen=True)
class MixerKind:
    """A kind of module whose tokens read others.

    `forward` computes what the forward pass of the module's class does, on this rank's part of a sequence. It is a
    method of the module, whose attribute `sequence_group` holds the ranks. If layers pass keywords on, packed
    `documents` are among them.
    """

    module: type[nn.Module]  # the class of the modules; subclasses are other kinds
    forward: Callable[..., Any]
    facts: Callable[[nn.Module], LinearMixer]  # what the plan and FLOPs need of one module
    layer_type: str | None = None  # its name in a config's `layer_types`


_KINDS: dict[type[nn.Module], MixerKind] = {}


def register_mixer(kind: MixerKind) -> None:
    """Lets models with modules of this kind be trained. Raises ValueError if the class has a kind already."""
    if kind.module in _KINDS:
        raise ValueError(
            f"{kind.module.__name__} is registered already; unregister_mixer({kind.module.__name__}) first"
        )
    _KINDS[kind.module] = kind


def unregister_mixer(module: type[nn.Module]) -> None:
    """Forgets the kind of a class of modules. Enabled models keep it."""
    del _KINDS[module]


def mixer_modules(model: nn.Module) -> list[tuple[nn.Module, MixerKind]]:
    """Returns the modules of registered kinds in a model, in its order."""
    return [(module, _KINDS[type(module)]) for module in model.modules() if type(module) in _KINDS]


def attending_layers(model: PreTrainedModel) -> int:
    """Returns the number of layers that attend: all but those with modules of registered kinds and no attention."""
    others = 0
    if mixer_modules(model):
        layers = decoder_layers(model)
        others = sum(bool(mixer_modules(layer)) and not attention_modules(layer) for layer in layers)
    return int(model.config.num_hidden_layers - others)


def mixer_layer_types() -> set[str]:
    """Returns the names of registered kinds in a config's `layer_types`."""
    return {kind.layer_type for kind in _KINDS.values() if kind.layer_type is not None}


def distribute_mixer(
    module: nn.Module, kind: MixerKind, group: SequenceGroup, set_attribute: Callable[[nn.Module, str, Any], None]
) -> None:
    """Lets a module span the ranks of a group. `set_attribute` takes module, name and value, as `setattr` does."""
    set_attribute(module, "sequence_group", group)
    set_attribute(module, "__class__", _distributed_class(kind))


@cache
def _distributed_class(kind: MixerKind) -> type[nn.Module]:
    """Returns a subclass with the kind's forward, shared by all modules, so that layers compile to one graph."""
    return type(f"Distributed{kind.module.__name__}", (kind.module,), {"forward": kind.forward})
