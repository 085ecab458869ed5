"""Attention of one module of a patched model, as transformers calls it."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.attention.context import SequenceContext
from lightseq.attention.operator import attention

# Keyword arguments of an attention call. Everything else that is not None or False changes what attention computes.
HONOURED: Final = frozenset({"documents", "dropout", "scaling", "sliding_window"})
HARMLESS: Final = frozenset(
    {
        "is_causal", "position_ids", "use_cache", "return_dict", "output_hidden_states", "logits_to_keep",
        "labels", "shift_labels", "num_items_in_batch", "ignore_index", "skip_logits", "return_token_accuracy",
    }
)  # fmt: skip


def attend(
    module: nn.Module, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scaling: float | None = None, **others: Any
) -> tuple[Tensor, Tensor]:
    """out (B, S, H, D) and log-sum-exp (B, H, S) of a patched model's attention module; `others` are what it is passed.

    Raises ValueError for what could not be honoured.
    """
    device = q_BSHD.device.type
    if torch.is_autocast_enabled(device):  # it casts what products give, and not what turns q and k
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q_BSHD, k_BSKD, v_BSKD))
        with torch.autocast(device, enabled=False):
            return attend(module, q, k, v, scaling, **others)
    if unknown := unhonoured_argument(others):
        remedy = "pass cu_seqlens to shard_batch" if unknown.startswith("cu_seq_lens") else "leave it out"
        raise ValueError(f"attention was passed {unknown}, for which there is no kernel; {remedy}")
    context, window = getattr(module, "sequence_context", None), others.get("sliding_window")
    if not isinstance(context, SequenceContext):
        raise ValueError("this model shares its config with a patched one; give it a copy of the config, or enable it")
    if window is not None and q_BSHD.shape[1] * context.layout.world > window:
        length = q_BSHD.shape[1] * context.layout.world
        raise ValueError(f"{length} tokens are more than the model's sliding window of {window}; give at most {window}")
    return attention(q_BSHD, k_BSKD, v_BSKD, context, scaling, others.get("documents"))


def unhonoured_argument(keywords: Mapping[str, Any]) -> str | None:
    """Returns the first keyword of an attention call that distributed attention would have to drop."""
    if keywords.get("is_causal") is False:
        return "is_causal=False"
    dropped = (name for name in keywords if name not in HONOURED | HARMLESS)
    return next((name for name in dropped if keywords[name] is not None and keywords[name] is not False), None)
