"""AdamW for weights and states in host memory: the GPU computes the update, a piece of a parameter at a time.

A CPU core updates some ten to thirty million weights a second with states of 8 bits, a link to a GPU carries two to
three billion; and what a GPU compiles for pieces of one size it compiles once. Streaming the states of layers through
the GPU is how ZeRO-Infinity (arXiv 2104.07857) updates what waits on NVMe.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lightseq.memory.piecewise import Piece, change_on
from lightseq.memory.pinned import PinnedMemory
from lightseq.training.optimization import local_part

PIECE = 1 << 25  # weights: three pieces in flight are 1.5 GiB of the GPU, with states of 8 bits 1 GiB
STATES = {"exp_avg": True, "exp_avg_sq": False}  # and whether they have a sign


def update_on(device: torch.device, optimizer: torch.optim.Optimizer, piece: int = PIECE) -> None:
    """From now on `optimizer.step()` computes on `device` what waits on the host.

    The optimizer is torch's AdamW or torchao's AdamW8bit; its state and its checkpoints stay what they are. New states
    are page-locked, which raises CannotPin where the host does not lock as much.
    """
    pinned = PinnedMemory() if device.type == "cuda" else None
    optimizer.defaults["fused"] = None  # the norm is on the host, which can look whether it is finite
    optimizer.step = partial(_step, optimizer, device, piece, pinned)  # type: ignore[method-assign, assignment]


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer, device: torch.device, size: int, pinned: PinnedMemory | None) -> None:
    pieces: list[Piece] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if not state:
                state.update(_new_state(optimizer, parameter, pinned))
            change = partial(_change, group, state["step"].to(device, copy=True))
            state["step"] += 1
            pieces += _pieces(parameter, state, size, change)
    change_on(device, pieces)


def _new_state(optimizer: Any, parameter: Tensor, pinned: PinnedMemory | None) -> dict[str, Tensor]:
    """As the optimizer itself would make it."""
    narrow = getattr(optimizer, "_new_buffer", None)
    state = {
        name: narrow(parameter, signed) if narrow else torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for name, signed in STATES.items()
    }
    if pinned is not None:
        for part in _flat_states(state):
            pinned.lock(part)
    return {"step": torch.tensor(0.0), **state}


def _flat_states(state: dict[str, Tensor]) -> Iterator[Tensor]:
    """Exponential averages of the gradient and of its square, each as its values or as codes and scales."""
    for name in STATES:
        local: Any = local_part(state[name])
        yield from (local.codes.view(-1), local.scale) if hasattr(local, "codes") else (local.view(-1),)


def _pieces(parameter: Tensor, state: dict[str, Tensor], size: int, change: Callable[..., None]) -> Iterator[Piece]:
    weights, states = local_part(parameter.detach()).view(-1), list(_flat_states(state))
    gradient = local_part(parameter.grad).view(-1)  # type: ignore[arg-type]
    tensors = (weights, *states, gradient)
    blocks = [len(weights) // len(x) for x in tensors] if len(weights) else []  # 256 weights share a scale
    sizes = tuple(size // block for block in blocks)
    for start in range(0, len(weights), size):
        parts = tuple(x[start // block : (start + size) // block] for x, block in zip(tensors, blocks, strict=True))
        yield Piece(parts, len(parts) - 1, sizes, change)


def _change(group: dict[str, Any], step: Tensor, there: Sequence[Tensor]) -> None:
    """The update of weights after `step` others, from their states and their gradient, which comes last."""
    weights, *states, gradient = there
    rate, (beta1, beta2), decay, epsilon = group["lr"], group["betas"], group["weight_decay"], group["eps"]
    if isinstance(rate, Tensor):
        from torchao.optim.adam import single_param_adam

        rate, decay = (
            rate.to(step.device),
            torch.tensor(decay, device=step.device),
        )  # as numbers they would be compiled in
        with torch._dynamo.utils.disable_cache_limit():
            update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
            update(
                weights, gradient, step + 1, *_wrapped(states), None, rate, beta1, beta2, decay, epsilon, True, False
            )
    else:
        adamw(
            [weights], [gradient], [states[0]], [states[1]], [], [step.clone()], fused=True, amsgrad=False,
            maximize=False, beta1=beta1, beta2=beta2, lr=rate, weight_decay=decay, eps=epsilon,
        )  # fmt: skip


def _wrapped(states: Sequence[Tensor]) -> Sequence[Tensor]:
    """Codes and scales as torchao's tensors of 8 bits; states too small for that are as they were."""
    if len(states) == len(STATES):
        return states
    from torchao.optim.subclass_8bit import OptimState8bit

    return [
        OptimState8bit(codes, scale, _table(signed, codes.device), signed, dtype=torch.float32)
        for codes, scale, signed in zip(states[::2], states[1::2], STATES.values(), strict=True)
    ]


@lru_cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values that codes stand for."""
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    return torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned(), device=device)
