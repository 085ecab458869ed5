"""The search for the largest model: every scale once, an end, and no error hidden."""

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import refusal

from benchmarks import largest
from benchmarks.largest import LargestSearch, Probe, next_scale, parameters
from benchmarks.processes import Failed
from benchmarks.records import read_lines

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "provenance", lambda commit: {"hardware": {"device": "cpu"}})


@pytest.mark.parametrize("limit", [*range(1, 9), 21, 38, 300])
def test_the_largest_scale_is_found(limit: int) -> None:
    known: dict[int, bool] = {}
    while (scale := next_scale(known)) is not None and scale not in known:
        known[scale] = scale <= limit
    assert scale is None and known[limit] and not known[limit + 1]
    assert len(known) < 16


def test_a_search_continues_where_it_was_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def trained(search: LargestSearch, scale: int, timeout: float) -> Probe:
        assert " ".join(search.words(scale)).endswith("--remat full --model_max_length 2048")
        asked.append(scale)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return Probe(scale, True, None, scale * GIB) if scale <= 5 else Probe(scale, False, "out of memory")

    monkeypatch.setattr(LargestSearch, "train", trained)
    file = tmp_path / "new" / "largest.jsonl"
    words = f"--what training --strategies n_layers --nproc_per_node 4 --length 2K --output {file}".split()
    words += ["--flags", "--remat full"]
    with pytest.raises(KeyboardInterrupt):
        largest.main(words)
    assert largest.main(words) == largest.main(words) == 0
    again = [scale for i, scale in enumerate(asked) if i != 2]
    assert len(set(again)) == len(again) and asked[2] == asked[3]
    (found,) = [r for r in read_lines(file) if r["benchmark"] == "largest"]
    assert (found["largest"], found["too_large"], found["gpus"], found["reason"]) == (5, 6, 4, "out of memory")


@pytest.mark.parametrize(
    ("why", "ends"), [("out of memory", True), ("killed: Signal 9 (SIGKILL)", True), ("no such preset", False)]
)
def test_only_a_lack_of_memory_counts_as_too_large(why: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise Failed(why)

    monkeypatch.setattr(largest, "run", run)
    search = LargestSearch("training", "all", 256, "", 1, None)
    if ends:
        assert search.attempt(1, 1.0) == Probe(1, False, why)
    else:
        with pytest.raises(ValueError, match=why):
            search.attempt(1, 1.0)


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
    assert len(set(sizes)) == len(sizes) and {("all", 18), ("all", 19), ("n_layers", 24), ("n_layers", 25)} <= {*sizes}
    assert largest.main(words) == 0 and len(read_lines(file)) == len(probes) + 1, "what is known is not tried again"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without GPUs")
def test_weights_without_a_gpu_need_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "largest.jsonl"
    said = refusal(largest.main, "--what", "weights", "--output", file)
    assert "this host has none; give --gpu_memory, such as 80" in said and not file.exists()


def test_a_garbled_line_is_named_and_the_search_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "largest.jsonl"
    words = f"--what weights --strategies all --gpu_memory 2 --output {file}".split()
    assert largest.main(words) == 0
    lines = file.read_text().splitlines()
    file.write_text("\n".join((lines[0][:40], *lines[1:])) + "\n")
    assert largest.main(words) == 0
    assert f"{file} line 1 is not JSON" in capsys.readouterr().err
    assert len(read_lines(file)) == len(lines) - 1, "the limit was found before"


@pytest.mark.slow
def test_real_steps_count_what_a_given_memory_holds() -> None:
    assert LargestSearch("training", "all", 256, "", 1, gpu_memory=64.0).attempt(1, 120.0).fits
    assert not LargestSearch("training", "all", 256, "", 1, gpu_memory=0.1).attempt(1, 120.0).fits
