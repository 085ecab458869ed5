"""Attention function of a patched model, with the interface that transformers calls."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.attention.context import SequenceContext
from lightseq.attention.operator import attention
from lightseq.schedule.reach import Reach, sliding
from lightseq.utils.logit_transform import LogitTransform

# Keywords passed to `attention`: documents, window and sinks, by transformers' names.
PASSED_ON: Final = ("documents", "sliding_window", "s_aux")
# Supported keywords, and keywords without effect. Others may change the result unless they are None or False.
HONOURED: Final = frozenset({*PASSED_ON, "dropout", "scaling", "softcap"})
HARMLESS: Final = frozenset(
    {
        "is_causal", "position_ids", "use_cache", "return_dict", "output_hidden_states", "logits_to_keep",
        "output_router_logits", "labels", "shift_labels", "num_items_in_batch", "ignore_index", "skip_logits",
        "return_token_accuracy",
    }
)  # fmt: skip


def attention_function(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Runs distributed attention in place of transformers' own attention function. Returns out (B, S, H, D).

    Queries are (B, H, S, D), keys and values (B, K, S, D). Raises ValueError for a mask, for dropout and for keywords
    that would change the result.
    """
    if attention_mask is not None:
        raise ValueError("the model passes its own attention mask, which no kernel supports; use a plain causal model")
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}; set it to 0 in the config from which the model is made "
            "(attention_dropout, or attn_pdrop)"
        )
    q, k, v = (x.transpose(1, 2) for x in (query_BHSD, key_BKSD, value_BKSD))
    # As `attend`, but without its stack frame: the host's time counts at short lengths.
    device = q.device.type
    if torch.is_autocast_enabled(device):
        return attend(module, q, k, v, scaling, **others)[0], None
    context, window = _checked_context(module, q, others)
    documents, sinks = others.get("documents"), others.get("s_aux")
    return attention(q, k, v, context, _scale_and_cap(q, scaling, others), documents, window, sinks)[0], None


def attend(
    module: nn.Module, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, scaling: float | None = None, **others: Any
) -> tuple[Tensor, Tensor]:
    """Returns out (B, S, H, D) and log-sum-exp (B, H, S) of a patched model's attention module.

    Under autocast it computes in autocast's dtype. `others` are further keywords from transformers. Raises ValueError
    for unsupported ones.
    """
    device = q_BSHD.device.type
    if torch.is_autocast_enabled(device):  # autocast casts outputs of matrix products, but not rotated q and k
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q_BSHD, k_BSKD, v_BSKD))
        with torch.autocast(device, enabled=False):
            return attend(module, q, k, v, scaling, **others)
    context, window = _checked_context(module, q_BSHD, others)
    documents, sinks = others.get("documents"), others.get("s_aux")
    scale = _scale_and_cap(q_BSHD, scaling, others)
    return attention(q_BSHD, k_BSKD, v_BSKD, context, scale, documents, window, sinks)


def _scale_and_cap(q: Tensor, scaling: float | None, others: Mapping[str, Any]) -> LogitTransform:
    """Returns the scale of the scores (default: D ** -0.5) and their soft cap, if any."""
    return LogitTransform(q.shape[-1] ** -0.5 if scaling is None else scaling, others.get("softcap"))


def _checked_context(module: nn.Module, q: Tensor, others: Mapping[str, Any]) -> tuple[SequenceContext, Reach | None]:
    """Returns the module's context and reach. Raises ValueError for unsupported keywords."""
    if unknown := unhonoured_argument(others):
        remedy = "pass cu_seqlens to shard_batch" if unknown.startswith("cu_seq_lens") else "leave it out"
        raise ValueError(f"attention got {unknown}, which no kernel supports; {remedy}")
    context = context_of(module)
    window = sliding(others.get("sliding_window"))
    of_mask: Reach | None = getattr(module, "reach_of_mask", window)  # set by `hf.enable`
    if of_mask is not None and not of_mask.is_passed:
        return context, of_mask
    if of_mask != window:
        _check_window(module, window, of_mask, tokens=q.shape[1] * context.schedule.world)
    return context, window


def _check_window(module: nn.Module, window: Reach | None, of_mask: Reach | None, tokens: int) -> None:
    """Raises ValueError if a layer passes another window than the mask of its model has, and sequences are longer."""
    if min(x.tokens for x in (window, of_mask) if x is not None) < tokens:
        given, masked = (None if x is None else x.tokens for x in (window, of_mask))
        raise ValueError(
            f"{type(module).__name__} passes window {given} to attention, but its model's mask has {masked}; set "
            f"sliding_window in the model's config to None, or to at least {tokens}, the length with its padding"
        )


def context_of(module: nn.Module) -> SequenceContext:
    """Returns the context of a patched model's attention module. Raises ValueError if the model is not patched."""
    context = getattr(module, "sequence_context", None)
    if not isinstance(context, SequenceContext):
        raise ValueError(
            "this model shares its config with a patched one; give it a copy of the config, or call hf.enable on it"
        )
    return context


def unhonoured_argument(keywords: Mapping[str, Any]) -> str | None:
    """Returns the first keyword of an attention call that distributed attention does not support."""
    if keywords.get("is_causal") is False:
        return "is_causal=False"
    dropped = (name for name in keywords if name not in HONOURED | HARMLESS)
    return next((name for name in dropped if keywords[name] is not None and keywords[name] is not False), None)
