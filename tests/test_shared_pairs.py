"""Preferences whose answers share their prompt as a tree: the same numbers as from whole documents."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_preferences import (
    CASES,
    METRICS,
    STEPS,
    Run,
    assert_weights_equal,
    draw_text,
    make_trainer,
    steps,
    train,
    words_of,
    write_inputs,
)
from transformers import AutoModelForCausalLM
from worlds import spawn

from benchmarks.tiny_models import tiny_config
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import Batch
from lightseq.data.shared_rows import even_lengths, least_saved_share, with_shared_prefixes
from lightseq.schedule.nodes import Nodes
from lightseq.utils.tensors import IGNORE_INDEX


def write_pairs(folder: Path, model: Any = None) -> Path:
    """Writes a model, and pairs: some answers begin alike, two prompts are equal, and one answer continues another."""
    write_inputs(folder, model)
    text = partial(draw_text, np.random.default_rng(1))
    rows = list[dict[str, str]]()
    for i in range(8):
        prompt = rows[0]["prompt"] if i == 4 else text(12 + i % 3)
        begin = text(3) if i % 2 else ""
        rows.append({"prompt": prompt, "chosen": begin + text(3 + i % 4), "rejected": begin + text(2 + i % 3)})
    rows[5]["rejected"] = rows[5]["chosen"] + text(1)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def both_ways(rank: int, files: Path, name: str) -> list[Run]:
    """Trains with shared prefixes and without."""
    (flags, rate), size = CASES[name], dist.get_world_size()
    return [
        train(rank, words_of(files, f"{name}-{size}-{x}", f"{flags} --learning_rate {rate} --share_prefixes {x}"))
        for x in ("auto", "False")
    ]


QUICK = ("full", 2)
EVERY = [(name, world) for name in CASES for world in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "world"), [case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
)
def test_numbers_equal_those_of_whole_documents(name: str, world: int, tmp_path: Path) -> None:
    shared, whole = spawn(world, both_ways, write_pairs(tmp_path), name)[0]
    assert len(steps(shared)) == len(steps(whole)) > 1
    for record, wanted in zip(shared["records"], whole["records"], strict=True):
        prefix = "eval_" if "eval_loss" in wanted else ""
        for metric in ("loss", *METRICS):
            assert record[prefix + metric] == pytest.approx(wanted[prefix + metric], rel=1e-5, abs=1e-5), metric
    for record, wanted in zip(steps(shared), steps(whole), strict=True):
        assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert record["valid_tokens"] == wanted["valid_tokens"]
        computed, all_tokens = (x["tokens"] * (1 - x["padding_percent"] / 100) for x in (record, wanted))
        assert computed < 0.8 * all_tokens
    assert_weights_equal(shared, whole)


def in_one_update(rank: int, files: Path) -> list[Run]:
    """Trains an update on all pairs in rows that hold trees only, and in rows that hold the pairs whole."""
    found = []
    for shares, length in ((True, 36), (False, 96)):
        more = f"--num_train_epochs 1 --gradient_accumulation_steps 8 --model_max_length {length} --learning_rate 0.05"
        words = words_of(files, str(shares), f"{more} --share_prefixes {shares}").replace(f"--max_steps {STEPS}", "")
        found.append(train(rank, words))
    return found


@pytest.mark.slow
def test_pairs_that_fit_only_as_trees_are_learned_alike(tmp_path: Path) -> None:
    shared, whole = spawn(2, in_one_update, write_pairs(tmp_path))[0]
    (ours,), (wanted,) = steps(shared), steps(whole)
    for metric in ("loss", "grad_norm", *METRICS):
        assert ours[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-5), metric
    assert_weights_equal(shared, whole)


def of_family(rank: int, files: Path, more: str) -> list[Run]:
    flags = f"--learning_rate 0.05 --sequence_parallel_size 2 {more}"
    return [train(rank, words_of(files, f"o-{x}", f"{flags} --share_prefixes {x}")) for x in ("auto", "False")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gemma3_text", ""),
        ("gpt_oss", ""),
        ("qwen3_moe", "--router_aux_loss_coef 0.1"),
        ("deepseek_v3", "--router_bias_update_rate 0.01"),
        ("granitemoehybrid", ""),
        ("lfm2", ""),
        ("nemotron_h", "--recurrent_schedule heads"),
    ],
)
def test_windows_sinks_experts_and_recurrences_learn_alike_on_two_groups_of_ranks(
    family: str, more: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    shared, whole = spawn(4, of_family, write_pairs(tmp_path, model), more)[0]
    for record, wanted in zip(steps(shared), steps(whole), strict=True):
        for metric in ("loss", "grad_norm", *METRICS):
            assert record[metric] == pytest.approx(wanted[metric], rel=2e-5, abs=2e-5), metric
        computed, all_tokens = (x["tokens"] * (1 - x["padding_percent"] / 100) for x in (record, wanted))
        assert computed < 0.8 * all_tokens


def packed(*documents: tuple[list[int], int], length: int = 40) -> Batch:
    """Returns a batch of documents, each with the number of tokens of its prompt."""
    ids, labels, edges = torch.zeros(1, length, dtype=torch.int64), torch.full((1, length), IGNORE_INDEX), [0]
    for document, prompt in documents:
        begin, end = edges[-1], edges[-1] + len(document)
        ids[0, begin:end] = torch.tensor(document)
        labels[0, begin + prompt - 1 : end - 1] = torch.tensor(document[prompt:])
        edges.append(end)
    return Batch(ids, labels, int((labels != IGNORE_INDEX).sum()), (edges[-1],), tuple(edges))


PROMPT = [9, 8, 7, 6, 5]
PAIR = (([*PROMPT, 1, 2], 5), ([*PROMPT, 1, 3, 4], 5))


def test_documents_of_a_pair_become_a_tree() -> None:
    batch = packed(*PAIR, ([20, 21], 1), ([20, 22, 23], 1))
    tree = with_shared_prefixes(batch, 0.2)
    assert (tree.boundaries, tree.parents) == ((0, 5, 7, 10, 12, 15), (-1, 0, 0, -1, -1))
    assert tree.input_ids[0, :15].tolist() == [*PROMPT, 1, 2, 1, 3, 4, 20, 21, 20, 22, 23]
    assert tree.labels[0].tolist() == [*[-100] * 4, 1, 2, -100, 3, 4, -100, 21, -100, 22, 23, *[-100] * 26]
    assert tree.sizes == (15,) and tree.length == batch.length and tree.valid_tokens == batch.valid_tokens == 8
    assert tree.document_sizes == batch.document_sizes == (7, 8, 2, 3)


def test_documents_stay_whole_where_trees_save_little_or_labels_differ() -> None:
    few = packed(*PAIR, (list(range(20, 35)), 3))
    assert with_shared_prefixes(few, 0.2) is few and with_shared_prefixes(few, 0.0) is not few
    alone = packed(([20, 21], 1), ([22, 23], 1))
    assert with_shared_prefixes(alone, 0.0) is alone
    labels = packed(*PAIR).labels
    labels[0, 4] = 99  # the chosen answer learns another token than the rejected one
    other = replace(packed(*PAIR), labels=labels)
    assert with_shared_prefixes(other, 0.0) is other


def test_batches_have_few_lengths() -> None:
    assert even_lengths(1000, 8) == (128, 256, 376, 504, 632, 752, 880, 1000)
    assert even_lengths(16, 8) == (8, 16)


def first_step(rank: int, files: Path) -> tuple[float, float, list[int]]:
    """Returns the attention area of a step, that of each token's visible keys, and the lengths of its batches."""
    trainer = make_trainer(rank, words_of(files, "area", "--learning_rate 0.1"))
    batches = trainer._batches(0)
    nodes = [Nodes(batch.boundaries, batch.parents) for batch in batches if batch.boundaries and batch.parents]
    assert len(nodes) == len(batches)
    visible = sum(float((2 * x.positions() + 1).sum()) for x in nodes)
    trainer.try_longest()
    return trainer.step(0).attention_area, visible, [batch.length for batch in batches]


def test_the_attention_of_trees_is_counted_and_padding_is_cut(tmp_path: Path) -> None:
    area, visible, lengths = spawn(1, first_step, write_pairs(tmp_path))[0]
    assert area == visible
    assert max(lengths) < 96


def config_of(flags: str) -> TrainConfig:
    return parse(f"--model_name_or_path m --data_path d --output_dir o {flags}".split(), "test")


def test_flags_say_when_prefixes_are_shared() -> None:
    asked = {
        x: least_saved_share(config_of(f"--objective dpo --share_prefixes {x}")) for x in ("auto", "True", "False")
    }
    assert asked == {"auto": 0.2, "True": 0.0, "False": None}
    asked = {x: least_saved_share(config_of(f"--packing best_fit --share_prefixes {x}")) for x in asked}
    assert asked == {"auto": None, "True": 0.0, "False": None}


REFUSED_FLAGS = {
    "": "--share_prefixes True applies to packed documents, but --packing is none; give best_fit",
    "--packing best_fit --deepspeed z.json": "--share_prefixes True does not work with --deepspeed z.json; ",
    "--packing best_fit --objective distill --teacher t": "--share_prefixes True does not work with --objective dist",
}


@pytest.mark.parametrize("flags", REFUSED_FLAGS)
def test_flags_that_exclude_shared_prefixes_are_refused(flags: str) -> None:
    with pytest.raises(ValueError) as refused:
        config_of(f"--share_prefixes True {flags}")
    assert str(refused.value).startswith(REFUSED_FLAGS[flags])
