"""Architecture of a causal language model, read from the model: built on the meta device and run once there.

Nothing depends on the model's name. A model that would train only approximately raises a one-line ValueError.
"""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.module_attention import unhonoured_argument
from lightseq.kernels.logit_transform import LogitTransform
from lightseq.models.weights import build_on_meta, constructed_buffers
from lightseq.modules.mlp import is_gated
from lightseq.modules.projections import has_projections
from lightseq.utils.formatting import first_line

PROBE: Final = "lightseq_probe"
TOKENS: Final = 4
MAX_LAYERS: Final = 10_000  # building a layer on the meta device takes a millisecond
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
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens; None: full attention
    logit_transform: LogitTransform  # makes logits of the head's result
    layer_class: str
    gated_mlp: bool  # down(silu(gate) * up) of plain linears
    mlp_is_last: bool  # only the residual sum follows an MLP, so no backward pass needs its output
    plain_projections: bool  # of attention: four linears without bias
    passes_documents: bool  # layers pass keyword arguments, and so packed documents, to attention
    layers: int
    heads: Heads
    total: int  # tied parameters count once
    sizes: tuple[int, ...]  # elements of each parameter tensor
    layer_linears: int  # weights of the linears in all layers
    ending_linears: int  # part of layer_linears: each layer's last linear, whose output no backward pass needs
    head: int  # weights of the LM head, tied or not
    extra_normalized: int  # elements per token that the norms of a layer take, beyond Llama's two of the hidden size

    def has_windows(self, length: int) -> bool:
        """Returns whether some layer does not see a whole sequence of this length."""
        return any(window is not None and window < length for window in self.windows)

    def attention_area(self, sizes: ArrayLike) -> float:
        """Returns twice the visible (query, key) pairs in documents of these sizes, the mean over layers.

        Without windows that is the sum of the squared sizes.
        """
        documents, area = np.asarray(sizes, dtype=np.float64), 0.0
        for window, layers in Counter(self.windows).items():
            seen = documents if window is None else np.minimum(documents, window)
            area += layers / len(self.windows) * float((seen * (2 * documents - seen)).sum())
        return area

    def attention_share(self, length: int) -> float:
        """Returns the visible (query, key) pairs of all layers over those of full attention."""
        return self.attention_area(length) / length**2

    @property
    def can_store_mlp(self) -> bool:
        """Returns whether a checkpoint can store the gate and up of every MLP, so that no MLP product is recomputed."""
        return self.gated_mlp and self.mlp_is_last


def heads_of(config: PreTrainedConfig) -> Heads:
    """Returns the heads of each layer. Raises ValueError if layers differ or the config has no number of heads."""
    try:
        query = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // query
        return Heads(query, getattr(config, "num_key_value_heads", None) or query, dim)
    except (AttributeError, RuntimeError) as error:  # RuntimeError: the config has one number per layer
        raise ValueError(f"{config.model_type} has no single number of attention heads for all layers") from error


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Returns a copy of a config with at most `layers` layers; lists with one entry per layer are cut too."""
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

    Both hold a single type, or a mapping from kind of layer to type (Gemma 3, OLMo 3).
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


def check_attention(model: PreTrainedModel) -> None:
    """Raises ValueError for a model whose attention is not supported exactly."""
    config, name = model.config, type(model).__name__
    if not attention_modules(model) or not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use the attention interface of transformers")
    if config.get_text_config(decoder=True) is not config:
        raise ValueError(f"{name} has inputs other than text; use the causal language model inside it")
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(f"{name} has attention_dropout {config.attention_dropout}; set it to 0 in the model's config")
    if not all(getattr(x, "is_causal", True) for x in (config, *attention_modules(model))):
        raise ValueError(f"{name} attends in both directions (is_causal is False); use a causal model")
    window = sliding_window(config)
    known = {"full_attention", *(["sliding_attention"] if window else [])}
    if kinds := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        raise ValueError(f"{name} has {kinds[0]} layers, which no kernel supports; use a full-attention model")


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Returns the sliding window in tokens, the query's own included; None for full attention."""
    kinds = getattr(config, "layer_types", None)
    asked = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if asked else None
    return None if window is None else int(window)


def caps_scores(config: PreTrainedConfig) -> bool:
    """Returns whether layers softly cap their attention scores. The cap itself is what they pass to attention."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer in tokens, None for full attention."""
    window, kinds = sliding_window(config), getattr(config, "layer_types", None)
    if not kinds:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def inspect_architecture(config: PreTrainedConfig) -> Architecture:
    """Returns the architecture of a config. Raises ValueError if it cannot be trained."""
    key = (type(config), repr(vars(config)))
    if key not in _inspected:  # the planner asks thousands of times, and a config takes long to serialize
        facts = {name: value for name, value in config.to_diff_dict().items() if name not in ("dtype", "use_cache")}
        try:
            _inspected[key] = _inspect(cast(Hashable, type(config)), json.dumps(facts, sort_keys=True))
        except ValueError as error:
            _inspected[key] = error
    if isinstance(found := _inspected[key], ValueError):
        raise ValueError(str(found)) from found.__cause__
    return found


_inspected: dict[tuple[type, str], Architecture | ValueError] = {}


def known_logit_transform(model: PreTrainedModel) -> LogitTransform | None:
    """Returns the function that makes logits of the head's result, or None if the model is not known well enough.

    A subclass is known if it has the forward pass of its base, as those that FSDP2 makes do.
    """
    try:
        found = inspect_architecture(model.config)
    except ValueError:
        return None
    kinds: list[Any] = [kind for kind in type(model).__mro__ if kind.__name__ == found.name]
    same = any(kind.forward is type(model).forward for kind in kinds)
    return found.logit_transform if same else None


@lru_cache(maxsize=64)
def _inspect(kind: Any, text: str) -> Architecture:
    try:
        config = kind.from_dict(json.loads(text))
        if config.num_hidden_layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}; give at most {MAX_LAYERS}")
        model = build_on_meta(config)
    except Exception as error:  # the model's code may raise anything
        raise ValueError(
            f"{kind.model_type!r} cannot be built as a causal language model: {first_line(error)}"
        ) from error
    check_attention(model)
    name, base = type(model).__name__, model.base_model
    layers, head = getattr(base, "layers", None), model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or not hasattr(base, "norm") or not isinstance(head, nn.Linear):
        raise ValueError(f"{name} does not consist of embeddings, layers, a norm and a linear head; use another model")
    _check_parts(model, layers)
    try:
        heads, passes_documents, ends, mlp_is_last, normalized = _run_on_meta(model, layers)
        logit_transform = _logit_transform(model, head)
    except ValueError:
        raise
    except Exception as error:  # the model's code may raise anything
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name} does not run on the meta device ({why}); use another model") from error
    return Architecture(
        name=name,
        windows=layer_windows(config),
        logit_transform=logit_transform,
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
        extra_normalized=max(0, normalized // len(layers) - 2 * config.hidden_size),
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
            f"{name} has dropout ({', '.join(f'{k} {v}' for k, v in rates.items())}); set it to 0 in its config"
        )
    known = {id(linear.weight) for linear in _linears(layers)}
    if strange := [n for n, p in layers.named_parameters() if p.ndim > 1 and id(p) not in known]:
        raise ValueError(
            f"{name} has weights outside linear layers, as a mixture of experts does ({strange[0]}); use a dense model"
        )
    if len(kinds := {type(layer).__name__ for layer in layers}) > 1:
        raise ValueError(
            f"{name} has different kinds of layers ({', '.join(sorted(kinds))}); use a model with one kind"
        )
    of_rope = {id(b) for m in model.modules() if hasattr(m, "inv_freq") for b in m.buffers()}
    if all(id(buffer) in of_rope for buffer in model.buffers()):
        return
    first, second = (constructed_buffers(model.config) for _ in range(2))
    if drawn := [n for n, buffer in first.items() if not torch.equal(buffer, second[n])]:
        raise ValueError(f"{name} has random buffers ({', '.join(drawn[:3])}); use another model")


def _run_on_meta(model: PreTrainedModel, layers: nn.ModuleList) -> tuple[Heads, bool, list[nn.Linear], bool, int]:
    """Runs the model once on the meta device.

    Returns the attention heads of every layer, whether packed documents reach attention, each layer's last linear,
    whether no layer saves anything after its MLP, and the elements per token that all norms of the layers take.
    """
    name, calls, ran = type(model).__name__, list[tuple[Heads, Any]](), list[nn.Linear]()
    normalized: list[int] = []
    documents, keys = object(), list[tuple[nn.Module, Tensor]]()

    def probe(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **others: Any) -> Any:
        if dropped := unhonoured_argument({"attention_mask": attention_mask} | others):
            raise ValueError(f"{name} passes {dropped} to attention, which no kernel supports; use another model")
        if q.shape[-1] != v.shape[-1]:
            raise ValueError(
                f"{name} has keys of {q.shape[-1]} and values of {v.shape[-1]} dimensions; use a model where they agree"
            )
        if any(
            k is other and module is not layer for layer, other in keys
        ):  # a checkpoint of some layers cannot recompute those of others
            raise ValueError(f"{name} has layers that share keys and values; use your own loop around hf.enable")
        keys.append((module, k))
        calls.append((Heads(q.shape[1], k.shape[1], q.shape[-1]), others.get("documents")))
        return q.transpose(1, 2).contiguous(), None

    ends: list[nn.Linear] = []
    hooks = [linear.register_forward_hook(lambda linear, *_: ran.append(linear)) for linear in _linears(layers)]
    hooks += [layer.register_forward_hook(lambda *_: ends.append(ran[-1])) for layer in layers]
    norms = [module for module in layers.modules() if "Norm" in type(module).__name__]
    hooks += [norm.register_forward_hook(lambda *call: normalized.append(call[-1].numel())) for norm in norms]
    for rope in [
        m for m in model.modules() if hasattr(m, "inv_freq") or isinstance(getattr(m, "rope_type", None), dict)
    ]:
        kinds: Any = getattr(rope, "rope_type", None)  # other types read position values, which meta tensors lack
        rope.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # type: ignore[assignment]
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with _attention_replaced(model, probe), _count_saved_after_mlps(layers) as saved:
        model(input_ids=ids, position_ids=ids, use_cache=False, documents=documents)
    for hook in hooks:
        hook.remove()
    if len(calls) != len(layers) or any(heads != calls[0][0] for heads, _ in calls):
        raise ValueError(f"{name} has layers with different attention; use a model with one kind of layer")
    passes_documents = all(passed is documents for _, passed in calls)
    return calls[0][0], passes_documents, ends, not any(saved), sum(normalized) // TOKENS


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


def _logit_transform(model: PreTrainedModel, head: nn.Linear) -> LogitTransform:
    """Returns the function that makes logits of the head's result, found by running the model's own code on numbers.

    Raises ValueError for one that is not known: the loss reads only the layers' output, the head's parameters and the
    function.
    """
    name, base = type(model).__name__, model.base_model
    hidden = torch.empty(1, TOKENS, head.in_features, device="meta")
    wide = torch.logspace(-3, 6, TOKENS * 16)  # in its middle a cap bends, at its ends it is a line and a constant
    product = torch.cat([torch.linspace(-50.0, 50.0, TOKENS * 32), wide, -wide]).view(1, TOKENS, 64)
    given: list[Tensor] = []

    def multiply(x: Tensor) -> Tensor:
        given.append(x)
        return product.clone()

    base.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[method-assign]
    head.forward = multiply  # type: ignore[method-assign, assignment]
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        logits = model(input_ids=ids, position_ids=ids, use_cache=False).logits
    finally:
        del base.forward, head.forward
    whole = len(given) == 1 and (given[0] is hidden or (given[0]._base is hidden and given[0].shape == hidden.shape))
    found = _fit(product.flatten(), logits.flatten()) if whole and logits.shape == product.shape else None
    if found is None:
        raise ValueError(
            f"{name} changes its logits in a way that the chunked loss does not support; use a model that scales or "
            "softly caps them, or leaves them as they are"
        )
    return found


def _fit(product: Tensor, logits: Tensor) -> LogitTransform | None:
    """Returns the transform that makes these logits of the product; None if there is none."""
    smallest, largest = product.abs().argmin(), product.argmax()
    scale, cap = float(logits[smallest] / product[smallest]), float(logits[largest])
    if not (0 < scale < math.inf and 0 < cap < math.inf):
        return None
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    capped = cap < 0.99 * scale * float(product[largest])
    found = LogitTransform(scale, cap if capped else None)
    return found if torch.allclose(logits, found.logits(product), rtol=1e-5, atol=0) else None
