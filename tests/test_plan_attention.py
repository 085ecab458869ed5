"""The plan of attention over clusters: its file, its table and its refusals."""

import contextlib
import io
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightseq.cli import main
from lightseq.config.lengths import format_tokens, parse_tokens
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.auto import MAX_SLOWDOWN, choose_by_time
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import H200_SYMMETRIC, RATES, kernel_seconds
from lightseq.tools.plan.attention import HEADINGS, predictions

WORDS = ["plan", "--attention", "--gpus", "1,3,4,64", "--gpus_per_host", "8", "--length", "128K", "--schedules"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "deep" / "plan.jsonl"
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main([*WORDS, "zigzag,prefix,ulysses,usp", "--output", str(path)]) == 0
    assert shown.getvalue().endswith(f"records  {path}\n")
    return path


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_file_says_what_it_depends_on_and_holds_every_point(planned: Path) -> None:
    head, *records = _records(planned)
    assert (head["plan"], head["length"], head["gpus_per_host"]) == ("attention", 128 * 1024, 8)
    assert {*head["rates"]} == {"symmetric", "nccl"}
    assert [(r["gpus"], r["schedule"]) for r in records] == [
        (n, name) for n in (1, 3, 4, 64) for name in ("zigzag", "prefix", "ulysses", "usp")
    ]
    assert {(r["gpus"], r["transport"]) for r in records} == {
        (1, "symmetric"), (3, "symmetric"), (4, "symmetric"), (64, "nccl")
    }  # fmt: skip


def test_unavailable_implementations_are_left_out_with_a_reason(planned: Path) -> None:
    skipped = {(r["gpus"], r["schedule"]): r["skipped"] for r in _records(planned)[1:] if r["skipped"]}
    assert {*skipped} == {(1, "usp"), (3, "ulysses"), (3, "usp"), (64, "ulysses")}
    assert "two or more Ulysses groups" in skipped[1, "usp"] and "cuts heads in 64" in skipped[64, "ulysses"]


def test_numbers_of_a_point_agree_with_each_other(planned: Path) -> None:
    alone = kernel_seconds(AttentionShape(128 * 1024, 32, 8, 128), H200_SYMMETRIC)
    for r in (r for r in _records(planned)[1:] if not r["skipped"]):
        parts = r["compute_seconds"] + r["exposed_communication_seconds"] + r["memory_seconds"]
        assert r["seconds"] == pytest.approx(parts)
        assert r["efficiency"] == pytest.approx(alone / r["gpus"] / r["seconds"]) and 0 < r["efficiency"] <= 1
        assert r["tflops_per_gpu"] == pytest.approx(7 * 2**34 * 4096 / r["gpus"] / r["seconds"] / 1e12)


def test_one_row_of_each_number_of_gpus_is_marked_and_it_is_the_fastest(planned: Path) -> None:
    records = [r for r in _records(planned)[1:] if not r["skipped"]]
    for gpus in (1, 3, 4, 64):
        mine = [r for r in records if r["gpus"] == gpus]
        (marked,) = [r["seconds"] for r in mine if r["fastest"]]
        assert marked <= (1 + MAX_SLOWDOWN) * min(r["seconds"] for r in mine)
    assert [(r["schedule"], r["ulysses_size"]) for r in records if r["gpus"] == 64 and r["fastest"]] == [("usp", 8)]


def test_the_marked_row_is_the_schedule_of_training() -> None:
    """Also where head groups that save memory put another schedule a little ahead."""
    for (gpus, length), (heads, kv_heads) in product([(4, 2**17), (4, 2**18), (8, 2**19)], [(32, 8), (24, 8), (16, 8)]):
        shape = AttentionShape(length, heads, kv_heads, 128)
        (marked,) = [row for row in predictions(shape, 8, [gpus], tuple(SCHEDULES)) if row["fastest"]]
        taken = choose_by_time(gpus, shape, RATES["symmetric"], 8)
        assert (marked["schedule"], marked["head_groups"]) == (taken.schedule, taken.head_groups)


def test_the_table_is_aligned_and_shows_schedules_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "prefix,usp"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    star = lines.index("*: the fastest for that number of GPUs")
    assert lines[star + 1].startswith("left out for 1 GPUs: schedule usp needs two or more Ulysses groups")
    lines = lines[:star]
    assert first.split() == [word for heading in HEADINGS for word in heading.split()]
    assert len(lines) == 6 and {len(line) for line in lines} == {len(first)}
    assert [line.split()[:3] for line in lines if line.startswith("*")] == [
        ["*", "1", "prefix"], ["*", "3", "prefix"], ["*", "4", "prefix"], ["*", "64", "usp"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        (["--gpus", "1,x"], "--gpus 1,x is not a list of positive numbers; write it like 1,2,4,8"),
        (["--gpus", "0"], "--gpus 0 is not a list of positive numbers; write it like 1,2,4,8"),
        (["--length", "1T"], "--length 1T is not a number of tokens; write it like 131072, 128K or 1.5M"),
        (["--schedules", "spiral"], "--schedules 'spiral' is unknown; give all, or choose from ring"),
        (["--kv_heads", "5"], "--kv_heads 5 does not divide --heads 32"),
        (["--gpus_per_host", "0"], "--gpus_per_host 0: give at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], words: str
) -> None:
    assert main(["plan", "--attention", *change, "--output", str(tmp_path / "a.jsonl")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "a.jsonl").exists()


def test_a_plan_takes_the_place_of_a_plan_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, file = [*WORDS, "prefix", "--output", str(tmp_path / "a.jsonl")], tmp_path / "a.jsonl"
    assert main(words) == main(words) == 0
    file.write_text('{"step": 1, "loss": 2.0}\n')
    assert main(words) == 2
    assert "a.jsonl exists and is not an attention plan; give another" in capsys.readouterr().err
    assert file.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_lengths_and_numbers_are_read_as_people_write_them() -> None:
    assert [parse_tokens(text) for text in ("131072", "128K", "1m", "1.5M")] == [2**17, 2**17, 2**20, 3 * 2**19]
    for word in ("1.5", "0.0001K", "0K", "-1K", "1e3", "K", ".5M", "1.M", ""):
        with pytest.raises(ValueError, match="is not a number of tokens"):
            parse_tokens(word)
    with pytest.raises(ValueError, match=r"--length 3\.4M is 3,565,158\.4 tokens, not a whole number; write 3565158"):
        parse_tokens("3.4M", "--length")
    assert [format_tokens(length) for length in (2**17, 2**20, 1000)] == ["128K", "1M", "1000"]
