"""Synthetic documents with a known structure: the kinds, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Generator = np.random.Generator


@dataclass(frozen=True)
class Synthetic:
    """Settings of a synthetic data set.

    Document i depends only on the seed and i, so a larger set begins with a smaller one.
    """

    kind: str
    documents: int
    length: int
    vocab_size: int
    seed: int


@dataclass(frozen=True)
class SyntheticKind:
    """Kind of synthetic document: its description, how it is drawn, and its smallest sizes."""

    help: str
    draw: Callable[[Generator, int, int], Ids]  # (generator, length, vocab_size)
    min_length: int = 2
    min_vocab_size: int = 2


def draw_uniform(generator: Generator, length: int, vocab_size: int) -> Ids:
    """Draws ids with equal probability."""
    return generator.integers(0, vocab_size, length)


def draw_zipf(generator: Generator, length: int, vocab_size: int) -> Ids:
    """Draws id i with a probability proportional to 1/(i+1)."""
    return np.searchsorted(_zipf_cumulative(vocab_size), generator.random(length), side="right")


@lru_cache(maxsize=1)
def _zipf_cumulative(vocab_size: int) -> NDArray[np.float64]:
    cumulative = np.cumsum(1.0 / np.arange(1, vocab_size + 1))
    cumulative /= cumulative[-1]  # exactly 1, so that no draw falls outside the vocabulary
    return cumulative


def draw_copy(generator: Generator, length: int, vocab_size: int) -> Ids:
    """Draws half a document and repeats it."""
    half = generator.integers(0, vocab_size, (length + 1) // 2)
    return np.concatenate([half, half])[:length]


def draw_needle(generator: Generator, length: int, vocab_size: int) -> Ids:
    """Draws a key and value at a random position, and again at the end of the document."""
    position = _draw_needle_position(generator, length)
    hay_ids = vocab_size // 2
    ids = generator.integers(0, hay_ids, length)
    key, value = generator.integers(hay_ids, vocab_size, 2)
    ids[[position, -2]] = key
    ids[[position + 1, -1]] = value
    return ids


def _draw_needle_position(generator: Generator, length: int) -> int:
    return int(generator.integers(0, length - 3))  # the pair ends before the question, which is the last two tokens


KINDS: Mapping[str, SyntheticKind] = {
    "uniform": SyntheticKind("independent ids, all equally likely: only the vocabulary can be learned", draw_uniform),
    "zipf": SyntheticKind(
        "independent ids, id i with a probability proportional to 1/(i+1), much like words", draw_zipf
    ),
    "copy": SyntheticKind(
        "uniform ids whose second half repeats the first: learned by attending half a document back", draw_copy
    ),
    "needle": SyntheticKind(
        "uniform ids from the lower half of the vocabulary, with a key and its value from the upper half at a random "
        "depth; the document ends with the key and the value again (needle_depth in the output lists the depths)",
        draw_needle,
        min_length=5,
        min_vocab_size=4,
    ),
}


def check_spec(spec: Synthetic) -> None:
    """Raises ValueError for sizes that are too small for the kind."""
    kind = KINDS[spec.kind]
    least = {"documents": 1, "length": kind.min_length, "vocab_size": kind.min_vocab_size, "seed": 0}
    for name, smallest in least.items():
        if getattr(spec, name) < smallest:
            raise ValueError(f"--{name} {getattr(spec, name)} is too small for {spec.kind}; give {smallest} or more")
    if spec.vocab_size > 1 << 31:
        raise ValueError(f"--vocab_size {spec.vocab_size} does not fit 32-bit ids; give {1 << 31} or less")


def generator_of(spec: Synthetic, index: int) -> Generator:
    """Returns the random generator of a document."""
    return np.random.default_rng((spec.seed, index))


def draw_document(spec: Synthetic, index: int) -> Ids:
    """Draws the document with this index."""
    return KINDS[spec.kind].draw(generator_of(spec, index), spec.length, spec.vocab_size)


def needle_depths(spec: Synthetic) -> list[float]:
    """Returns the relative position of each document's key: 0 at the start, 1 right before the question."""
    positions = (_draw_needle_position(generator_of(spec, index), spec.length) for index in range(spec.documents))
    return [round(position / max(1, spec.length - 4), 4) for position in positions]
