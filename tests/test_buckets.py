"""Batches of short rows are short: at most eight lengths, the same on every rank, and the losses of full padding."""

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import small
import torch
from programs import program
from test_preferences import make_trainer
from worlds import spawn

from lightseq.data.batches import MAX_BUCKETS, bucket_lengths
from lightseq.training.loop import TrainingLoop
from lightseq.training.metrics import MetricsFile, read_records
from lightseq.training.trainer import Trainer

LENGTH = 256
SIZES = (60, 9, 33, 3, 17, 64, 5, 130, 2, 40, 250, 31)
TORCH_COMPILE = torch.compile


def write_rows(path: Path, sizes: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, small.VOCABULARY, size).tolist() for size in sizes]
    path.write_bytes(pickle.dumps({"input_ids": ids}))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    small.CONFIG.save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "data.pkl", SIZES)
    return tmp_path


class Run(NamedTuple):
    losses: list[float]
    lengths: list[int]  # of every batch that reached the model, before it is cut into ranks' parts
    eval_losses: list[float]


def trainer_of(rank: int, files: Path, output: str, flags: str) -> Trainer:
    words = f"{small.words(files, output)} --model_max_length {LENGTH} --save_strategy no {flags}"
    return make_trainer(rank, words)


def trained(rank: int, files: Path, output: str, flags: str, pads: bool) -> Run:
    """A run on the ranks of a test; with `pads` every batch is as long as the longest may be."""
    trainer = trainer_of(rank, files, output, flags)
    if pads:
        trainer.batch_lengths = trainer.batch_lengths[-1:]
    lengths: list[int] = []
    trainer.models.trained.register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1] * trainer.inputs.dims.sequence)
    )
    trainer.output_dir.mkdir(exist_ok=True)
    metrics = MetricsFile(trainer.output_dir, 0) if rank == 0 else None
    loop = TrainingLoop(trainer, metrics)
    loop.run()
    records = read_records(metrics.path) if metrics is not None else []
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record]
    return Run(loop.journal.losses, lengths, evaluated)


def with_and_without(rank: int, files: Path, cases: dict[str, str]) -> dict[str, tuple[Run, Run]]:
    return {
        name: (
            trained(rank, files, f"{name}-short", flags, pads=False),
            trained(rank, files, f"{name}-padded", flags, pads=True),
        )
        for name, flags in cases.items()
    }


def check_same_losses(files: Path, world: int, cases: dict[str, str]) -> None:
    ranks = spawn(world, with_and_without, files, cases)
    for name in cases:
        short, padded = ranks[0][name]
        np.testing.assert_allclose(short.losses, padded.losses, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(short.eval_losses, padded.eval_losses, rtol=1e-5, err_msg=name)
        assert min(padded.lengths) == max(padded.lengths) >= LENGTH, "the comparison is with full padding"
        assert sum(short.lengths) < 0.7 * sum(padded.lengths)
        assert len(set(short.lengths)) <= MAX_BUCKETS
        for rank in ranks[1:]:
            assert rank[name][0].lengths == short.lengths, "ranks that run together have batches of one length"
            assert rank[name][0].losses == short.losses


# ---- the lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 15, 61, 256, 2048, 2049, 131072, 1_000_003])
@pytest.mark.parametrize("multiple", [1, 16, 48, 128])
def test_there_are_at_most_eight_lengths_and_each_is_about_half_the_next(longest: int, multiple: int) -> None:
    lengths = bucket_lengths(longest, multiple)
    assert lengths[-1] == longest and len(lengths) <= MAX_BUCKETS and list(lengths) == sorted(set(lengths))
    assert all(length % multiple == 0 for length in lengths[:-1])
    for shorter, longer in pairwise(lengths):
        assert longer <= 2 * shorter < 2 * longer


def test_the_lengths_of_2048_tokens_are_its_halves() -> None:
    assert bucket_lengths(2048, 16) == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert bucket_lengths(2048, 64) == (64, 128, 256, 512, 1024, 2048)


# ---- losses ---------------------------------------------------------------------------------------------------------

EVALUATES = "--eval_data_path {files}/data.pkl --eval_strategy steps --eval_steps 2"


CASES = {  # flags by ranks
    1: {
        "accumulated": f"--max_steps 4 --gradient_accumulation_steps 3 {EVALUATES}",
        "two-a-batch": "--num_train_epochs 1 --per_device_train_batch_size 2",
    },
    2: {
        "sequence": "--max_steps 4 --gradient_accumulation_steps 2",
        "data": f"--max_steps 4 --gradient_accumulation_steps 2 --sequence_parallel_size 1 {EVALUATES}",
    },
    3: {
        "sequence": "--max_steps 4",
        "data": "--max_steps 3 --gradient_accumulation_steps 2 --sequence_parallel_size 1",
    },
    4: {"both": "--max_steps 4 --gradient_accumulation_steps 2 --sequence_parallel_size 2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_losses_equal_full_padding(world: int, files: Path) -> None:
    check_same_losses(files, world, {name: flags.format(files=files) for name, flags in CASES[world].items()})


@pytest.mark.slow
def test_texts_that_are_tokenised_on_access_make_short_batches_on_all_ranks(files: Path) -> None:
    lines = [json.dumps({"text": "x" * size}) for size in SIZES]
    (files / "texts.jsonl").write_text("\n".join(lines) + "\n")
    small.CONFIG.__class__(**{**small.CONFIG.to_dict(), "vocab_size": 300}).save_pretrained(files / "model")
    lazy = f"--data_path {files}/texts.jsonl --tokenizer byte --lazy_preprocess True --sequence_parallel_size 1"
    check_same_losses(files, 2, {"lazy": f"--max_steps 4 {lazy}"})


# ---- memory ---------------------------------------------------------------------------------------------------------


def lengths_of(rank: int, files: Path, sizes: tuple[int, ...], runs: list[str]) -> list[list[int]]:
    """Lengths of the batches of each run on rows of these sizes."""
    write_rows(files / "data.pkl", sizes)
    return [trained(rank, files, f"{len(sizes)}-{i}", flags, pads=False).lengths for i, flags in enumerate(runs)]


def test_the_longest_batch_is_tried_before_the_first_step_where_that_is_short(files: Path) -> None:
    ((short,),) = spawn(1, lengths_of, files, SIZES, ["--max_steps 1 --seed 1"])
    assert short[0] == LENGTH > short[1] and len(short) == 2, "once"
    assert spawn(1, lengths_of, files, (LENGTH + 1,) * 4, ["--max_steps 2"]) == [[[LENGTH, LENGTH]]], "of no use"


def test_no_longer_batch_is_tried_than_the_data_has(files: Path) -> None:
    ((lengths,),) = spawn(1, lengths_of, files, (9, 30, 17), ["--max_steps 3"])
    assert 30 <= max(lengths) < LENGTH


@pytest.mark.slow
def test_the_longest_batch_is_tried_before_a_shorter_one_of_its_step(files: Path) -> None:
    runs = [f"--gradient_accumulation_steps 2 --max_steps 1 --seed {seed}" for seed in range(5)]
    (found,) = spawn(1, lengths_of, files, (9, LENGTH + 1), runs)
    assert {len(lengths) for lengths in found} == {2, 3}, "in both orders"
    assert all(lengths[0] == LENGTH for lengths in found)


def resumed(rank: int, files: Path) -> tuple[list[float], list[float]]:
    common = f"{small.words(files, 'whole')} --model_max_length {LENGTH} --save_strategy steps --save_steps 2"
    ends = [
        program(rank, "llama3", f"{common} {more}")
        for more in (
            "--max_steps 4",
            f"--output_dir {files}/parts --max_steps 4",
            f"--output_dir {files}/again --max_steps 4 --resume_from_checkpoint {files}/parts/checkpoint-2",
        )
    ]
    assert [end.status for end in ends] == [0, 0, 0], ends
    return small.losses(files, "whole"), small.losses(files, "again")


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_next_row_to_the_bit(files: Path) -> None:
    whole, again = spawn(2, resumed, files)[0]
    assert again == whole[2:], "the longest batch that is tried first changes nothing"


# ---- what is said ---------------------------------------------------------------------------------------------------


def said(rank: int, files: Path, flags: str) -> str:
    end = program(rank, "llama3", f"{small.words(files, 'said')} --model_max_length {LENGTH} {flags}")
    assert end.status == 0, end.err
    return end.out


def test_the_printed_rate_counts_no_padding_and_its_share_is_shown(files: Path) -> None:
    write_rows(files / "data.pkl", (60,) * 8)
    out = spawn(2, said, files, "--max_steps 2 --per_device_train_batch_size 2")[0]
    for record in read_records(files / "said" / "metrics.jsonl"):
        assert (record["tokens"], record["valid_tokens"]) == (128, 118)
        assert record["padding_percent"] == pytest.approx(100 * 8 / 128)
        assert record["tokens_per_second"] == pytest.approx(120 / record["step_seconds"])
        assert f"{record['tokens_per_second']:,.0f} tokens/s, 6% padding" in out


def test_rope_that_scales_with_the_length_of_a_sequence_sees_full_padding(files: Path) -> None:
    rope = '{"rope_type":"dynamic","factor":2.0}'
    out = spawn(1, said, files, f"--max_steps 1 --rope_scaling '{rope}'")[0]
    assert "all batches are padded to --model_max_length, because the model's RoPE depends on the length" in out
    assert read_records(files / "said" / "metrics.jsonl")[0]["tokens"] == LENGTH


# ---- compiled -------------------------------------------------------------------------------------------------------


def graphs(rank: int, files: Path) -> tuple[int, list[int]]:
    """Lengths of batches, and graphs that were compiled up to the end of each of two epochs with an evaluation."""
    compiled, lengths = [], set()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:  # the compiler's own code is torch's to test, and takes minutes to make
        patch.setattr(torch, "compile", lambda f, dynamic, **_: TORCH_COMPILE(f, dynamic=dynamic, backend="aot_eager"))
        evaluates = f"--eval_data_path {files}/data.pkl --eval_strategy epoch"
        trainer = trainer_of(rank, files, "compiled", f"--num_train_epochs 2 --torch_compile True {evaluates}")
        for epoch in range(2):
            for step in range(len(SIZES)):
                lengths.add(trainer.step(epoch * len(SIZES) + step).positions)
            trainer.evaluate()
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return len(lengths), compiled


@pytest.mark.slow
def test_nothing_is_compiled_once_each_length_was_seen(files: Path) -> None:
    write_rows(files / "data.pkl", (*SIZES[:-1], 100))
    lengths, compiled = spawn(1, graphs, files)[0]
    # Of a layer and of the norm after the last, each in training and in evaluation: more than torch keeps by itself.
    assert lengths == 5 and compiled == [2 * 2 * lengths] * 2
