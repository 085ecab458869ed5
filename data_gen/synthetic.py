"""Synthetic documents with a known structure: the kinds, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
    shortest: int | None = None  # None: all documents have `length` tokens


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
    if spec.shortest is not None:
        if spec.shortest < kind.min_length:
            raise ValueError(f"--shortest {spec.shortest} is too small for {spec.kind}; give {kind.min_length} or more")
        doublings = (spec.length // spec.shortest).bit_length() - 1
        if spec.shortest > spec.length or spec.shortest << doublings != spec.length:
            raise ValueError(
                f"--length {spec.length} is not --shortest {spec.shortest} times a power of two; change one of them"
            )
    if spec.vocab_size > 1 << 31:
        raise ValueError(f"--vocab_size {spec.vocab_size} does not fit 32-bit ids; give {1 << 31} or less")


def generator_of(spec: Synthetic, index: int) -> Generator:
    """Returns the random generator of a document."""
    return np.random.default_rng((spec.seed, index))


def draw_document(spec: Synthetic, index: int) -> Ids:
    """Draws the document with this index."""
    generator = generator_of(spec, index)
    return KINDS[spec.kind].draw(generator, _draw_length(spec, generator), spec.vocab_size)


def _draw_length(spec: Synthetic, generator: Generator) -> int:
    """Draws a length that is `shortest` or a multiple by a power of two; each gets as many tokens on average."""
    if spec.shortest is None:
        return spec.length
    lengths = spec.shortest << np.arange((spec.length // spec.shortest).bit_length())
    return int(generator.choice(lengths, p=1 / lengths / (1 / lengths).sum()))


def answer_targets(needle: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Returns the mask of a needle document's answer, which is its last token."""
    return np.arange(len(needle)) == len(needle) - 1


def needle_depths(spec: Synthetic) -> list[float]:
    """Returns the relative position of each document's key: 0 at the start, 1 right before the question."""
    return [_needle_depth(spec, generator_of(spec, index)) for index in range(spec.documents)]


def _needle_depth(spec: Synthetic, generator: Generator) -> float:
    length = _draw_length(spec, generator)
    return round(_draw_needle_position(generator, length) / max(1, length - 4), 4)
