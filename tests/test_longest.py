"""The search for the longest length: each rehearsal once, an end within the resolution, no error hidden."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import longest
from benchmarks.longest import Probe, Search, main, next_length
from benchmarks.report import read_lines
from benchmarks.training.launch import Failed
from benchmarks.training.records import Machine


@pytest.mark.parametrize("limit", [1, 1023, 1024, 5000, 131072, 999_999, 12_345_678])
@pytest.mark.parametrize("guess", [1024, 100_000, 10_000_000])
def test_the_limit_is_found_within_the_resolution_from_any_guess(limit: int, guess: int) -> None:
    known: dict[int, bool] = {}
    while (tokens := next_length(known, guess, 0.02, 1024)) is not None and len(known) < 60:
        assert tokens not in known and tokens % 1024 == 0
        known[tokens] = tokens <= limit
        if tokens == 1024 and not known[tokens]:
            return
    low = max(n for n, fits in known.items() if fits)
    high = min(n for n, fits in known.items() if not fits)
    assert low <= limit < high and high - low <= max(1024, 0.02 * low)
    assert len(known) <= 12 if 0.8 < guess / limit < 1.25 else len(known) < 60


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_search_of_small_numbers_comes_to_its_end(limit: int) -> None:
    """A quarter more than 1, 2 or 3 is no whole number more."""
    known: dict[int, bool] = {}
    while (scale := next_length(known, 1, 0.0, 1)) is not None and scale not in known:
        known[scale] = scale <= limit
    assert scale is None and known[limit] and not known[limit + 1]


def test_a_search_goes_on_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def rehearsed(search: Search, tokens: int, timeout: float) -> Probe:
        asked.append(tokens)
        if len(asked) == 3:
            raise KeyboardInterrupt
        fits = tokens <= 50_000
        return Probe(
            tokens, fits, None if fits else "out of memory", tokens * 2**14 if fits else None, tokens * 2**12, 1.0
        )

    monkeypatch.setattr(longest, "rehearse", rehearsed)
    monkeypatch.setattr(longest, "look_at_machine", lambda: Machine(False, {"device": "cpu"}, {}))
    file = tmp_path / "new" / "longest.jsonl"
    words = f"--models tiny-llama3 --nproc_per_node 2 --first 40K --host_memory 4 --output {file}".split()
    words += ["--flags", "--offload activations"]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    assert main(words) == main(words) == 0
    again = [tokens for i, tokens in enumerate(asked) if i != 2]
    assert len(set(again)) == len(again) and asked[2] == asked[3]
    found = [r for r in read_lines(file) if r["benchmark"] == "longest"]
    assert len(found) == 1 and 49_000 < found[0]["longest"] <= 50_000 < found[0]["too_long"]
    assert found[0]["host_bytes"] == 2 * found[0]["longest"] * 2**12 and found[0]["reason"] == "out of memory"
    assert found[0]["tokens_per_gpu_gib"] == pytest.approx(2**30 / 2**14 / 2)


@pytest.mark.parametrize(
    ("why", "ends"), [("out of memory", True), ("killed: Signal 9 (SIGKILL)", True), ("no such preset", False)]
)
def test_only_a_lack_of_memory_counts_as_too_long(
    why: str, ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*_: Any) -> None:
        raise Failed(why)

    monkeypatch.setattr(longest, "run", run)
    search = Search("tiny-llama3", "", 1, None, None)
    if ends:
        assert longest.rehearse(search, 1024, 1.0) == Probe(1024, False, why)
    else:
        with pytest.raises(ValueError, match=why):
            longest.rehearse(search, 1024, 1.0)


def test_a_terminal_of_80_columns_shows_every_number_whole() -> None:
    file = Path(longest.__file__).parent / "results" / "longest-1b-1xh200.jsonl"
    found = [r for r in read_lines(file) if r["benchmark"] == "longest"]
    console = Console(width=80)
    with console.capture() as terminal:
        console.print(longest.table(found))
    lines = terminal.get().splitlines()
    assert "3008K 3040K 137.5 22,407 176.2 17,476" in " ".join(terminal.get().split())
    assert max(map(len, lines)) <= 80 and "…" not in terminal.get()


@pytest.mark.slow
def test_rehearsals_count_what_a_given_memory_holds(tmp_path: Path) -> None:
    file = tmp_path / "longest.jsonl"
    limits = "--gpu_memory 0.16 --first 8K --step 8K --resolution 0.5 --nproc_per_node 1"
    assert main(f"--models tiny-llama3 {limits} --output {file}".split()) == 0
    *probes, found = read_lines(file)
    assert {probe["fits"] for probe in probes} == {True, False}
    assert found["peak_bytes"] <= 0.16 * 2**30 and "more than 0.16 GiB" in found["reason"]
