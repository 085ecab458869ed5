"""Load-balancing loss of routers, from counts and probabilities that ranks can sum, and its gradient by logits.

Observers of `lightseq train` (parts/routers.py) and a user's own loop (hf/router_losses.py) compute it from these.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig


def asks_for_router_logits(config: PreTrainedConfig, kwargs: dict[str, Any]) -> bool:
    """Returns whether a call, or else the model's config, asks for the logits of routers."""
    given = kwargs.get("output_router_logits")
    configs: tuple[Any, ...] = (config, config.get_text_config(decoder=True))
    return bool(given or (given is None and any(getattr(x, "output_router_logits", False) for x in configs)))


class RouterSums(NamedTuple):
    """Sums over tokens, of one router or of several."""

    counts: Tensor  # int64 (experts,): how often each expert is among the first `top_k`
    probabilities: Tensor  # float32 (experts,), with gradients
    tokens: Tensor  # int64 (): tokens that count, once for each router


def router_sums(logits: Tensor, top_k: int, counted: Tensor | None) -> RouterSums:
    """Returns a router's sums over its tokens, computed as transformers' `load_balancing_loss_func` does.

    `logits` are (tokens, experts). `counted`, (batch, local) in the order of the tokens, says whether a token counts,
    or how often; all count once if it is None.
    """
    if logits.ndim != 2:
        raise ValueError(f"router logits have {logits.ndim} dimensions, not 2 (tokens, experts)")
    weights = torch.softmax(logits, dim=-1)
    chosen = weights.topk(top_k, dim=-1).indices
    # Integers, because float32 counts are exact only up to 16.7 million.
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    if counted is None:
        ones = counts.new_ones(1).expand(chosen.numel())
        tokens = counts.new_full((), len(logits))
        return RouterSums(counts.scatter_add_(0, chosen.flatten(), ones), weights.float().sum(0), tokens)
    flat = counted.reshape(-1)
    if len(flat) != len(logits):
        raise ValueError(f"a router has logits of {len(logits)} tokens, but the batch has {len(flat)} on this rank")
    counts.scatter_add_(0, chosen.flatten(), flat.long().repeat_interleave(top_k, output_size=chosen.numel()))
    return RouterSums(counts, (weights.float() * flat.unsqueeze(-1)).sum(0), flat.sum())


def gradient_by_logits(logits: Tensor, by_probabilities: Tensor, counted: Tensor | None) -> Tensor:
    """Backpropagates the gradient by the probabilities of `router_sums` to a router's logits."""
    weights = torch.softmax(logits.float(), dim=-1)
    gradient = weights * (by_probabilities - (weights * by_probabilities).sum(-1, keepdim=True))
    if counted is not None:
        gradient = gradient * counted.reshape(-1, 1)
    return gradient.to(logits.dtype)


def sums_over_ranks(routers: Sequence[RouterSums], group: dist.ProcessGroup | None) -> RouterSums:
    """Adds up the sums of routers. Sums counts and tokens over a group's ranks, which must all call it.

    Probabilities are summed over this rank's tokens only.
    """
    counts, probabilities, tokens = (torch.stack(field).sum(0) for field in zip(*routers, strict=True))
    totals = torch.cat([counts, tokens.unsqueeze(0)])
    if group is not None:
        dist.all_reduce(totals, group=group)
    return RouterSums(totals[:-1], probabilities, totals[-1].clamp_min(1))  # a batch may hold padding only


def router_loss_share(sums: RouterSums) -> Tensor:
    """Returns a rank's share of the load-balancing loss: experts * sum(counts / tokens * probabilities / tokens).

    Counts and tokens of all ranks carry no gradient, so the loss is linear in the probabilities, which are this rank's
    own. The shares of the ranks add up to the loss.
    """
    counts, probabilities, tokens = sums
    return len(counts) * (counts.float() / tokens * probabilities / tokens).sum()
