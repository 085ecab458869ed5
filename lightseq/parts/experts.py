"""Experts of a mixture: rows sorted by their expert, and one grouped product for each weight.

Shape suffixes: T tokens, K experts of a token, R rows (T x K, sorted by expert), E experts, H hidden.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightseq.kernels.grouped_products import STORED_PRODUCT_OP, grouped_product
from lightseq.kernels.token_rows import copy_to_rows, sum_rows
from lightseq.parts.changes import Changes
from lightseq.parts.expert_adapters import expert_adapter
from lightseq.parts.part import Choices, Part, Ranks

IMPLEMENTATION: Final = "lightseq"  # in transformers' registry of functions that run experts


def experts_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the modules of stacked experts, as transformers' `use_experts_implementation` marks them, with names."""
    for name, child in module.named_modules():
        if hasattr(child, "_is_expert_parallel") and hasattr(child, "is_transposed"):
            yield name, child


def parameters_of_experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of stacked experts, and of the modules around them, such as routers."""
    for name, _ in experts_modules(module):
        while name.endswith(".base_layer"):  # in peft's wrappers of adapters
            name = name.rpartition(".")[0]
        yield from module.get_submodule(name.rpartition(".")[0]).parameters()


def names_of_products(experts: Any) -> tuple[str, str]:
    """Returns the names of the weights that experts multiply by, in order."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _fit(modules: Sequence[nn.Module], choices: Choices, ranks: Ranks, changes: Changes) -> None:
    """Runs experts as grouped products on their ranks, and marks first products to be stored."""
    for module in modules:
        if choices.groups_experts:
            use_grouped_experts(module, changes)
        for _, experts in experts_modules(module):
            if ranks.experts is not None:
                changes.set_attribute(experts, "expert_group", ranks.experts)
            if choices.stores_products:  # backward then repeats no product: it never reads the second
                changes.set_attribute(experts, "stores_products", True)


def use_grouped_experts(module: nn.Module, changes: Changes) -> None:
    """Makes the experts inside a module run with `experts_forward`."""
    for _, experts in experts_modules(module):
        if not _scales_inputs(experts):  # they have no other implementation
            before = experts.config._experts_implementation  # a property
            changes.call_later(functools.partial(setattr, experts.config, "_experts_implementation", before))
            experts.config._experts_implementation = IMPLEMENTATION


class Routes(NamedTuple):
    """Order in which experts take the tokens' copies."""

    order_R: Tensor  # copy, counted by token and then by choice, in each row
    places_R: Tensor  # row of each copy
    experts_R: Tensor  # expert of each row
    ends_E: Tensor  # row after an expert's last (int32)


def sort_by_expert(experts_TK: Tensor, count: int) -> Routes:
    """Sorts copies of rows by expert, for `count` experts. The copies of an expert keep their order."""
    experts_R, order_R = experts_TK.reshape(-1).sort(stable=True)
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    numbers = torch.arange(count, device=order_R.device, dtype=experts_R.dtype)
    return Routes(order_R, places_R, experts_R, torch.searchsorted(experts_R, numbers, right=True, out_int32=True))


def experts_forward(module: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Returns the weighted sum of each token's experts (T, H), for a module of transformers' stacked experts.

    A token's weights multiply the input of the second product, not its result, so that no backward pass needs that
    result (as in SonicMoE, arXiv 2512.14080); or the input of the first product, where the model does so
    (chosen_experts.py). Copies are summed in float32, in the order of a token's choices.
    """
    if (group := getattr(module, "expert_group", None)) is not None:
        return group.forward(module, hidden_TH, experts_TK, weights_TK)  # type: ignore[no-any-return]
    return run_experts(module, hidden_TH, experts_TK, weights_TK, module.num_experts)


def run_experts(module: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, count: int) -> Tensor:
    """Runs this rank's `count` experts. Returns their sum for each token (T, H); expert number `count` adds nothing."""
    routes, partial = sort_by_expert(experts_TK, count), count < module.num_experts
    x = _Dispatch.apply(hidden_TH, routes, partial)
    weights = _DispatchWeights.apply(weights_TK.reshape(-1, 1), routes)
    (first, last), stored = names_of_products(module), getattr(module, "stores_products", False)
    scales_inputs = _scales_inputs(module)
    if scales_inputs:
        x = (x * weights).to(x.dtype)
    y = _linear(module, first, x, routes, stored)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    if module.has_post_expert_norm:
        y = _linear(module, last, y, routes)
        if partial:  # rows of other ranks' experts would reach the gradient of the norm's weight
            here = torch.arange(len(y), device=y.device) < routes.ends_E[-1]
            y = torch.where(here[:, None], y, 0)
        y = module.post_expert_norm(y) * weights
    elif scales_inputs:
        y = _linear(module, last, y, routes)
    else:
        y = _linear(module, last, (y * weights).to(y.dtype), routes, bias_factor=weights)
    return _Combine.apply(y.to(hidden_TH.dtype), routes, len(hidden_TH), partial)


def _scales_inputs(experts: Any) -> bool:
    return getattr(experts, "scales_inputs", False)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def _linear(
    module: Any, name: str, x: Tensor, routes: Routes, stored: bool = False, bias_factor: Tensor | None = None
) -> Tensor:
    """Applies a weight of the experts, with its bias if they have one, to their rows."""
    group, parameter = getattr(module, "expert_group", None), getattr(module, name)
    transposed = module.is_transposed or getattr(module, "is_transposed_without_mark", False)
    x = x.to(parameter.dtype if group is None else group.dtype)
    product = grouped_product if group is None else group.product
    y = product(x, parameter, routes.ends_E, transposed, stored)
    if (adapter := expert_adapter(module, name, x.dtype, transposed)) is not None:
        y = y + adapter.product(x, routes.ends_E)
    if not module.has_bias:
        return y
    bias = getattr(module, f"{name}_bias")
    bias = _RowBias.apply(bias if group is None else group.weight(bias), routes.experts_R)
    return y + (bias if bias_factor is None else (bias * bias_factor).to(y.dtype))


class _Dispatch(torch.autograd.Function):
    """Copies each token to the rows of its experts. Gradients of its copies are summed in float32.

    `partial`: some rows belong to experts of other ranks. Nothing reads them, nor their gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes, partial: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(routes.places_R, routes.ends_E)
        ctx.tokens = len(x)
        return _copy_to_rows(x, routes.order_R, routes.ends_E, partial)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        places_R, ends_E = ctx.saved_tensors
        return sum_rows(dy, places_R, ends_E, ctx.tokens), None, None


class _Combine(torch.autograd.Function):
    """Sums each token's rows in float32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, routes: Routes, tokens: int, partial: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(routes.order_R, routes.ends_E)
        ctx.partial = partial
        return sum_rows(y, routes.places_R, routes.ends_E, tokens)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        order_R, ends_E = ctx.saved_tensors
        return _copy_to_rows(dout, order_R, ends_E, ctx.partial), None, None, None


def _copy_to_rows(x: Tensor, order_R: Tensor, ends_E: Tensor, partial: bool) -> Tensor:
    # A compiler would fuse the indexing, but also copy rows that nobody reads.
    return copy_to_rows(x, order_R, ends_E) if partial else x[order_R // (len(order_R) // len(x))]


class _DispatchWeights(torch.autograd.Function):
    """Gives each row the weight of its copy. Weights of copies at other ranks' experts get no gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, routes: Routes) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(routes.places_R, routes.ends_E)
        return weights[routes.order_R]

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        places_R, ends_E = ctx.saved_tensors
        return torch.where((places_R < ends_E[-1])[:, None], dweights[places_R], 0), None


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
        total = dy.new_zeros(ctx.count + 1, dy.shape[-1], dtype=wide)  # the last: rows of other ranks' experts
        return total.index_add_(0, experts_R, dy.to(wide))[: ctx.count].to(dy.dtype), None


PART = Part(name="experts", fit=_fit, stored=(STORED_PRODUCT_OP,))
