"""What the backward pass recomputes: nothing, all of a layer but attention (and its linears), or everything."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightseq.attention.operator import ATTENTION_OP
from lightseq.config.remat_policies import POLICIES
from lightseq.kernels.checkpoint_context import Results, checkpoint_pass, free_memory, is_recomputing
from lightseq.memory.offload import Offload
from lightseq.modules.mlp import KEEPING_MLP_OP
from lightseq.modules.projections import KEEPING_LINEAR_OP

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
Forward = Callable[..., Tensor]


def apply_remat(
    layers: Iterable[nn.Module], policy: str, compiled: bool = False, offload: Offload | None = None
) -> None:
    """Checkpoints the forward of every layer. Only its input is kept, and under `attention` the operator's out and lse;
    under `attention+mlp` besides what its MLP, which `tile_mlps` has told so, gives to be kept, and under
    `attention+linears` what its projections do, which `keep_projections` has told.

    The forward is replaced, not the call: module hooks, FSDP's among them, stay outside and run once a pass. `compiled`
    is for a forward that torch.compile shall see; `offload` takes what is kept.
    """
    assert policy in POLICIES, policy
    if policy == "none":
        return
    options: dict[str, Any] = {}
    if not compiled:
        options["context_fn"] = _again_contexts if policy == "full" else partial(_keep_contexts, offload)
    elif policy != "full":
        # The compiler needs to be told by torch's own policy, whose store no hook for saved tensors gets to see.
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_results)
    for layer in layers:
        layer.forward = partial(  # type: ignore[method-assign]
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # no dropout anywhere
            **options,
        )


def changed_forwards(layers: Sequence[nn.Module], change: Callable[[], None]) -> list[Forward]:
    """What `change` makes of the forwards of layers, which keep their own."""
    before = [layer.forward for layer in layers]
    change()
    changed = [layer.forward for layer in layers]
    for layer, forward in zip(layers, before, strict=True):
        layer.forward = forward  # type: ignore[method-assign]
    return changed


def checkpoint_groups(
    groups: Sequence[Sequence[nn.Module]], inner: Offload | None = None, lasts_again: Sequence[Forward] | None = None
) -> None:
    """Checkpoints neighbouring layers as one: of a group, only the first one's input is kept.

    The backward pass first runs a group's layers forward again, each of which keeps what its own checkpoint keeps (on
    the host, given `inner`). The last one's backward pass comes at once, so that it may run another forward then, of
    `lasts_again`, that keeps more: it is there no longer than what is computed again would be. Nobody reads what comes
    out at its end (`is_recomputing`). The first layer's forward runs them all, and the others hand on what it returns,
    so that the model that calls them need not know.
    """
    lasts_again = [group[-1].forward for group in groups] if lasts_again is None else lasts_again
    for group, last_again in zip(groups, lasts_again, strict=True):
        last = group[-1].forward
        group[-1].forward = last_again  # type: ignore[method-assign]
        if inner is not None and len(group) > 1:
            inner.wrap(group[:-1], group[-1])
        *others, last_again = (layer.forward for layer in group)
        group[0].forward = partial(_run_group, others, last, last_again)  # type: ignore[method-assign]
        for layer in group[1:]:
            layer.forward = _hand_on  # type: ignore[method-assign, assignment]


def _run_group(
    others: list[Forward], last: Forward, last_again: Forward, hidden: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    def run(hidden: Tensor, after_last: Callable[[Tensor], None] | None = None) -> Tensor:
        for forward in others:
            hidden = forward(hidden, *args, **kwargs)
        if after_last is None:
            return last(hidden, *args, **kwargs)
        hidden.register_hook(after_last)
        with checkpoint_pass(None, recomputing=True):
            return last_again(hidden, *args, **kwargs)

    if not torch.is_grad_enabled():
        return run(hidden)
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)  # weights want gradients even if hidden does not
    return _Group.apply(hidden, anchor, run)


class _Group(torch.autograd.Function):
    """A checkpoint with checkpoints inside, and hooks for saved tensors between the two.

    torch's own, not reentrant, counts what is saved inside, and would miss what such hooks take.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, run: Callable[..., Tensor]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(hidden)
        ctx.run = run
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        hidden = ctx.saved_tensors[0].detach().requires_grad_()

        def after_last(_: Tensor) -> None:
            free_memory(dout)

        with torch.enable_grad():
            edge = get_gradient_edge(ctx.run(hidden, after_last))  # of the output itself nothing is needed any more
        torch.autograd.backward(edge, dout)
        return hidden.grad, None, None


def _hand_on(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden


def _keep_results(_ctx: Any, op: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = op in (ATTENTION_OP, KEEPING_MLP_OP, KEEPING_LINEAR_OP)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _again_contexts() -> Contexts:
    return checkpoint_pass(None, is_recomputing()), checkpoint_pass(None, recomputing=True)


def _keep_contexts(offload: Offload | None) -> Contexts:
    """For the forward pass and for the recomputation: what operators gave is kept in the one and taken in the other."""
    kept: deque[list[Any]] = deque()
    keep: Callable[[Tensor], Any] = offload.keep if offload else lambda x: x
    fetch: Callable[[Any], Tensor] = offload.fetch if offload else lambda x: x

    def keeping(compute: Callable[[], Results]) -> Results:
        results = compute()
        kept.append([keep(x.detach()) for x in results])
        return results

    def taking(_compute: Callable[[], Results]) -> Results:
        if not kept:
            raise RuntimeError("what a layer kept is gone after its backward pass; a second one needs --remat none")
        return tuple(fetch(x).detach() for x in kept.popleft())

    return checkpoint_pass(keeping, is_recomputing()), checkpoint_pass(taking, recomputing=True)
