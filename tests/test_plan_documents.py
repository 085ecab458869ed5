"""Plans of packed rows: the share of full attention that documents need, and the time that follows."""

import json
import pickle
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import run_in
from small import CONFIG, words, write_inputs
from test_plan_training import planned_run
from worlds import spawn

import llama3
from lightseq.architecture.family import preset_config
from lightseq.architecture.inspection import Architecture, inspect_architecture
from lightseq.cli import BOTH, main
from lightseq.config.command_line import parse
from lightseq.data.packing import open_packed
from lightseq.data.token_directory import write_token_directory
from lightseq.distributed.world import World
from lightseq.memory.placement import KEEP, OFFLOAD, in_order
from lightseq.parts.facts import Attention
from lightseq.plan import document_lengths, rates
from lightseq.plan.document_lengths import (
    DocumentLengths,
    area_of_nodes,
    document_lengths_of,
    read_document_lengths,
)
from lightseq.plan.make_plan import make_plan
from lightseq.plan.plan import plan_as_given
from lightseq.plan.rates import CHIPS
from lightseq.schedule.reach import sliding
from lightseq.sequence.shared_prefixes import share_prefixes
from lightseq.tools.plan.answers import answers_of
from lightseq.training.build import choose_memory_settings
from lightseq.training.inputs import prepare

LENGTH, SIZES = 150, (149, 3, 2, 40, 1, 90, 301, 17, 152, 60, 33, 151, 4, 75)  # of documents; some are cut or dropped
LLAMA = preset_config(BOTH, "llama3-8b")
QUARTER = DocumentLengths(8192, 8192, 8192)
PLAN = "plan --model_name_or_path llama3-8b --bf16 --gpus 2 --model_max_length 32K"


def write_documents(path: Path, sizes: tuple[int, ...]) -> Path:
    ids = [np.arange(size) % 50 for size in sizes]
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps({"input_ids": [x.tolist() for x in ids]}))
    else:
        write_token_directory(path, ids, 64, dict)
    return path


def config_of(data: Path, more: str = "--packing best_fit") -> Any:
    return parse(
        f"--model_name_or_path m --data_path {data} --output_dir o --model_max_length {LENGTH} {more}".split(), ""
    )


# ---- the share ------------------------------------------------------------------------------------------------------


def with_windows(*windows: int | None) -> Architecture:
    """Returns an architecture with a layer for each window."""
    found = inspect_architecture(CONFIG)
    layer, heads = found.layers[0], found.attentions[0].heads
    return replace(
        found,
        layers=tuple(replace(layer, mixers=(Attention(heads, sliding(window)),)) for window in windows),
    )


def test_the_area_is_twice_the_visible_pairs_without_the_diagonals_half() -> None:
    sizes, windows = (10, 3, 1, 7), (4, None, 7)
    found = with_windows(*windows)
    pairs = [sum(min(i + 1, w or n) for n in sizes for i in range(n)) for w in windows]
    diagonal = [sum(min(n, w or n) for n in sizes) for w in windows]
    assert found.attention_area(sizes) == pytest.approx((2 * sum(pairs) - sum(diagonal)) / 3)
    assert with_windows(None, None).attention_area(sizes) == sum(n * n for n in sizes)


@pytest.mark.parametrize("kind", ["tokens", "data.pkl"])
def test_the_share_is_the_mean_of_all_rows_with_and_without_training(kind: str, tmp_path: Path) -> None:
    data = write_documents(tmp_path / kind, SIZES)
    rows = open_packed(data, LENGTH, CONFIG.vocab_size)
    found = document_lengths_of(rows, LENGTH, inspect_architecture(CONFIG))
    edges = [rows[i].boundaries or () for i in range(len(rows))]
    sizes = [[b - a for a, b in pairwise(row)] for row in edges]
    assert found is not None and found == read_document_lengths(config_of(data), CONFIG)
    assert found.area_per_token / LENGTH == pytest.approx(np.mean([sum(n * n for n in x) for x in sizes]) / LENGTH**2)
    assert found.mean_tokens == pytest.approx(np.mean([n for x in sizes for n in x]))
    few = read_document_lengths(config_of(data, "--packing best_fit --max_train_samples 2"), CONFIG)
    assert few == DocumentLengths((149 + 3) / 2, (149**2 + 3**2) / (2 * LENGTH), 149)


def test_trees_are_counted_as_they_are_computed(tmp_path: Path) -> None:
    """Two documents of 120 tokens, 100 of them common, fit into a row of 150 as a node of 99 and two of 21."""
    begin = np.arange(100) % 50
    ids = [np.concatenate([begin, [50 + i], np.arange(19)]) for i in range(8)]
    write_token_directory(tmp_path / "tokens", ids, 64, dict)
    found = read_document_lengths(config_of(tmp_path / "tokens", "--packing best_fit --share_prefixes True"), CONFIG)
    assert found == DocumentLengths(120, (99**2 + 2 * (120**2 - 99**2)) / LENGTH, 120)
    whole = read_document_lengths(config_of(tmp_path / "tokens"), CONFIG)
    assert whole == DocumentLengths(120, 120**2 / LENGTH, 120)


def test_documents_that_are_not_packed_or_not_known_beforehand_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "ab"}\n')
    cases = [(tmp_path / "rows.jsonl", "--packing best_fit"), (tmp_path / "nowhere", "--packing best_fit")]
    cases += [(write_documents(tmp_path / "tokens", SIZES), ""), (write_documents(tmp_path / "one", (1,)), cases[0][1])]
    assert [read_document_lengths(config_of(data, flags), CONFIG) for data, flags in cases] == [None] * 4


def test_evenly_spaced_documents_stand_for_very_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(2, LENGTH + 1, 4000)
    data = write_documents(tmp_path / "tokens", tuple(sizes.tolist()))
    every = read_document_lengths(config_of(data), CONFIG)
    monkeypatch.setattr(document_lengths, "MAX_READ", 1000)
    some = read_document_lengths(config_of(data), CONFIG)
    assert every is not None and some is not None and some != every
    assert some == read_document_lengths(config_of(data), CONFIG)
    assert some.area_per_token == pytest.approx(every.area_per_token, rel=0.03)
    assert some.mean_tokens == sizes[::4].mean()


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_at_another_length_documents_keep_their_sizes() -> None:
    run = planned_run(LLAMA, "--bf16 --packing best_fit --model_max_length 32K", 2).changed(documents=QUARTER)
    assert [run.with_length(n).attention_share for n in (2**14, 2**15, 2**16)] == [0.5, 0.25, 0.125]
    assert run.with_length(4096).attention_share == 1.0


@pytest.mark.slow
def test_the_choice_follows_from_the_time_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short documents hide fewer copies, so recomputing projections becomes faster than offloading their outputs.

    The link is fast enough here that the two choices differ.
    """
    monkeypatch.setattr(rates, "HOST_LINK_SHARE", 0.8)
    flags = "--bf16 --packing best_fit --lora_rank 16 --model_max_length 32K"
    run = planned_run(LLAMA, flags, 1, 72.8 * 2**30, chosen=True)
    whole, packed = (make_plan(run.changed(documents=x)) for x in (None, QUARTER))
    as_whole = plan_as_given(whole.run.changed(documents=QUARTER), whole.placement)
    assert [plan.run.config.remat for plan in (whole, packed)] == ["attention+linears", "attention+mlp"]
    assert packed.step_seconds <= 1.01 * as_whole.step_seconds


@pytest.mark.slow
def test_layers_that_stay_hide_the_copies_of_offloaded_layers_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's copy takes nearly twice as long as its forward pass over documents of 8K, at this rate of the link."""
    monkeypatch.setattr(rates, "HOST_LINK_SHARE", 0.8)
    run = planned_run(LLAMA, "--bf16 --packing best_fit --model_max_length 32K", 2, chosen=True)
    chip = CHIPS["h100-80gb"]
    hardware = replace(run.hardware, chip=chip, gpu_memory=float(chip.memory_bytes))
    plan = make_plan(run.changed(documents=QUARTER, hardware=hardware))
    offloaded = [i for i, action in enumerate(plan.placement.layers) if action == OFFLOAD]
    assert plan.fits and offloaded == [*range(0, 26, 2)] and "13 of 32 layers offload;" in str(plan)
    contiguous = plan_as_given(plan.run, in_order(Counter(plan.placement.layers)))
    exposed = [found.seconds["offloading, exposed"] for found in (plan, contiguous)]
    assert exposed[0] == pytest.approx(0, abs=1e-9) and exposed[1] > 0.08 * plan.step_seconds


@pytest.mark.parametrize("remat", ["none", "attention+linears", "attention+mlp"])
def test_layers_that_save_products_offload_them_and_recompute_nothing_more(remat: str) -> None:
    flags = f"--bf16 --packing best_fit --model_max_length 32K --offload auto --remat {remat}"
    plan = make_plan(planned_run(LLAMA, flags, 2, 72.8 * 2**30).changed(documents=QUARTER))
    assert plan.fits and set(plan.placement.layers) == {KEEP, OFFLOAD}
    all_offload = plan_as_given(plan.run, in_order({OFFLOAD: 31, KEEP: 1}))
    assert plan.step_seconds < 0.9 * all_offload.step_seconds


def test_answers_to_a_prompt_are_planned_as_the_tree_that_they_become(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[1, 2, 3, 4, *(10 + i for _ in range(3))] for i in range(5)]
    assert answers_of("5x4+3").tree == share_prefixes(rows).nodes
    architecture = inspect_architecture(LLAMA)
    found = answers_of("8x2K+128").lengths(8192, architecture)
    tree = answers_of("8x2K+128").tree
    assert found.area_per_token * 8192 == 2 * area_of_nodes(tree, architecture)  # two trees of 3,079 tokens fit
    assert main([*PLAN.split(), "--documents", "8x2K+128"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a tree of 8 answers has 3,079 tokens instead of 17,408; 10 trees in a sequence" in said
    for flag, error in (
        ("8x2K", "error: --documents 8x2K: write 8x32K+2K for 8 answers of 2K tokens to a prompt of 32K"),
        ("8x32K+2K", "are a tree of 49,159 tokens; give a --model_max_length of at least that"),
    ):
        assert main([*PLAN.split(), "--documents", flag]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.slow
def test_plan_prints_and_records_the_documents_of_the_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = write_documents(tmp_path / "tokens", (8192,) * 8)
    assert main(f"{PLAN} --packing best_fit --data_path {data}".split()) == 0
    shown = capsys.readouterr().out
    assert "  documents    mean 8,192 tokens; attention needs 25.0% of full rows" in shown
    records = []
    for flags in (f"--packing best_fit --data_path {data}", "--packing best_fit", f"--data_path {data}"):
        assert main([*PLAN.split(), *flags.split(), "--json"]) == 0
        records.append(json.loads(capsys.readouterr().out))
    documents = [record["memory_plan"]["documents"] for record in records]
    assert documents == [{"mean_tokens": 8192.0, "attention_share": 0.25}, None, None]
    noted = ["one document per sequence" in " ".join(record["notes"]) for record in records]
    assert noted == [False, True, False]
    beyond = ["exceed the 8192 positions" in " ".join(record["notes"]) for record in records]
    assert beyond == [False, True, True]
    assert records[0]["step_seconds"] < 0.9 * records[1]["step_seconds"]
    assert main(f"{PLAN} --data_path {data}".split()) == 0
    assert "documents" not in capsys.readouterr().out
    assert main([*PLAN.split(), "--packing", "best_fit", "--data_path", f"{data}=2,rows.jsonl", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    rows = tmp_path / "rows.pkl"
    rows.write_bytes(pickle.dumps({"input_ids": [[5] * 100] * 4}))
    assert main([*PLAN.split(), "--packing", "best_fit", "--share_prefixes", "True", "--data_path", str(rows)]) == 0
    assert "--share_prefixes True is counted in token directories only" in capsys.readouterr().out
    assert [note for note in notes if "not here" in note] == [
        "--data_path rows.jsonl is not here, so its documents are not counted"
    ]


# ---- training -------------------------------------------------------------------------------------------------------


def _plan_on_rank(rank: int, command: str) -> tuple[DocumentLengths | None, float]:
    """Runs a program, and plans it again as if this rank had read other documents than the others."""
    size = dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"))
    ended = run_in(world, "llama3", command)
    assert ended.status == 0, ended.err
    config = parse(f"{command} --overwrite_output_dir".split(), "")
    inputs = prepare(config, llama3.FAMILY, world)
    assert inputs.documents is not None
    _, _, plan = choose_memory_settings(
        config, replace(inputs, documents=DocumentLengths(10 + rank, 10 + rank, 10)), world
    )
    assert plan is not None
    return plan.run.documents, plan.step_seconds


def test_all_ranks_plan_with_the_same_documents_and_run_json_has_them(tmp_path: Path) -> None:
    files = write_inputs(tmp_path)
    more = "--packing best_fit --max_steps 1 --save_strategy no --offload auto --device_memory_budget 64"
    found = spawn(2, _plan_on_rank, words(files, "run", more))
    assert found[0] == found[1] and found[0][0] == DocumentLengths(10, 10, 10)
    plan = json.loads((files / "run" / "run.json").read_text())["memory_plan"]
    expected = read_document_lengths(parse(words(files, "run", more).split(), ""), CONFIG)
    assert expected is not None
    share = expected.area_per_token / 48
    assert plan["documents"] == {"mean_tokens": expected.mean_tokens, "attention_share": share} and 0.5 < share < 1
