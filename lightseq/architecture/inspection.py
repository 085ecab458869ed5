"""Architecture of a causal language model, read from the model: built on the meta device and run once there.

Nothing depends on the model's name. A model that would train only approximately raises a one-line ValueError.
"""

import json
import traceback
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final, cast

import torch
from numpy.typing import ArrayLike
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.architecture.meta_run import TOKENS, LayerRun, MetaRun, linears_of, run_on_meta
from lightseq.models.build import constructed_buffers, settings_of
from lightseq.models.decoder import (
    decoder_layers,
    float32_parameters,
    has_known_parts,
    has_towers,
    layers_of,
    norms_of,
    positions_in_table,
    text_config,
    text_decoder,
    ties_embeddings,
    transformers_model,
)
from lightseq.parts.attention import attention_modules, reaches_by_type, reaches_of_masks, sliding_window
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import parameters_of_experts
from lightseq.parts.facts import Attention, Layer, LinearMixer, distinct, heads_of
from lightseq.parts.mlp import gate_activation
from lightseq.parts.probes import find_logit_transform, works_on_each_token
from lightseq.parts.projections import has_projections
from lightseq.parts.recurrences import (
    MixerKind,
    is_of_hybrids,
    layer_types_of_mixers,
    mixer_modules,
    registered_mixers,
    unknown_convolution,
)
from lightseq.schedule.reach import sliding
from lightseq.utils.formatting import first_line
from lightseq.utils.logit_transform import LogitTransform
from lightseq.utils.versions import OLDEST_FOR_RECURRENCES, check_version

MAX_LAYERS: Final = 10_000  # building a layer on the meta device takes a millisecond
# Attention alone has fewer requirements.
OWN_LOOP: Final = "use your own loop around hf.enable (examples/README.md), or another model"
OTHER_HEADS: Final = ("summary_", "classifier_")  # prefixes of settings for other heads than a language model's


@dataclass(frozen=True)
class Architecture:
    """Facts about a model; counts are of parameters in the whole model."""

    name: str
    layers: tuple[Layer, ...]
    layers_share_inputs: bool  # all layers get the same arguments, such as RoPE, apart from the hidden states
    layers_share_keys: bool  # some layer attends to keys and values of another
    passes_documents: bool  # layers pass keyword arguments, and so packed documents, to attention
    logit_transform: LogitTransform  # turns the head's output into logits: scale, soft cap
    total: int  # tied parameters count once
    sizes: tuple[int, ...]  # elements of each parameter tensor
    head: int  # weights of the LM head, tied or not
    ties_embeddings: bool  # the LM head's weight is that of the input embeddings
    outside_linears: tuple[str, ...]  # weights of layers outside linears and experts, such as Conv1D's
    in_float32: tuple[str, ...] = ()  # parameters that compute in float32 when others do not, such as routers
    positions: int | None = (
        None  # rows of a table of positions, learned or computed; None: any position has an encoding
    )

    @cached_property
    def kinds(self) -> list[Layer]:
        """Returns one of each kind of layers, in order of first appearance."""
        return distinct(self.layers)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Returns the softmax attention of all layers."""
        return tuple(attention for layer in self.layers for attention in layer.attentions)

    @cached_property
    def linears(self) -> int:
        """Returns the weights of the linears in all layers."""
        return sum(layer.linears for layer in self.layers)

    @cached_property
    def active(self) -> int:
        """Returns the weights in all layers that a token is multiplied by."""
        return sum(layer.active for layer in self.layers)

    @property
    def ends_with_mlps(self) -> bool:
        """Returns whether only the residual sum follows the MLP in every layer."""
        return all(layer.mlp_is_last for layer in self.kinds)

    @property
    def has_recurrences(self) -> bool:
        """Returns whether some layer mixes tokens without attention."""
        return any(isinstance(mixer, LinearMixer) for layer in self.kinds for mixer in layer.mixers)

    @property
    def windows(self) -> set[int]:
        """Returns the window or chunk sizes of layers without full attention."""
        found = {mixer.reach for layer in self.kinds for mixer in layer.attentions}
        return {reach.tokens for reach in found if reach is not None}

    def attention_area(self, sizes: ArrayLike) -> float:
        """Returns twice the visible (query, key) pairs in documents of these sizes, the mean over all mixers.

        A mixer's weight in the mean is the FLOPs of one of its pairs. Without windows the area is the sum of the
        squared sizes.
        """
        return sum(share * mixer.area(sizes) for mixer, share in self._shares_of_mixers.items())

    @cached_property
    def _shares_of_mixers(self) -> dict[Attention, float]:
        kinds = Counter(self.attentions)
        whole = sum(count * mixer.pair_flops for mixer, count in kinds.items())
        return {mixer: count * mixer.pair_flops / whole for mixer, count in kinds.items()}

    def attention_share(self, length: int) -> float:
        """Returns the FLOPs of attention to one sequence as a share of full causal attention in all layers."""
        return self.attention_area(length) / length**2


def check_attention(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose attention is not supported exactly."""
    _check_kind_of_attention(model)
    _check_attention_dropout(model)


def _check_kind_of_attention(model: PreTrainedModel) -> None:
    model = transformers_model(model)  # unwraps PEFT and others
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder and a decoder; use a causal language model, which has a decoder only")
    config, decoder = text_config(model.config), text_decoder(model)
    if has_towers(model.config) and not (has_known_parts(model) and type(decoder.config) is type(config)):
        raise ValueError(f"{name} has inputs other than text, and no plain text decoder; use a language model")
    modules = attention_modules(decoder)
    if not modules and mixer_modules(decoder):
        raise ValueError(f"{name} has no layer with softmax attention; use a model with at least one")
    if (convolution := unknown_convolution(decoder)) is not None:
        check_version("transformers", OLDEST_FOR_RECURRENCES, f"the convolution over tokens of {name} ({convolution})")
        raise ValueError(
            f"{name} has a convolution over tokens ({convolution}) in no known mixer, as Mamba 1 has, or patched code; "
            "use another model, transformers' own code, or register the module (docs/architecture.md)"
        )
    is_hybrid = mixer_modules(decoder) or is_of_hybrids(type(decoder))
    uses_interface = getattr(decoder, "_supports_attention_backend", False) or is_hybrid
    if not modules or not uses_interface:
        raise ValueError(f"{name} does not use the attention interface of transformers")
    if not all(getattr(x, "is_causal", True) for x in (config, *modules)):
        raise ValueError(f"{name} attends in both directions (is_causal is False); use a causal model")
    known = {*reaches_by_type(config)} | layer_types_of_mixers(config, layers_of(decoder))
    if factor := getattr(config, "z_loss_coefficient", None):
        raise ValueError(
            f"{name} adds a mean over each rank's own logits to its loss (z_loss_coefficient {factor}); set it to 0"
        )
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        raise ValueError(f"{name} has {kinds[0]} layers, which no kernel supports; use a full-attention model")


def _check_attention_dropout(model: PreTrainedModel) -> None:
    """Raises ValueError for a dropout rate of attention above 0, in the config or in the attention modules."""
    found: dict[str, Any] = dict(text_config(model.config).to_dict())
    for value in list(found.values()):
        found |= value if isinstance(value, dict) else {}  # a nested config
    in_config = set(found)
    for module in attention_modules(text_decoder(model)):
        found |= {name: x for name, x in vars(module).items() if isinstance(x, float)}
        found |= {name: child.p for name, child in module.named_children() if isinstance(child, nn.Dropout)}
    for name, rate in found.items():
        of_attention = "drop" in str(name) and ("attn" in str(name) or "attention" in str(name))
        if of_attention and isinstance(rate, float) and rate > 0:
            known = _dropout_remedy(name)
            remedy = known if name in in_config else "set it to 0 in the config from which the model is made"
            raise ValueError(f"{type(model).__name__} has {name} {rate}; {remedy}")


def inspect_architecture(config: PreTrainedConfig) -> Architecture:
    """Returns the architecture of a config. Raises ValueError if it cannot be trained."""
    key = (type(config), repr(vars(config)), registered_mixers())
    if key not in _inspected:  # the planner asks thousands of times, and a config takes long to serialize
        try:
            _inspected[key] = _inspect(cast(Hashable, type(config)), settings_of(config), key[-1])
        except ValueError as error:
            _inspected[key] = error
    if isinstance(found := _inspected[key], ValueError):
        raise ValueError(str(found)) from found.__cause__
    return found


_inspected: dict[tuple[type, str, tuple[MixerKind, ...]], Architecture | ValueError] = {}


def attentions_of(model: PreTrainedModel) -> tuple[Attention, ...]:
    """Returns the attention of all layers. For a model that cannot be inspected, reads it from the config."""
    try:
        return inspect_architecture(model.config).attentions
    except ValueError:
        text = text_config(model.config)
        # Where layers differ, transformers has a config of each.
        configs = text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)
        return tuple(Attention(heads_of(config), sliding(sliding_window(config))) for config in configs)


def configured_logit_transform(config: PreTrainedConfig) -> LogitTransform | None:
    """Returns the function that makes logits in a model that its config builds, or None if it is not known."""
    try:
        return inspect_architecture(config).logit_transform
    except ValueError:
        return None


def _is_raised_by_transformers(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("transformers.")


@lru_cache(maxsize=64)
def _inspect(kind: Any, text: str, _mixers: tuple[MixerKind, ...]) -> Architecture:
    try:
        config = kind.from_dict(json.loads(text))
        if (count := text_config(config).num_hidden_layers) > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {count}; give at most {MAX_LAYERS}")
        model = build_to_train(config)
    except Exception as error:  # the model's code may raise anything
        # The message about a missing package has its remedy in the second line.
        why = " ".join(str(error).split()) if isinstance(error, ImportError) else first_line(error)
        raise ValueError(f"{kind.model_type!r} cannot be built as a causal language model: {why}") from error
    _check_kind_of_attention(model)
    name = type(model).__name__
    if not has_known_parts(model):
        raise ValueError(f"{name} does not consist of embeddings, layers, a norm and a linear head; {OWN_LOOP}")
    _check_attention_dropout(model)
    _check_dropout(model)
    _check_buffers(model)
    layers, head = decoder_layers(model), model.get_output_embeddings()
    try:
        ran = run_on_meta(model, layers)
        for layer_run, reach in zip(ran.layers, reaches_of_masks(model), strict=False):
            if reach is not None and not reach.is_passed:
                layer_run.mixers = [replace(x, reach=reach) for x in layer_run.mixers if isinstance(x, Attention)]
        logit_transform = find_logit_transform(model)
    except Exception as error:  # the model's code may raise anything
        if isinstance(error, ValueError) and not _is_raised_by_transformers(error):
            raise
        why = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, NotImplementedError) and "meta" in str(error):
            why = "they read the values of tensors, as experts with code of their own do"
        raise ValueError(f"{name} has layers that a plan cannot run on text alone ({why}); {OWN_LOOP}") from error
    known = {id(linear.weight) for linear in linears_of(layers)} | {id(p) for p in parameters_of_experts(layers)}
    known |= {id(p) for mixer, _ in mixer_modules(layers) for p in mixer.parameters()}
    # Norms of queries and keys may have a weight for each head.
    known |= {id(p) for norm in norms_of(layers) for p in norm.parameters(recurse=False)}
    return Architecture(
        name=name,
        layers=_facts(layers, ran, text_config(config).hidden_size),
        layers_share_inputs=ran.layers_share_inputs,
        layers_share_keys=ran.layers_share_keys,
        passes_documents=ran.passes_documents,
        logit_transform=logit_transform,
        total=sum(p.numel() for p in model.parameters()),
        sizes=tuple(p.numel() for p in model.parameters()),
        head=head.weight.numel(),
        ties_embeddings=ties_embeddings(model),
        outside_linears=tuple(n for n, p in layers.named_parameters() if p.ndim > 1 and id(p) not in known),
        in_float32=tuple(float32_parameters(model)),
        positions=positions_in_table(model),
    )


def _facts(layers: nn.ModuleList, ran: MetaRun, hidden: int) -> tuple[Layer, ...]:
    """Returns the facts about each layer that ran on the meta device; equal ones are one object."""
    known: dict[Layer, Layer] = {}
    found = [_layer(place, layer, ran.layers[place], hidden) for place, layer in enumerate(layers)]
    return tuple(known.setdefault(facts, facts) for facts in found)


def _layer(place: int, layer: nn.Module, did: LayerRun, hidden: int) -> Layer:
    """Returns the facts about a layer that ran on the meta device."""
    mlp: Any = getattr(layer, "mlp", None)
    in_mlp = set(mlp.modules()) if mlp is not None else set()
    mlp_is_last = not did.saved_after_mlp
    gated_mlp = did.experts is None and gate_activation(mlp) is not None
    is_repeated = mlp is not None and not (mlp_is_last or gated_mlp)  # later operations need the MLP's result
    last_linear = did.linears[-1] if did.linears and did.experts is None and not is_repeated else None
    if did.experts is not None:
        last_product = did.experts.per_token * did.experts.last_product
    else:
        last_product = last_linear.weight.numel() if last_linear else 0
    return Layer(
        kind=type(layer).__name__,
        mixers=tuple(did.mixers),
        mixes_tokens=bool(did.mixers) or not works_on_each_token(layer, hidden),
        hidden=hidden,
        intermediate=next((linear.in_features for linear in reversed(did.linears) if linear in in_mlp), 0),
        parameters=sum(p.numel() for p in layer.parameters()),
        active=did.products // TOKENS,
        linears=sum(linear.weight.numel() for linear in linears_of(layer)),
        last_product=last_product,
        gated_mlp=gated_mlp,
        mlp_is_last=mlp_is_last,
        plain_projections=has_projections(layer),
        linear_inputs=sum(linear.in_features for linear in did.linears),
        linear_outputs=sum(linear.out_features for linear in did.linears),
        last_linear_input=last_linear.in_features if last_linear else 0,
        experts=did.experts,
        place=place,
    )


def _check_dropout(model: PreTrainedModel) -> None:
    rates = {
        key: rate
        for key, rate in text_config(model.config).to_dict().items()
        if "drop" in key and isinstance(rate, float) and rate and not key.startswith(OTHER_HEADS)
    }
    if rates:  # a recomputed layer would drop other elements
        raise ValueError(
            f"{type(model).__name__} has dropout ({', '.join(f'{k} {v}' for k, v in rates.items())}); "
            f"{_dropout_remedy(*rates)}"
        )


def _dropout_remedy(*names: object) -> str:
    zeros = ", ".join(f"{name}=0.0" for name in names)
    return f"set it to 0 in config.json of a local copy, or in your own loop by from_pretrained(..., {zeros})"


def _check_buffers(model: PreTrainedModel) -> None:
    of_rope = {id(b) for m in model.modules() if hasattr(m, "inv_freq") for b in m.buffers()}
    if all(id(buffer) in of_rope for buffer in model.buffers()):
        return
    first, second = (constructed_buffers(model.config) for _ in range(2))
    if drawn := [n for n, buffer in first.items() if not torch.equal(buffer, second[n])]:
        raise ValueError(f"{type(model).__name__} has random buffers ({', '.join(drawn[:3])}); use another model")
