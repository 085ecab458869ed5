"""Router losses of an enabled model over the whole sequence. Each rank computes a share.

Models of transformers call the global function `load_balancing_loss_func` of their module. In its place stands a
function that computes an enabled model's share, which it knows by the type of the logits, and passes other calls on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.parts.probes import is_load_balancing_loss
from lightseq.parts.router_loss import router_loss_share, router_sums, sums_over_ranks
from lightseq.parts.routers import FUNCTION, router_loss_namespaces

RouterLoss = Callable[..., Tensor | int]


class ShardedRouterLogits(tuple[Tensor, ...]):
    """Logits of all routers for this rank's tokens, with the context of their loss."""

    context: SequenceContext
    counted: Tensor | None  # number of times that one process counts a token, (batch, local); None: once


def install_router_loss(model: PreTrainedModel) -> None:
    """Replaces the router loss in a model's modeling files. Enabled models then compute it over all ranks.

    Other models are not affected, so the function stays when a model is disabled.
    """
    for namespace in router_loss_namespaces(model):
        share_router_loss(namespace)


def share_router_loss(namespace: dict[str, Any]) -> None:
    """Replaces the loss function in a module's namespace, unless it is replaced already or computes another loss."""
    function = namespace[FUNCTION]
    if getattr(function, "func", None) is not _router_loss and is_load_balancing_loss(function):
        namespace[FUNCTION] = partial(_router_loss, function)


@torch.compiler.disable
def mark_router_logits(context: SequenceContext, _base: nn.Module, _args: tuple, output: Any) -> None:
    """Marks the router logits of the headless model as a shard's."""
    logits = getattr(output, "router_logits", None)
    if isinstance(logits, tuple):
        sharded = ShardedRouterLogits(logits)
        sharded.context, sharded.counted = context, context.forward_pass.counted_tokens
        output.router_logits = sharded


@torch.compiler.disable
def unmark_router_logits(_model: nn.Module, _args: tuple, output: Any) -> None:
    """Converts router logits back to a plain tuple, as transformers returns them."""
    if isinstance(logits := getattr(output, "router_logits", None), ShardedRouterLogits):
        output.router_logits = tuple(logits)


def _router_loss(
    plain: RouterLoss,
    gate_logits: Any,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """Returns an enabled model's share of the router loss; the result of `plain` for another model."""
    if isinstance(gate_logits, ShardedRouterLogits):
        return _share(gate_logits, top_k)  # an enabled model has no mask, but knows the tokens that count
    return plain(gate_logits, num_experts, top_k, attention_mask)


@torch.compiler.disable
def _share(logits: ShardedRouterLogits, top_k: int) -> Tensor:
    """Returns this rank's share of a router loss. All ranks of the group must call it."""
    state = logits.context.forward_pass
    state.router_losses += 1
    sums = [router_sums(x.to(logits[0].device), top_k, logits.counted) for x in logits]
    return router_loss_share(sums_over_ranks(sums, logits.context.group))
