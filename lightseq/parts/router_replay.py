"""Replay of a rollout's choice of experts: layers take experts that were chosen elsewhere, and weigh them themselves.

The server that generates a completion and the trainer round differently, so they choose other experts for some tokens.
Training with the server's choice keeps log-probabilities of both close (Rollout Routing Replay, arXiv 2510.11370).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightseq.parts.changes import Changes
from lightseq.parts.experts import experts_modules

ROUTED_EXPERTS: Final = "routed_experts"  # argument of layers: (batch, tokens, layers, experts of a token)


class _Replay:
    """Choice of one layer in its running forward pass."""

    def __init__(self) -> None:
        self.experts_TK: Tensor | None = None


class _Chosen(TorchFunctionMode):
    """Lets the first `topk` over experts return given experts and their scores."""

    def __init__(self, experts_TK: Tensor, experts: int) -> None:
        self._experts_TK, self._experts = experts_TK, experts
        self.is_used = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.is_used or function not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if result[1].shape != self._experts_TK.shape or scores.shape[-1] != self._experts:
            return result  # chooses groups of experts
        self.is_used = True
        return torch.return_types.topk((scores.gather(-1, self._experts_TK), self._experts_TK))


def install(layers: Sequence[nn.Module], changes: Changes) -> None:
    """Lets layers with experts take `routed_experts` beside their other arguments. Layers without experts drop it."""
    if not any(True for layer in layers for _ in experts_modules(layer)):
        return
    with_experts = 0
    for number, layer in enumerate(layers):
        replay, has_experts = _Replay(), False
        for block, experts in _blocks(layer):
            has_experts = True
            changes.replace_forward(block, partial(_choose, replay, int(experts.num_experts)))
        index = (number, with_experts if has_experts else None, len(layers))
        changes.replace_forward(layer, partial(_take_choice, replay, index))
        with_experts += has_experts


def layers_with_experts(layers: Sequence[nn.Module]) -> int:
    """Returns the number of layers that have experts."""
    return sum(any(True for _ in experts_modules(layer)) for layer in layers)


def check_routed_experts(routed: Any, batch: tuple[int, int], layers: Sequence[nn.Module]) -> None:
    """Raises ValueError unless a choice has an expert's number for each of a batch's tokens, layers and choices."""
    found = [experts for layer in layers for _, experts in experts_modules(layer)]
    if not found:
        raise ValueError(f"{ROUTED_EXPERTS}: the model has no experts; leave it out")
    if not isinstance(routed, Tensor) or routed.is_floating_point() or routed.ndim != 4:
        shape = tuple(routed.shape) if isinstance(routed, Tensor) else type(routed).__name__
        raise ValueError(f"{ROUTED_EXPERTS} is {shape}; give whole numbers (batch, length, layers, experts of a token)")
    if tuple(routed.shape[:2]) != batch:
        raise ValueError(f"{ROUTED_EXPERTS} is for {tuple(routed.shape[:2])} tokens, but the batch has {batch}")
    counts = {len(layers), layers_with_experts(layers)}
    if routed.shape[2] not in counts:
        names = " or ".join(map(str, sorted(counts)))
        raise ValueError(f"{ROUTED_EXPERTS} has {routed.shape[2]} layers, but the model {names}; give all, or those with experts")
    lowest, highest = (int(x) for x in routed.aminmax())
    if lowest < 0 or highest >= (experts := int(found[0].num_experts)):
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{ROUTED_EXPERTS} names expert {wrong}, but layers have experts 0 to {experts - 1}")


def _blocks(layer: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules that choose experts, which hold them, and the experts."""
    for name, experts in experts_modules(layer):
        yield layer.get_submodule(name.rpartition(".")[0]), experts


def _take_choice(
    replay: _Replay,
    index: tuple[int, int | None, int],
    _layer: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a layer with its part of a choice. Checkpoints hold the choice with the layer's other arguments."""
    routed = kwargs.pop(ROUTED_EXPERTS, None)
    if routed is None:
        return forward(*args, **kwargs)
    return _run_with_choice(replay, index, routed, forward, args, kwargs)


@torch.compiler.disable
def _run_with_choice(
    replay: _Replay, index: tuple[int, int | None, int], routed: Tensor, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    number, place, layers = index
    if place is not None:
        replay.experts_TK = routed[:, :, number if routed.shape[2] == layers else place].flatten(0, 1).long()
    try:
        return forward(*args, **kwargs)
    finally:
        replay.experts_TK = None


def _choose(
    replay: _Replay, experts: int, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a block of experts, whose router scores all experts, and takes those of the replay."""
    if replay.experts_TK is None:
        return forward(*args, **kwargs)
    with _Chosen(replay.experts_TK, experts) as chosen:
        output = forward(*args, **kwargs)
    if not chosen.is_used:
        k = replay.experts_TK.shape[1]
        raise ValueError(
            f"{type(block).__name__} did not choose {k} of {experts} experts by topk, so {ROUTED_EXPERTS} cannot replace "
            "its choice; give as many experts a token as the model takes, or leave it out"
        )
    return output
