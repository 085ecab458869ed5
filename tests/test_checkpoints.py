"""The table of published checkpoints, and its rows in the page of models."""

import csv
import re
from pathlib import Path

import pytest

from benchmarks import checkpoints
from benchmarks.checkpoints import CHECKPOINTS, WAYS, config_of
from lightseq.parts.chosen_experts import build_to_train

DOCS = Path(__file__).parent.parent / "docs"
COST = r"[\d,]+ \(\d+\)|–"  # tokens per second and GiB per GPU
ACTIVE = re.compile(r"A\d|17B-16E|8x7B")  # in the names of mixtures of experts


def rows() -> list[dict[str, str]]:
    with (DOCS / "checkpoints.csv").open(newline="", encoding="utf-8") as opened:
        return [*csv.DictReader(opened)]


def test_the_table_lists_every_checkpoint() -> None:
    listed = rows()
    assert [row["checkpoint"] for row in listed] == [*CHECKPOINTS]
    for row in listed:
        assert row["change"] == checkpoints.change(row["checkpoint"])
        cells = [row[way] for way in WAYS]
        assert not any(cells) if row["not in lightseq train"] else all(re.fullmatch(COST, cell) for cell in cells)


def test_the_page_of_models_repeats_costs_of_the_table() -> None:
    page, listed = (DOCS / "models.md").read_text(), {row["checkpoint"]: row for row in rows()}
    shown = re.findall(r"^\|.*\| `([^`]+/[^`]+)` \| (.*?) ?\| (.*?) ?\|$", page, re.MULTILINE)
    assert len(shown) > 10
    for name, full, lora in shown:
        assert (full, lora) == (listed[name]["full, 2 GPUs"], listed[name]["LoRA, 1 GPU"]), name
    assert f"has {len(listed)} checkpoints" in " ".join(page.split())


@pytest.mark.slow
def test_a_checkpoint_is_planned(alone: None) -> None:
    _, gemma, lfm = checkpoints.table(["google/gemma-3-270m", "LiquidAI/LFM2-1.2B"])
    assert gemma[:3] == ["google/gemma-3-270m", "", "0.27B"] and lfm[:3] == ["LiquidAI/LFM2-1.2B", "", "1.17B"]
    assert all(re.fullmatch(r"[\d,]+ \(\d+\)", cell) for row in (gemma, lfm) for cell in row[3:7])


def test_a_checkpoint_is_refused_with_the_reason(alone: None) -> None:
    _, gpt2, opt = checkpoints.table(["openai-community/gpt2-xl", "facebook/opt-6.7b"])
    assert gpt2[:2] == ["openai-community/gpt2-xl", "dropout set to 0"]
    assert gpt2[-1].startswith("weights in Conv1D, not linear")
    assert gpt2[-1].endswith("; your own loop takes it up to 1024 positions")
    assert opt[-1] == "2048 positions, in your own loop too"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if re.search(r"\dB", name) and not ACTIVE.search(name)])
def test_sizes_follow_from_names(name: str) -> None:
    told = float(re.findall(r"([\d.]+)B", name)[0])
    parameters = sum(parameter.numel() for parameter in build_to_train(config_of(name)).parameters()) / 1e9
    assert 0.8 * told - 0.3 < parameters < 1.1 * told + 0.3  # names count encoders of images, or round
