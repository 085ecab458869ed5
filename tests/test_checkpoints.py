"""The table of published checkpoints in the page of models."""

import re
from pathlib import Path

import pytest

from benchmarks import checkpoints
from benchmarks.checkpoints import CHECKPOINTS, config_of
from lightseq.parts.chosen_experts import build_to_train

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
ACTIVE = re.compile(r"A\d|17B-16E|8x7B")  # in the names of mixtures of experts


def test_the_page_lists_every_checkpoint() -> None:
    table = PAGE.read_text().split(checkpoints.BEGIN)[1].split(checkpoints.END)[0]
    assert sorted(re.findall(r"^\| `(.*?)`", table, re.MULTILINE)) == sorted(CHECKPOINTS)


@pytest.mark.slow
def test_a_checkpoint_is_planned(alone: None) -> None:
    lines = [*checkpoints.table(["google/gemma-3-270m", "LiquidAI/LFM2-1.2B"])]
    assert re.fullmatch(r"\| `google/gemma-3-270m` \| 0.27B( \| [\d,]+ \(\d+\)){4} \|", lines[2])
    assert re.fullmatch(r"\| `LiquidAI/LFM2-1.2B` \| 1.17B( \| [\d,]+ \(\d+\)){4} \|", lines[3])


def test_a_checkpoint_is_refused_with_the_reason(alone: None) -> None:
    *_, gpt2, opt = checkpoints.table(["openai-community/gpt2-xl", "facebook/opt-6.7b"])
    assert gpt2.startswith("| `openai-community/gpt2-xl`, its dropout set to 0 | weights in Conv1D, not linear")
    assert gpt2.endswith("; [your own loop](../examples/README.md) takes it up to 1024 positions |")
    assert opt == "| `facebook/opt-6.7b`, its dropout set to 0 | 2048 positions, in your own loop too |"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if re.search(r"\dB", name) and not ACTIVE.search(name)])
def test_sizes_follow_from_names(name: str) -> None:
    told = float(re.findall(r"([\d.]+)B", name)[0])
    parameters = sum(parameter.numel() for parameter in build_to_train(config_of(name)).parameters()) / 1e9
    assert 0.8 * told - 0.3 < parameters < 1.1 * told + 0.3  # names count encoders of images, or round
