"""The benchmark of shared prefixes: its shapes, and the costs that it fits."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT
from transformers import LlamaConfig

from benchmarks.shared_prefix import Shape, costs, shape_of


def test_a_shape_has_the_nodes_that_its_rows_make() -> None:
    shape = shape_of("8x32K+2K")
    assert shape == Shape(rows=8, prompt=32768, answer=2048) and str(shape) == "8x32K+2K"
    small = Shape(rows=3, prompt=10, answer=4)
    assert small.nodes("rows").boundaries == (0, 14, 28, 42)
    # Each answer begins with a copy of the prompt's last token.
    assert small.nodes("tree").boundaries == (0, 9, 14, 19, 24) and small.nodes("tree").parents == (-1, 0, 0, 0)


@pytest.mark.parametrize("text", ["8x32K", "32K+2K", "x1+1", "2x0+1"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        shape_of(text)


def test_costs_of_tokens_and_pairs_are_found_again() -> None:
    measured = [
        {"tokens": tokens, "pairs": pairs, "seconds": 2e-5 * tokens + 3e-10 * pairs}
        for tokens, pairs in ((300_000, 5e9), (150_000, 7e8), (150_000, 2e8))
    ]
    assert costs(measured) == pytest.approx((2e-5, 3e-10))


@pytest.mark.slow
def test_the_rows_the_tree_and_trls_tree_take_the_same_step(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    ).save_pretrained(tmp_path / "m")  # fmt: skip
    words = f"--model {tmp_path}/m --shapes 3x40+8 --warmup 1 --steps 1 --parts step,trl --output {tmp_path}/o.jsonl"
    subprocess.run([sys.executable, "benchmarks/shared_prefix.py", *words.split()], cwd=ROOT, check=True, timeout=120)
    found = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [record["form"] for record in found] == ["rows", "tree", "trl tree"]
    for name in ("losses", "grad_norms"):
        for record in found[1:]:
            assert record[name] == pytest.approx(found[0][name], rel=1e-5)
