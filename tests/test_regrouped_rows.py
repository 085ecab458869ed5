"""Rows of an update are grouped by their prompts where that saves tokens, and only inside the update."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightseq.integrations.regrouped_rows import micro_batches_of_update, shuffle_in_groups

PROMPTS = [[5] * 9, [0, 0, *[6] * 7], [5] * 9, [7] * 9, [0, 0, *[6] * 7], [5] * 9, [7] * 9, [5] * 9]


def rows(**others: Any) -> dict[str, Any]:
    ids = torch.tensor(PROMPTS)
    return {
        "prompt_ids": ids,
        "prompt_mask": (ids != 0).long(),
        "completion_mask": torch.ones(len(PROMPTS), 3),
        "advantages": torch.arange(len(PROMPTS)),
        "texts": [*"abcdefgh"],
        "num_items_in_batch": torch.tensor(24),
        "nothing": None,
        **others,
    }


def grouped(rows_per_micro_batch: int, micro_batches: int, least_saved: float = 0.2, **others: Any) -> list[int]:
    found = shuffle_in_groups(lambda x: x, rows_per_micro_batch, micro_batches, least_saved)(rows(**others))
    order: list[int] = found["advantages"].tolist()
    assert found["texts"] == ["abcdefgh"[i] for i in order]
    assert torch.equal(found["prompt_ids"], torch.tensor(PROMPTS)[order])
    assert found["num_items_in_batch"] == 24 and found["nothing"] is None
    return order


def test_rows_of_a_prompt_meet() -> None:
    assert grouped(rows_per_micro_batch=2, micro_batches=4) == [0, 2, 5, 7, 1, 4, 3, 6]


def test_rows_do_not_leave_their_update() -> None:
    assert grouped(rows_per_micro_batch=2, micro_batches=2, least_saved=0.0) == [0, 2, 1, 3, 5, 7, 4, 6]


@pytest.mark.parametrize(
    "changes",
    [{"rows_per_micro_batch": 1}, {"micro_batches": 1}, {"least_saved": 0.5}, {"pixel_values": torch.zeros(8, 1)}],
)
def test_rows_stay_where_grouping_saves_little_or_nothing(changes: dict[str, Any]) -> None:
    assert grouped(**{"rows_per_micro_batch": 2, "micro_batches": 4, **changes}) == [*range(8)]


def test_updates_are_those_of_the_trainer() -> None:
    def micro_batches(in_update: int, generated: int, entropy: dict[str, Any] | None = None, **of_trainer: Any) -> int:
        arguments = SimpleNamespace(
            gradient_accumulation_steps=in_update, steps_per_generation=generated, **(entropy or {})
        )
        return micro_batches_of_update(SimpleNamespace(args=arguments, **of_trainer))

    assert micro_batches(4, 4) == micro_batches(4, 8) == micro_batches(8, 4) == 4
    assert micro_batches(4, 6) == micro_batches(1, 4) == 1
    assert micro_batches(4, 4, loss_type="bnpo") == micro_batches(4, 4, top_entropy_quantile=0.5) == 1
    assert micro_batches(4, 4, aux_loss_enabled=True) == 1
    assert micro_batches(4, 4, {"entropy_coef": 0.1}) == micro_batches(4, 4, {"use_adaptive_entropy": True}) == 1
    assert micro_batches(4, 4, {"entropy_coef": 0.0, "use_adaptive_entropy": False}) == 4
    assert micro_batches(4, 4, loss_type="dapo", top_entropy_quantile=1.0, aux_loss_enabled=False) == 4
