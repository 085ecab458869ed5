"""Finds out whether a layer without known mixers, such as one of only experts, works on each token alone."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

TOKENS = 5
WEIGHT = 0.01  # of all parameters: one number, because a published layer with values of its own takes gigabytes


def works_on_each_token(layer: nn.Module, hidden_size: int) -> bool:
    """Returns whether a change of one token's hidden states leaves the results of all others as they were.

    Runs the layer's own code on the CPU; a layer that needs more than hidden states does not count.
    """
    values = {name: _constant(value) for name, value in (*layer.named_parameters(), *layer.named_buffers())}
    hidden = torch.rand(1, TOKENS, hidden_size, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            before = _result(functional_call(layer, values, (hidden,)))
            for token in range(TOKENS):
                changed = hidden.clone()
                changed[:, token] += 1 + hidden[:, token]
                differs = _result(functional_call(layer, values, (changed,))) != before
                if not differs[:, token].any() or differs.any(-1).sum() > 1:
                    return False
    except Exception:  # the layer's code may raise anything
        return False
    return True


def _constant(parameter: Tensor) -> Tensor:
    """Returns a parameter of equal elements that share their memory; stacked experts share that of one of them."""
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    own = parameter.shape[1:] if parameter.ndim == 3 else ()
    return torch.full(own, WEIGHT, dtype=dtype).expand(parameter.shape)


def _result(out: object) -> Tensor:
    found = out[0] if isinstance(out, tuple) else out
    assert isinstance(found, Tensor)
    return found
