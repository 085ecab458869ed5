"""The searches for the longest sequence and the largest model: every size once, an end, and no error hidden."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import largest, longest, search
from benchmarks.largest import LargestSearch, parameters
from benchmarks.longest import LongestSearch
from benchmarks.processes import Failed
from benchmarks.records import read_lines
from benchmarks.search import Probe, next_size

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "provenance", lambda commit: {"hardware": {"device": "cpu"}})


@pytest.mark.parametrize("limit", [1, 1023, 1024, 5000, 131072, 999_999, 12_345_678])
@pytest.mark.parametrize("guess", [1024, 100_000, 10_000_000])
def test_the_limit_is_found_within_the_resolution_from_any_guess(limit: int, guess: int) -> None:
    known: dict[int, bool] = {}
    while (tokens := next_size(known, guess, 0.02, 1024)) is not None and len(known) < 60:
        assert tokens not in known and tokens % 1024 == 0
        known[tokens] = tokens <= limit
    low = max((n for n, fits in known.items() if fits), default=0)
    high = min(n for n, fits in known.items() if not fits)
    assert low <= limit < high and high - low <= max(1024, 0.02 * low)
    assert len(known) <= 12 if 0.8 < guess / limit < 1.25 else len(known) < 60


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_search_of_small_numbers_comes_to_its_end(limit: int) -> None:
    """A quarter more than 1, 2 or 3 is no whole number more."""
    known: dict[int, bool] = {}
    while (scale := next_size(known, 1, 0.0, 1)) is not None and scale not in known:
        known[scale] = scale <= limit
    assert scale is None and known[limit] and not known[limit + 1]


def test_a_search_goes_on_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def rehearsed(words: list[str], tokens: int, *_: Any) -> Probe:
        assert " ".join(words).endswith(f"--host_memory_budget 2.000000000 --model_max_length {tokens}")
        asked.append(tokens)
        if len(asked) == 3:
            raise KeyboardInterrupt
        if tokens > 50_000:
            return Probe(tokens, False, "out of memory")
        return Probe(tokens, True, None, tokens * 2**14, tokens * 2**12, 1.0)

    monkeypatch.setattr(longest, "rehearse", rehearsed)
    file = tmp_path / "new" / "longest.jsonl"
    words = f"--models tiny-llama3 --nproc_per_node 2 --first 40K --host_memory 4 --output {file}".split()
    words += ["--flags", "--offload activations"]
    with pytest.raises(KeyboardInterrupt):
        longest.main(words)
    assert longest.main(words) == longest.main(words) == 0
    again = [tokens for i, tokens in enumerate(asked) if i != 2]
    assert len(set(again)) == len(again) and asked[2] == asked[3]
    found = [r for r in read_lines(file) if r["benchmark"] == "longest"]
    assert len(found) == 1 and 49_000 < found[0]["longest"] <= 50_000 < found[0]["too_long"]
    assert found[0]["host_bytes"] == 2 * found[0]["longest"] * 2**12 and found[0]["reason"] == "out of memory"
    assert found[0]["tokens_per_gpu_gib"] == pytest.approx(GIB / 2**14 / 2)


def test_a_limit_on_file_is_shown_and_not_searched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "longest.jsonl"
    file.write_text((Path(longest.__file__).parent / "results" / "longest-1b-1xh200.jsonl").read_text())
    flags = "--torch_compile True --offload activations --remat full --tile_layers True"
    words = ["--models", "llama3.2-1b", "--nproc_per_node", "1", "--flags", flags, "--output", str(file)]
    assert longest.main(words) == 0
    assert "3,080,192 tokens, 22,407 a GiB of GPU memory, 17,476 a GiB of host memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("why", "ends"), [("out of memory", True), ("killed: Signal 9 (SIGKILL)", True), ("no such preset", False)]
)
def test_only_a_lack_of_memory_counts_as_too_long(why: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise Failed(why)

    monkeypatch.setattr(search, "run", run)
    limit = LongestSearch("tiny-llama3", "", 1, None, None)
    if ends:
        assert limit.attempt(1024, 1.0) == Probe(1024, False, why)
    else:
        with pytest.raises(ValueError, match=why):
            limit.attempt(1024, 1.0)


def test_the_weights_of_94_gb_hold_the_model_that_was_found_for_them(tmp_path: Path) -> None:
    """48,185,937,920 parameters, growing layers alone, were found by bisection on a GPU of 94.5 GB."""
    file = tmp_path / "largest.jsonl"
    words = f"--what weights --gpu_memory 93 --output {file}".split()
    assert largest.main(words) == 0
    *probes, depth = read_lines(file)
    width = next(r for r in probes if r["benchmark"] == "largest")
    assert (depth["strategy"], depth["largest"], depth["parameters"]) == ("n_layers", 24, 48_185_937_920)
    assert depth["peak_bytes"] == 2 * 48_185_937_920 and depth["too_large"] == 25
    assert width["parameters"] == parameters("scaled-all-18") < 93 * GIB / 2 < parameters("scaled-all-19")
    sizes = [(p["strategy"], p["length"]) for p in probes if p["benchmark"] == "largest-probe"]
    assert sorted(sizes) == [("all", 18), ("all", 19), ("n_layers", 24), ("n_layers", 25)], "what fits is known before"
    assert largest.main(words) == 0 and len(read_lines(file)) == len(probes) + 1, "what is known is not tried again"


def test_a_garbled_line_is_named_and_the_search_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "largest.jsonl"
    words = f"--what weights --strategies all --gpu_memory 2 --first 2 --output {file}".split()
    assert largest.main(words) == 0
    lines = file.read_text().splitlines()
    file.write_text("\n".join((lines[0][:40], *lines[1:])) + "\n")
    assert largest.main(words) == 0
    assert f"{file} line 1 is not JSON" in capsys.readouterr().err
    assert len(read_lines(file)) == len(lines) - 1, "the limit was found before"


def test_training_is_rehearsed_with_the_flags_that_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def rehearsed(words: list[str], size: int, about: str, gpus: int, memory: float | None, timeout: float) -> Probe:
        seen.append(words)
        return Probe(size, size <= 5, None if size <= 5 else "out of memory", size * GIB)

    monkeypatch.setattr(largest, "rehearse", rehearsed)
    file = tmp_path / "largest.jsonl"
    words = f"--what training --strategies all --nproc_per_node 4 --first 8 --output {file}".split()
    assert largest.main([*words, "--flags", "--remat full", "--length", "2K"]) == 0
    found = read_lines(file)[-1]
    assert (found["largest"], found["too_large"], found["gpus"], found["reason"]) == (5, 6, 4, "out of memory")
    assert all("--remat full --model_max_length 2048" in " ".join(each) for each in seen)


def test_a_search_begins_where_the_plan_says_that_memory_ends() -> None:
    """Weights, gradients, and two states of Adam in float32: 16 bytes a parameter that ranks share."""
    for gpus in (1, 2):
        first = LargestSearch("training", "all", 256, "--remat full", gpus, 32.0).planned({})
        fits, larger = (16 * parameters(f"scaled-all-{scale}") / gpus for scale in (first, first + 1))
        assert fits < 32 * GIB < 1.35 * larger, "beside the weights there are activations and gathered layers"
    assert LargestSearch("training", "all", 256, "", 1, 0.5).planned({}) == 1, "nothing fits"


@pytest.mark.slow
def test_real_rehearsals_count_what_a_given_memory_holds(tmp_path: Path) -> None:
    file = tmp_path / "longest.jsonl"
    limits = "--gpu_memory 0.16 --first 8K --step 8K --resolution 0.5 --nproc_per_node 1"
    assert longest.main(f"--models tiny-llama3 {limits} --output {file}".split()) == 0
    *probes, found = read_lines(file)
    assert {probe["fits"] for probe in probes} == {True, False}
    assert found["peak_bytes"] <= 0.16 * GIB and "more than 0.16 GiB" in found["reason"]
    assert LargestSearch("training", "all", 256, "", 1, gpu_memory=2.0).attempt(1, 120.0).fits
    assert not LargestSearch("training", "all", 256, "", 1, gpu_memory=0.1).attempt(1, 120.0).fits
