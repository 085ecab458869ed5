"""Registry of modules that mix tokens without softmax attention, such as recurrences and short convolutions.

Softmax attention needs no entry: it is what calls transformers' attention interface. The plan, FLOPs, checkpoints,
compilation and saving read the layer itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightseq.models.attention_modules import attention_modules
from lightseq.models.decoder import decoder_layers, text_config
from lightseq.models.layers import LinearMixer
from lightseq.sequence.group import SequenceGroup


@dataclass(frozen=True)
class MixerKind:
    """Class of modules that mix tokens without softmax attention.

    `forward` replaces the class's forward and gets this rank's part of the sequence; `self.sequence_group` is the group
    of ranks. Packed batches also pass `documents`, if the layers forward keywords.
    """

    module: type[nn.Module]  # its subclasses are other kinds
    forward: Callable[..., Any]
    facts: Callable[[nn.Module], LinearMixer]  # returns what the plan and FLOPs need of one module
    layer_type: str | None = None  # its name in a config's `layer_types`


_KINDS: dict[type[nn.Module], MixerKind] = {}


def register_mixer(kind: MixerKind) -> None:
    """Registers a kind of mixer. Raises ValueError if its class has another kind already."""
    if _KINDS.setdefault(kind.module, kind) != kind:
        raise ValueError(f"{kind.module.__name__} is registered already, with another forward or other facts")


def registered_mixers() -> tuple[MixerKind, ...]:
    """Returns the registered kinds, on which facts about a model depend."""
    return tuple(_KINDS.values())


def mixer_modules(model: nn.Module) -> list[tuple[nn.Module, MixerKind]]:
    """Returns the modules of registered kinds in a model, in its order."""
    return [(module, _KINDS[type(module)]) for module in model.modules() if type(module) in _KINDS]


def attending_layers(model: PreTrainedModel) -> int:
    """Returns the number of layers with attention. Layers that have only a registered mixer do not count."""
    others = 0
    if mixer_modules(model):
        layers = decoder_layers(model)
        others = sum(bool(mixer_modules(layer)) and not attention_modules(layer) for layer in layers)
    return int(text_config(model.config).num_hidden_layers - others)


def mixer_layer_types() -> set[str]:
    """Returns the names of registered kinds in a config's `layer_types`."""
    return {kind.layer_type for kind in _KINDS.values() if kind.layer_type is not None}


def distribute_mixer(
    module: nn.Module, kind: MixerKind, group: SequenceGroup, set_attribute: Callable[[nn.Module, str, Any], None]
) -> None:
    """Replaces a module's forward by its kind's, and gives it the group.

    `set_attribute` is `setattr`, or records the change so that it can be undone.
    """
    set_attribute(module, "sequence_group", group)
    set_attribute(module, "__class__", _distributed_class(kind))


@cache
def _distributed_class(kind: MixerKind) -> type[nn.Module]:
    """Returns a subclass with the kind's forward, shared by all modules, so that layers compile to one graph."""
    return type(f"Distributed{kind.module.__name__}", (kind.module,), {"forward": kind.forward})
