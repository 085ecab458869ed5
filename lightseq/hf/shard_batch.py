"""A rank's part of a batch in the form of Hugging Face: ids, labels, masks, positions and packed documents."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import BATCH_FACTS, COUNTED_TOKENS, batch_facts
from lightseq.hf.images import local_images, whole_images
from lightseq.parts.router_replay import OWN_CHOICE, ROUTED_EXPERTS, check_shape
from lightseq.schedule.nodes import Nodes, check_boundaries
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup
from lightseq.utils.tensors import IGNORE_INDEX, upload

Labels = TypeVar("Labels", bound=Tensor | None)


def shard_batch(
    context: SequenceContext,
    input_ids: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | Nodes | None = None,
    position_ids: Tensor | None = None,
    shift_labels: Tensor | None = None,
    routed_experts: Tensor | None = None,
    **images: Tensor | None,
) -> dict[str, Any]:
    """Returns this rank's part of a whole batch (batch, length), as keyword arguments of the patched model.

    Labels are aligned with the ids, as in Hugging Face; they are shifted here, on the whole sequence, unless
    `shift_labels` are given instead, which already are. Every rank of the group passes the same batch.
    `num_items_in_batch` counts the valid labels of this group's batch: with data parallelism or accumulation, replace
    it with the sum over all. Masked tokens are not targets.

    A batch of one may hold several packed documents: `cu_seqlens` gives the first token of each and the end of the
    last, or `position_ids` restart at each. Documents neither attend to each other nor predict each other's tokens,
    unless `shift_labels` say so.

    `cu_seqlens` may be `Nodes` of trees, whose tokens see all nodes on their path (`schedule.nodes`). Targets then come
    in `shift_labels`, because the last token of a node has one too.

    `routed_experts`, (batch, length, layers, experts of a token), lets the layers take a rollout's choice of experts
    (`parts.router_replay`). Layers are all of the model's, or those with experts; -1 leaves a choice to the layer.

    `images` are what a processor returns beside the text: `pixel_values`, and where the model takes them
    `image_grid_thw`, `image_sizes`, `spatial_shapes`, `pixel_attention_mask` and token types. A rank gets those that
    have a token among its own.
    Raises ValueError for a mask other than right padding, and for positions of neither kind. In a batch of one, a mask
    may number documents from 1, as multipack trainers do.
    """
    parents = None
    if isinstance(cu_seqlens, Nodes):
        parents, cu_seqlens = cu_seqlens.parents, cu_seqlens.boundaries
        _check_beside_trees(parents, labels, images)
    numbers_documents = check_right_padding(attention_mask)
    check_shapes(input_ids, labels=labels, shift_labels=shift_labels, attention_mask=attention_mask)
    length, given_images = input_ids.shape[1], whole_images(context, input_ids, images)
    others = {"attention_mask": attention_mask, "position_ids": position_ids, ROUTED_EXPERTS: routed_experts, **images}
    if routed_experts is not None:
        check_shape(routed_experts, input_ids)
    if attention_mask is not None and numbers_documents:
        cu_seqlens = with_numbered_documents(attention_mask, cu_seqlens)
        attention_mask = (attention_mask != 0).long()
    if attention_mask is not None and cu_seqlens is None:
        position_ids = continued_positions(position_ids, attention_mask)
    boundaries = find_boundaries(input_ids, cu_seqlens, position_ids)
    if boundaries is not None and boundaries[-1] < length:
        check_tail(boundaries[-1], length, [labels, shift_labels], attention_mask)
    if shift_labels is None and labels is not None:
        labels = shifted_labels(labels, attention_mask, boundaries)
    elif shift_labels is not None:
        labels = shift_labels if attention_mask is None else without_masked(shift_labels, attention_mask)
    if labels is not None:
        check_labels(labels)
    nodes = None if boundaries is None else Nodes(boundaries, parents)
    ids, local, documents = local_batch(context.sequence, input_ids, labels, nodes)
    batch: dict[str, Any] = {"input_ids": ids}
    if documents is None:
        batch["position_ids"] = context.sequence.positions(length, input_ids.device).expand(len(input_ids), -1)
    else:
        positions = upload(documents.positions(context.rank), input_ids.device)
        batch |= {"position_ids": positions, "documents": documents}
    batch[BATCH_FACTS] = batch_facts(input_ids, labels, others)
    if (counted := counted_tokens(context.sequence, input_ids, attention_mask, documents)) is not None:
        batch[COUNTED_TOKENS] = counted
    if routed_experts is not None:
        batch[ROUTED_EXPERTS] = context.sequence.shard(
            routed_experts.to(input_ids.device), fill=OWN_CHOICE, documents=documents
        )
    if given_images is not None:
        model, inputs = given_images
        batch |= local_images(
            context, model, inputs, input_ids, attention_mask, documents, boundaries, batch["position_ids"]
        )
    if labels is not None:
        valid = (labels != IGNORE_INDEX).sum().clamp_min(1)  # without a target the loss is 0, not NaN
        batch |= {"labels": local, "shift_labels": local, "num_items_in_batch": valid}
    return batch


def _check_beside_trees(
    parents: Sequence[int] | None, labels: Tensor | None, images: Mapping[str, Tensor | None]
) -> None:
    """Raises ValueError for inputs that trees do not support."""
    given = [name for name, x in images.items() if x is not None]
    if parents is not None and labels is not None:
        raise ValueError("labels of rows that share a prefix cannot be shifted; pass shift_labels or use hf.shard_rows")
    if parents is not None and given:
        raise ValueError(f"{given[0]}: rows that share a prefix do not take images yet; pack whole rows")


def check_shapes(input_ids: Tensor, **given: Tensor | None) -> None:
    """Raises ValueError unless ids are (batch, length), and the other tensors have a value for each."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids are a {type(input_ids).__name__}; give a tensor (batch, length)")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids are {tuple(input_ids.shape)}; give (batch, length) with at least one token")
    for name, x in given.items():
        if x is not None and x.shape != input_ids.shape:
            shapes = f"{name} {tuple(x.shape)} and input_ids {tuple(input_ids.shape)}"
            raise ValueError(f"{shapes} differ in shape; give one value per token")


def local_batch(
    group: SequenceGroup, input_ids: Tensor, labels: Labels, nodes: Nodes | None
) -> tuple[Tensor, Labels, Documents | None]:
    """Returns this rank's shard of a batch's ids and shifted labels, and the documents if it is packed as `nodes`."""
    documents = None if nodes is None else group.pack(nodes.boundaries, input_ids.shape[1], nodes.parents)
    local: Any = labels if labels is None else group.shard(labels, IGNORE_INDEX, documents)
    return group.shard(input_ids, documents=documents), local, documents


def counted_tokens(
    group: SequenceGroup, input_ids: Tensor, attention_mask: Tensor | None, documents: Documents | None
) -> Tensor | None:
    """Marks this rank's tokens that one process would count, (batch, local). None: all.

    Masked tokens do not count, nor does the padding that a layout adds.
    """
    length = input_ids.shape[1]
    padded = group.layout.padded_length(length) if documents is None else documents.length
    if attention_mask is None and padded == length:
        return None
    counted = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    return group.shard(counted, False, documents)


def find_boundaries(
    input_ids: Tensor, cu_seqlens: Tensor | Sequence[int] | None, position_ids: Tensor | None
) -> tuple[int, ...] | None:
    """Returns the start of each document and the last end, for a batch of one; None for one document per sequence."""
    batch, length = input_ids.shape
    if position_ids is not None:
        if not isinstance(position_ids, Tensor) or position_ids.shape[-1:] != (length,):
            given = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__
            raise ValueError(f"position_ids are {given}; give a tensor with one for each of {length} tokens")
        position_ids = position_ids.cpu()  # once, because the host waits for a device
    if cu_seqlens is None:
        if position_ids is None or bool((position_ids == torch.arange(length, dtype=position_ids.dtype)).all()):
            return None
        cu_seqlens = [*(position_ids.reshape(-1)[:length] == 0).nonzero().flatten().tolist(), length]
    if batch != 1:
        raise ValueError(f"packed documents in a batch of {batch}; pack all documents into one sequence")
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = cu_seqlens.flatten().tolist()  # collators add a batch dimension
    if fractions := [x for x in cu_seqlens if x % 1 != 0]:
        raise ValueError(f"cu_seqlens has {fractions[0]}; give whole numbers of tokens")
    try:
        found = check_boundaries([int(x) for x in cu_seqlens], length)
        fit = position_ids is None or _restarts(position_ids, found)
    except ValueError:
        if position_ids is None:
            raise
        fit = False
    if not fit:
        raise ValueError("position_ids do not count up from 0 in each document; leave them out")
    return found


def continued_positions(position_ids: Tensor | None, attention_mask: Tensor) -> Tensor | None:
    """Continues positions over right padding, where transformers' collators write 0 or 1.

    Positions of another shape than (batch, length) or (1, length) stay as they are.
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return position_ids
    batch, length = attention_mask.shape
    if position_ids.shape not in ((batch, length), (1, length)):
        return position_ids
    given = position_ids.expand(batch, -1)
    tokens = (attention_mask != 0).sum(1, keepdim=True).to(given.device)
    beyond = torch.arange(length, device=given.device, dtype=given.dtype) - tokens
    return torch.where(beyond < 0, given, given.gather(1, tokens - 1) + 1 + beyond)


def with_numbered_documents(
    attention_mask: Tensor, cu_seqlens: Tensor | Sequence[int] | None
) -> Tensor | Sequence[int]:
    """Returns the boundaries of documents that a mask numbers, or `cu_seqlens` if these have the same and padding.

    Raises ValueError unless the mask is a batch of one whose numbers rise.
    """
    if len(attention_mask) != 1:
        raise ValueError(
            f"attention_mask has {attention_mask.max():g} in a batch of {len(attention_mask)}; give 1 for tokens and 0 "
            "for padding, or pack all documents into one sequence"
        )
    numbers = attention_mask[0].cpu()
    numbers = numbers[numbers != 0]
    if wrong := [x for x in numbers.tolist() if x < 1 or x % 1]:
        raise ValueError(f"attention_mask has {wrong[0]:g}; give 1 for tokens and 0 for padding, or number documents")
    if (numbers.diff() < 0).any():
        raise ValueError("attention_mask numbers documents, but its numbers fall; number them in order, from 1")
    found = [0, *(numbers.diff().nonzero().flatten() + 1).tolist(), len(numbers)]
    if cu_seqlens is None:
        return found
    given = cu_seqlens.flatten().tolist() if isinstance(cu_seqlens, Tensor) else [*cu_seqlens]
    if given[: len(found)] != found:
        raise ValueError(f"attention_mask numbers documents at {found}, but cu_seqlens are {given}; leave one out")
    return cu_seqlens


def check_tail(end: int, length: int, labels: Sequence[Tensor | None], attention_mask: Tensor | None) -> None:
    """Raises ValueError for tokens after the last document that are not padding: masked, or without a label."""
    given = [x for x in labels if x is not None]
    is_masked = attention_mask is not None and not attention_mask[:, end:].any()
    has_labels = any(bool((x[:, end:] != IGNORE_INDEX).any()) for x in given)
    if not is_masked and (has_labels or not given):
        raise ValueError(
            f"cu_seqlens end at {end}, but the sequence has {length} tokens; give the end of the last document, or set "
            f"the labels of padding to {IGNORE_INDEX}"
        )


def _restarts(position_ids: Tensor, boundaries: tuple[int, ...]) -> bool:
    got = position_ids.reshape(-1)[: boundaries[-1]]
    return torch.equal(got, torch.from_numpy(Nodes(boundaries).positions()).to(got.dtype))


def shifted_labels(labels: Tensor, attention_mask: Tensor | None, boundaries: Sequence[int] | None) -> Tensor:
    """Shifts labels to the left by one. Masks targets that are masked tokens, or belong to the next document."""
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, IGNORE_INDEX)
    labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if boundaries is not None:
        labels[:, [end - 1 for end in boundaries[1:]]] = IGNORE_INDEX
        labels[:, boundaries[-1] :] = IGNORE_INDEX
    return labels


def without_masked(shift_labels: Tensor, attention_mask: Tensor) -> Tensor:
    """Removes the labels of masked tokens, and labels whose target is masked, from shifted labels."""
    targets = torch.nn.functional.pad(
        attention_mask[:, 1:], (0, 1), value=1
    )  # nothing is known about the last token's target
    return shift_labels.masked_fill((attention_mask == 0) | (targets == 0), IGNORE_INDEX)


def check_labels(labels: Tensor) -> None:
    """Raises ValueError for negative labels other than -100. Those on a GPU are checked there, as torch's loss does."""
    valid = ((labels >= 0) | (labels == IGNORE_INDEX)).all()
    if labels.device.type != "cpu":
        torch._assert_async(valid, f"a label is negative, but not {IGNORE_INDEX}")
    elif not valid:
        raise ValueError(f"a label is {int(labels[labels != IGNORE_INDEX].min())}; tokens without a target have -100")


def check_right_padding(
    attention_mask: Tensor | None, labels: Tensor | None = None, shift_labels: Tensor | None = None
) -> bool:
    """Raises ValueError unless each row of a mask is ones, then zeros; causal attention ignores right padding.

    Returns whether other numbers than ones stand there, which may number documents. Labels of masked tokens, shifted or
    not, must be -100: one process would train on others.
    """
    if attention_mask is None:
        return False
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask is a {type(attention_mask).__name__}; give a tensor (batch, length)")
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has {attention_mask.ndim} dimensions; give one of shape (batch, sequence)")
    there = (attention_mask != 0).int()  # bool and uint8 have no negative differences
    empty, rises = ~there.any(dim=1).all(), (there.diff(dim=1) > 0).any()
    masked_labels = there.new_zeros(())
    if labels is not None and labels.shape == there.shape:
        masked_labels = ((there == 0) & (labels != IGNORE_INDEX)).sum()
    if shift_labels is not None and shift_labels.shape == there.shape:
        masked_labels = (without_masked(shift_labels, there) != shift_labels).sum()
    # One transfer for all checks, because the host waits for the device.
    numbered = (attention_mask != there).any()
    facts = torch.stack([empty.int(), rises.int(), masked_labels.int(), numbered.int()])
    empty_row, not_right, masked, numbers_documents = facts.tolist()
    if empty_row:
        raise ValueError("attention_mask has a row without tokens; remove the row")
    if not_right:
        raise ValueError("attention_mask has padding on the left, or holes; pad on the right (padding_side='right')")
    if masked:
        raise ValueError(f"{masked} masked tokens have labels; set the labels of padding to {IGNORE_INDEX}")
    return bool(numbers_documents)
