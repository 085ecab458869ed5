"""Documents that begin alike, packed side by side as trees: they fit, and a run learns the same from them."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from byte_level import byte_level, write_rows
from cases import slow_except
from test_preferences import Run, assert_weights_equal, draw_text, steps, train, write_inputs
from worlds import spawn

from lightseq.data.packing import PackedExamples, open_packed
from lightseq.data.prefix_groups import BLOCK
from lightseq.data.sources import ReadOptions
from lightseq.sequence.shared_prefixes import share_prefixes

LENGTH = 160


def open_shared(folder: Path, rows: list[dict[str, Any]], shares: bool = True, length: int = LENGTH) -> PackedExamples:
    path = write_rows(folder / "rows.jsonl", *rows)
    options = ReadOptions(pairs="chosen" in rows[0], shares_prefixes=shares, cache=folder / "cache")
    return open_packed(path, length, 300, byte_level(None), False, True, options)


def documents_of(example: Any) -> list[list[int]]:
    return [example.input_ids[a:b].tolist() for a, b in pairwise(example.boundaries)]


def forks(draw: np.random.Generator, count: int) -> list[str]:
    """Returns texts that begin as one of three others do, at one of several places."""
    letters = np.array([*"abcdefgh"])
    trunks = ["".join(draw.choice(letters, 140)) for _ in range(3)]
    return [
        trunks[draw.integers(3)][: draw.integers(70, 140)] + "".join(draw.choice(letters, draw.integers(1, 20)))
        for _ in range(count)
    ]


def test_trees_of_a_sequence_fit_and_hold_every_document_once(tmp_path: Path) -> None:
    texts = forks(np.random.default_rng(0), 60)
    shared, whole = (open_shared(tmp_path, [{"text": x} for x in texts], shares) for shares in (True, False))
    found = [documents_of(shared[i]) for i in range(len(shared))]
    wanted = [documents_of(whole[i]) for i in range(len(whole))]
    assert sorted(x for row in found for x in row) == sorted(x for row in wanted for x in row)
    assert all(len(share_prefixes(row).ids) <= LENGTH for row in found)
    assert max(sum(map(len, row)) for row in found) > 2 * LENGTH
    assert len(shared) < 0.6 * len(whole)
    assert "computed once with others, as shared prefixes" in "".join(shared.notes)


@pytest.mark.parametrize("letters", ["ab", "ba"])  # rows are sorted by a hash, so a greedy cut is right for one
def test_rows_too_long_for_one_tree_are_cut_where_least_is_repeated(letters: str, tmp_path: Path) -> None:
    alone, others = ("p" * BLOCK + letter * BLOCK for letter in letters)
    texts = [alone + "x" * 8, *(others + end * 8 for end in "xyz")]
    found = open_shared(tmp_path, [{"text": text} for text in texts], length=222)
    trees = [len(share_prefixes(documents_of(found[i])).ids) for i in range(len(found))]
    assert sorted(trees) == [BLOCK * 2 + 9, BLOCK * 2 + 3 * 9 + 2]  # branches begin with the last common token


def test_padding_is_that_of_sequences_cut_after_their_trees(tmp_path: Path) -> None:
    """Five trees of 93 tokens do not fit in pairs; a sequence of 160 is cut to five eighths, 100 tokens."""
    rows = [{"text": trunk * 80 + end * 5} for trunk in "abcde" for end in "xy"]
    notes = "".join(open_shared(tmp_path, rows).notes)
    assert "10 documents packed into 5 sequences of up to 160 tokens, " in notes
    assert "tokens of padding (7.00%)" in notes and "warning" not in notes
    assert "give a lower --model_max_length" in "".join(open_shared(tmp_path, rows, shares=False).notes)


def test_documents_that_share_less_than_a_block_are_packed_by_their_size(tmp_path: Path) -> None:
    rows = [{"text": "a" * (BLOCK - 2) + str(i)} for i in range(8)]
    shared, whole = (open_shared(tmp_path, rows, shares) for shares in (True, False))
    assert len(shared) == len(whole) == 4


def test_a_pair_needs_room_for_its_prompt_once(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "chosen": "c" * 8, "rejected": "r" * 5} for n in (100, 130, 9)]
    examples = open_shared(tmp_path, rows)
    assert sorted(len(documents_of(examples[i])) for i in range(len(examples))) == [2, 4]
    with pytest.raises(ValueError, match=r"pair 1 most \(146, chosen and rejected together, their prompt once\); give"):
        open_shared(tmp_path, rows, length=140)


WORDS = (
    "--num_train_epochs 1 --gradient_accumulation_steps 12 --packing best_fit --optim sgd --max_grad_norm 0 "
    "--learning_rate 0.2 --save_strategy no --eval_strategy steps --eval_steps 1"
)


def write_forks(folder: Path, learns_all: bool) -> Path:
    write_inputs(folder)
    text = partial(draw_text, np.random.default_rng(3))
    rows, trunk = [], text(BLOCK + 20)
    for i in range(6):
        prompt, answer = trunk + text(3 * (i % 2)), text(4 + i)
        rows.append({"text": prompt + answer} if learns_all else {"prompt": prompt, "completion": answer})
    rows.append({"text": text(50)} if learns_all else {"prompt": text(40), "completion": text(10)})
    (folder / "forks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def both_ways(rank: int, files: Path) -> list[Run]:
    """Trains an update on all documents, with shared prefixes and without."""
    data, found = f"{files}/forks.jsonl", []
    for shares in (True, False):
        output = f"{files}/{shares}-{dist.get_world_size()}"
        words = f"--model_name_or_path {files}/model --data_path {data} --eval_data_path {data} --output_dir {output} "
        words += f"--model_max_length {LENGTH} --data_cache {files}/cache --share_prefixes {shares} {WORDS}"
        found.append(train(rank, words))
    return found


@pytest.mark.parametrize("world", slow_except([2], (1, 2, 3)))
@pytest.mark.parametrize("learns_all", slow_except([True], (True, False)))
def test_an_update_on_shared_documents_equals_one_on_whole_documents(
    learns_all: bool, world: int, tmp_path: Path
) -> None:
    shared, whole = spawn(world, both_ways, write_forks(tmp_path, learns_all))[0]
    (ours,), (wanted,) = steps(shared), steps(whole)
    assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert ours["valid_tokens"] == wanted["valid_tokens"]
    computed, all_tokens = (x["tokens"] * (1 - x["padding_percent"] / 100) for x in (ours, wanted))
    assert computed < 0.5 * all_tokens
    evaluations = [next(x for x in run["records"] if "eval_loss" in x) for run in (shared, whole)]
    for name in ("eval_loss", "eval_perplexity", "eval_accuracy"):
        assert evaluations[0][name] == pytest.approx(evaluations[1][name], rel=1e-5), name
    assert_weights_equal(shared, whole)
