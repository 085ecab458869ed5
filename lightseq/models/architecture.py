"""Architecture of a causal language model, read from the model: built on the meta device and run once there.

Nothing depends on its name. Anything that training here would honour only in part is a ValueError of one line.
"""

import copy
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.module_attention import unhonoured_argument
from lightseq.models.weights import build_on_meta
from lightseq.modules.mlp import is_gated
from lightseq.modules.projections import has_projections
from lightseq.utils.formatting import first_line

PROBE: Final = "lightseq_probe"
TOKENS: Final = 4
MAX_LAYERS: Final = 10_000  # each takes a millisecond to build on the meta device
LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Heads:
    """Attention heads of a layer: query heads, key/value heads, and their dimension."""

    query: int
    key_value: int
    dim: int


@dataclass(frozen=True)
class Architecture:
    """Facts about a model; counts are of parameters in the whole model."""

    name: str
    window: int | None  # most tokens that a token of some layer sees; None: all
    layer_class: str
    gated_mlp: bool  # down(silu(gate) * up) of plain linears
    mlp_is_last: bool  # no backward pass needs an MLP's output, as only a sum follows it and no norm
    plain_projections: bool  # of attention: four linears without bias
    passes_documents: bool  # layers pass keyword arguments, and so packed documents, to attention
    layers: int
    heads: Heads
    total: int  # tied parameters count once
    sizes: tuple[int, ...]  # elements of each parameter tensor
    layer_linears: int  # weights of the linears in all layers
    ending_linears: int  # of them, those that end a layer: no backward pass needs their output
    head: int  # weights of the LM head, tied or not

    @property
    def can_store_mlp(self) -> bool:
        """Returns whether a checkpoint may store gate and up of its MLPs and recompute no product of them."""
        return self.gated_mlp and self.mlp_is_last


def heads_of(config: PreTrainedConfig) -> Heads:
    """Returns the heads of every layer. Raises ValueError if layers differ or the config does not say."""
    try:
        query = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return Heads(query, getattr(config, "num_key_value_heads", None) or query, dim)
    except (AttributeError, RuntimeError) as error:  # RuntimeError: the config has one number per layer
        raise ValueError(f"{config.model_type} has no one number of attention heads for all layers") from error


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Returns a copy of a config with the first few layers; lists with one entry per layer are cut too."""
    before, few = config.num_hidden_layers, copy.deepcopy(config)
    few.num_hidden_layers = min(before, layers)
    for key, value in vars(few).items():
        if isinstance(value, list) and len(value) == before:
            setattr(few, key, value[: few.num_hidden_layers])
    return few


def matrix_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Returns the sizes of a layer's weight matrices, by the names that config.json gives them."""
    heads = heads_of(config)
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention heads x head_dim": heads.query * heads.dim,
        "key/value heads x head_dim": heads.key_value * heads.dim,
    }


def rope_types(source: object) -> set[str]:
    """Returns the RoPE types of a config or of a RoPE module.

    Both have one type, or a mapping with one for each kind of layer (Gemma 3, OLMo 3).
    """
    found = getattr(source, "rope_type", None)
    if isinstance(found, Mapping):
        return {str(kind) for kind in found.values()}
    if found is not None:
        return {str(found)}
    parameters = getattr(source, "rope_parameters", None) or {}
    all_layers = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return {str(each["rope_type"]) for each in all_layers if "rope_type" in each}


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the attention modules of a model."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]


def check_attention(model: PreTrainedModel, length: int) -> None:
    """Raises ValueError for a model whose attention over `length` tokens would be honoured only in part."""
    config, name = model.config, type(model).__name__
    if not attention_modules(model) or not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use the attention interface of transformers")
    if config.get_text_config(decoder=True) is not config:
        raise ValueError(f"{name} has inputs other than text; give the causal language model inside of it")
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(f"{name} has attention_dropout {config.attention_dropout}; set it to 0 in the model's config")
    if not all(getattr(x, "is_causal", True) for x in (config, *attention_modules(model))):
        raise ValueError(f"{name} attends in both directions (is_causal is False); use a causal model")
    window = sliding_window(config)
    known = {"full_attention", *(["sliding_attention"] if window else [])}
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        raise ValueError(f"{name} has layers of {kinds[0]}, for which there is no kernel; use a full-attention model")
    _check_window(name, window, length)


def _check_window(name: str, window: int | None, length: int) -> None:
    if window is not None and length > window:
        raise ValueError(
            f"{name} has sliding-window attention over {window} tokens, for which there is no kernel at {length}; "
            f"give at most {window}, where it is full attention, or a full-attention model"
        )


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Returns the smallest number of keys that a token of some layer can see, itself included; None if all."""
    kinds = getattr(config, "layer_types", None)
    asked = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if asked else None
    return None if window is None else int(window)


def inspect_architecture(config: PreTrainedConfig, length: int | None = None) -> Architecture:
    """Returns the architecture of a config.

    Raises ValueError for one that cannot be trained here, or not at a given length.
    """
    facts = {name: value for name, value in config.to_diff_dict().items() if name not in ("dtype", "use_cache")}
    found = _inspect(cast(Hashable, type(config)), json.dumps(facts, sort_keys=True))
    _check_window(found.name, found.window, length or 1)
    return found


@lru_cache(maxsize=64)
def _inspect(kind: Any, text: str) -> Architecture:
    try:
        config = kind.from_dict(json.loads(text))
        if config.num_hidden_layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}; give at most {MAX_LAYERS}")
        model = build_on_meta(config)
    except Exception as error:  # the model's code may raise anything
        raise ValueError(f"{kind.model_type!r} is no causal language model here: {first_line(error)}") from error
    check_attention(model, 1)
    name, base = type(model).__name__, model.base_model
    layers, head = getattr(base, "layers", None), model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or not hasattr(base, "norm") or not isinstance(head, nn.Linear):
        raise ValueError(f"{name} is not built of embeddings, layers, a norm and a linear head; use a model that is")
    if head.bias is not None:
        raise ValueError(f"{name} has a bias in its head, which the loss over chunks leaves out; use another model")
    _check_parts(model, layers)
    try:
        heads, passes_documents, ends, mlp_is_last = _run_on_meta(model, layers, head)
    except ValueError:
        raise
    except Exception as error:  # from the model's code, too
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name} does not run as the models that train here do ({why}); use another model") from error
    return Architecture(
        name=name,
        window=sliding_window(config),
        layer_class=type(layers[0]).__name__,
        gated_mlp=all(is_gated(getattr(layer, "mlp", None)) for layer in layers),
        mlp_is_last=mlp_is_last,
        plain_projections=all(map(has_projections, layers)),
        passes_documents=passes_documents,
        layers=len(layers),
        heads=heads,
        total=sum(p.numel() for p in model.parameters()),
        sizes=tuple(p.numel() for p in model.parameters()),
        layer_linears=sum(linear.weight.numel() for linear in _linears(layers)),
        ending_linears=sum(linear.weight.numel() for linear in ends),
        head=head.weight.numel(),
    )


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def _check_parts(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    name = type(model).__name__
    rates = {
        key: rate for key, rate in model.config.to_dict().items() if "drop" in key and isinstance(rate, float) and rate
    }
    if rates:  # a recomputation would drop other elements
        raise ValueError(
            f"{name} drops out ({', '.join(f'{k} {v}' for k, v in rates.items())}); set it to 0 in its config"
        )
    known = {id(linear.weight) for linear in _linears(layers)}
    if strange := [n for n, p in layers.named_parameters() if p.ndim > 1 and id(p) not in known]:
        raise ValueError(
            f"{name} has {strange[0]}, weights of no linear layer (a mixture of experts, perhaps); use a dense model"
        )
    if len(kinds := {type(layer).__name__ for layer in layers}) > 1:
        raise ValueError(f"{name} has layers of several kinds, {', '.join(sorted(kinds))}; use a model of one")
    computed = {id(b) for m in model.modules() if hasattr(m, "inv_freq") for b in m.buffers()}
    if left := [n for n, buffer in model.named_buffers() if id(buffer) not in computed]:
        raise ValueError(f"{name} has buffers that cannot be computed anew, {', '.join(left[:3])}; use another model")


def _run_on_meta(
    model: PreTrainedModel, layers: nn.ModuleList, head: nn.Linear
) -> tuple[Heads, bool, list[nn.Linear], bool]:
    """Runs the model once on the meta device.

    Returns the heads that attention is called with in every layer, whether packed documents reach it, the linear that
    each layer runs last, and whether no layer saves anything after its MLP.
    """
    name, calls, ran = type(model).__name__, list[tuple[Heads, Any]](), list[nn.Linear]()
    documents = object()

    def probe(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **others: Any) -> Any:
        if dropped := unhonoured_argument({"attention_mask": attention_mask} | others):
            raise ValueError(f"{name} passes {dropped} to attention, for which there is no kernel; use another model")
        if q.shape[-1] != v.shape[-1]:
            raise ValueError(f"{name} has keys of {q.shape[-1]} and values of {v.shape[-1]}; use a model of one size")
        calls.append((Heads(q.shape[1], k.shape[1], q.shape[-1]), others.get("documents")))
        return q.transpose(1, 2).contiguous(), None

    ends: list[nn.Linear] = []
    hooks = [linear.register_forward_hook(lambda linear, *_: ran.append(linear)) for linear in _linears(layers)]
    hooks += [layer.register_forward_hook(lambda *_: ends.append(ran[-1])) for layer in layers]
    for rope in [
        m for m in model.modules() if hasattr(m, "inv_freq") or isinstance(getattr(m, "rope_type", None), dict)
    ]:
        kinds: Any = getattr(rope, "rope_type", None)  # some frequencies depend on values, which meta tensors lack
        rope.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # type: ignore[assignment]
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with _attention_replaced(model, probe), _count_saved_after_mlps(layers) as saved, _plain_head_required(model, head):
        model(input_ids=ids, position_ids=ids, use_cache=False, documents=documents)
    for hook in hooks:
        hook.remove()
    if len(calls) != len(layers) or any(heads != calls[0][0] for heads, _ in calls):
        raise ValueError(f"{name} has layers whose attention differs; use a model of one kind of layer")
    return calls[0][0], all(passed is documents for _, passed in calls), ends, not any(saved)


@contextmanager
def _count_saved_after_mlps(layers: nn.ModuleList) -> Iterator[list[int]]:
    """Yields a list that receives, per layer, the number of tensors saved for backward after its MLP.

    A layer without an MLP counts all that it saves.
    """
    since: list[Tensor] = []
    counts: list[int] = []

    def save(x: Tensor) -> Tensor:
        since.append(x)
        return x

    mlps = [mlp for layer in layers if (mlp := getattr(layer, "mlp", None)) is not None]
    hooks = [mlp.register_forward_hook(lambda *_: since.clear()) for mlp in mlps]
    hooks += [layer.register_forward_hook(lambda *_: counts.append(len(since))) for layer in layers]
    with saved_tensors_hooks(save, lambda x: x):
        yield counts
    for hook in hooks:
        hook.remove()


@contextmanager
def _attention_replaced(model: PreTrainedModel, function: Callable[..., Any]) -> Iterator[None]:
    ALL_ATTENTION_FUNCTIONS.register(PROBE, function)
    model.set_attn_implementation(PROBE)
    yield
    model.set_attn_implementation("eager")


@contextmanager
def _plain_head_required(model: PreTrainedModel, head: nn.Linear) -> Iterator[None]:
    """Raises ValueError unless the logits are exactly the head applied to the layers' output.

    The loss reads only the head's weight and that output.
    """
    found: dict[str, Tensor] = {}
    hooks = [
        model.base_model.register_forward_hook(lambda _, __, output: found.update(layers=output.last_hidden_state)),
        head.register_forward_hook(lambda _, args, output: found.update(given=args[0], product=output)),
        model.register_forward_hook(lambda _, __, output: found.update(logits=output.logits)),
    ]
    yield
    for hook in hooks:
        hook.remove()
    given, layers = found.get("given"), found["layers"]
    whole = given is layers or (given is not None and given._base is layers and given.shape == layers.shape)
    if not whole or found["logits"] is not found["product"]:
        raise ValueError(
            f"{type(model).__name__} scales or caps its logits, which the loss over chunks leaves out; use another"
        )
