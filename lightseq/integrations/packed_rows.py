"""Rows of a padded batch as documents or trees of one row: no padding is computed, and a shared prefix only once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightseq.architecture.inspection import inspect_architecture
from lightseq.hf.image_inputs import IMAGE_INPUTS, TOKEN_TYPES
from lightseq.integrations.tree_rows import KEYS, unpack_tree_row
from lightseq.parts.attention import length_dependent_ropes
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.sequence.shared_prefixes import LEAST_SAVED, share_prefixes
from lightseq.utils.tensors import IGNORE_INDEX, upload

# Arguments of a model that a packed batch has, too. Others, such as positions, belong to padded rows. Images stay as
# they are, because they come in the order of their tokens.
PACKED: Final = ("input_ids", "labels", "attention_mask", ROUTED_EXPERTS, *IMAGE_INPUTS)


@dataclass(frozen=True)
class PackedRows:
    """Places of a padded batch's tokens in one row of documents or trees."""

    shape: tuple[int, int]  # shape of the padded batch
    places: Tensor  # (tokens,), in the flattened batch
    in_trees: Tensor | None = None  # (tokens,): the same tokens in a row of trees; None: documents, in the same order
    has_target: Tensor | None = None  # (tokens,): whether a row of trees predicts something for this row there

    def row_counts(self, tokens: int) -> Tensor | None:
        """Returns how many rows hold each token of the trees, (tokens,); None for documents."""
        if self.in_trees is None:
            return None
        return self.in_trees.new_zeros(tokens).index_add(0, self.in_trees, torch.ones_like(self.in_trees))

    def unpack(self, values: Tensor) -> Tensor:
        """Returns values (1, tokens, ...) in their places of the padded batch (batch, length, ...), 0 for padding.

        A token of a shared prefix has its value in all rows; their gradients are summed.
        """
        batch, length = self.shape
        found = values[0]
        if self.in_trees is not None and self.has_target is not None:
            found = found[self.in_trees]
            found = found.where(self.has_target.view(-1, *[1] * (found.ndim - 1)), 0)
        padded = values.new_zeros(batch * length, *values.shape[2:]).index_copy(0, self.places, found)
        return padded.unflatten(0, (batch, length))


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Returns whether a model is known to compute several documents, or trees, of one row."""
    try:
        passes_documents = inspect_architecture(model.config).passes_documents
    except ValueError:
        return False
    return passes_documents and not length_dependent_ropes(model)


def pack_rows(
    kwargs: dict[str, Any], shares_prefixes: bool = False, packs_documents: bool = True
) -> tuple[dict[str, Any], PackedRows | None]:
    """Returns the arguments of a model with all rows as documents of one, and their places; None if they stay padded.

    Rows may be padded on either side. Without padding, rows are packed too, because attention of several documents is
    balanced better over ranks than that of each row. With `shares_prefixes`, rows that begin alike become trees, if
    that saves enough tokens; other rows stay padded unless `packs_documents`. Waits for the device, which has the mask.
    """
    if KEYS in kwargs:  # TRL's AsyncGRPOTrainer has packed them
        return unpack_tree_row(kwargs), None
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return kwargs, None
    if any(isinstance(value, Tensor) and name not in PACKED for name, value in kwargs.items()):
        return kwargs, None
    kept: Tensor = mask != 0
    lengths = [length for length in kept.sum(1).tolist() if length]
    if not lengths:  # all completions of a micro-batch may be masked
        return kwargs, None
    places = kept.flatten().nonzero().squeeze(1)
    edges = [0, *accumulate(lengths)]
    if shares_prefixes and _depends_on_ids_alone(kwargs) and (trees := _as_trees(kwargs, places, edges)) is not None:
        return trees
    if not packs_documents:
        return kwargs, None
    packed = {**kwargs, "input_ids": ids.flatten()[places][None], "attention_mask": None, "cu_seq_lens_q": edges}
    if (labels := kwargs.get("labels")) is not None:
        own = labels.flatten()[places]
        own[edges[:-1]] = IGNORE_INDEX  # nothing predicts the first token of a row
        packed["labels"] = own[None]
    for name in (ROUTED_EXPERTS, *TOKEN_TYPES):
        if (values := kwargs.get(name)) is not None:
            packed[name] = values.flatten(0, 1)[places][None]
    return packed, PackedRows(shape=(ids.shape[0], ids.shape[1]), places=places)


def join_rows(kwargs: dict[str, Any]) -> tuple[dict[str, Any], PackedRows | None]:
    """Returns the arguments of a model with all rows in one, if rows hold several documents each.

    Positions tell where documents begin. Waits for the device, which has them, if there are several rows.
    """
    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    if not isinstance(ids, Tensor) or not isinstance(positions, Tensor) or positions.shape != ids.shape or len(ids) < 2:
        return kwargs, None
    others = ("attention_mask", ROUTED_EXPERTS, *IMAGE_INPUTS, *TOKEN_TYPES)
    if any(kwargs.get(name) is not None for name in others) or not bool((positions[:, 1:] == 0).any()):
        return kwargs, None
    given = {
        name: x
        for name in ("input_ids", "labels", "shift_labels", "position_ids")
        if (x := kwargs.get(name)) is not None
    }
    joined = {name: x.reshape(1, -1) for name, x in given.items()}
    if "labels" in joined:
        joined["labels"] = joined["labels"].index_fill(
            1, torch.arange(len(ids), device=ids.device) * ids.shape[1], IGNORE_INDEX
        )
    return {**kwargs, **joined}, PackedRows((len(ids), ids.shape[1]), torch.arange(ids.numel(), device=ids.device))


def _depends_on_ids_alone(kwargs: dict[str, Any]) -> bool:
    """Returns whether rows with labels differ in their ids only, not also in images."""
    others = (*IMAGE_INPUTS, *TOKEN_TYPES)
    return isinstance(kwargs.get("labels"), Tensor) and all(kwargs.get(name) is None for name in others)


def _as_trees(kwargs: dict[str, Any], places: Tensor, edges: Sequence[int]) -> tuple[dict[str, Any], PackedRows] | None:
    """Packs rows as trees, given their places and edges. Returns None if they share few tokens."""
    ids, labels = kwargs["input_ids"], kwargs["labels"]
    of_tokens, of_labels = torch.stack([ids.flatten()[places], labels.flatten()[places]]).cpu().numpy()
    shared = share_prefixes([of_tokens[a:b] for a, b in pairwise(edges)])
    # A token's target is the next one of its row, if that has a label.
    targets = np.append(of_labels[1:], IGNORE_INDEX)
    targets[np.array(edges[1:]) - 1] = IGNORE_INDEX
    if not shared.saves(LEAST_SAVED) or (shift_labels := shared.labels(targets)) is None:
        return None
    routes: dict[str, Tensor] = {}
    if (chosen := kwargs.get(ROUTED_EXPERTS)) is not None:
        of_rows = chosen.flatten(0, 1)[places].cpu().numpy()
        if (merged := shared.merged([of_rows[a:b] for a, b in pairwise(edges)])) is None:
            return None  # routes differ: the server rounded differently in each row
        routes[ROUTED_EXPERTS] = upload(torch.from_numpy(merged), chosen.device)[None]
    in_trees, has_target = np.concatenate(shared.places), targets != IGNORE_INDEX
    row, of_trees, predicts = (upload(torch.from_numpy(x), ids.device) for x in (shared.ids, in_trees, has_target))
    packed = {
        **kwargs,
        "input_ids": row[None],
        "attention_mask": None,
        "labels": None,
        "shift_labels": upload(torch.from_numpy(shift_labels), ids.device)[None],
        "cu_seq_lens_q": shared.nodes,
        **routes,
    }
    return packed, PackedRows((ids.shape[0], ids.shape[1]), places, of_trees, predicts)
