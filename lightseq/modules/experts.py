"""Experts of a mixture: rows sorted by their expert, and one grouped product for each weight.

Shape suffixes: T tokens, K experts of a token, R rows (T x K, sorted by expert), E experts, H hidden.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightseq.kernels.grouped_products import grouped_product
from lightseq.modules.expert_adapters import expert_adapter

IMPLEMENTATION: Final = "lightseq"  # in transformers' registry of functions that run experts


def experts_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the modules of stacked experts, as transformers' `use_experts_implementation` marks them, with names."""
    for name, child in module.named_modules():
        if hasattr(child, "_is_expert_parallel") and hasattr(child, "is_transposed"):
            yield name, child


def parameters_of_experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of stacked experts, and of the modules around them, such as routers."""
    for name, _ in experts_modules(module):
        yield from module.get_submodule(name.rpartition(".")[0]).parameters()


def use_grouped_experts(model: PreTrainedModel) -> None:
    """Lets a model run its experts with `experts_forward`."""
    for _, experts in experts_modules(model):
        experts.config._experts_implementation = IMPLEMENTATION


def store_experts(layers: Iterable[nn.Module]) -> None:
    """Lets a checkpoint around each layer store the first product of its experts.

    The backward pass then repeats no product of experts: it needs no result of the second one.
    """
    for layer in layers:
        for _, experts in experts_modules(layer):
            experts.stores_products = True


class Routes(NamedTuple):
    """Order in which experts take the tokens' copies."""

    order_R: Tensor  # copy, counted by token and then by choice, in each row
    places_R: Tensor  # row of each copy
    experts_R: Tensor  # expert of each row
    ends_E: Tensor  # row after an expert's last (int32)


def sort_by_expert(experts_TK: Tensor, count: int) -> Routes:
    """Returns the rows of `count` experts. Copies keep their order among those of an expert."""
    experts_R, order_R = experts_TK.reshape(-1).sort(stable=True)
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    numbers = torch.arange(count, device=order_R.device, dtype=experts_R.dtype)
    return Routes(order_R, places_R, experts_R, torch.searchsorted(experts_R, numbers, right=True, out_int32=True))


def experts_forward(module: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Returns the weighted sum of each token's experts (T, H), for a module of transformers' stacked experts.

    A token's weights multiply the input of the second product, not its result, so that no backward pass needs that
    result (as in SonicMoE, arXiv 2512.14080). Copies are summed in float32, in the order of a token's choices.
    """
    if (group := getattr(module, "expert_group", None)) is not None:
        return group.forward(module, hidden_TH, experts_TK, weights_TK)  # type: ignore[no-any-return]
    return run_experts(module, hidden_TH, experts_TK, weights_TK, module.num_experts)


def run_experts(module: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, count: int) -> Tensor:
    """Returns what the `count` experts of this rank add to each token (T, H). An expert `count` adds nothing."""
    routes = sort_by_expert(experts_TK, count)
    here: Tensor | None = None  # rows of this rank's experts
    if count < module.num_experts:
        here = (torch.arange(len(routes.order_R), device=hidden_TH.device) < routes.ends_E[-1])[:, None]

    def only_here(x: Tensor) -> Tensor:
        """Sets rows of other ranks' experts, which no product writes, and their gradients to zero."""
        return x if here is None else torch.where(here, x, 0)

    x = only_here(_Dispatch.apply(hidden_TH, routes.order_R, routes.places_R))
    weights = _Dispatch.apply(weights_TK.reshape(-1, 1), routes.order_R, routes.places_R)
    first, stored = "gate_up_proj" if module.has_gate else "up_proj", getattr(module, "stores_products", False)
    y = only_here(_linear(module, first, x, routes, stored))
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(only_here(_linear(module, "down_proj", y, routes))) * weights
    else:
        y = _linear(module, "down_proj", only_here((y * weights).to(y.dtype)), routes, bias_factor=weights)
    return _Combine.apply(only_here(y).to(hidden_TH.dtype), routes.order_R, routes.places_R, len(hidden_TH))


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def _linear(
    module: Any, name: str, x: Tensor, routes: Routes, stored: bool = False, bias_factor: Tensor | None = None
) -> Tensor:
    """Applies a weight of the experts, with its bias if they have one, to their rows."""
    weight = _weight(module, name)
    x = x.to(weight.dtype)
    y = grouped_product(x, weight, routes.ends_E, module.is_transposed, stored)
    if (adapter := expert_adapter(module, name, weight.dtype)) is not None:
        y = y + adapter.product(x, routes.ends_E)
    if not module.has_bias:
        return y
    bias = _RowBias.apply(_weight(module, f"{name}_bias"), routes.experts_R)
    return y + (bias if bias_factor is None else (bias * bias_factor).to(y.dtype))


def _weight(module: Any, name: str) -> Tensor:
    group, parameter = getattr(module, "expert_group", None), getattr(module, name)
    return parameter if group is None else group.weight(parameter)  # type: ignore[no-any-return]


class _Dispatch(torch.autograd.Function):
    """Copies each token's values to the rows of its experts. Gradients of its copies are summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_R: Tensor, places_R: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(places_R)
        ctx.tokens = len(x)
        return x[order_R // (len(order_R) // len(x))]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places_R,) = ctx.saved_tensors
        return _sum_of_copies(dy, places_R, ctx.tokens), None, None


class _Combine(torch.autograd.Function):
    """Sums each token's rows in float32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order_R: Tensor, places_R: Tensor, tokens: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(order_R)
        ctx.copies = len(order_R) // tokens
        return _sum_of_copies(y, places_R, tokens)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (order_R,) = ctx.saved_tensors
        return dout[order_R // ctx.copies], None, None, None


def _sum_of_copies(x: Tensor, places_R: Tensor, tokens: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x[places_R].view(tokens, -1, x.shape[-1]).sum(1, dtype=wide).to(x.dtype)


class _RowBias(torch.autograd.Function):
    """Copies each expert's bias to its rows. Gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, bias_EO: Tensor, experts_R: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(experts_R)
        ctx.count = len(bias_EO)
        return bias_EO[experts_R.clamp_max(ctx.count - 1)]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (experts_R,) = ctx.saved_tensors
        wide = torch.promote_types(dy.dtype, torch.float32)
        total = dy.new_zeros(ctx.count, dy.shape[-1], dtype=wide)
        return total.index_add_(0, experts_R.clamp_max(ctx.count - 1), dy.to(wide)).to(dy.dtype), None
