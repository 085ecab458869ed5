"""Rows of a padded batch as the documents of one row, so that no padding is computed."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from torch import Tensor

from lightseq.hf.image_inputs import IMAGE_INPUTS, TOKEN_TYPES
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.utils.tensors import IGNORE_INDEX

# Arguments of a model that a packed batch has, too. Others, such as positions, belong to padded rows. Images stay as
# they are, because they come in the order of their tokens.
PACKED: Final = ("input_ids", "labels", "attention_mask", ROUTED_EXPERTS, *IMAGE_INPUTS)


@dataclass(frozen=True)
class PackedRows:
    """Places of a padded batch's tokens in one row of documents."""

    shape: tuple[int, int]  # of the padded batch
    places: Tensor  # (tokens,), in the flattened batch

    def unpack(self, values: Tensor) -> Tensor:
        """Returns values (1, tokens, ...) in their places of the padded batch (batch, length, ...), 0 for padding."""
        batch, length = self.shape
        padded = values.new_zeros(batch * length, *values.shape[2:]).index_copy(0, self.places, values[0])
        return padded.unflatten(0, (batch, length))


def pack_rows(kwargs: dict[str, Any]) -> tuple[dict[str, Any], PackedRows | None]:
    """Returns the arguments of a model with all rows as documents of one, and their places; None if they stay padded.

    Rows may be padded on either side. Without padding, rows are packed too, because attention of several documents is
    balanced better over ranks than that of each row. Waits for the device, which has the mask.
    """
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
    packed = {**kwargs, "input_ids": ids.flatten()[places][None], "attention_mask": None, "cu_seq_lens_q": edges}
    if (labels := kwargs.get("labels")) is not None:
        own = labels.flatten()[places]
        own[edges[:-1]] = IGNORE_INDEX  # nothing predicts the first token of a row
        packed["labels"] = own[None]
    for name in (ROUTED_EXPERTS, *TOKEN_TYPES):
        if (values := kwargs.get(name)) is not None:
            packed[name] = values.flatten(0, 1)[places][None]
    return packed, PackedRows(shape=(ids.shape[0], ids.shape[1]), places=places)
