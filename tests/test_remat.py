"""Checkpoints of compiled layers."""

import pickle

import torch
from torch import nn

from lightseq.memory.remat import apply_remat


def test_torch_can_cache_compiled_layers_on_disk() -> None:
    """A policy that cannot be pickled would make every run compile its layers anew."""
    layer = nn.Linear(1, 1)
    apply_remat([layer], "attention", compiled=True)
    contexts = layer.forward.keywords["context_fn"]  # type: ignore[attr-defined]
    assert contexts.cache_hash
    assert len(pickle.loads(pickle.dumps(contexts))()) == 2
    assert layer(torch.ones(1)).shape == (1,)
