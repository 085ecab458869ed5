"""Low-rank adapters of stacked experts' weights, in peft's layers: two thin grouped products beside the experts' own.

Shape suffixes: R rows, sorted by expert, E experts, I inputs, O outputs, K an adapter's rank.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightseq.kernels.grouped_products import grouped_product
from lightseq.parts.changes import Changes
from lightseq.parts.identity import change_of, linear_change, plain_class
from lightseq.parts.low_rank import adapter_in_use

WRAPPERS: Final = "adapter_wrappers"  # attribute of experts: peft's wrapper of each adapted weight, by its name
MULTIPLE: Final = 8  # ranks are padded to it, because GPU kernels need rows of whole 16 bytes


class ExpertAdapter(NamedTuple):
    """Adapter that adds scale · (x Aᵀ) Bᵀ to the product of each expert's rows with its weight.

    With `reversed`, A has the outputs and B the inputs, and the adapter adds scale · (x B) A.
    """

    a_EKI: Tensor
    b_EOK: Tensor
    scale: float
    reversed: bool = False

    def product(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        """Returns the output of the adapter (R, O). Expert e has the rows between `ends_E[e - 1]` and `ends_E[e]`."""
        first, last = (self.b_EOK, self.a_EKI) if self.reversed else (self.a_EKI, self.b_EOK)
        x_RK = grouped_product(x_RI, first, ends_E, self.reversed) * self.scale
        return grouped_product(x_RK, last, ends_E, self.reversed)


def expert_adapter(experts: Any, name: str, dtype: torch.dtype, transposed: bool) -> ExpertAdapter | None:
    """Returns the adapter of an experts' weight, cast to `dtype`; None without an active one.

    The weight of a `transposed` expert is (inputs, outputs). peft takes the experts' word for that, `is_transposed`,
    and exchanges inputs and outputs of an adapter where it is wrong.
    """
    wrapper: Any = vars(experts).get(WRAPPERS, {}).get(name)
    if wrapper is None or not adapter_in_use(wrapper):
        return None
    (adapter,) = wrapper.lora_A
    a, b = wrapper.lora_A[adapter].weight.to(dtype), wrapper.lora_B[adapter].weight.to(dtype)
    a_EKI, b_EOK = split_by_expert(a, b, wrapper.num_experts)
    if (group := getattr(experts, "expert_group", None)) is not None:  # this rank computes some experts
        count = wrapper.num_experts // group.ranks
        own = slice(group.rank * count, (group.rank + 1) * count)
        a_EKI, b_EOK = a_EKI[own], b_EOK[own]
    if padding := -a_EKI.shape[1] % MULTIPLE:
        a_EKI, b_EOK = (
            nn.functional.pad(a_EKI, (0, 0, 0, padding)),
            nn.functional.pad(b_EOK, (0, padding)),
        )
    return ExpertAdapter(
        a_EKI, b_EOK.contiguous(), wrapper.scaling[adapter], reversed=transposed != experts.is_transposed
    )


def split_by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns views of peft's A (E·K, I), by expert and then rank, and B (O, K·E), by rank and then expert."""
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)


def use_in_experts(wrapper: Any, changes: Changes) -> None:
    """Moves the adapter of peft's wrapper into the experts; peft's forward would add B·A to all their weights.

    The experts must run by `experts_forward`. Raises ValueError if the wrapper computes more than plain LoRA.
    """
    from peft.tuners.lora.layer import ParamWrapper

    (adapter,) = wrapper.lora_A
    parts = (wrapper.lora_A[adapter], wrapper.lora_B[adapter])
    change = change_of(wrapper) or next(filter(None, map(linear_change, parts)), None)
    if plain_class(wrapper) is not ParamWrapper or change or wrapper.lora_variant:
        raise ValueError(f"the adapter of experts' {wrapper.parameter_name} {change or 'is no plain LoRA'}")
    experts = wrapper.get_base_layer()
    # In a dict, because a module would count the wrapper among its children.
    changes.set_attribute(experts, WRAPPERS, {**vars(experts).get(WRAPPERS, {}), wrapper.parameter_name: wrapper})
    changes.set_attribute(wrapper, "__class__", _passing_on(cast(Hashable, type(wrapper))))


@cache
def _passing_on(kind: Any) -> Any:
    """Returns a subclass of peft's wrapper that does not apply its adapter, because the experts inside do."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not adapter_in_use(self):
            return kind.forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
        return self.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]

    return type(f"Grouped{kind.__name__}", (kind,), {"forward": forward})
