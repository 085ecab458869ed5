"""Rows of a padded batch in one row: documents, and trees where they begin alike."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

from lightseq.integrations.packed_rows import join_rows, pack_rows
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.schedule.nodes import Nodes
from lightseq.utils.tensors import IGNORE_INDEX

EDGES = "cu_seq_lens_q"
PROMPT = list(range(10, 30))
ANSWERS = ([1, 2, 3], [1, 2, 4, 5], [6], [1, 2, 3])


def batch(answers: Any = ANSWERS) -> dict[str, Any]:
    """Returns a batch as GRPO makes it: prompts padded on the left, answers on the right."""
    longest = max(map(len, answers))
    ids, mask = torch.zeros(2, len(answers), 22 + longest, dtype=torch.int64).unbind(0)
    for row, answer in enumerate(answers):
        ids[row, 2 : 22 + len(answer)] = torch.tensor([*PROMPT, *answer])
        mask[row, 2 : 22 + len(answer)] = 1
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :22] = IGNORE_INDEX
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def predicted(given: dict[str, Any], shares_prefixes: bool) -> Tensor:
    """Returns what every token of the padded batch predicts, as the packed row has it; 0 without a target."""
    packed, rows = pack_rows(given, shares_prefixes)
    assert rows is not None
    targets = packed.get("shift_labels")
    if targets is None:
        targets = torch.nn.functional.pad(packed["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    return rows.unpack(targets.masked_fill(targets == IGNORE_INDEX, 0).double().requires_grad_())


def test_a_shared_prompt_is_packed_once() -> None:
    given = batch()
    packed, rows = pack_rows(given, shares_prefixes=True)
    assert rows is not None and isinstance(packed[EDGES], Nodes)
    # The prompt without its last token; its copy before 1 and before 6, that of 2 before 3 and 4; two answers are equal
    assert packed["input_ids"].shape == (1, 19 + 2 + 2 + (1 + 1 + 1) + 2)
    counts = rows.row_counts(packed["input_ids"].shape[1])
    assert counts is not None and counts[:19].eq(4).all() and counts.sum() == 4 * 20 + 11
    assert torch.equal(predicted(given, True), predicted(given, False))
    assert packed[EDGES].length == packed["input_ids"].shape[1]


def test_a_rollouts_experts_go_with_the_tokens_of_trees() -> None:
    given = batch()
    given[ROUTED_EXPERTS] = given["input_ids"][..., None, None].expand(-1, -1, 2, 1)
    packed, rows = pack_rows(given, shares_prefixes=True)
    assert rows is not None and isinstance(packed[EDGES], Nodes)
    assert torch.equal(packed[ROUTED_EXPERTS], packed["input_ids"][..., None, None].expand(-1, -1, 2, 1))


def test_gradients_of_a_shared_token_are_summed_over_its_rows() -> None:
    _, rows = pack_rows(batch(), shares_prefixes=True)
    assert rows is not None and rows.in_trees is not None
    values = torch.zeros(1, int(rows.in_trees.max()) + 1, dtype=torch.float64, requires_grad=True)
    rows.unpack(values).sum().backward()
    assert values.grad is not None
    assert values.grad.sum() == sum(map(len, ANSWERS)) and values.grad.max() == 3  # three answers begin with 1


CHANGES = (
    "few shared tokens",
    "other experts for a shared token",
    "images",
    "without labels",
    "labels that are not ids",
)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_stay_documents(change: str) -> None:
    given = batch(([*range(100, 600)], [*range(600, 1100)]) if change == "few shared tokens" else ANSWERS)
    if change == "other experts for a shared token":
        given[ROUTED_EXPERTS] = torch.zeros(*given["input_ids"].shape, 2, 1, dtype=torch.int64)
        given[ROUTED_EXPERTS][1, 8:] = 1
    if change == "images":
        given["pixel_values"] = torch.zeros(4, 3)
    if change == "labels that are not ids":
        given["labels"][0, 22] = 77
    if change == "without labels":
        given["labels"] = None
    packed, rows = pack_rows(given, shares_prefixes=True)
    assert rows is not None and not isinstance(packed[EDGES], Nodes)
    padded, rows = pack_rows(given, shares_prefixes=True, packs_documents=False)
    assert rows is None and padded is given


def test_rows_of_several_documents_are_joined() -> None:
    ids = torch.arange(1, 13).view(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    joined, rows = join_rows({"input_ids": ids, "labels": ids.clone(), "position_ids": positions})
    assert rows is not None and joined["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1]]
    # Nothing predicts the first token of a row; the first of a later document stays a target, as in one process.
    assert joined["labels"].tolist() == [[IGNORE_INDEX, 2, 3, 4, 5, 6, IGNORE_INDEX, 8, 9, 10, 11, 12]]
    assert torch.equal(rows.unpack(joined["input_ids"]), ids)


@pytest.mark.parametrize("positions", [None, [[0, 1, 2, 3, 4, 5]] * 2])
def test_rows_of_one_document_stay_apart(positions: list[list[int]] | None) -> None:
    given = {"input_ids": torch.ones(2, 6), "position_ids": None if positions is None else torch.tensor(positions)}
    assert join_rows(given) == (given, None)
