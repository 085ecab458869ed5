"""Rows that --eval_fraction holds out: which ones, the same each time, and none of them trained on."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from byte_level import byte_level, open_path, published, write_rows

from lightseq.data.content import hash_content
from lightseq.data.examples import Examples
from lightseq.data.held_out import SelectedExamples, hold_out
from lightseq.data.mixture import WeightedPath, mix
from lightseq.data.open_examples import open_examples
from lightseq.data.packing import open_windows_to_pack, pack
from lightseq.data.token_directory import write_token_directory

LENGTH, DOCUMENTS = 8, 20
SIZES = [1 + 3 * i for i in range(DOCUMENTS)]  # the first has no target


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of various lengths; every token of a document is its number."""
    path = tmp_path_factory.mktemp("held-out") / "tokens"
    write_token_directory(path, [np.full(size, i) for i, size in enumerate(SIZES)], 100, lambda: {})
    return path


def split(path: Path, fraction: float = 0.25, seed: int = 1) -> tuple[SelectedExamples, SelectedExamples]:
    return hold_out(open_examples(path, LENGTH, 100), fraction, seed, path)


def documents_in(examples: Examples) -> set[int]:
    return {int(x) for i in range(len(examples)) for x in examples[i].input_ids}


def test_documents_are_held_out_whole_and_never_trained_on(tokens: Path) -> None:
    trained, held = split(tokens)
    assert documents_in(trained) | documents_in(held) == set(range(1, DOCUMENTS))
    assert not documents_in(trained) & documents_in(held)
    assert len(documents_in(held)) == 5, "a quarter of 19, rounded up"
    assert len(trained) + len(held) == len(open_examples(tokens, LENGTH, 100))
    assert f"held out 5 of 19 documents for evaluation ({len(held)} examples)" in trained.notes[-1]
    assert [len(trained[i].input_ids) for i in range(len(trained))] == trained.sizes.tolist()
    assert trained.tokens.tolist() == [SIZES[i] for i in sorted(documents_in(trained))]


def test_the_seed_alone_decides_which_are_held_out(tokens: Path) -> None:
    first, again, other = split(tokens), split(tokens), split(tokens, seed=2)
    assert documents_in(first[1]) == documents_in(again[1]) != documents_in(other[1])
    assert hash_content(first[0]) == hash_content(again[0]) != hash_content(other[0])


def test_packed_sequences_hold_the_documents_of_their_side_only(tokens: Path) -> None:
    trained, held = hold_out(open_windows_to_pack(tokens, LENGTH, 100), 0.25, 1, tokens)
    sides = [documents_in(pack(tokens, part)) for part in (trained, held)]
    assert sides == [documents_in(part) for part in split(tokens)]
    assert hash_content(pack(tokens, trained)) != hash_content(pack(tokens, held))


def test_sequences_of_a_pickle_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.pkl"
    path.write_bytes(pickle.dumps({"input_ids": [[i] * 5 for i in range(8)]}))
    trained, held = split(path)
    assert len(held) == 2 and not documents_in(trained) & documents_in(held)


def test_a_share_that_leaves_nothing_to_train_on_is_refused(tokens: Path) -> None:
    with pytest.raises(
        ValueError, match=r"--eval_fraction 0.99 holds out 19 of 19 documents in .* leaves none to train"
    ):
        split(tokens, 0.99)


def test_a_chat_is_held_out_with_all_its_answers(tmp_path: Path) -> None:
    """Qwen3's template makes an example of each answer, which begins with the questions before it."""
    tokenizer, chats = byte_level(published("qwen3")), []
    for number in range(12):
        turns = [turn for i in range(3) for turn in (("user", f"question {number}"), ("assistant", f"answer {i}"))]
        chats.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    path = write_rows(tmp_path / "chats.jsonl", *chats)
    examples = open_path(path, tokenizer)

    def questions(part: Examples) -> list[str]:
        texts = [tokenizer.backend.decode(part[i].input_ids) for i in range(len(part))]
        return [text.partition("question ")[2].partition("<")[0] for text in texts]

    trained, held = hold_out(examples, 0.25, 1, path)
    assert len(examples) == 36 and len(trained) == 27 and len(held) == 9
    assert not set(questions(trained)) & set(questions(held))
    assert f"{path}: held out 3 of 12 rows for evaluation (9 examples)" in trained.notes
    source = WeightedPath(str(path), 1.5)
    for part, rows in ((examples, 12), (trained, 9)):
        some = mix([part], [source], 1)
        count = [questions(some).count(question) for question in set(questions(part))]
        assert len(count) == rows and set(count) == {3, 6}
