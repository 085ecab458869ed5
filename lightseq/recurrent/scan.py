"""A linear recurrence over a sequence that ranks share, as one operator: states in a chain, or heads exchanged.

This file has the chain: every fragment is summarized from a state of zeros, the summaries are gathered and composed,
and a kernel runs once from the right initial states. Messages do not grow with the length. head_exchange.py has the
other way, and kernels/recurrent/base.py states the recurrence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightseq.config.recurrent_schedules import HEADS
from lightseq.kernels.recurrent.base import ScanInputs, transition_size
from lightseq.kernels.recurrent.scan_kernel_choice import select_kernel
from lightseq.recurrent.chain import final_gradients, gather, initial_states
from lightseq.recurrent.chain_or_heads import choose
from lightseq.recurrent.fragments import FragmentPlan, count_fragments, plan_for, slots_of
from lightseq.recurrent.head_exchange import scan_heads
from lightseq.recurrent.operators import scan_operator
from lightseq.recurrent.tree_scan import tree_scan
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup


def scan(
    group: SequenceGroup,
    x: ScanInputs,
    schedule: str,
    scale: float = 1.0,
    documents: Documents | None = None,
) -> Tensor:
    """Returns the outputs (B, S, H, V) of a recurrence for this rank's part of a sequence.

    Inputs lie in the group's layout, or in the documents' layout; states start anew in each document, and a node of
    a tree begins with its parent's final state. `schedule` is one of `RECURRENT_SCHEDULES`. Every rank of the group
    must call it, forward and backward. Raises ValueError for a layout or heads that the schedule does not take.
    """
    q, v = x.q, x.v
    if x.k.shape != q.shape or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"a recurrence has {v.shape[2]} heads of values, {q.shape[2]} of queries and {x.k.shape[2]} of keys; set "
            "equal numbers of queries and keys, of which that of values is a multiple"
        )
    boundaries = None if documents is None else documents.boundaries
    fragments = count_fragments(group, v.shape[1], packed=documents is not None)
    if choose(schedule, group.layout.world, v.shape[2], fragments) == HEADS:
        operator = scan_heads
    else:
        slots_of(group, v.shape[1], boundaries)
        operator = tree_scan if documents is not None and documents.are_trees else _scan
    found: Tensor | tuple[Tensor, ...] = operator(*x, scale, group.name, boundaries)
    return found if isinstance(found, Tensor) else found[0]


def _compute(
    x: ScanInputs, scale: float, group: SequenceGroup, boundaries: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns outputs, and the initial states (B, slots, H, K, V) and transitions of this rank's fragments."""
    group.check_documents(boundaries)
    tokens = x.v.shape[1]
    plan, slots = plan_for(group, tokens, boundaries, x.v.device), slots_of(group, tokens, boundaries)
    kernel = select_kernel(x)
    outer = kernel.forward(plan.outer.select_inputs(x), scale, plan.outer.edges)
    if plan.communicates:
        summary = outer.summarize()
        transitions = _by_fragment(summary.transition, plan.last, slots)
        ends = _by_fragment(summary.state, plan.last, slots)
        states = initial_states(plan.chain, gather(group, (transitions, ends)), group.rank)
        out = outer.run(_at_segments(states, plan, plan.first))
    else:
        states, transitions = (part.zero_() for part in _empty_chain(x, group, boundaries))
        out = outer.run(None)
    if plan.inner is not None:
        inner = kernel.forward(plan.inner.select_inputs(x), scale, plan.inner.edges).run(None)
        out = _join(plan, out, inner)
    return out, states, transitions


def _gradients(
    dout: Tensor, x: ScanInputs, saved: Sequence[Tensor], scale: float, group: SequenceGroup, boundaries: Tensor | None
) -> list[Tensor]:
    states, transitions = saved
    plan, kernel = plan_for(group, x.v.shape[1], boundaries, x.v.device), select_kernel(x)
    initial = _at_segments(states, plan, plan.first) if plan.communicates else None
    outer = kernel.backward(plan.outer.select_inputs(x), scale, plan.outer.edges, initial, plan.outer.select(dout))
    dfinal = None
    if plan.communicates:
        own = _by_fragment(outer.initial_gradients(), plan.first, states.shape[1])
        dfinal = final_gradients(plan.chain, gather(group, (transitions, own)), group.rank)
        dfinal = _at_segments(dfinal, plan, plan.last)
    gradients = outer.run(dfinal)
    if plan.inner is not None:
        part = kernel.backward(plan.inner.select_inputs(x), scale, plan.inner.edges, None, plan.inner.select(dout))
        pairs = zip(gradients, part.run(None), strict=True)
        return [_join(plan, a, b) for a, b in pairs if a is not None and b is not None]
    return [gradient for gradient in gradients if gradient is not None]


def _empty_chain(x: ScanInputs, group: SequenceGroup, boundaries: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns uninitialized states and transitions of a rank's fragments."""
    slots = slots_of(group, x.v.shape[1], boundaries)
    (batch, _, heads, values), keys = x.v.shape, x.k.shape[-1]
    dtype = torch.promote_types(x.v.dtype, torch.float32)
    states = x.v.new_empty(batch, slots, heads, keys, values, dtype=dtype)
    return states, x.v.new_empty(batch, slots, heads, *transition_size(x), dtype=dtype)


_scan = scan_operator("scan", _compute, _gradients, _empty_chain, saved_count=2)
SCAN_OP = torch.ops.lightseq.scan.default  # for checkpointing policies


def _join(plan: FragmentPlan, outer: Tensor, inner: Tensor) -> Tensor:
    """Puts the tokens of outer and inner segments back into their order."""
    assert plan.inner is not None
    out = outer.new_empty(outer.shape[0], outer.shape[1] + inner.shape[1], *outer.shape[2:])
    plan.outer.put(out, outer)
    plan.inner.put(out, inner)
    return out


def _by_fragment(by_segment: Tensor, segments: Tensor | None, slots: int) -> Tensor:
    """Arranges values of segments by a rank's fragments (B, slots, ...); unused slots are zero."""
    found = by_segment if segments is None else by_segment.index_select(1, segments)
    missing = slots - found.shape[1]
    return torch.cat([found, found.new_zeros(len(found), missing, *found.shape[2:])], 1) if missing else found


def _at_segments(by_fragment: Tensor, plan: FragmentPlan, segments: Tensor | None) -> Tensor:
    """Returns values for the outer segments (B, N, ...): each fragment's at its segment, zeros at others."""
    count = len(plan.outer.edges) - 1
    if segments is None:
        return by_fragment[:, :count]
    out = by_fragment.new_zeros(len(by_fragment), count, *by_fragment.shape[2:])
    return out.index_copy_(1, segments, by_fragment[:, : len(segments)])
