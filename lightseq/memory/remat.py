"""Activation checkpointing: the backward pass recomputes all of a layer, or all but what the policy stores."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightseq.config.remat_policies import POLICIES
from lightseq.memory.expert_choices import CHOICE_OPS, choice_contexts
from lightseq.memory.offload import Offload
from lightseq.parts.changes import Changes
from lightseq.parts.experts import experts_modules
from lightseq.parts.fit import STORED_OPS
from lightseq.parts.identity import hook_of
from lightseq.utils.checkpoint_context import Results, checkpoint_pass, free_memory, is_recomputing

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Forward = Callable[..., Tensor]


def apply_remat(
    layers: Iterable[nn.Module],
    policy: str,
    compiled: bool = False,
    offload: Offload | None = None,
    has_dropout: bool = False,
) -> None:
    """Checkpoints the forward of every layer.

    `full` stores only the layer's input, `attention` also attention's output and lse, and the output of a tiled MLP
    that a norm follows, `attention+mlp` also the tensors that `tile_mlps(store=True)` marks, and `attention+linears`
    those that `store_projections` marks. The forward is replaced rather than the call, so module hooks such as FSDP's
    stay outside and run once per pass. Every policy stores which experts were chosen. Set `compiled` for a forward that
    torch.compile will see. `offload` receives the stored tensors. Set `has_dropout` if the layers may have some: they
    then draw the same masks again.
    """
    assert policy in POLICIES, policy
    if policy == "none":
        return
    for layer in layers:
        routes = next(experts_modules(layer), None) is not None
        layer.forward = partial(  # type: ignore[method-assign]
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=has_dropout and not compiled,  # torch.compile draws the same masks by itself
            **(_compiled_options(policy, routes) if compiled else _eager_options(policy, routes, offload)),
        )


def _eager_options(policy: str, routes: bool, offload: Offload | None) -> dict[str, Any]:
    contexts = _recompute_contexts if policy == "full" else partial(_storing_contexts, offload)
    return {"context_fn": partial(_routing_contexts, contexts) if routes else contexts}


def _compiled_options(policy: str, routes: bool) -> dict[str, Any]:
    if policy == "full" and not routes:
        return {}
    return {"context_fn": _STORING_CHOICES if policy == "full" else _STORING_RESULTS}


def capture_forwards(layers: Sequence[nn.Module], patch: Callable[[], None]) -> list[Forward]:
    """Returns the forwards that `patch` sets on the layers, and restores the previous ones."""
    changes = Changes()
    for layer in layers:
        changes.restore_later(layer, "forward")
    patch()
    patched = [layer.forward for layer in layers]
    changes.undo()
    return patched


def checkpoint_groups(
    groups: Sequence[Sequence[nn.Module]],
    rerun_offload: Offload | None = None,
    rerun_forwards: Sequence[Forward] | None = None,
) -> None:
    """Checkpoints groups of adjacent layers. Only the input of each group is stored.

    The backward pass first runs a group forward again, where each layer's own checkpoint stores its tensors (in host
    memory if `rerun_offload` is given, which then frees the group's input). `rerun_forwards` are the forwards of each
    group's last layer in that rerun. They may store more, because its backward pass follows at once, and its output is
    never read (`is_recomputing`). The first layer's forward runs the whole group and the others return their input, so
    the model needs no change. Raises ValueError for a layer with hooks, which would get values of other layers.
    """
    for layer in (layer for group in groups if len(group) > 1 for layer in group):
        if (change := hook_of(layer)) is not None:
            raise ValueError(f"{type(layer).__name__} {change}, which groups of layers would leave out; remove it")
    rerun_forwards = [group[-1].forward for group in groups] if rerun_forwards is None else rerun_forwards
    for group, rerun_last in zip(groups, rerun_forwards, strict=True):
        last = group[-1].forward
        group[-1].forward = rerun_last  # type: ignore[method-assign]
        if rerun_offload is not None and len(group) > 1:
            rerun_offload.wrap(group[:-1], group[-1])
        *others, rerun_last = (layer.forward for layer in group)
        forwards = _Forwards(others, last, rerun_last, rerun_offload if len(group) > 1 else None)
        group[0].forward = partial(_run_group, forwards)  # type: ignore[method-assign]
        for layer in group[1:]:
            layer.forward = _identity  # type: ignore[method-assign, assignment]


class _Forwards(NamedTuple):
    """Forwards of a group's layers: all but the last, the last, and the last while the group is recomputed."""

    others: list[Forward]
    last: Forward
    rerun_last: Forward
    rerun_offload: Offload | None  # offloads what `others` store while the group is recomputed


def _run_group(group: _Forwards, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    def run(hidden: Tensor, after_last: Callable[[Tensor], None] | None = None) -> Tensor:
        for forward in group.others:
            hidden = forward(hidden, *args, **kwargs)
        if after_last is None:
            return group.last(hidden, *args, **kwargs)
        hidden.register_hook(after_last)
        with checkpoint_pass(None, recomputing=True):
            return group.rerun_last(hidden, *args, **kwargs)

    if not torch.is_grad_enabled():
        return run(hidden)
    # Weights get gradients even if `hidden` needs none.
    anchor = torch.empty(0, device=hidden.device, requires_grad=True)
    return _Group.apply(hidden, anchor, run, group.rerun_offload)


class _Group(torch.autograd.Function):
    """A checkpoint of checkpoints, with saved-tensor hooks between the two levels.

    torch's non-reentrant checkpoint counts the tensors saved inside, and would miss those that the hooks take.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, anchor: Tensor, run: Callable[..., Tensor], rerun_offload: Offload | None
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run = run
        ctx.rerun_offload = None if hidden.is_leaf else rerun_offload  # the caller may read a leaf again
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        if hidden.numel() and not hidden.untyped_storage().nbytes():
            raise RuntimeError("a group's input is freed by the backward pass; use --offload none for a second one")

        def after_last(_: Tensor) -> None:
            free_memory(dout)

        free_input = nullcontext() if ctx.rerun_offload is None else ctx.rerun_offload.free_input_after_copy(hidden)
        with torch.enable_grad(), free_input:
            edge = get_gradient_edge(ctx.run(hidden, after_last))  # frees the output itself
        torch.autograd.backward(edge, dout)
        return hidden.grad, None, None, None


def _identity(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden


def stored_operators(policy: str) -> tuple[torch._ops.OpOverload, ...]:
    """Returns the operators whose results a checkpoint stores under a policy, if the layer has them."""
    return CHOICE_OPS if policy == "full" else STORED_OPS + CHOICE_OPS


def _store_results(_ctx: Any, op: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in STORED_OPS or op in CHOICE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _store_choices(_ctx: Any, op: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in CHOICE_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts(policy: Callable[..., CheckpointPolicy], operators: Sequence[Any]) -> Callable[[], Contexts]:
    """Returns contexts for torch.compile, which supports only torch's own policies.

    Saved-tensor hooks do not see the tensors that these store. torch caches a compiled graph on disk only if the hash
    identifies the policy, with its operators, and only if the policy can be pickled, as functions of a module can.
    """
    contexts = partial(create_selective_checkpoint_contexts, policy)
    contexts.cache_hash = f"lightseq: {' '.join(map(str, operators))}"  # type: ignore[attr-defined]
    return contexts


# Layers that share contexts share a graph.
_STORING_RESULTS = _selective_contexts(_store_results, STORED_OPS + CHOICE_OPS)
_STORING_CHOICES = _selective_contexts(_store_choices, CHOICE_OPS)


def _recompute_contexts() -> Contexts:
    """Returns the contexts of the forward pass and of the recomputation, which store nothing."""
    return checkpoint_pass(None, is_recomputing()), checkpoint_pass(None, recomputing=True)


def _routing_contexts(contexts: Callable[[], Contexts]) -> Contexts:
    """Returns contexts that also store which experts were chosen."""
    (forward, recomputation), (chosen, chosen_again) = contexts(), choice_contexts()
    return _both(forward, chosen), _both(recomputation, chosen_again)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _storing_contexts(offload: Offload | None) -> Contexts:
    """Returns the contexts of the forward pass, which stores operators' results, and of the recomputation."""
    stored: deque[list[Any]] = deque()
    store: Callable[[Tensor], Any] = offload.store if offload else lambda x: x
    fetch: Callable[[Any], Tensor] = offload.fetch if offload else lambda x: x

    def storing(compute: Callable[[], Results]) -> Results:
        results = compute()
        stored.append([store(x.detach()) for x in results])
        return results

    def reusing(_compute: Callable[[], Results]) -> Results:
        if not stored:
            raise RuntimeError("stored tensors are freed by the backward pass; use --remat none for a second one")
        return tuple(fetch(x).detach() for x in stored.popleft())

    return checkpoint_pass(storing, is_recomputing()), checkpoint_pass(reusing, recomputing=True)
