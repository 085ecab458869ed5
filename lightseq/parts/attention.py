"""Attention modules of a model: those whose forward pass calls the attention interface of transformers."""

from functools import cache
from typing import Any

from torch import nn

from lightseq.parts.probes import calls_attention_interface


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules with a place in the layers that call the attention interface. Names do not matter.

    Reads their code, because running it may need weights and inputs that are not there.
    """
    calls = cache(calls_attention_interface)  # for this model: others may have patched classes

    def attends(module: nn.Module) -> bool:
        kind: Any = type(module)
        own = vars(module).get("forward")
        return calls(kind.forward, kind) or (own is not None and calls_attention_interface(own, kind))

    return [module for module in model.modules() if hasattr(module, "layer_idx") and attends(module)]
