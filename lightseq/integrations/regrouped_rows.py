"""Order of rows in an update: completions of a prompt meet in a micro-batch, which computes their prompt once.

TRL shuffles the rows of a generation over micro-batches. Losses that are sums or means over the rows of an update do
not depend on that order, so rows may change places inside an update.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

Rows = dict[str, Any]  # values of a generation by name, with a row first


def micro_batches_of_update(trainer: Any) -> int:
    """Returns how many micro-batches of a generation belong to one update, in which rows may change places.

    It is 1 where the loss depends on the rows that meet in a micro-batch: bnpo, top_entropy_quantile, an entropy bonus,
    router losses.
    """
    arguments = trainer.args
    in_update, generated = arguments.gradient_accumulation_steps, arguments.steps_per_generation
    depends_on_micro_batches = (
        getattr(trainer, "loss_type", None) == "bnpo"
        or getattr(trainer, "top_entropy_quantile", 1.0) < 1.0
        or getattr(arguments, "entropy_coef", 0.0) != 0
        or getattr(arguments, "use_adaptive_entropy", False)
        or getattr(trainer, "aux_loss_enabled", False)
    )
    smaller = min(in_update, generated)
    return 1 if depends_on_micro_batches or gcd(in_update, generated) != smaller else smaller


def shuffle_in_groups(
    shuffle: Callable[[Rows], Rows], rows_per_micro_batch: int, micro_batches: int, least_saved: float
) -> Callable[[Rows], Rows]:
    """Returns a function that shuffles rows, and then groups the rows of an update by prompt.

    Rows stay as they were shuffled if that saves a smaller share of their tokens than `least_saved`.
    """

    def shuffled(rows: Rows) -> Rows:
        found = shuffle(rows)
        if micro_batches == 1 or rows_per_micro_batch == 1 or found.get("pixel_values") is not None:
            return found
        prompts = _prompts(found["prompt_ids"], found["prompt_mask"])
        order = _grouped(prompts, rows_per_micro_batch * micro_batches)
        tokens = int(found["prompt_mask"].sum() + found["completion_mask"].sum())
        saved = [
            _shared_tokens([prompts[i] for i in places], rows_per_micro_batch) for places in (range(len(order)), order)
        ]
        if saved[1] - saved[0] < least_saved * tokens:
            return found
        return {name: _permuted(values, order) for name, values in found.items()}

    return shuffled


def _prompts(ids: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    """Returns the prompt of every row. Waits for the device."""
    return [tuple(row[kept].tolist()) for row, kept in zip(ids.cpu(), mask.bool().cpu(), strict=True)]


def _grouped(prompts: Sequence[tuple[int, ...]], rows_of_update: int) -> list[int]:
    """Groups the rows of each update by prompt. Larger groups come first, so that they fit into micro-batches.

    Prompts of as many rows keep the order in which they first occur.
    """
    order = list[int]()
    for start in range(0, len(prompts), rows_of_update):
        first = dict[tuple[int, ...], int]()
        own = range(start, min(start + rows_of_update, len(prompts)))
        for row in own:
            first.setdefault(prompts[row], row)
        counts = Counter(prompts[row] for row in own)
        order += sorted(own, key=lambda row: (-counts[prompts[row]], first[prompts[row]], row))
    return order


def _shared_tokens(prompts: Sequence[tuple[int, ...]], rows_per_micro_batch: int) -> int:
    """Returns the tokens of prompts that micro-batches leave out."""
    saved = 0
    for start in range(0, len(prompts), rows_per_micro_batch):
        counts = Counter(prompts[start : start + rows_per_micro_batch])
        saved += sum((count - 1) * len(prompt) for prompt, count in counts.items())
    return saved


def _permuted(values: Any, order: Sequence[int]) -> Any:
    if values is None or (isinstance(values, Tensor) and values.ndim == 0):
        return values
    if isinstance(values, Tensor):
        return values[torch.tensor(order, device=values.device)]
    return [values[row] for row in order]
