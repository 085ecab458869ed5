"""Scale of gradients in wrappers that average them over ranks, such as DDP and FSDP2."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from lightseq.attention.context import SequenceContext
from lightseq.distributed.averaging import find_averaging, trainer_scales_loss
from lightseq.hf.agreement import FACTS, TARGETS


def find_gradient_factor(
    model: nn.Module, context: SequenceContext, facts: Tensor, num_items: Tensor | float | None
) -> None:
    """Sets the factor that turns a wrapper's average of gradients into the sum over a sequence's ranks.

    The ranks of a sequence are summed. Over several sequences DDP and FSDP2 then still average, as they do for plain
    models, unless the loss is divided by the targets of all sequences. All ranks of a wrapper agree on that, because a
    group whose targets are all targets cannot tell; they ask again while some group has no target at all.
    """
    state = context.forward_pass
    ddp = DistributedDataParallel._get_active_ddp_module()
    hooks = tuple(id(hook) for hook, _ in ddp._comm_hooks) if ddp is not None else ()
    wrappers = (type(model), id(ddp), hooks, num_items is None)
    if state.gradients_are_averaged_outside or not torch.is_grad_enabled():
        return
    if wrappers == state.averaging_checked:
        return
    state.averaging_checked, state.gradient_factor = wrappers, 1
    averaging = find_averaging(model)
    if averaging is None or trainer_scales_loss():
        return
    ranks, wrapper = dist.get_process_group_ranks(context.group), averaging.wrapper
    if missing := sorted(set(ranks) - set(averaging.ranks)):
        raise ValueError(
            f"{wrapper} averages gradients over ranks {', '.join(map(str, averaging.ranks))} without rank "
            f"{missing[0]}, which shares their sequence; let {wrapper} span all ranks, or sum gradients without it"
        )
    factor = len(ranks)
    if len(averaging.ranks) > factor and num_items is not None and facts.shape == (FACTS,):
        targets = int(facts[TARGETS])
        differs = float(num_items) != max(targets, 1)
        answers = torch.tensor([differs, targets == 0], dtype=torch.int32, device=context.config.device)
        for group in averaging.groups:
            dist.all_reduce(answers, dist.ReduceOp.MAX, group)
        some_differ, some_empty = answers.tolist()
        if some_differ:
            factor = len(averaging.ranks)
        elif some_empty:
            state.averaging_checked = None
    state.gradient_factor = factor
    if factor > 1 and dist.get_rank() == averaging.ranks[0]:
        warnings.warn(
            f"{wrapper} averages gradients over {len(averaging.ranks)} ranks, which share sequences: lightseq "
            f"multiplies them by {factor}; do not scale the loss for that yourself",
            stacklevel=2,
        )


@torch.compiler.disable
def scale_gradients(context: SequenceContext, model: nn.Module, _args: tuple, output: Any) -> Any:
    """Multiplies the gradients of the outermost module's outputs, from which parameters get theirs."""
    state = context.forward_pass
    if state.outermost is not model or state.gradient_factor == 1 or not torch.is_grad_enabled():
        return output
    return tree_map_only(Tensor, lambda x: _Scaled.apply(x, state.gradient_factor) if x.requires_grad else x, output)


class _Scaled(torch.autograd.Function):
    """Identity with a scaled gradient. A hook on a tensor would also scale what reaches it from other outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.detach()  # FSDP2 warns about views

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None
