"""Batches by index: padding, the order over ranks and epochs, and runs that resume at the next sample."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightseq.data.batches import BatchStream
from lightseq.data.open_examples import open_examples
from lightseq.data.sources import ReadOptions
from lightseq.utils.tensors import IGNORE_INDEX

HERE = Path("/somewhere")


def stream(folder: Path, count: int = 10, **keywords: Any) -> BatchStream:
    """Returns a stream of sequences of 2 and 3 equal ids, from 0 on."""
    path = folder / "stream.pkl"
    path.write_bytes(pickle.dumps({"input_ids": [[i, i, i][: 2 + i % 2] for i in range(count)]}))
    return BatchStream(open_examples(path, 4, 100), length=4, **keywords)


def firsts(stream: BatchStream, steps: Sequence[int]) -> list[int]:
    """Returns the first id of every sequence, in the order of ranks and accumulation; -1 for an empty one."""
    found = []
    for step in steps:
        for accumulation_index in range(stream.accumulation):
            for rank in range(stream.data_ranks):
                batch = stream.batch(step, accumulation_index, rank)
                empty = (batch.labels == IGNORE_INDEX).all(dim=1)
                found += [-1 if e else int(i) for e, i in zip(empty, batch.input_ids[:, 0], strict=True)]
    return found


def filled(stream: BatchStream, steps: Sequence[int]) -> list[int]:
    return [i for i in firsts(stream, steps) if i >= 0]


def texts_file(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_batch_is_right_padded_and_counts_its_targets(tmp_path: Path) -> None:
    batch = stream(tmp_path, batch_size=2, shuffle=False, data_ranks=2).batch(0, data_rank=1)
    assert batch.input_ids.tolist() == [[2, 2, 0, 0], [3, 3, 3, 0]]
    assert batch.labels.tolist() == [[2, -100, -100, -100], [3, 3, -100, -100]]
    assert batch.valid_tokens == 3


def test_every_epoch_reads_every_example_once_in_its_own_order(tmp_path: Path) -> None:
    ordered = stream(tmp_path, count=12, batch_size=2, data_ranks=3, accumulation=2, shuffle=False, epochs=2)
    assert ordered.sequences_per_step == 12 and ordered.steps == 2
    assert firsts(ordered, range(2)) == [*range(12), *range(12)]
    endless = stream(tmp_path, count=3, batch_size=2, shuffle=False)
    assert firsts(endless, range(4)) == [0, 1, 2, 0, 1, 2, 0, 1]
    shuffled = stream(tmp_path, batch_size=5, epochs=3, seed=7)
    epochs = [firsts(shuffled, range(start, start + 2)) for start in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert firsts(stream(tmp_path, batch_size=5, epochs=3, seed=8), range(2)) != epochs[0]


def test_the_last_step_is_filled_up_with_empty_sequences(tmp_path: Path) -> None:
    ordered = stream(tmp_path, count=5, batch_size=2, data_ranks=2, shuffle=False, epochs=1)
    assert ordered.steps == 2 and ordered.epochs_after(2) == 1.0
    assert firsts(ordered, range(2)) == [0, 1, 2, 3, 4, -1, -1, -1]
    assert ordered.batch(1, data_rank=1).valid_tokens == 0


def test_a_fraction_of_an_epoch_is_a_fraction_of_the_examples(tmp_path: Path) -> None:
    assert stream(tmp_path, batch_size=1, epochs=0.3).steps == 3
    assert stream(tmp_path, batch_size=1, epochs=1.5).epochs_after(12) == 1.2


def test_a_batch_depends_on_its_index_alone_and_a_step_on_no_split(tmp_path: Path) -> None:
    first = stream(tmp_path, batch_size=2, data_ranks=2, accumulation=2, seed=3)
    in_order = [first.batch(step, a, rank) for step in range(4) for a in range(2) for rank in range(2)]
    again = stream(tmp_path, batch_size=2, data_ranks=2, accumulation=2, seed=3).batch(3, 1, 0)
    assert again.input_ids.equal(in_order[14].input_ids) and again.labels.equal(in_order[14].labels)
    wide, narrow = stream(tmp_path, batch_size=8, seed=3), stream(tmp_path, batch_size=1, data_ranks=8, seed=3)
    assert firsts(wide, range(5)) == firsts(narrow, range(5)) == firsts(first, range(5))


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_a_run_resumed_with_other_ranks_skips_and_repeats_nothing(tmp_path: Path) -> None:
    before = stream(tmp_path, 40, batch_size=1, data_ranks=3, accumulation=2, epochs=1)
    line = filled(before, range(before.steps))
    assert sorted(line) == list(range(40))
    for data_ranks, accumulation, batch_size in ((3, 2, 1), (1, 3, 2), (1, 6, 1), (4, 1, 2), (1, 1, 1)):
        after = BatchStream(before.examples, 4, batch_size, data_ranks, accumulation, epochs=1)
        resumed, notes = after.resume_at(4, before.state(4), HERE)
        assert filled(before, range(4)) + filled(resumed, range(4, resumed.steps)) == line
        assert len(notes) == (after.sequences_per_step != 6)
        assert resumed.epochs_after(resumed.steps) == 1 and resumed.state(resumed.steps)["places"] >= 40
        older = {key: value for key, value in before.state(4).items() if key != "sequences_per_step"}
        assert after.resume_at(4, older, HERE) == (resumed, notes)
    again, notes = after.resume_at(10, resumed.state(10), HERE)  # of one that was resumed before
    assert notes == (), "nothing is another since then"
    assert firsts(again, range(10, 12)) == firsts(resumed, range(10, 12))


def test_a_finished_run_that_is_extended_skips_no_example_of_the_next_epoch(tmp_path: Path) -> None:
    once, twice = (stream(tmp_path, batch_size=4, epochs=epochs) for epochs in (1, 2))  # 10 examples, 4 a step
    extended, _ = twice.resume_at(once.steps, once.state(once.steps), HERE)
    assert sorted(filled(extended, range(once.steps, extended.steps))) == list(range(10))
    over = BatchStream(once.examples, 4, 2, epochs=1, first_step=3, first_sample=12)
    assert over.steps == 3, "the last step had read beyond the end by more than a step reads now"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"examples": 3000}, "/somewhere was trained on 3,000 examples, not on 10 examples; resume"),
        ({"seed": 7000}, "with --seed 7000, not with --seed 0; resume"),
    ],
)
def test_a_run_resumed_with_another_number_of_examples_or_seed_is_refused(
    tmp_path: Path, change: dict[str, int], line: str
) -> None:
    found = stream(tmp_path, batch_size=1)
    with pytest.raises(ValueError, match=line):
        found.resume_at(1, found.state(1) | change, HERE)


def test_a_missing_source_is_refused_with_what_makes_it(tmp_path: Path) -> None:
    for name, remedy in {
        "chats.jsonl": r"write \.jsonl rows there \(docs/data\.md",
        "rows.jsonl.gz": r"write \.jsonl\.gz rows there",
        "table.parquet": r"write \.parquet rows there",
        "tokens": "make a token directory with lightseq data",
        "data.pkl": "make the file with data_gen",
        "book.txt": "give another file",
    }.items():
        with pytest.raises(ValueError, match=f"{name} does not exist; check the path, .*{remedy}"):
            open_examples(tmp_path / name, 9, 300, "byte")


def test_resuming_with_different_data_of_the_same_size_is_refused(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(40)]
    before = BatchStream(open_examples(texts_file(tmp_path / "a.jsonl", *texts), 9, 300, "byte"), 9, 1)
    reversed_texts = texts_file(tmp_path / "b.jsonl", *(text[::-1] for text in texts))
    other = BatchStream(open_examples(reversed_texts, 9, 300, "byte"), 9, 1)
    with pytest.raises(ValueError, match="trained on other data with as many examples"):
        other.resume_at(1, before.state(1), HERE)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"or start from its weights with --lora_adapter {tmp_path}$"):
        other.resume_at(1, before.state(1), tmp_path)
    options = ReadOptions(cache=tmp_path / "cache")
    moved = open_examples(texts_file(tmp_path / "c.jsonl", *texts), 9, 300, "byte", False, read_options=options)
    assert BatchStream(moved, 9, 1).resume_at(1, before.state(1), HERE)[1] == (), "the same, wherever it lies"
    older = {key: value for key, value in before.state(1).items() if key != "fingerprint"}
    assert other.resume_at(1, older, HERE)[0].first_sample == 1
