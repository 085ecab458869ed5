"""The plan is held to measured steps, memory within 5% and time within 10%; how such points are measured."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import plan_points
from benchmarks.plan_points import Point, line, main, take
from benchmarks.records import read_lines
from benchmarks.step_flags import NEEDED
from benchmarks.step_models import model_of
from lightseq.attention.accumulate import Accumulator
from lightseq.attention.buffers import BufferLayout
from lightseq.config.command_line import parse
from lightseq.memory.planner.attention_memory import attention_memory
from lightseq.memory.planner.choice import SAME_SPEED, make_plan
from lightseq.memory.planner.memory import snapshots
from lightseq.memory.planner.packed_documents import PackedDocuments
from lightseq.memory.planner.placement import Placement, in_order
from lightseq.memory.planner.plan import Plan, plan_as_given
from lightseq.memory.planner.rates import CHIPS, GIB, MATRIX_SHARE, PROCESS_BYTES, chip_of_device
from lightseq.memory.planner.run import Hardware, PlannedRun
from lightseq.memory.planner.step_time import matrix_seconds
from lightseq.models.heads import Heads
from lightseq.modules.loss import CHUNK_TOKENS
from lightseq.schedule import auto, head_slices
from lightseq.schedule.auto import ScheduleChoice
from lightseq.schedule.head_slices import MIN_COLUMNS

RESULTS = Path(plan_points.__file__).parent / "results"
POINTS = [r for file in sorted(RESULTS.glob("plan-*.jsonl")) for r in read_lines(file)]
GLUE = [r for r in read_lines(RESULTS / "glue-1xh100.jsonl") if r["way"] in ("eager", "compiled")]  # ours alone
PACKED = [
    r
    for r in read_lines(RESULTS / "step-8b-packed-h100.jsonl")
    if r["implementation"] == "lightseq" and not r["skipped"]
]
SPREAD = [  # as the planner chose, since it spreads offloaded layers
    r
    for name in (
        "step-8b-packed-1xh100",
        "step-8b-packed-2xh200",
        "step-8b-packed-trl-2xh100",
        "step-8b-packed-unsloth-1xh100",
    )
    for r in read_lines(RESULTS / f"{name}.jsonl")
    if r["implementation"] == "lightseq"
]
GEMMA = [
    r
    for name in ("step-gemma3-4b-2xh200", "step-gemma3-4b-32k-2xh200")
    for r in read_lines(RESULTS / f"{name}.jsonl")
    if r["label"] == "lightseq"
]
MEASURED = [r for r in POINTS + GLUE if not r["skipped"]]
# Measured while one layer more that leaves was there beside those that stay, and with fewer head groups.
TOOK_MORE = ("8b, 8 layers, 128K, offload both",)
# Tensors of the model's width that were there too, before gradients went as soon as they had been used.
HELD = {
    "8b, 8 layers, 128K, layers over tiles, four GPUs": 1,
    "1b, 1 layer, 2M, one GPU, offload activations, remat full, tiles": 1,
}
# With `--offload auto`, when weights stayed on the GPU even if nothing fitted.
STATE_STAYED = ("8b, 8 layers, 128K, offload auto within 25 GiB",)
# Layers measured since results take memory late.
SINCE = (
    *("attention-2xh200-overlap", "attention-2xh200-kept", "attention-2xh200-lean", "attention-2xh200-auto"),
    *(f"attention-2xh100-{name}" for name in ("out-travels", "short", "streams", "head-groups", "window")),
)
# Schedules under which queries travel, whose backward pass sends out with them. It did so in the first measurements on
# four H200 and does in OUT_TRAVELS; in between terms of rows travelled in its place, which took an eighth less memory.
QUERIES_TRAVEL = ("ulysses", "usp", "balanced")
OUT_TRAVELS = "attention-2xh100-out-travels"
# Until then an eager layer's MLP over tiles ran twice where a checkpoint ran the layer again.
MLPS_RUN_ONCE_SINCE = "2026-11-24T11:00:00+00:00"
# Until then tiled layers passed all heads to attention at once, and the input of a group of layers stayed on the GPU.
LESS_IS_HELD_SINCE = "2026-11-25T14:30:00+00:00"
# Until then schedules took the most head groups of those that were equally fast.
FEWEST_HEAD_GROUPS_SINCE = "2026-11-25T15:20:00+00:00"
# Until then the loss held the logits of two chunks of tokens at a time.
ONE_CHUNK_SINCE = "2026-11-27T02:30:00+00:00"
HERE = {"hardware": {"device": "cpu"}}


def planned(record: dict[str, Any]) -> Plan:
    point = Point(*(record[name] for name in ("point", "gpus", "model", "length", "words", "layers")))
    _, model = model_of(point.model, point.layers)
    chip = chip_of_device(record["hardware"]["device"])
    assert chip is not None
    budget = f"--host_memory_budget {record['host_budget_bytes'] / GIB}" if record.get("host_budget_bytes") else ""
    config = parse([*NEEDED, *point.flags(point.model, on_gpu=True), *budget.split()], "")
    threads = record.get("host_cores", point.gpus)  # one a rank, in the days of those that do not say
    hosts = record.get("gpus_per_host", 8), chip.memory_bytes, 256 * GIB, threads
    hardware = Hardware(chip, point.gpus, *hosts)
    make = plan_as_given if point.name in STATE_STAYED else make_plan
    run = PlannedRun(model, config, hardware)
    with _as_it_ran(record):
        if record.get("state_on_host") and record["placement"]:
            return _as_it_was_placed(run, record)
        plan = make(run)
        reshards = record.get("reshard_after_forward", True)  # older records do not say: they gathered weights twice
        return plan_as_given(plan.run.changed(reshard_after_forward=reshards), plan.placement)


@contextmanager
def _as_it_ran(record: dict[str, Any]) -> Iterator[None]:
    """Plans inside the block with the head groups of the code that was measured."""
    columns = math.inf if record["date"] < LESS_IS_HELD_SINCE else MIN_COLUMNS
    packed = "--packing" in record["words"]
    small = 0.0 if record["date"] < FEWEST_HEAD_GROUPS_SINCE and not packed else auto.MAX_GATHERED_BYTES
    auto.choose_by_time.cache_clear()
    with patch.object(head_slices, "MIN_COLUMNS", columns), patch.object(auto, "MAX_GATHERED_BYTES", small):
        yield
    auto.choose_by_time.cache_clear()


def _as_it_was_placed(run: PlannedRun, record: dict[str, Any]) -> Plan:
    """Plans what `--offload auto` chose then: it followed from the host's free memory, which no record has."""
    resident = record["layers_with_state_on_gpu"]
    run = replace(run, state_offloaded=True, layers_with_state_on_gpu=resident)
    return plan_as_given(run, Placement(tuple(record["placement"])))


def test_at_least_eight_steps_were_measured() -> None:
    assert len({record["point"] for record in MEASURED}) >= 8


@pytest.mark.usefixtures("results_from_the_beginning")
@pytest.mark.parametrize("record", MEASURED, ids=[record["point"] for record in MEASURED])
def test_memory_is_planned_within_five_percent_and_time_within_ten(record: dict[str, Any]) -> None:
    plan = planned(record)
    if record["point"] not in TOOK_MORE:
        tensors = HELD.get(record["point"], 0)
        if record["date"] < LESS_IS_HELD_SINCE and plan.run.group_size > 1 and plan.placement.offloads:
            tensors += 1
        held = 2 * plan.run.model.hidden_size * plan.run.tokens * tensors
        planned_bytes = max(plan.parts.total + held, _loss_with_two_chunks(plan, record))
        assert planned_bytes == pytest.approx(record["peak_memory_allocated_bytes"], rel=0.05), plan.parts
    assert plan.step_seconds + _mlps_once_more(plan.run, record) == pytest.approx(record["step_seconds"], rel=0.10)
    if plan.run.state_on_host and "host_cores" in record:  # since weights are page-locked where they lie
        assert plan.host_bytes == pytest.approx(record["host_rss_bytes"], rel=0.05)
    elif "offloaded_bytes" in record:
        handed_over = plan.host_bytes / plan.run.hardware.ranks_per_host - PROCESS_BYTES
        assert handed_over == pytest.approx(record["offloaded_bytes"], rel=0.05)


@pytest.mark.parametrize("record", PACKED, ids=[f"{r['world']} GPUs, LoRA {r['lora_rank']}" for r in PACKED])
def test_packed_rows_are_planned_within_five_percent_and_ten(record: dict[str, Any]) -> None:
    """These runs were placed by a planner that knew neither their documents nor how to spread offloaded layers."""
    asked, documents = packed_run(record)
    before = make_plan(asked.changed(config=replace(asked.config, remat=record["remat"])))
    contiguous = in_order(Counter(before.placement.layers))
    whole, plan = (plan_as_given(before.run.changed(documents=x), contiguous) for x in (None, documents))
    assert plan.run.attention_share == record["packed_rows"] / record["length"]
    assert plan.parts.total == pytest.approx(record["peak_memory_allocated_bytes"], rel=0.05)
    assert plan.step_seconds == pytest.approx(record["step_seconds"], rel=0.10)
    assert plan.mfu * plan.step_seconds == pytest.approx(record["mfu"] * record["step_seconds"], rel=1e-6)
    assert whole.step_seconds > 1.2 * record["step_seconds"]
    assert make_plan(asked.changed(documents=documents)).step_seconds <= plan.step_seconds * (1 + SAME_SPEED)


@pytest.mark.parametrize("record", SPREAD, ids=[f"{r['world']} GPUs, {r['label']}" for r in SPREAD])
def test_spread_layers_are_planned_within_five_percent_and_ten(record: dict[str, Any]) -> None:
    asked, documents = packed_run(record)
    plan = make_plan(asked.changed(documents=documents))
    assert plan.run.config.remat == record["remat"]
    assert plan.parts.total == pytest.approx(record["peak_memory_allocated_bytes"], rel=0.05)
    assert plan.step_seconds == pytest.approx(record["step_seconds"], rel=0.10)


@pytest.mark.parametrize("record", GEMMA, ids=[f"{r['length']}, {r['commit']}" for r in GEMMA])
def test_windows_wide_heads_and_more_norms_are_planned_within_five_percent_and_ten(record: dict[str, Any]) -> None:
    words = [*NEEDED, "--bf16", "--model_max_length", str(record["length"])]
    config = parse(words, "").resolve_memory_flags(on_gpu=True)
    hardware = Hardware(CHIPS["h200"], record["world"], 8, record["hardware"]["memory_bytes"], 256 * GIB)
    plan = make_plan(PlannedRun(model_of(record["model"])[1], config, hardware))
    assert plan.parts.total == pytest.approx(record["peak_memory_allocated_bytes"], rel=0.05)
    assert plan.step_seconds == pytest.approx(record["step_seconds"], rel=0.10)


def packed_run(record: dict[str, Any]) -> tuple[PlannedRun, PackedDocuments]:
    """Returns the run of a record of benchmarks/step.py as asked for, and its documents."""
    words = record["trial_command"].split()
    config = parse(words[words.index("llama3/train.py") + 1 :], "").resolve_memory_flags(on_gpu=True)
    hardware, size = record["hardware"], record["packed_rows"]
    chip = chip_of_device(hardware["device"])
    assert chip is not None
    here = Hardware(chip, record["world"], 8, hardware["memory_bytes"], 256 * GIB)
    return (
        PlannedRun(model_of(record["model"])[1], config, here),
        PackedDocuments(size, area_per_token=size, longest_tokens=size),
    )


def _loss_with_two_chunks(plan: Plan, record: dict[str, Any]) -> float:
    """Bytes during the loss as it was when this was measured."""
    run = plan.run
    loss = next(x for x in snapshots(run, plan.placement) if x.when == "loss").parts.total
    chunk = min(run.tokens, CHUNK_TOKENS) * run.model.vocab_size * run.itemsize
    return loss + chunk * (record["date"] < ONE_CHUNK_SINCE and run.tokens > CHUNK_TOKENS)


def _mlps_once_more(run: PlannedRun, record: dict[str, Any]) -> float:
    """Seconds that this took, where it was measured: as it would for a model that needs the MLP's output again."""
    if record["date"] >= MLPS_RUN_ONCE_SINCE:
        return 0.0
    now = matrix_seconds(run)
    layers = tuple(replace(layer, mlp_is_last=False) for layer in run.layers)
    with patch.object(PlannedRun, "architecture", replace(run.architecture, layers=layers)):
        then = matrix_seconds(replace(run))  # which has looked at no model yet
    return run.config.gradient_accumulation_steps * (then - now)


def test_an_mlp_over_tiles_runs_once_more_in_eager_layers_whose_backward_pass_needs_what_it_gives() -> None:
    records = {record["point"]: record for record in MEASURED}
    ran_twice, compiled, one_tile = (
        records[name] for name in ("1b 128K, eager, one GPU", "1b 128K", "1b 8K, eager, one GPU")
    )
    run = planned(ran_twice).run
    flops = 2 * run.tokens * len(run.layers) * 3 * 2048 * 8192
    assert _mlps_once_more(run, ran_twice) == pytest.approx(flops / (run.hardware.chip.peak_flops * MATRIX_SHARE))
    for record in (compiled, one_tile, {**ran_twice, "date": MLPS_RUN_ONCE_SINCE}):
        assert _mlps_once_more(planned(record).run, record) == 0


@pytest.fixture
def results_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their memory was there from the first step of a pass on when these layers were measured; it comes later now."""
    begin = Accumulator.__init__

    def early(self: Accumulator, layout: BufferLayout, device: torch.device, in_final_dtype: bool) -> None:
        begin(self, layout, device, in_final_dtype)
        self.open()
        self.there = self.finals or layout.whole(device, layout.dtype)  # type: ignore[attr-defined]

    monkeypatch.setattr(Accumulator, "__init__", early)
    attention_memory.cache_clear()
    yield
    attention_memory.cache_clear()


def test_results_take_memory_when_the_first_part_of_them_comes(request: pytest.FixtureRequest) -> None:
    layer = (ScheduleChoice("ulysses", None, 1), 4, Heads(32, 8, 128), 2)
    now = attention_memory(*layer)
    request.getfixturevalue("results_from_the_beginning")
    early = attention_memory(*layer)
    assert early.backward - now.backward == 2 * (32 + 2 * 8) * 128


@pytest.mark.usefixtures("results_from_the_beginning")
def test_attention_layers_take_what_was_measured_of_them_alone() -> None:
    """Forward and backward of a layer; nothing in the plan was fitted to these."""
    files = [file for file in sorted(RESULTS.glob("attention-*.jsonl")) if file.stem not in SINCE]
    layers = [
        r
        for file in files
        for r in _long_layers(file)
        if r["schedule"] not in QUERIES_TRAVEL or ("4xh200" in file.name and "auto" not in file.name)
    ]
    assert len({(r["schedule"], r["head_groups"]) for r in layers}) >= 7
    for r in layers:
        assert _planned_layer(r) == pytest.approx(r["peak_memory_bytes"], rel=0.05), r["request"]


def test_attention_layers_take_what_was_measured_since_results_take_memory_late() -> None:
    layers = [
        r
        for name in SINCE
        for r in _long_layers(RESULTS / f"{name}.jsonl")
        if r["schedule"] not in QUERIES_TRAVEL or name == OUT_TRAVELS
    ]
    assert {(r["schedule"], r["head_groups"]) for r in layers} >= {("prefix", 2), ("prefix", 4), ("zigzag", 1)}
    assert {(r["schedule"], r.get("keep_gathered")) for r in layers} >= {("ulysses", True), ("ulysses", False)}
    for r in layers:
        assert _planned_layer(r) == pytest.approx(r["peak_memory_bytes"], rel=0.02), r["request"]


def _long_layers(file: Path) -> list[dict[str, Any]]:
    """Below 64K, what the benchmark holds beside counts."""
    layers = [r for r in read_lines(file) if r.get("implementation") == "lightseq" and r["seconds_median"]]
    return [r for r in layers if r["length"] >= 65536]


def _planned_layer(r: dict[str, Any]) -> float:
    ulysses = r["ulysses_size"] if r["schedule"] == "usp" else None
    q, kv = (2 * r[name] * r["head_dim"] for name in ("heads", "kv_heads"))
    keeps, heads = r.get("keep_gathered", False), Heads(r["heads"], r["kv_heads"], r["head_dim"])
    share = r["window"] / r["length"] if r.get("window") else None
    choice = ScheduleChoice(r["schedule"], ulysses, r["head_groups"])
    found = attention_memory(choice, r["world"], heads, 2, keeps, share)
    held = 3 * q + 2 * kv + 4 * r["heads"]  # q, k, v, the output with its lse, and its gradient
    held += keeps * (q + 2 * kv)  # the benchmark holds its own as well
    return (held + found.backward + found.buffers) * r["length"] / r["world"]


def test_a_point_is_measured_once_and_what_failed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def taken(point: Point, *_: Any) -> dict[str, Any]:
        failed = len(asked) == 1
        asked.append(point.name)
        return {"point": point.name, "skipped": "out of memory" if failed else None, "step_seconds": 1.0,
                "length": point.length, "gpus": point.gpus}  # fmt: skip

    asked: list[str] = []
    monkeypatch.setattr(plan_points, "take", taken)
    monkeypatch.setattr(plan_points, "provenance", lambda commit: HERE)
    words = ["--output", str(tmp_path / "new" / "points.jsonl"), "--gpus", "1"]
    assert main(words) == main(words) == 0
    alone = [point.name for point in plan_points.POINTS if point.gpus == 1]
    assert asked == [*alone, alone[1]]
    assert len({point.name for point in plan_points.POINTS}) == len(plan_points.POINTS)


def test_a_flag_that_is_wrong_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "soon", "--output", "never"]) == 2
    assert capsys.readouterr().err == "error: --minutes: invalid float value: 'soon'; see --help\n"


@pytest.mark.slow
def test_a_measured_point_has_its_seconds_and_its_parts() -> None:
    point = Point("tiny", 2, "tiny-llama3", 512, "--gradient_accumulation_steps 2", layers=2, warmup=1, steps=2)
    record = json.loads(json.dumps(take(point, HERE, 120)))
    assert record["skipped"] is None and "s per step" in line(record)
    assert len(record["all_step_seconds"]) == 2 and record["tokens"] == 1024
    assert len(record["losses"]) == 3 and record["losses"][0] > record["losses"][2] > 0
    assert record["step_seconds"] > 0 and record["host_rss_bytes"] > 0 and record["hardware"] == HERE["hardware"]
    assert record["parts"]["optimizer"] == 2 * record["parts"]["parameters"] > 0
    assert take(Point("bad", 1, "tiny-llama3", 512, "--remat sometimes"), HERE, 120)["skipped"].startswith("--remat")
