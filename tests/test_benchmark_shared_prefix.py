"""The benchmark of shared prefixes: its shapes, and the costs that it fits."""

import argparse

import pytest

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
