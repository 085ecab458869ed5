"""A rank's part of rows that begin alike, as trees: a prefix is computed once, and learned as often as it occurs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import BATCH_FACTS, COUNTED_TOKENS, TARGETS, add_to_checksum
from lightseq.hf.images import check_text
from lightseq.hf.shard_batch import shard_batch
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.sequence.documents import RowPlaces
from lightseq.sequence.shared_prefixes import SharedRows, share_prefixes
from lightseq.utils.tensors import IGNORE_INDEX, upload


def shard_rows(
    context: SequenceContext,
    rows: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    device: torch.device | str | None = None,
    routed_experts: Sequence[Tensor | NDArray[Any]] | None = None,
) -> dict[str, Any]:
    """Returns this rank's part of rows of token ids, as keyword arguments of the patched model.

    `weights` has a number for each token of `rows`, of any sign: 0 for a prompt, an advantage for a completion. The
    model's `loss` is this rank's share of the sum of weight x -log p(token) over all rows, divided by
    `num_items_in_batch`: the number of tokens with another weight than 0, each row counted by itself. Replace it with
    the sum over all groups of ranks and micro-batches, or with a divisor of your own. The first token of a row has no
    prediction, so its weight does nothing.

    `token_log_probs` returns values of this rank's tokens, and `sequence_sums` sums of rows. `device` is where the
    tensors go (default: that of the context). Every rank of the group passes the same rows.

    `routed_experts` has a rollout's choice of experts for each row, (tokens, layers, experts of a token), as in
    `shard_batch`. Router losses count a token once for each row that holds it, as over the separate rows.

    Raises ValueError for rows without tokens or with those of images, weights of other lengths or that are not finite,
    and rows that chose other experts for a token that they share.
    """
    shared, target = share_prefixes(rows), context.config.device if device is None else torch.device(device)
    own_weights = _checked_weights([len(places) for places in shared.places], weights)
    assert target is not None, "the context has a device"
    # Here the ids are still on the host, where a message can name what is wrong.
    check_text(context, torch.from_numpy(shared.ids)[None], "trees of rows hold text only; use shard_batch for images")
    # The weight of a token belongs to the token before it, which predicts it.
    predicted = [np.append(x[1:], 0.0) for x in own_weights]
    is_target = shared.sum_over_rows([(x != 0).astype(np.float64) for x in predicted]) > 0
    labels = np.where(is_target, shared.ids[shared.targets], IGNORE_INDEX)
    ids, shift_labels = (upload(torch.from_numpy(x)[None], target) for x in (shared.ids, labels))
    routes = None if routed_experts is None else upload(_merged_routes(shared, routed_experts), target)
    batch = shard_batch(context, ids, shift_labels=shift_labels, cu_seqlens=shared.nodes, routed_experts=routes)
    documents = batch["documents"]
    counts = torch.from_numpy(shared.row_counts)[None]
    batch[COUNTED_TOKENS] = upload(context.sequence.shard(counts, documents=documents), target)
    sums = torch.from_numpy(shared.sum_over_rows(predicted))[None]
    add_to_checksum(batch[BATCH_FACTS], {"weights": sums})
    rows_of_trees = RowPlaces(
        places=torch.from_numpy(np.concatenate(shared.places)),
        has_target=torch.from_numpy(np.concatenate([x != 0 for x in predicted])),
        sizes=tuple(map(len, shared.places)),
        weights=upload(context.sequence.shard(sums, documents=documents), target),
    )
    count = sum(int(np.count_nonzero(x)) for x in predicted)
    batch[BATCH_FACTS][TARGETS] = count  # lets the model detect a divisor set by the user
    return batch | {
        "documents": replace(documents, rows=rows_of_trees),
        "num_items_in_batch": torch.full_like(batch["num_items_in_batch"], max(count, 1)),
    }


def _merged_routes(shared: SharedRows, routed_experts: Sequence[Tensor | NDArray[Any]]) -> Tensor:
    """Returns the experts of all tokens of trees, (1, tokens, layers, experts of a token)."""
    sizes = [len(places) for places in shared.places]
    given = [np.asarray(x.cpu() if isinstance(x, Tensor) else x) for x in routed_experts]
    if [len(x) for x in given] != sizes:
        raise ValueError(
            f"{ROUTED_EXPERTS} is for rows of {[len(x) for x in given]} tokens, but rows have {sizes}; give a choice "
            "for each token"
        )
    if len({x.shape[1:] for x in given}) > 1:
        raise ValueError(
            f"{ROUTED_EXPERTS} has {' and '.join(sorted({str(x.shape[1:]) for x in given}))} (layers, experts of a "
            "token) for rows; give as many for each"
        )
    merged = shared.merged(given)
    if merged is None:
        raise ValueError(
            f"{ROUTED_EXPERTS}: rows chose other experts for a token that they share; pass whole rows to shard_batch"
        )
    return torch.from_numpy(merged)[None]


def _checked_weights(sizes: Sequence[int], weights: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    if len(weights) != len(sizes):
        raise ValueError(
            f"there are weights for {len(weights)} rows, but {len(sizes)} rows; give one list for each row"
        )
    found = [np.asarray(x.double().cpu() if isinstance(x, Tensor) else x, dtype=np.float64) for x in weights]
    for index, (size, x) in enumerate(zip(sizes, found, strict=True)):
        if x.shape != (size,):
            raise ValueError(f"row {index} has {size} tokens, but weights {x.shape}; give one weight for each token")
        if not np.isfinite(x).all():
            raise ValueError(f"row {index} has the weight {x[~np.isfinite(x)][0]}; give finite numbers")
    return found
