"""Needle-in-a-haystack texts: a number hidden at some depth of a long text, and a question at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightseq.data.examples import check_ids
from lightseq.data.tokenizer import Tokenizer

SENTENCE: Final = "\nThe pass key is {number}. Remember it: {number} is the pass key.\n"
QUESTION: Final = "\nWhat is the pass key? The pass key is"
ANSWER: Final = " {number}"
# The default haystack (Mohtashami and Jaggi, arXiv 2305.16300).
FILLER: Final = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SMALLEST, LARGEST = 10_000, 100_000  # five digits
DRAWS = 1000  # numbers tried as wrong answers, which need as many tokens as the right one

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Needle:
    """Hidden sentence, question at the end, and answers of equal length, the right one first."""

    sentence: Ids
    question: Ids
    answers: tuple[Ids, ...]
    absent: Ids  # tokens to remove from the haystack, so that only the needle has the answer


@dataclass(frozen=True)
class TextNeedles:
    """Needles made of text: five-digit numbers in a sentence."""

    tokenizer: Tokenizer

    @property
    def begin(self) -> Ids:
        return np.asarray(self.tokenizer.begin, dtype=np.int64)

    def draw(self, generator: np.random.Generator, choices: int) -> Needle:
        right = int(generator.integers(SMALLEST, LARGEST))
        question, answer = self._ending(right)
        answers, numbers = [answer], {right}
        for number in map(int, generator.integers(SMALLEST, LARGEST, DRAWS)):
            its_question, answer = self._ending(number)
            comparable = len(answer) == len(answers[0]) and np.array_equal(its_question, question)
            if len(answers) < choices and number not in numbers and comparable:
                answers.append(answer)
                numbers.add(number)
        if len(answers) < choices:
            raise ValueError(
                f"--choices {choices}: tokenizer {self.tokenizer.name} has {len(answers)} numbers of equal length; "
                "give fewer"
            )
        return Needle(self._ids(SENTENCE.format(number=right)), question, tuple(answers), np.zeros(0, np.int64))

    def hay(self, generator: np.random.Generator, count: int) -> Ids:
        return self._ids(FILLER * 8)

    def _ending(self, number: int) -> tuple[Ids, Ids]:
        """Encodes question and answer as one text and splits the tokens where the number begins."""
        question, whole = self._ids(QUESTION), self._ids(QUESTION + ANSWER.format(number=number))
        shorter = min(len(question), len(whole) - 1)
        same = question[:shorter] == whole[:shorter]
        cut = shorter if same.all() else int(same.argmin())
        return whole[:cut], whole[cut:]

    def _ids(self, text: str) -> Ids:
        return self.tokenizer.encode_part(text).astype(np.int64)


@dataclass(frozen=True)
class IdNeedles:
    """Needles made of token ids: a key and a value from the upper half of the vocabulary, and the key as question.

    `data_gen synthetic --kind needle` writes such data, to train retrieval without a tokenizer.
    """

    vocab_size: int
    excluded: tuple[int, ...] = ()  # ids that mark images or audio

    @property
    def begin(self) -> Ids:
        return np.zeros(0, np.int64)

    def draw(self, generator: np.random.Generator, choices: int) -> Needle:
        upper = self._ids(self.vocab_size // 2, self.vocab_size)
        if len(upper) < choices + 1:
            raise ValueError(f"--choices {choices} needs {choices + 1} of the upper {len(upper)} token ids; give fewer")
        key, *values = generator.choice(upper, choices + 1, replace=False)
        answers = tuple(np.array([value], dtype=np.int64) for value in values)
        return Needle(np.array([key, values[0]]), np.array([key]), answers, np.array([key, *values]))

    def hay(self, generator: np.random.Generator, count: int) -> Ids:
        return generator.choice(self._ids(0, max(1, self.vocab_size // 2)), count)

    def _ids(self, begin: int, end: int) -> Ids:
        return np.setdiff1d(np.arange(begin, end), self.excluded)


@dataclass(frozen=True)
class Search:
    """Needles and their haystack. A trial has the same needle and hay at every depth and length."""

    source: TextNeedles | IdNeedles
    needles: tuple[Needle, ...]
    hay: Ids
    seed: int

    def text(self, trial: int, depth: float, length: int) -> Ids:
        """Returns a text that has `length` tokens with its answer, and the needle at `depth` (0 to 1) of the hay."""
        needle = self.needles[trial]
        hay = self.hay[~np.isin(self.hay, needle.absent)]
        around = length - self.least_length(needle)
        first = int(np.random.default_rng((self.seed, trial, 1)).integers(len(hay)))
        hay = hay.take(np.arange(first, first + around), mode="wrap")
        before = round(depth * around)
        return np.concatenate([self.source.begin, hay[:before], needle.sentence, hay[before:], needle.question])

    def least_length(self, needle: Needle) -> int:
        """Returns the tokens of a text without hay."""
        return sum(map(len, (self.source.begin, needle.sentence, needle.question, needle.answers[0])))


def make_search(
    source: TextNeedles | IdNeedles,
    hay: Ids | None,
    trials: int,
    choices: int,
    seed: int,
    lengths: Sequence[int],
    vocab_size: int,
) -> Search:
    """Draws needles. Raises ValueError if they do not fit into the lengths or the model's vocabulary."""
    drawn = tuple(source.draw(np.random.default_rng((seed, trial)), choices) for trial in range(trials))
    if hay is None:
        hay = source.hay(np.random.default_rng((seed, trials)), max(lengths))
    search = Search(source, drawn, hay, seed)
    for needle in drawn:
        for ids in (needle.sentence, needle.question, *needle.answers, source.begin):
            check_ids(ids, vocab_size, "the needle")
        if np.isin(hay, needle.absent).all():
            raise ValueError("the haystack has only keys and values; give another --data_path, or leave it out")
    check_ids(hay, vocab_size, "the haystack")
    if min(lengths) < (least := max(map(search.least_length, drawn))):
        raise ValueError(f"--lengths {min(lengths)}: the needle and its question take {least} tokens; give {least}")
    return search
