"""The chain of states: summaries of all fragments, gathered once and composed in the order of the sequence.

A fragment maps its initial state to its final one, S_out = M S_in + b. Backward, the gradient of its initial state is
the one from its own outputs plus M^T times the gradient of its final state.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.recurrent.fragments import Fragment
from lightseq.sequence.group import SequenceGroup

# torch 2.13 renamed the function, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather(group: SequenceGroup, parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Gathers each rank's tensors in one message. Shapes are the same on all ranks."""
    flat = torch.cat([part.flatten() for part in parts])
    world = group.layout.world
    every = flat.new_empty(world * len(flat))
    _all_gather(every, flat, group=group.process_group)
    sizes = [part.numel() for part in parts]
    return [
        tuple(piece.view(part.shape) for piece, part in zip(row.split(sizes), parts, strict=True))
        for row in every.chunk(world)
    ]


def initial_states(chain: Sequence[Fragment], every: Sequence[tuple[Tensor, ...]], rank: int) -> Tensor:
    """Returns the initial states of a rank's fragments (B, slots, H, K, V).

    `every` has the transitions (B, slots, H, K, K or 1) and states (B, slots, H, K, V) of every rank's fragments.
    """
    found, state = torch.zeros_like(every[rank][1]), None
    for fragment in chain:
        transition, own = (x[:, fragment.slot] for x in every[fragment.rank])
        if fragment.rank == rank and fragment.receives and state is not None:
            found[:, fragment.slot] = state
        state = own if state is None or not fragment.passes else apply_transition(transition, state) + own
    return found


def final_gradients(chain: Sequence[Fragment], every: Sequence[tuple[Tensor, ...]], rank: int) -> Tensor:
    """Returns the gradients of the final states of a rank's fragments (B, slots, H, K, V).

    `every` has the transitions and the gradients of initial states, those from a fragment's own outputs alone.
    """
    found, gradient = torch.zeros_like(every[rank][1]), None
    for fragment in reversed(chain):
        transition, own = (x[:, fragment.slot] for x in every[fragment.rank])
        if fragment.rank == rank and gradient is not None:
            found[:, fragment.slot] = gradient
        if not fragment.receives:
            gradient = None  # a document begins here: nothing goes to the fragment before
        elif gradient is None or not fragment.passes:
            gradient = own
        else:
            gradient = apply_transition(transposed(transition), gradient) + own
    return found


def transposed(transition: Tensor) -> Tensor:
    """Returns the transition of gradients, from a final state to the initial one."""
    return transition.mT if transition.shape[-1] > 1 else transition


def apply_transition(transition: Tensor, state: Tensor) -> Tensor:
    """Multiplies a state by a transition, which scales its rows if it has one column.

    Products are in float64, because those in float32 may be rounded to TF32, and errors grow along the chain.
    """
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.double() @ state.double()).to(state.dtype)
