"""A handful of the faults of `make faults`: every kind of input and some kills, in seconds."""

import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from programs import Ended, program
from small import words, write_inputs
from worlds import spawn

from benchmarks.faults import child, fuzz, ranks, trials
from benchmarks.faults.trials import Bench
from lightseq import parallelize
from lightseq.training.metrics import read_records


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    ranks.write_inputs(tmp_path)
    return Bench(tmp_path, random.Random(1))


def test_a_killed_run_comes_to_the_weights_of_one_that_nothing_befell(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "STEPS", 9)
    bench.undisturbed = trials.undisturbed(bench)
    records = list(trials.kill(bench, 2))
    assert len(records) == 2 and all(record["steps_lost"] <= 2 * trials.SAVE_STEPS for record in records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [trials.full_disk, trials.short_files, trials.freeze, trials.failing, trials.corrupt_data, trials.two_runs]
)
def test_a_run_goes_on_after(fault: Any, bench: Bench) -> None:
    bench.undisturbed = trials.undisturbed(bench)
    try:
        assert list(fault(bench))
    except trials.SkipTrial as why:
        pytest.skip(str(why))


def test_malformed_files_are_taken_or_refused_in_words_and_never_run(bench: Bench) -> None:
    (record, *more) = list(fuzz.files(bench, 60))
    assert sum(r["taken"] + r["refused"] for r in (record, *more)) == 60


def test_random_flags_are_taken_or_refused_in_one_line(bench: Bench) -> None:
    (record,) = fuzz.flags(bench, 20)
    assert sum(record["statuses"].values()) == 20 and record["statuses"].get("status 2")


@pytest.mark.slow
def test_a_planted_fault_that_is_not_survived_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness tells: a run whose step was left out does not pass for an undisturbed one."""
    monkeypatch.setattr(trials, "STEPS", 6)
    bench.undisturbed = trials.undisturbed(bench)
    assert trials.undisturbed(bench, (child.skips, (3,))) != bench.undisturbed


@pytest.mark.slow
def test_host_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """Steps, records, checkpoints and evaluations leave nothing behind. `docs/log.md` shows 2,000 steps."""
    write_inputs(tmp_path)
    evaluated = f"--eval_data_path {tmp_path}/data.pkl --eval_strategy steps --eval_steps 50"
    flags = f"--max_steps 400 --save_steps 20 --save_total_limit 2 {evaluated}"
    assert spawn(2, program, "llama3", words(tmp_path, "long", flags))[0].status == 0
    resident = [r["host_rss_bytes"] for r in read_records(tmp_path / "long" / "metrics.jsonl") if "loss" in r]
    assert statistics.median(resident[-50:]) - statistics.median(resident[150:200]) < 4e6


def slowed(rank: int, line: str) -> Ended:
    head_loss = parallelize.cross_entropy_sum

    def slower(*args: Any) -> Any:
        time.sleep(0.1 * rank)
        return head_loss(*args)

    parallelize.cross_entropy_sum = slower  # type: ignore[assignment]
    return program(rank, "llama3", line)


def test_the_slowest_rank_is_in_the_metrics(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    assert spawn(2, slowed, words(tmp_path, "slow", "--max_steps 3 --save_strategy no"))[0].status == 0
    records = read_records(tmp_path / "slow" / "metrics.jsonl")
    assert [r["slowest_rank"] for r in records] == [1, 1, 1]
    assert all(0.3 < r["slowest_rank_share"] <= 0.5 for r in records), [r["slowest_rank_share"] for r in records]
