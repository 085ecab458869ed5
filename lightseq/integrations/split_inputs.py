"""Split of a trainer's whole batch into each rank's inputs of one pass."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightseq import hf
from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import BATCH_FACTS, COUNTED_TOKENS, add_to_checksum
from lightseq.hf.image_inputs import IMAGE_INPUTS, TOKEN_TYPES
from lightseq.hf.shard_batch import check_right_padding, continued_positions, counted_tokens
from lightseq.integrations.packed_rows import PackedRows, join_rows, pack_rows
from lightseq.parts.router_loss import asks_for_router_logits
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.schedule.nodes import Nodes
from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import IGNORE_INDEX

PER_BATCH = (*("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", ROUTED_EXPERTS, *IMAGE_INPUTS),)
# What collators of packed documents add; `cu_seq_lens_q` has all that is needed.
PACKING = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
REFUSED = {
    "past_key_values": "to generate, call lightseq.integrations.accelerate.disable(model) first",
    "use_cache": "to generate, call lightseq.integrations.accelerate.disable(model) first",
    "inputs_embeds": "pass input_ids",
    "output_hidden_states": "each rank has hidden states of its own tokens only",
    "logits_to_keep": "it counts from the end of the whole sequence; slice the gathered logits",
}
CONFIGURED = ("output_hidden_states",)  # refused in the model's config, too


@dataclass(frozen=True)
class SplitInputs:
    """This rank's part of the batch that a model was called with, and the other arguments of the call."""

    batch: dict[str, Any]  # without labels
    options: dict[str, Any]
    labels: Tensor | None  # this rank's, shifted
    divisor: Tensor | None  # the number of valid tokens, which divides the loss
    shifted_here: bool  # we shift labels, as TRL does; per-token values then end one token earlier
    length: int  # tokens of the batch or of its packed row, before padding
    has_router_loss: bool
    packed: PackedRows | None  # the batch was packed into one row

    @cached_property
    def nonzero_divisor(self) -> Tensor | None:
        """Returns a divisor that leaves gradients finite where there is nothing to divide."""
        return None if self.divisor is None else self.divisor.clamp_min(1)


def split_inputs(
    context: SequenceContext,
    config: PreTrainedConfig,
    kwargs: dict[str, Any],
    pad_to: int | None,
    keeps_targets: bool,
    packs_rows: bool,
    shares_prefixes: bool = False,
) -> SplitInputs:
    """Returns this rank's part of a model's arguments. Raises ValueError for arguments that cannot be split.

    Rows are padded to `pad_to` tokens, if given. `keeps_targets` leaves the first token of a document a target.
    `packs_rows` lets the rows of a padded batch be documents of one row, `shares_prefixes` trees of one.
    """
    padding, shifted_here = kwargs.get("attention_mask"), kwargs.get("shift_labels") is None
    options, packed = dict(kwargs), None
    if packs_rows or shares_prefixes:
        options, packed = pack_rows(options, shares_prefixes, packs_documents=packs_rows)
    if packed is None:
        options, packed = join_rows(options)
    _refuse_options(config, options)
    for name in PACKING:
        options.pop(name, None)
    whole = {name: options.pop(name, None) for name in PER_BATCH}
    if whole["input_ids"] is None:
        raise ValueError("input_ids are missing; pass the whole batch")
    length, mask = whole["input_ids"].shape[1], whole["attention_mask"]
    numbers_documents = check_right_padding(mask, whole["labels"] if shifted_here else None, whole["shift_labels"])
    edges = options.pop("cu_seq_lens_q", None)
    if mask is not None and mask.shape == whole["input_ids"].shape and not numbers_documents:
        whole["attention_mask"] = None  # is right padding without labels; another check would wait for the device
        if edges is None:
            whole["position_ids"] = continued_positions(whole["position_ids"], mask)
    if pad_to is not None:
        whole, edges = _padded(whole, pad_to), _padded_edges(edges, length, pad_to)
    given = options.pop("num_items_in_batch", None)
    if shifted_here and whole["labels"] is not None and (keeps_targets or given is not None):
        # Counted already, so targets at the starts of documents stay: shard_batch would remove them.
        labels = nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        whole |= {"labels": None, "shift_labels": labels}
    batch = hf.shard_batch(context, cu_seqlens=edges, **whole)
    add_to_checksum(batch[BATCH_FACTS], {"attention_mask": padding})
    has_router_loss = asks_for_router_logits(config, options)
    batch.pop(COUNTED_TOKENS, None)
    if (
        has_router_loss
        and (counted := _counted_tokens(context, whole["input_ids"], mask, length, packed, batch)) is not None
    ):
        batch[COUNTED_TOKENS] = counted
    local = batch.pop("shift_labels", None)
    batch.pop("labels", None)
    divisor = batch.pop("num_items_in_batch", None)
    if given is not None:
        divisor = torch.as_tensor(given, device=batch["input_ids"].device)
    return SplitInputs(
        batch=batch,
        options=options,
        labels=local,
        divisor=divisor,
        shifted_here=shifted_here,
        length=length,
        has_router_loss=has_router_loss,
        packed=packed,
    )


def _refuse_options(config: PreTrainedConfig, options: dict[str, Any]) -> None:
    """Removes options that are off. Raises ValueError for those that only one rank can honor."""
    for name, reason in REFUSED.items():
        if _is_set(options.pop(name, None)) or (name in CONFIGURED and getattr(config, name, False)):
            raise ValueError(f"{name} is not supported over several ranks: {reason}")
    returns_dict = options.get("return_dict")
    if not (config.return_dict if returns_dict is None else returns_dict):
        raise ValueError("return_dict=False is not supported over several ranks: the loss is read by its name")
    has_documents = any(options.get(name) is not None for name in ("cu_seq_lens_q", "position_ids"))
    if options.get("seq_idx") is not None and not has_documents:
        raise ValueError("seq_idx alone does not tell where documents begin; let the collator add position_ids")


def _counted_tokens(
    context: SequenceContext,
    input_ids: Tensor,
    mask: Tensor | None,
    length: int,
    packed: PackedRows | None,
    batch: dict[str, Any],
) -> Tensor | None:
    """Returns how often router losses count this rank's tokens on one process; None if all count once.

    In trees a token counts once for each row that holds it. In the rows of TRL's AsyncGRPOTrainer it counts once, as in
    TRL.
    """
    documents: Documents | None = batch.get("documents")
    counts = None if packed is None else packed.row_counts(length)
    if counts is None and documents is not None and documents.are_trees:
        counts = torch.ones(length, dtype=torch.int64, device=input_ids.device)
    if counts is not None:
        return context.sequence.shard(counts[None], documents=documents)
    missing = input_ids.shape[1] - length
    if missing and mask is None:
        mask = torch.ones_like(input_ids[:, :length])
    padded = mask if mask is None else nn.functional.pad(mask, (0, missing))
    return counted_tokens(context.sequence, input_ids, padded, documents)


def _padded(batch: dict[str, Tensor | None], length: int) -> dict[str, Tensor | None]:
    """Pads rows to a length. The padding is a document of its own where positions tell documents apart."""
    ids = batch["input_ids"]
    assert ids is not None
    missing = length - ids.shape[1]
    if missing <= 0:
        return batch
    fill = {"input_ids": 0, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "attention_mask": 0}
    fill |= dict.fromkeys(TOKEN_TYPES, 0)
    padded = {
        name: None if (x := batch[name]) is None else nn.functional.pad(x, (0, missing), value=value)
        for name, value in fill.items()
    }
    positions = batch["position_ids"]
    if positions is not None:
        tail = torch.arange(missing, device=positions.device, dtype=positions.dtype).expand(len(positions), -1)
        positions = torch.cat([positions, tail], dim=1)
    return {**batch, **padded, "position_ids": positions}


def _padded_edges(edges: Tensor | Nodes | None, length: int, padded: int) -> Tensor | Nodes | list[int] | None:
    """Adds the document of padding that `_padded` makes to the edges of documents that fill a row."""
    if edges is None or padded <= length:
        return edges
    if isinstance(edges, Nodes):
        return edges.padded(padded)
    found: list[int] = edges.flatten().tolist()
    return [*found, padded] if found[-1] == length else found


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, int) and value == 0)  # False is 0
