"""Weights of a base model as an adapter was trained on them: as its files have them, or dequantized."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig

from lightseq.models import bnb4, nf4
from lightseq.models.packed import PackedWeight
from lightseq.models.published_layout import layout_of_files
from lightseq.models.weight_files import stored_form, tensor_files
from lightseq.models.weights import base_parameters
from lightseq.parts.adapter_files import read_packed_base
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.packed_base import PackedBase, bits_of, check_package, weights_to_quantize

FLAG: Final = "--keep_16_bits"


@dataclass(frozen=True)
class BaseWeights:
    """Base weights to merge an adapter into."""

    stored: str | None  # form of packed weights in the files
    packed_base: PackedBase | None  # the run's, if the adapter was trained on packed weights
    quantized: frozenset[str] = frozenset()  # names in the files of weights that the run quantized on loading

    def read(self, name: str, stored: Any) -> tuple[Tensor, torch.dtype]:
        """Returns a dense weight with the values that the adapter was trained on, and the dtype to store it in.

        It has that dtype, or a wider one in which the run computed.
        """
        found = stored[...]
        dtype, trained = (
            found.dtype,
            found.dtype if self.packed_base is None else getattr(torch, self.packed_base.dtype),
        )
        if isinstance(found, PackedWeight):
            found = found.like(found.raw, dtype=trained).dense()
        elif name in self.quantized:
            # GPUs may sum scales in another order than CPUs, so use a GPU as the run did.
            device = "cuda" if torch.cuda.is_available() else "cpu"
            found = nf4.quantize(found.to(device, trained)).dense().cpu()
        return found.to(torch.promote_types(found.dtype, dtype)) if found.is_floating_point() else found, dtype

    @property
    def note(self) -> str:
        """Returns the end of a summary line."""
        form = self.stored or (bnb4.READ_FORMAT if self.quantized else None)
        return f", with base weights as dequantized from {bits_of(form)}" if form else ""


def find_base_weights(source: Path, adapter: Path, keep_16_bits: bool) -> BaseWeights:
    """Finds the base weights that an adapter was trained on, or the 16-bit weights of `source`'s files.

    Raises ValueError if the `source` does not have them.
    """
    held, form = read_packed_base(adapter), stored_form(source)
    if form:
        if form == bnb4.READ_FORMAT:
            check_package(f"{source} in four bits")
        if keep_16_bits:
            raise ValueError(f"{FLAG}: {source} has its weights in {bits_of(form)}; give a base model in 16 bits")
    if held is None or keep_16_bits:
        return BaseWeights(form, held)
    if form != (held.form if held.in_files else None):
        stored = f"stored in {held.bits}" if held.in_files else "quantized from 16 or 32 bits on loading"
        remedy = f", or add {FLAG}" if held.in_files else ""
        raise ValueError(
            f"{adapter} was trained on weights {stored}, but {source} has none such; give its base model with "
            f"--model_name_or_path{remedy}"
        )
    if form:
        return BaseWeights(form, held)
    check_package(f"{adapter}, which was trained on weights in four bits,")
    return BaseWeights(None, held, _quantized_on_loading(source))


def _quantized_on_loading(source: Path) -> frozenset[str]:
    """Returns the names in the files of the weights that `--load_in_4bit True` quantizes."""
    try:
        model = build_to_train(AutoConfig.from_pretrained(source, trust_remote_code=False))
        files = tensor_files(source, "copy it again")
        renamed = layout_of_files(model, base_parameters(model), files).renamed
        names = [weight.name for weight in weights_to_quantize(model)]
    except Exception as error:  # foreign code, or files of another model
        raise ValueError(
            f"{source} does not show which weights training had in four bits ({error}); give its base model with "
            f"--model_name_or_path, or add {FLAG}"
        ) from error
    if split := [name for name in names if name not in renamed]:
        raise ValueError(
            f"{split[0]} was quantized as one weight of all experts in training, but {source} has a tensor for each "
            f"expert; add {FLAG}"
        )
    return frozenset(renamed[name] for name in names)
