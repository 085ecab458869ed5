"""Adapters as changes of the tensors in a model's files. Files hold stacked experts, or a tensor for each.

Shape suffixes: E experts, O outputs, I inputs, K an adapter's rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Transpose, revert_weight_conversion

from lightseq.models.published_layout import Conversion, PublishedLayout
from lightseq.models.weights import without_wrappers
from lightseq.parts.expert_adapters import split_by_expert


@dataclass(frozen=True)
class LinearChange:
    """Product of an adapter that is added to the weight of a linear."""

    a_KI: Tensor
    b_OK: Tensor

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shape that the tensor of the files must have."""
        return [(len(self.b_OK), self.a_KI.shape[1])]

    def add_to(self, weight: Tensor, scale: float) -> Tensor:
        """Returns the sum of the weight and the scaled product, computed in float32, in the dtype of the weight."""
        a, b = self.a_KI.to(torch.float32), self.b_OK.to(torch.float32)
        return (weight.to(torch.float32) + scale * (b @ a)).to(weight.dtype)


@dataclass(frozen=True)
class ExpertsChange:
    """Products of an adapter that are added to one expert's weight, or to the stacked weights of several."""

    a_EKI: Tensor
    b_EOK: Tensor
    places: Tensor  # flat index into (E, O) of each output of the tensor; one row per expert if it is stacked
    transposed: bool  # the tensor has (inputs, outputs) of an expert

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes that the tensor of the files may have, the expected one first."""
        *stack, outputs = self.places.shape
        inputs = self.a_EKI.shape[2]
        found = [(*stack, outputs, inputs), (*stack, inputs, outputs)]
        return found[::-1] if self.transposed else found

    def add_to(self, weight: Tensor, scale: float) -> Tensor:
        """Returns the sum of the weight and the scaled products, computed in float32, in the dtype of the weight."""
        merged, outputs = weight.clone(), self.b_EOK.shape[1]
        transposed = self.transposed == (tuple(weight.shape) == self.shapes[0])
        matrices, places = merged.view(-1, *weight.shape[-2:]), self.places.view(-1, self.places.shape[-1])
        for matrix, place in zip(matrices, places, strict=True):
            expert = int(place[0]) // outputs
            a, b = self.a_EKI[expert].to(torch.float32), self.b_EOK[expert, place % outputs].to(torch.float32)
            delta = scale * (b @ a)
            matrix.copy_(matrix.to(torch.float32) + (delta.T if transposed else delta))
        return merged


def weights_by_adapter(model: PreTrainedModel, target_parameters: list[str]) -> dict[str, str]:
    """Returns the names of a model's parameters by the names of the modules that peft puts around their owners.

    Raises ValueError if the model has none of the parameters.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import ParamWrapper

    config = LoraConfig(r=1, target_modules=[], target_parameters=target_parameters)
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ParamWrapper)]
    return {name: f"{without_wrappers(name)}.{module.parameter_name}" for name, module in found}


def changes_of_experts(
    model: PreTrainedModel, layout: PublishedLayout, name: str, a: Tensor, b: Tensor
) -> dict[str, ExpertsChange]:
    """Returns the changes of the tensors in the files that hold a stacked weight, by their names.

    transformers' own rules say where each part of the weight is: they move a tensor of places as they move weights.
    Raises ValueError if they do more than split and transpose it.
    """
    experts: Any = model.get_submodule(name.rpartition(".")[0])
    count, transposed = experts.num_experts, experts.is_transposed
    a_EKI, b_EOK = split_by_expert(a, b, count)
    places_EO = torch.arange(count * len(b)).view(count, len(b))
    if name in layout.renamed:
        return {layout.renamed[name]: ExpertsChange(a_EKI, b_EOK, places_EO, transposed)}
    by_shape = _is_transposed_by_shape(layout.converted[name])
    changes = {}
    for published, found in revert_weight_conversion(
        model, {name: places_EO.unsqueeze(1 if transposed else 2)}
    ).items():
        moved = found.shape[-1] != 1
        places = found.squeeze(-2 if moved else -1)
        changes[published] = ExpertsChange(a_EKI, b_EOK, places, transposed if by_shape else moved)
    held = torch.cat([change.places.flatten() for change in changes.values()]).sort().values
    if not torch.equal(held, places_EO.flatten()) or not all(
        _are_of_one_expert(x.places, len(b)) for x in changes.values()
    ):
        raise ValueError(f"{name} is stored in one with others; use peft's merge_and_unload")
    return changes


def _is_transposed_by_shape(conversion: Conversion) -> bool:
    """Returns whether only its shape tells if files hold a weight transposed."""
    return any(isinstance(step, Transpose) and step.check_dims for step in conversion.converter.operations)


def _are_of_one_expert(places: Tensor, outputs: int) -> bool:
    experts = places // outputs
    return bool((experts == experts[..., :1]).all())
