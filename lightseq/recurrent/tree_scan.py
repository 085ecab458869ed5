"""A linear recurrence over a row of trees that ranks share: each node begins with the final state of its parent.

Links (tree_plan.py) are summarized from a state of zeros, the summaries of shared ones are gathered, and states are
composed from the roots down. Then a kernel runs once over all pieces from the right initial states. Backward, the
gradient of a final state sums the gradients of the pieces that begin from it. Only inputs are saved. The backward pass
summarizes and composes again, because saving a state for each parent costs more than the time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.kernels.recurrent.base import ForwardScan, ScanInputs, Summary, transition_size
from lightseq.kernels.recurrent.scan_kernel_choice import select_kernel
from lightseq.recurrent.chain import apply_transition, gather, transposed
from lightseq.recurrent.fragments import Segments
from lightseq.recurrent.operators import scan_operator
from lightseq.recurrent.tree_plan import Step, TreePlan, tree_plan
from lightseq.sequence.group import SequenceGroup


class States(NamedTuple):
    """Final states of links by the rows of a plan, and the transitions that they were composed with."""

    table: Tensor  # (B, rows, H, K, V)
    own_transitions: Tensor | None  # (B, links, H, K, K or 1) of this rank
    shared_transitions: Tensor | None  # (B, shared rows, ...) of all ranks


def tree_outputs(x: ScanInputs, scale: float, plan: TreePlan, group: SequenceGroup) -> Tensor:
    """Returns the outputs (B, S, H, V) of this rank's pieces. Every rank of the group must call it."""
    links = _forward(x, scale, plan.links)
    states = compose(x, links, plan, group)
    out = torch.empty_like(x.v)
    if links is not None and plan.links is not None:
        plan.links.put(out, links.run(states.table.index_select(1, plan.links_begin)))
        del links
    if plan.leaves is not None:
        leaves = _forward(x, scale, plan.leaves)
        assert leaves is not None
        plan.leaves.put(out, leaves.run(states.table.index_select(1, plan.leaves_begin)))
    return out


def tree_gradients(x: ScanInputs, scale: float, plan: TreePlan, group: SequenceGroup, dout: Tensor) -> list[Tensor]:
    """Returns the gradients of q, k, v, g and, if it is given, beta. Every rank of the group must call it."""
    states, kernel = compose(x, _forward(x, scale, plan.links), plan, group), select_kernel(x)
    found = [torch.empty_like(part) for part in x if part is not None]
    dstates = torch.zeros_like(states.table)
    if plan.leaves is not None:
        begin = states.table.index_select(1, plan.leaves_begin)
        leaves = kernel.backward(
            plan.leaves.select_inputs(x), scale, plan.leaves.edges, begin, plan.leaves.select(dout)
        )
        dstates.index_add_(1, plan.leaves_begin, leaves.initial_gradients())
        _put_all(found, plan.leaves, leaves.run(None))
        del leaves, begin
    links = None
    if plan.links is not None:
        begin = states.table.index_select(1, plan.links_begin)
        links = kernel.backward(plan.links.select_inputs(x), scale, plan.links.edges, begin, plan.links.select(dout))
        own = links.initial_gradients()
        for step in reversed(plan.own_steps):
            assert states.own_transitions is not None
            transition = states.own_transitions.index_select(1, step.summaries)
            through = apply_transition(transposed(transition), dstates.index_select(1, step.rows))
            dstates.index_add_(1, step.begin, own.index_select(1, step.summaries) + through)
        begins = plan.links_begin.index_select(0, plan.shared_links)
        dstates.index_add_(1, begins, own.index_select(1, plan.shared_links))
    _add_shared(dstates, states, plan, group)
    if links is not None and plan.links is not None:
        _put_all(found, plan.links, links.run(dstates.index_select(1, plan.link_rows)))
    return found


def _add_shared(dstates: Tensor, states: States, plan: TreePlan, group: SequenceGroup) -> None:
    """Adds the gradients of shared states from all ranks, in place, and passes them up to the roots."""
    if states.shared_transitions is None:
        return
    shared = dstates[:, 1 : 1 + plan.shared_rows].contiguous()
    dist.all_reduce(shared, group=group.process_group)
    dstates[:, 1 : 1 + plan.shared_rows] = shared
    for step in reversed(plan.shared_steps):
        transition = states.shared_transitions.index_select(1, step.summaries)
        through = apply_transition(transposed(transition), dstates.index_select(1, step.rows))
        dstates.index_add_(1, step.begin, through)


def compose(x: ScanInputs, links: ForwardScan | None, plan: TreePlan, group: SequenceGroup) -> States:
    """Computes the final states of links: all ranks' shared links, and this rank's others."""
    (batch, _, heads, values), keys = x.v.shape, x.k.shape[-1]
    dtype = torch.promote_types(x.v.dtype, torch.float32)
    table = x.v.new_zeros(batch, plan.row_count, heads, keys, values, dtype=dtype)
    own = None if links is None else links.summarize()
    shared = None
    if plan.most_shared:
        shared = _gather_shared(own, (transition_size(x), (keys, values)), table, plan, group)
        _descend(table, plan.shared_steps, shared)
    if own is not None:
        _descend(table, plan.own_steps, own)
    return States(table, *(None if each is None else each.transition for each in (own, shared)))


def _gather_shared(
    own: Summary | None, sizes: Sequence[tuple[int, int]], table: Tensor, plan: TreePlan, group: SequenceGroup
) -> Summary:
    """Gathers the summaries of all ranks' shared links, padded with zeros to `most_shared` per rank."""
    mine = [table.new_zeros(len(table), plan.most_shared, table.shape[2], *size) for size in sizes]
    if own is not None:
        for padded, part in zip(mine, own, strict=True):
            padded[:, : len(plan.shared_links)] = part.index_select(1, plan.shared_links)
    return Summary(*(torch.cat(parts, 1) for parts in zip(*gather(group, mine), strict=True)))


def _descend(table: Tensor, steps: Sequence[Step], summaries: Summary) -> None:
    """Writes the final states of links into the table, from the roots down."""
    for step in steps:
        transition, state = (part.index_select(1, step.summaries) for part in summaries)
        above = table.index_select(1, step.begin)
        table.index_copy_(1, step.rows, apply_transition(transition, above) + state)


def _forward(x: ScanInputs, scale: float, segments: Segments | None) -> ForwardScan | None:
    return None if segments is None else select_kernel(x).forward(segments.select_inputs(x), scale, segments.edges)


def _put_all(out: list[Tensor], segments: Segments, parts: ScanInputs) -> None:
    for whole, part in zip(out, (part for part in parts if part is not None), strict=True):
        segments.put(whole, part)


# ---- operator --------------------------------------------------------------------------------------------------------


def _plan_for(group: SequenceGroup, x: ScanInputs, table: Tensor | None) -> TreePlan:
    layout, nodes = group.layout_and_nodes(x.v.shape[1], table)
    return tree_plan(layout, group.rank, nodes, x.v.device)


def _compute(x: ScanInputs, scale: float, group: SequenceGroup, nodes: Tensor | None) -> tuple[Tensor]:
    return (tree_outputs(x, scale, _plan_for(group, x, nodes), group),)


def _gradients(
    dout: Tensor, x: ScanInputs, _saved: Sequence[Tensor], scale: float, group: SequenceGroup, nodes: Tensor | None
) -> list[Tensor]:
    return tree_gradients(x, scale, _plan_for(group, x, nodes), group, dout)


tree_scan = scan_operator("tree_scan", _compute, _gradients)  # for the trees of a `node_tensor`
TREE_SCAN_OP = torch.ops.lightseq.tree_scan.default  # for checkpointing policies
