"""Recognizes foreign code by running it on numbers, or by reading its bytecode, but never by the name of a class.

Each public function is a probe. One that runs code does so on the CPU, with functions in place of child modules, and
compares the result with the definition; code that raises is not known. One that reads code follows it into wrappers,
closures and the functions that it calls.

| probe | how | recognizes | refuses |
|---|---|---|---|
| `calls_attention_interface` | reads | attention through transformers' interface | attention in code of its own |
| `counts_its_tokens` | reads | attention that counts the tokens it gets (Llama 4) | attention that does not |
| `functions_of_mixer` | reads | mixers of transformers, such as recurrences | patched or unknown classes, functions |
| `is_gated_mlp` | runs | down(act(gate(x)) * up(x)) of plain linears | other results, patches, hooks, biases |
| `blocks_running_every_expert` | runs | mixtures that run all experts | other results, patches, hooks, biases |
| `works_on_each_token` | runs | layers that mix no tokens | layers that do, or take more than hidden states |
| `find_logit_transform` | runs | logits that are scaled or softly capped | other functions of the head's result |
| `is_load_balancing_loss` | runs | transformers' router loss | other results, other parameters |
| `sees_later_tokens_of_images` | runs | masks that let a token see all of its image | other masks |

Shape suffixes: T tokens, K experts of a token, E experts, H hidden, I intermediate.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from inspect import signature, unwrap
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import AttentionInterface

from lightseq.models.decoder import headless, text_config, text_decoder, with_head
from lightseq.parts.identity import (
    StandIn,
    functions_held,
    is_known_code,
    is_unchanged,
    named_in,
    plain_numbers,
    reached,
    run_twin,
    runs_on_numbers,
)
from lightseq.parts.low_rank import is_linear
from lightseq.parts.router_loss import router_loss_share, router_sums, sums_over_ranks
from lightseq.utils.logit_transform import LogitTransform

TOKENS: Final = 5
INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"  # its name in transformers
LIBRARY_CLASSES: Final = frozenset({*nn.Module.__mro__, *PreTrainedModel.__mro__})  # whose methods do not attend
# Packages that define functions of mixers. lightseq replaces transformers' functions by dispatching wrappers.
LIBRARIES: Final = ("torch", "transformers", "kernels", "fla", "mamba_ssm", "causal_conv1d", "triton", "lightseq")
MLP_LINEARS: Final = ("gate_proj", "up_proj", "down_proj")
ACTIVATION_CLASSES: Final = (nn.SiLU, SiLUActivation, nn.GELU, GELUTanh, NewGELUActivation)


def calls_attention_interface(forward: Callable[..., Any], kind: type) -> bool:
    """Returns whether a forward pass of a class, its methods or functions of the same file refer to the interface."""

    def follow(function: Any) -> Iterator[Any]:
        named = named_in(function)
        yield from functions_held(function)
        yield from (x for x in named.values() if isinstance(x, FunctionType) and x.__globals__ is function.__globals__)
        for owner in (owner for owner in kind.__mro__ if owner not in LIBRARY_CLASSES):
            yield from (vars(owner)[name] for name in named.keys() & vars(owner).keys())  # overridden ones included

    found = map(named_in, reached(forward, follow))
    return any(INTERFACE in x or any(isinstance(value, AttentionInterface) for value in x.values()) for x in found)


def counts_its_tokens(attention: nn.Module) -> bool:
    """Returns whether an attention module counts its tokens, starting at the cache's length (as Llama 4 does)."""
    names = {name for function in reached(type(attention).forward, functions_held) for name in named_in(function)}
    return names >= {"arange", "get_seq_length"}


def functions_of_mixer(kind: Any, known: Collection[str], harmless: Collection[str]) -> tuple[str, ...]:
    """Returns those `known` functions of its modeling file that a class's forward calls.

    Returns none for a class or function that is not transformers' own, and for a forward that calls a function of its
    file that is neither known nor harmless.
    """
    forward: Any = unwrap(kind.forward)
    if not _is_of_models(forward):
        return ()
    named = named_in(forward, only_globals=True)
    called = {name: x for name, x in named.items() if callable(x) and not isinstance(x, type)}
    found = tuple(name for name in known if name in called)
    if not found or called.keys() - {*known, *harmless} or kind.__call__ is not nn.Module.__call__:
        return ()
    is_own = all(getattr(called[name], "__module__", None) == forward.__module__ for name in found)
    return found if is_own and all(map(_is_written_by_libraries, (kind.forward, *called.values()))) else ()


def _is_of_models(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__module__.startswith("transformers.models.")


def _is_written_by_libraries(function: Any) -> bool:
    """Returns whether a function, and the functions of its modeling file that it calls, are unpatched."""

    def follow(one: Any) -> Collection[Any]:
        own = unwrap(one) if isinstance(one, FunctionType) else None
        return named_in(own, only_globals=True).values() if _is_of_models(own) else ()

    called = (one for one in reached(function, follow) if isinstance(one, FunctionType))
    return all(is_known_code(one, LIBRARIES) for one in called)


@runs_on_numbers
def is_gated_mlp(mlp: Any, activation: Callable[[Tensor], Tensor]) -> bool:
    """Returns whether a module computes down(activation(gate(x)) * up(x)) with linears that `linear_weights` reads."""
    act_fn, has_linears = mlp.act_fn, all(is_linear(getattr(mlp, name)) for name in MLP_LINEARS)
    if not (has_linears and type(act_fn) in ACTIVATION_CLASSES and is_unchanged(act_fn) and is_unchanged(mlp)):
        return False
    x, given = torch.zeros(1, 4), list[Tensor]()
    gate, up, out = (torch.linspace(-4, end, 16)[None] for end in (4, 2, 1))

    def down(act: Tensor) -> Tensor:
        given.append(act)
        return out

    calls = (lambda y: gate.clone() if y is x else None, lambda y: up.clone() if y is x else None, down)
    returned = run_twin(mlp, dict(zip(MLP_LINEARS, calls, strict=True), act_fn=act_fn), x)
    if returned is not out or len(given) != 1:
        return False
    return torch.allclose(given[0], activation(gate) * up, rtol=1e-5, atol=1e-6)


def blocks_running_every_expert(model: nn.Module) -> list[Any]:
    """Returns blocks that run every expert on every token, multiplied by its score (Llama 4).

    Scores are zero for experts that a token did not choose. Blocks whose parts somebody changed are left out.
    """
    known: dict[tuple[type, ...], bool] = {}
    found = list[Any]()
    for block in filter(_has_parts_of_mixture, model.modules()):
        kinds = type(block), type(block.experts), type(block.router)
        if kinds not in known:
            known[kinds] = _runs_every_expert(block)
        found += [block] if known[kinds] else []
    return found


def _has_parts_of_mixture(block: Any) -> bool:
    """Returns whether a module has a router and experts, each with a forward of transformers."""
    parts = [block, *(getattr(block, name, None) for name in ("experts", "router"))]
    if not all(isinstance(x, nn.Module) for x in (*parts, getattr(block, "shared_expert", None))):
        return False
    dimensions = {name: weight.ndim for name, weight in block.experts.named_parameters()}
    if dimensions != {"gate_up_proj": 3, "down_proj": 3} or hasattr(block.experts, "is_transposed"):
        return False
    return all(is_unchanged(part, ("torch", "transformers")) for part in parts)


@runs_on_numbers
def _runs_every_expert(block: Any) -> bool:
    experts, (count, hidden, _) = block.experts, block.experts.gate_up_proj.shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5

    x_TH, router_EH = draw(TOKENS, hidden), draw(count, hidden)
    first_EHI, last_EIH = draw(count, hidden, 2), draw(count, 1, hidden)
    children = {
        "router": lambda x: functional_call(block.router, {"weight": router_EH}, (x,)),
        "experts": lambda x: functional_call(experts, {"gate_up_proj": first_EHI, "down_proj": last_EIH}, (x,)),
        "shared_expert": lambda x: 2 * x,
    }
    found, found_logits = run_twin(block, children, x_TH[None])
    scores, logits = children["router"](x_TH)
    scores_TK, chosen_TK = scores.topk(block.router.top_k, dim=-1)
    inputs_TKH = x_TH[:, None] * scores_TK[..., None]
    gate, up = torch.einsum("tkh,tkhi->tki", inputs_TKH, first_EHI[chosen_TK]).chunk(2, dim=-1)
    routed_TH = torch.einsum("tki,tkih->th", up * experts.act_fn(gate), last_EIH[chosen_TK])
    return torch.equal(found_logits, logits) and torch.allclose(found, 2 * x_TH + routed_TH, rtol=1e-5, atol=1e-6)


def _result(output: Any) -> Any:
    """Extracts the logits of a model's output, or the hidden states of a layer's."""
    return output[0] if isinstance(output, tuple) else getattr(output, "logits", output)


@runs_on_numbers
def works_on_each_token(layer: nn.Module, hidden_size: int) -> bool:
    """Returns whether changing one token's hidden states does not change the results of other tokens."""

    def constant(parameter: Tensor) -> Tensor:
        # Elements share their memory, because a published layer takes gigabytes; stacked experts share one expert's.
        dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
        own = parameter.shape[1:] if parameter.ndim == 3 else ()
        return torch.full(own, 0.01, dtype=dtype).expand(parameter.shape)

    values = {name: constant(value) for name, value in (*layer.named_parameters(), *layer.named_buffers())}
    hidden = torch.rand(1, TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    before = _result(functional_call(layer, values, (hidden,)))
    for token in range(TOKENS):
        changed = hidden.clone()
        changed[:, token] += 1 + hidden[:, token]
        differs = _result(functional_call(layer, values, (changed,))) != before
        if not differs[:, token].any() or differs.any(-1).sum() > 1:
            return False
    return True


class _LayersOutput(MoeModelOutputWithPast):
    """Output of a model without its head. Fields that only models with other inputs have are None."""

    def __getattr__(self, _name: str) -> None:
        return None


def find_logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Finds the function from the head's product to the logits, without running the layers and the head.

    The code runs with the attributes and the config that this model has now. Raises ValueError for a function that is
    not known: the loss reads only the layers' output, the head's parameters and the function.
    """
    if (inside := with_head(model)) is not model:
        _check_passes_logits(model, inside)
        return find_logit_transform(inside)
    name, head, body = type(model).__name__, model.get_output_embeddings(), headless(model)
    given: list[Tensor] = []
    with plain_numbers(gradients=True):
        hidden = torch.linspace(0.5, 2.0, TOKENS * head.in_features).view(1, TOKENS, -1)
        wide = torch.logspace(-3, 6, TOKENS * 16)  # in its middle a cap bends, at its ends it is a line
        product = torch.cat([torch.linspace(-50.0, 50.0, TOKENS * 32), wide, -wide]).view(1, TOKENS, 64)
        ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")

        def multiply(x: Tensor) -> Tensor:
            given.append(x)
            return product.clone()

        base, layers = (StandIn(x, lambda *_, **__: _LayersOutput(hidden)) for x in (body, text_decoder(model)))
        vars(base)["decoder"] = layers  # OPT's head calls it
        parts = {id(body): base, id(head): StandIn(head, multiply)}
        children = {key: parts[id(child)] for key, child in model._modules.items() if id(child) in parts}
        logits = _result(run_twin(model, children, input_ids=ids, position_ids=ids, use_cache=False))
    before = _factor(hidden, given[0]) if len(given) == 1 else None
    known = logits.shape == product.shape and not logits.requires_grad  # a trained scale needs gradients
    found = _fit(product.flatten(), logits.flatten()) if known else None
    scales_bias = before == 1.0 or head.bias is None
    if found is None or before is None or not scales_bias:
        raise ValueError(
            f"{name} changes its logits in a way that the chunked loss does not support; use a model that scales or "
            "softly caps them, or leaves them as they are"
        )
    return LogitTransform(found.scale * before, found.cap)


def _check_passes_logits(model: PreTrainedModel, inside: PreTrainedModel) -> None:
    """Raises ValueError unless a composite model returns its language model's logits unchanged."""
    with plain_numbers():
        logits = torch.linspace(-50.0, 50.0, TOKENS * 64).view(1, TOKENS, 64)
        embeds = torch.zeros(1, TOKENS, inside.get_input_embeddings().embedding_dim)
        children = {key: StandIn(inside, lambda *_, **__: _LayersOutput(logits)) for key in model._modules}
        found = _result(run_twin(model, children, inputs_embeds=embeds, use_cache=False))
    if not torch.equal(found, logits):
        raise ValueError(f"{type(model).__name__} changes the logits of its {type(inside).__name__}; use another model")


def _factor(hidden: Tensor, given: Tensor) -> float | None:
    """Returns the factor between the layers' output and what the head gets (MiniCPM 3); None if it is anything else."""
    if given.shape != hidden.shape or given.is_meta:
        return None
    if given.dtype != hidden.dtype:  # a cast; a factor would have been rounded too
        return 1.0 if torch.equal(given, hidden.to(given.dtype)) else None
    ratios = given / hidden
    factor = float(ratios.flatten()[0])
    alike = torch.allclose(ratios, ratios.new_tensor(factor), rtol=1e-6, atol=0)
    return factor if alike and factor > 0 else None


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


@cache
@runs_on_numbers
def is_load_balancing_loss(function: Callable[..., Any]) -> bool:
    """Returns whether a function computes the router loss of transformers' mixtures, with a mask or without."""
    if tuple(signature(function).parameters) != ("gate_logits", "num_experts", "top_k", "attention_mask"):
        return False
    logits = torch.arange(48, dtype=torch.float32).square().sin().view(2, 6, 4).unbind()
    for mask in (None, torch.tensor([[1, 1, 1], [1, 0, 0]])):
        sums = [router_sums(x, 2, None if mask is None else mask.bool()) for x in logits]
        expected = router_loss_share(sums_over_ranks(sums, None))
        if not torch.isclose(torch.as_tensor(function(logits, 4, 2, mask)), expected, rtol=1e-4):
            return False
    return True


def sees_later_tokens_of_images(model: PreTrainedModel) -> bool:
    """Returns whether image tokens see later tokens of their image, in every layer and within its window.

    Runs the mask functions of the model's own file on a short row, because models differ in this.
    """
    kind: Any = type(model.base_model)
    return _masks_join_images(kind, text_config(model.config).__class__)


@cache
@runs_on_numbers
def _masks_join_images(kind: Any, config_class: Any) -> bool:
    file, config = sys.modules[kind.__module__], config_class()
    config._attn_implementation, config.sliding_window = "sdpa", 5
    types = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0]])
    places = torch.arange(types.shape[1])
    blocks = (types[0].diff(prepend=types[0, :1]) == 1).cumsum(0).masked_fill(types[0] == 0, -1)
    want = (places[:, None] >= places) | ((blocks[:, None] == blocks) & (blocks >= 0))
    found = file.create_masks_for_vision_model(
        config=config, inputs_embeds=torch.zeros(1, len(places), 1), attention_mask=None, cache=None,
        position_ids=places[None], block_sequence_ids=file.get_block_sequence_ids_for_mask(types),
    )  # fmt: skip
    full, sliding = (found[name][0, 0] for name in ("full_attention", "sliding_attention"))
    inside = places > places[:, None] - config.sliding_window
    return torch.equal(full, want) and torch.equal(sliding, want & inside)
