"""Facts about a model, found by running its own code on the meta device, where no tensor has values."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.module_attention import unhonoured_argument
from lightseq.kernels.logit_transform import LogitTransform
from lightseq.models.heads import Heads
from lightseq.modules.identity import StandIn, twin_forward

PROBE: Final = "lightseq_probe"
TOKENS: Final = 4
NOT_COMPARED: Final = ("hidden_states", "attention_mask")  # among layers; attention takes no mask


@dataclass(frozen=True)
class MetaRun:
    """Facts that one forward pass on the meta device shows."""

    heads: Heads  # of every layer
    windows: tuple[int | None, ...]  # that each layer passes to attention, in tokens; None: full attention
    layers_share_inputs: bool  # all layers get the same arguments, apart from the hidden states
    passes_documents: bool  # packed documents reach attention
    ending_linears: list[nn.Linear]  # each layer's last linear
    mlp_is_last: bool  # no layer saves anything after its MLP
    normalized: int  # elements per token that the norms of all layers take


def run_on_meta(model: PreTrainedModel, layers: nn.ModuleList) -> MetaRun:
    """Runs a model, which is on the meta device, once.

    Raises ValueError if attention would not be what a kernel computes, or differs between layers.
    """
    name, calls, ran = type(model).__name__, list[tuple[Heads, Any]](), list[nn.Linear]()
    normalized: list[int] = []
    windows: list[int | None] = []
    inputs: list[dict[str, Any]] = []  # arguments of each layer
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
        windows.append(others.get("sliding_window"))
        calls.append((Heads(q.shape[1], k.shape[1], q.shape[-1]), others.get("documents")))
        return q.transpose(1, 2).contiguous(), None

    def record_inputs(_layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        by_place = {str(place): value for place, value in enumerate(args) if place > 0}
        inputs.append({key: value for key, value in (by_place | keywords).items() if key not in NOT_COMPARED})

    ends: list[nn.Linear] = []
    hooks = [linear.register_forward_hook(lambda linear, *_: ran.append(linear)) for linear in linears_of(layers)]
    hooks += [layer.register_forward_hook(lambda *_: ends.append(ran[-1])) for layer in layers]
    hooks += [layer.register_forward_pre_hook(record_inputs, with_kwargs=True) for layer in layers]
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
    return MetaRun(
        heads=calls[0][0],
        windows=tuple(windows),
        layers_share_inputs=all(_are_same(x, inputs[0]) for x in inputs),
        passes_documents=all(passed is documents for _, passed in calls),
        ending_linears=ends,
        mlp_is_last=not any(saved),
        normalized=sum(normalized) // TOKENS,
    )


def _are_same(x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
    return x.keys() == y.keys() and all(x[key] is y[key] for key in x)


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


def find_logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Returns the function that makes logits of the head's result, found by running the model's own code on numbers.

    The code runs with the attributes and the config that this model has now, on the CPU, without its layers and its
    head. Raises ValueError for a function that is not known: the loss reads only the layers' output, the head's
    parameters and the function.
    """
    name, head = type(model).__name__, model.get_output_embeddings()
    hidden = torch.empty(1, TOKENS, head.in_features, dtype=head.weight.dtype, device="meta")
    wide = torch.logspace(-3, 6, TOKENS * 16, device="cpu")  # in its middle a cap bends, at its ends it is a line
    line = torch.linspace(-50.0, 50.0, TOKENS * 32, device="cpu")
    product = torch.cat([line, wide, -wide]).view(1, TOKENS, 64)
    given: list[Tensor] = []

    def multiply(x: Tensor) -> Tensor:
        given.append(x)
        return product.clone()

    parts = {
        id(model.base_model): StandIn(model.base_model, lambda *_, **__: MoeModelOutputWithPast(hidden)),
        id(head): StandIn(head, multiply),
    }
    children = {key: parts[id(child)] for key, child in model._modules.items() if id(child) in parts}
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        output = twin_forward(model, children, input_ids=ids, position_ids=ids, use_cache=False)
    logits = output[0] if isinstance(output, tuple) else output.logits
    whole = len(given) == 1 and (given[0] is hidden or (given[0]._base is hidden and given[0].shape == hidden.shape))
    known = whole and logits.shape == product.shape and not logits.requires_grad  # a trained scale needs gradients
    found = _fit(product.flatten(), logits.flatten()) if known else None
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


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """Returns all linears inside a module."""
    return [m for m in module.modules() if isinstance(m, nn.Linear)]
