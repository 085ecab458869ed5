"""What the backward pass recomputes: nothing, everything in a layer but attention, or everything."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lightseq.attention import ATTENTION_OP

POLICIES: Final = ("none", "attention", "full")


def apply_remat(layers: Iterable[nn.Module], policy: str) -> None:
    """Checkpoints the forward of every layer. Only its input is kept, and under `attention` the operator's out and lse.

    The forward is replaced, not the call: module hooks, FSDP's among them, stay outside and run once a pass.
    """
    assert policy in POLICIES, policy
    if policy == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
    for layer in layers:
        layer.forward = partial(  # type: ignore[method-assign]
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # no dropout anywhere
            context_fn=contexts if policy == "attention" else noop_context_fn,
        )


def _keep_attention(_ctx: Any, op: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ATTENTION_OP else CheckpointPolicy.PREFER_RECOMPUTE
