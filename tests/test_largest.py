"""The search for the largest model: every size once, weights counted to the byte, what does not fit named."""

from pathlib import Path

import pytest

from benchmarks import largest, longest
from benchmarks.largest import Search, main, parameters
from benchmarks.longest import Probe
from benchmarks.report import read_lines
from benchmarks.training.records import Machine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest, "look_at_machine", lambda: Machine(False, {"device": "cpu"}, {}))


def test_the_weights_of_94_gb_hold_the_model_that_was_found_for_them(tmp_path: Path) -> None:
    """48,185,937,920 parameters, growing layers alone, were found by bisection on a GPU of 94.5 GB."""
    file = tmp_path / "largest.jsonl"
    words = f"--what weights --gpu_memory 93 --output {file}".split()
    assert main(words) == 0
    *probes, depth = read_lines(file)
    width = next(r for r in read_lines(file) if r["benchmark"] == "largest")
    assert (depth["strategy"], depth["largest"], depth["parameters"]) == ("n_layers", 24, 48_185_937_920)
    assert depth["peak_bytes"] == 2 * 48_185_937_920 and depth["too_large"] == 25
    assert width["parameters"] == parameters("scaled-all-18") < 93 * 2**30 / 2 < parameters("scaled-all-19")
    sizes = [(p["strategy"], p["length"]) for p in probes if p["benchmark"] == "largest-probe"]
    assert sorted(sizes) == [("all", 18), ("all", 19), ("n_layers", 24), ("n_layers", 25)], "what fits is known before"
    assert main(words) == 0 and len(read_lines(file)) == len(probes) + 1, "what is known is not tried again"


def test_a_garbled_line_is_said_and_the_search_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "largest.jsonl"
    words = f"--what weights --strategies all --gpu_memory 2 --first 2 --output {file}".split()
    assert main(words) == 0
    lines = file.read_text().splitlines()
    file.write_text("\n".join((lines[0][:40], *lines[1:])) + "\n")
    assert main(words) == 0
    assert f"{file} line 1 is not JSON" in capsys.readouterr().err
    assert len(read_lines(file)) == len(lines) - 1, "the limit was found before"


def test_training_is_rehearsed_with_the_flags_that_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def rehearsed(words: list[str], size: int, about: str, gpus: int, memory: float | None, timeout: float) -> Probe:
        seen.append(words)
        return Probe(size, size <= 5, None if size <= 5 else "out of memory", size * 2**30)

    monkeypatch.setattr(largest, "rehearsed", rehearsed)
    file = tmp_path / "largest.jsonl"
    words = f"--what training --strategies all --nproc_per_node 4 --first 8 --output {file}".split()
    assert main([*words, "--flags", "--remat full", "--length", "2K"]) == 0
    found = read_lines(file)[-1]
    assert (found["largest"], found["too_large"], found["gpus"], found["reason"]) == (5, 6, 4, "out of memory")
    assert all("--remat full --model_max_length 2048" in " ".join(each) for each in seen)


def test_a_search_begins_where_the_plan_says_that_memory_ends() -> None:
    """Weights, gradients, and two states of Adam in float32: 16 bytes a parameter that ranks share."""
    for gpus in (1, 2):
        first = largest.planned(Search("training", "all", 256, "--remat full", gpus, 32.0), Machine(False, {}, {}))
        fits, larger = (16 * parameters(f"scaled-all-{scale}") / gpus for scale in (first, first + 1))
        assert fits < 32 * 2**30 < 1.35 * larger, "beside the weights there are activations and gathered layers"
    assert largest.planned(Search("training", "all", 256, "", 1, 0.5), Machine(False, {}, {})) == 1, "nothing fits"


@pytest.mark.slow
def test_a_real_rehearsal_is_told_from_one_that_takes_too_much() -> None:
    search = Search("training", "all", 256, "", 1, gpu_memory=2.0)
    assert largest.try_out(search, 1, 120.0).fits
    assert not largest.try_out(Search("training", "all", 256, "", 1, gpu_memory=0.1), 1, 120.0).fits
