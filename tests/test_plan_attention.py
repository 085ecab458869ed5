"""The plan of attention over clusters agrees with what training chooses."""

from itertools import product

import pytest

from benchmarks.plan_attention import main, predictions
from lightseq.config.lengths import format_tokens, parse_tokens
from lightseq.schedule.auto import MAX_SLOWDOWN, choose_by_time
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import H200_SYMMETRIC, RATES, kernel_seconds


def test_a_plan_marks_the_fastest_schedule_and_says_why_others_are_left_out() -> None:
    shape = AttentionShape(128 * 1024, 32, 8, 128)
    records = list(predictions(shape, 8, [1, 3, 4, 64]))
    skipped = {(r["gpus"], r["schedule"]): r["skipped"] for r in records if r["skipped"]}
    assert {(1, "usp"), (3, "ulysses"), (3, "usp"), (64, "ulysses")} <= {*skipped}
    assert "two or more Ulysses groups" in skipped[1, "usp"] and "cuts heads in 64" in skipped[64, "ulysses"]
    alone = kernel_seconds(shape, H200_SYMMETRIC)
    for gpus in (1, 3, 4, 64):
        mine = [r for r in records if r["gpus"] == gpus and not r["skipped"]]
        (marked,) = [r["seconds"] for r in mine if r["fastest"]]
        assert marked <= (1 + MAX_SLOWDOWN) * min(r["seconds"] for r in mine)
        for r in mine:
            assert r["efficiency"] == pytest.approx(alone / gpus / r["seconds"]) and 0 < r["efficiency"] <= 1
            assert r["tflops_per_gpu"] == pytest.approx(7 * 2**34 * 4096 / gpus / r["seconds"] / 1e12)
    assert [(r["schedule"], r["ulysses_size"]) for r in records if r["gpus"] == 64 and r["fastest"]] == [("usp", 8)]


def test_the_marked_row_is_the_schedule_of_training() -> None:
    """Also where head groups that save memory put another schedule a little ahead."""
    for (gpus, length), (heads, kv_heads) in product([(4, 2**17), (4, 2**18), (8, 2**19)], [(32, 8), (24, 8), (16, 8)]):
        shape = AttentionShape(length, heads, kv_heads, 128)
        (marked,) = [row for row in predictions(shape, 8, [gpus]) if row["fastest"]]
        taken = choose_by_time(gpus, shape, RATES["symmetric"], 8)
        assert (marked["schedule"], marked["head_groups"]) == (taken.schedule, taken.head_groups)


def test_the_command_prints_a_row_per_schedule_and_refuses_odd_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "1,4"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n*") == 3 and "left out for 1 GPUs: schedule usp needs two or more Ulysses groups" in shown
    assert main(["--kv_heads", "5"]) == 2 and "kv_heads divide heads" in capsys.readouterr().err


def test_lengths_and_numbers_are_read_as_people_write_them() -> None:
    assert [parse_tokens(text) for text in ("131072", "128K", "1m", "1.5M")] == [2**17, 2**17, 2**20, 3 * 2**19]
    for word in ("1.5", "0.0001K", "0K", "-1K", "1e3", "K", ".5M", "1.M", ""):
        with pytest.raises(ValueError, match="is not a number of tokens"):
            parse_tokens(word)
    with pytest.raises(ValueError, match=r"--length 3\.4M is 3,565,158\.4 tokens, not a whole number; write 3565158"):
        parse_tokens("3.4M", "--length")
    assert [format_tokens(length) for length in (2**17, 2**20, 1000)] == ["128K", "1M", "1000"]
