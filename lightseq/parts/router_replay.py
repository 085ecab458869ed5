"""Replay of a rollout's choice of experts: layers take experts that were chosen elsewhere, and weigh them themselves.

The server that generates a completion and the trainer round differently, so they choose other experts for some tokens.
Training with the server's choice keeps log-probabilities of both close (Rollout Routing Replay, arXiv 2510.11370).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightseq.parts.attention import attention_modules
from lightseq.parts.changes import Changes
from lightseq.parts.experts import experts_modules

ROUTED_EXPERTS: Final = "routed_experts"  # argument of layers: (batch, tokens, layers, experts of a token)
REPLAY: Final = "lightseq_replay"  # attribute of a block of experts
OWN_CHOICE: Final = -1  # stands for all experts of a token that the layer chooses itself, such as padding


@dataclass
class _Replay:
    """Choice of one layer, and the place of the layer among all, and among those with experts."""

    number: int
    place: int
    layers: int
    experts_TK: Tensor | None = None  # in the running forward pass

    def take(self, routed: Tensor) -> None:
        """Stores the layer's part of a choice."""
        number = self.number if routed.shape[2] == self.layers else self.place
        self.experts_TK = routed[:, :, number].flatten(0, 1).long()


class _Chosen(TorchFunctionMode):
    """Replaces the result of the first `topk` over experts by given experts and their scores."""

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
        experts_TK = torch.where(self._experts_TK < 0, result[1], self._experts_TK)
        return torch.return_types.topk((scores.gather(-1, experts_TK), experts_TK))


def install(layers: Iterable[nn.Module], changes: Changes) -> None:
    """Makes layers with experts accept the argument `routed_experts`. Layers without experts drop it."""
    layers, place = list(layers), 0
    if not _layers_with_experts(layers):
        return
    for number, layer in enumerate(layers):
        blocks = [*_blocks(layer)]
        replay = _Replay(number, place, len(layers)) if blocks else None
        place += bool(blocks)
        readers = attention_modules(layer)
        for block, experts in blocks:
            assert replay is not None
            if "forward" in vars(block):
                changes.replace_forward(block, partial(_choose, replay, int(experts.num_experts)))
            else:
                kind: Any = type(block)
                changes.set_attribute(block, REPLAY, replay)
                changes.set_attribute(block, "__class__", _replaying(kind, int(experts.num_experts)))
        for reader in readers:
            changes.add_hook(reader.register_forward_pre_hook(partial(_take_in_layer, replay), with_kwargs=True))
        changes.replace_forward(layer, partial(_take_before_layer, replay, bool(readers)))


def check_shape(routed: Any, input_ids: Tensor) -> None:
    """Raises ValueError unless a choice has whole numbers for each of a batch's tokens."""
    if not isinstance(routed, Tensor) or routed.is_floating_point() or routed.ndim != 4 or not routed.numel():
        given = f"{tuple(routed.shape)} of {routed.dtype}" if isinstance(routed, Tensor) else type(routed).__name__
        raise ValueError(f"{ROUTED_EXPERTS} is {given}; give whole numbers (batch, length, layers, experts of a token)")
    if routed.shape[:2] != input_ids.shape:
        raise ValueError(
            f"{ROUTED_EXPERTS} is for {tuple(routed.shape[:2])} tokens (batch, length), but input_ids are "
            f"{tuple(input_ids.shape)}; give a choice for each token, of prompts too"
        )


def check_experts(routed: Tensor, layers: Iterable[nn.Module], whole_range: Tensor | None) -> None:
    """Raises ValueError unless a choice fits the layers and experts of a model. Waits for the device.

    `whole_range` has the lowest and the highest expert of the whole batch, so that all ranks raise.
    """
    layers = list(layers)
    found = [experts for layer in layers for _, experts in experts_modules(layer)]
    if not found:
        raise ValueError(f"{ROUTED_EXPERTS}: the model has no experts that can be chosen for it; leave it out")
    counts = sorted({len(layers), _layers_with_experts(layers)})
    if routed.shape[2] not in counts:
        raise ValueError(
            f"{ROUTED_EXPERTS} has {routed.shape[2]} layers, but the model {' or '.join(map(str, counts))}; give all "
            "layers, or those with experts"
        )
    experts = int(found[0].num_experts)
    lowest, highest = (torch.stack(routed.aminmax()) if whole_range is None else whole_range).tolist()  # waits once
    if lowest < OWN_CHOICE or highest >= experts:
        wrong = lowest if lowest < OWN_CHOICE else highest
        raise ValueError(
            f"{ROUTED_EXPERTS} names expert {wrong}; layers have experts 0 to {experts - 1}, and {OWN_CHOICE} leaves "
            "the choice of a token to them"
        )


def _layers_with_experts(layers: Iterable[nn.Module]) -> int:
    return sum(any(True for _ in experts_modules(layer)) for layer in layers)


def _blocks(layer: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules that choose experts, which hold them, and the experts."""
    for name, experts in experts_modules(layer):
        yield layer.get_submodule(name.rpartition(".")[0]), experts


def _take_before_layer(
    replay: _Replay | None,
    has_readers: bool,
    layer: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a layer with its part of a choice.

    The layer passes the choice on to its attention, which takes it again where transformers' checkpoint runs the layer
    a second time. Raises ValueError for such a checkpoint around a layer without attention.
    """
    if (routed := kwargs.get(ROUTED_EXPERTS)) is None:
        return forward(*args, **kwargs)
    if not has_readers:
        kwargs.pop(ROUTED_EXPERTS)
        if replay is not None and layer.training and getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"{ROUTED_EXPERTS}: transformers' checkpoint of {type(layer).__name__} would choose experts again; "
                "leave gradient_checkpointing out"
            )
    return _run_with_choice(replay, routed, forward, args, kwargs)


@torch.compiler.disable
def _run_with_choice(
    replay: _Replay | None, routed: Tensor, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    if replay is not None:
        replay.take(routed)
    try:
        return forward(*args, **kwargs)
    finally:
        if replay is not None:
            replay.experts_TK = None


def _take_in_layer(
    replay: _Replay | None, _attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Removes the routed experts from a layer's arguments and keeps its own. Checkpoints run it again."""
    routed = kwargs.pop(ROUTED_EXPERTS, None)
    if routed is None:
        return None
    if replay is not None:
        replay.take(routed)
    return args, kwargs


@cache
def _replaying(kind: Any, experts: int) -> Any:
    """Returns a subclass of a block's class that takes the experts of its replay.

    Layers of one class share compiled code, which a forward function of each block's own would prevent.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _choose(vars(self)[REPLAY], experts, self, partial(kind.forward, self), *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _choose(
    replay: _Replay, experts: int, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs a block of experts with the replayed choice instead of its router's."""
    if replay.experts_TK is None:
        return forward(*args, **kwargs)
    chosen_TK, replay.experts_TK = replay.experts_TK, None
    with _Chosen(chosen_TK, experts) as chosen:
        output = forward(*args, **kwargs)
    if not chosen.is_used:
        raise ValueError(
            f"{type(block).__name__} did not choose {chosen_TK.shape[1]} of {experts} experts by topk, so "
            f"{ROUTED_EXPERTS} cannot replace its choice; give as many a token as the model takes, or leave it out"
        )
    return output
