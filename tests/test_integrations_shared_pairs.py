"""TRL's DPOTrainer with prompts that both answers share, as trees: the numbers of one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from cases import slow_except
from datasets import Dataset
from test_integrations_trl import dpo, text
from torch import Tensor
from trainer_numbers import Numbers, assert_equal, documents
from transformers import Trainer
from trl import DPOTrainer
from worlds import spawn

from lightseq.integrations.trl import SequenceParallelDPOTrainer

SHORT = {"max_steps": 2, "eval_strategy": "no"}
CASES: Mapping[str, dict[str, Any]] = {
    "adapters": {"adapters": True, **SHORT},
    "reference": {"gradient_accumulation_steps": 2, **SHORT},
    "precomputed": {"precompute_ref_log_probs": True, **SHORT},
    "weighted": {"use_weighting": True, "ld_alpha": 0.5, **SHORT},
}


def write_pairs(folder: Path) -> str:
    """Writes pairs; every second one has answers that begin alike, and one answer continues the other."""
    rows = []
    for i, ids in enumerate(documents()):
        half, begin = len(ids) * 2 // 3, ids[:3] if i % 2 else []
        chosen, rejected = [*begin, *ids[half:]], [*begin, *ids[half + 2 :: 2], 5]
        rows.append({"prompt": ids[:half], "chosen": chosen, "rejected": [*chosen, 9] if i == 3 else rejected})
    Dataset.from_list([{name: text(ids) for name, ids in row.items()} for row in rows]).save_to_disk(folder)
    return str(folder)


def shared_and_whole(rank: int, case: Mapping[str, Any], folders: list[str], world: int) -> list[tuple[Numbers, int]]:
    """Trains with shared prefixes and without. Returns the numbers, and the tokens that this rank computes."""
    found, computed = [], 0

    class Counting(SequenceParallelDPOTrainer):
        def __init__(self, model: Any, **options: Any) -> None:
            model.get_input_embeddings().register_forward_pre_hook(count)
            super().__init__(model, **options)

    def count(_module: Any, args: tuple[Tensor, ...]) -> None:
        nonlocal computed
        computed += args[0].numel()

    for shares, folder in zip((True, False), folders, strict=True):
        computed = 0
        numbers = dpo(rank, Counting, {**case, "rows": folder}, 1, share_prefixes=shares, sequence_parallel_size=world)
        found.append((numbers, computed))
    return found


def one_process(rank: int, kind: type[Trainer], case: Mapping[str, Any], folder: str) -> Numbers:
    return dpo(rank, kind, {**case, "rows": folder}, 1)


@pytest.mark.parametrize("world", slow_except([2], (2, 3)))
@pytest.mark.parametrize("case", slow_except([], CASES))
def test_shared_prompts_give_the_numbers_of_one_process(case: str, world: int, tmp_path: Path) -> None:
    wanted = spawn(1, one_process, DPOTrainer, CASES[case], write_pairs(tmp_path / "plain"))[0]
    folders = [write_pairs(tmp_path / name) for name in ("shared", "whole")]
    for (shared, few), (whole, many) in spawn(world, shared_and_whole, CASES[case], folders, world):
        assert_equal(shared, wanted)
        assert_equal(whole, wanted)
        assert few < 0.75 * many
