"""Choice of the parameters to which weight decay applies: products and tables, as in transformers' Trainer."""

import re
from typing import Final

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from lightseq.models.decoder import norms_of
from lightseq.models.weights import global_shape

# In the names, in lower case, of biases and norms.
NOT_DECAYED: Final = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
PRODUCTS: Final = (nn.Linear, nn.Embedding, _ConvNd, Conv1D)  # whose weight decays whatever its shape
# Ends of names of rates, skips and gains, which may have the shape of a matrix.
OTHERS: Final = re.compile(r"(^|\.)(A|A_log|D|.*scale)$")


def without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Returns norms, biases, rates of recurrences, sinks, and other parameters that no input is multiplied with.

    A module's own parameter, such as stacked experts, is a weight of a product if more than one of its axes has a
    length above 1.
    """
    found = {p for norm in norms_of(model) for p in norm.parameters(recurse=False)}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            is_matrix = sum(length > 1 for length in global_shape(parameter)) > 1 and not OTHERS.search(name)
            if NOT_DECAYED.search(name.lower()) or not (isinstance(module, PRODUCTS) or is_matrix):
                found.add(parameter)
    return found
