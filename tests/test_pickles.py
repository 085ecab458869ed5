"""Pickles of token ids: read in every protocol, and refused in one line if damaged, hostile or of another shape."""

import json
import os
import pickle
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile_pickles import Hostile
from programs import alone
from transformers import LlamaConfig

from lightseq.data.open_examples import open_examples
from lightseq.data.sequences import read_pickle
from lightseq.data.sources import ReadOptions
from lightseq.utils.pickles import load_plain
from lightseq.utils.tensors import IGNORE_INDEX

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def pickle_file(path: Path, content: object, protocol: int | None = None) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def refusal(path: Path, length: int = 4, vocab_size: int = 10) -> str:
    with pytest.raises(ValueError) as caught:
        open_examples(path, length, vocab_size)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_a_pickle_is_one_example_a_sequence_cut_and_counted(tmp_path: Path) -> None:
    ids = [[1, 2, 3, 4, 5], [6, 7], [8]]
    content = {"input_ids": ids, "source": "somewhere", "attention_mask": [[1] * len(row) for row in ids]}
    path = pickle_file(tmp_path / "data.pkl", content)
    examples = open_examples(path, length=3, vocab_size=10)
    found = [(examples[i].input_ids.tolist(), examples[i].labels.tolist()) for i in range(len(examples))]
    assert found == [([1, 2, 3], [2, 3, 4]), ([6, 7], [7, IGNORE_INDEX])]  # 4 is no input, but still a target
    assert examples.notes == (
        f"{path}: skipped 1 sequence of fewer than two tokens",
        f"{path}: truncated 1 sequence of 2 to 3 tokens, 2 tokens dropped",
    )


def test_labels_are_shifted_once_and_sequences_without_a_target_left_out(tmp_path: Path) -> None:
    content = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[-100, -100, -100], [-100, -100, 6]]}
    path = pickle_file(tmp_path / "p.pkl", content)
    examples = open_examples(path, 3, 10)
    assert len(examples) == 1 and examples[0].labels.tolist() == [IGNORE_INDEX, 6, IGNORE_INDEX]
    assert "skipped 1 sequence without a target in the first 3 tokens" in examples.notes[0]
    assert "every label is -100" in refusal(path, length=1)


def test_every_sequence_has_labels_or_none_has(tmp_path: Path) -> None:
    ids, given = [[1, 2, 3], [4, 5, 6]], [-100, 2, 3]
    rows = [{"input_ids": ids[0], "labels": given}, {"input_ids": ids[1]}]
    for content in (rows, [rows[0], {**rows[1], "labels": None}], {"input_ids": ids, "labels": [given, None]}):
        said = refusal(pickle_file(tmp_path / "p.pkl", content))
        assert "sequence 1 has no labels or mask, but the first row has" in said
    for content in (rows[::-1], {"input_ids": ids[::-1], "labels": [None, given]}):
        assert "sequence 1 has labels, but the first row has none" in refusal(pickle_file(tmp_path / "p.pkl", content))
    for nothing in (None, [None, None]):
        path = pickle_file(tmp_path / "p.pkl", {"input_ids": ids, "labels": nothing})
        assert open_examples(path, 3, 10)[1].labels.tolist() == [5, 6, IGNORE_INDEX]


# Columns that token ids were made from, and metadata.
SOURCES: Mapping[str, list[object]] = {
    "text": ["a text", "b"],
    "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
    "prompt": ["a", None],
    "completion": [[{"role": "assistant", "content": "text"}], []],
    "article_title": ["A", "B"],
    "provenance": [{"page": 1, "by": "Ada"}, {"page": 2, "by": None}],
    "pieces": [["a", " text"], ["b"]],
}
METADATA = {"id": [1, 2], "source": ["web", "web"], "label": [0, 1], "score": [0.5, 0.25]}


def test_columns_that_ids_were_made_from_are_ignored_with_one_note_in_every_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    ids = [[1, 2, 3], [4, 5]]
    plain = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    columns = {**plain, **SOURCES, **METADATA}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(ids))]
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(tmp_path / "data.parquet")
    made.save_to_disk(tmp_path / "saved")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data.json").write_text(json.dumps(rows))
    pickle_file(tmp_path / "rows.pkl", rows)
    pickle_file(tmp_path / "columns.pkl", columns)
    options = ReadOptions(cache=tmp_path / "cache")
    for name in ("columns.pkl", "rows.pkl", "data.jsonl", "data.json", "data.parquet", "saved"):
        examples = open_examples(tmp_path / name, 8, 10, read_options=options)
        assert [examples[i].input_ids.tolist() for i in range(len(examples))] == ids, name
        (note,) = (note for note in examples.notes if "ignored" in note)
        assert note.endswith(f"ignored 7 columns beside input_ids, which are trained: {', '.join(SOURCES)}"), name


def test_columns_of_numbers_beside_ids_are_refused_in_every_file_unless_ignored(tmp_path: Path) -> None:
    ids, unknown = [[1, 2, 3], [4, 5]], {"targets": [[1, 2, 3], [4, 5]], "importance": [0.5, 1.0]}
    for column, values in unknown.items():
        rows = [{"input_ids": row, "text": "x", column: value} for row, value in zip(ids, values, strict=True)]
        pickle_file(tmp_path / "data.pkl", {"input_ids": ids, "text": ["x", "x"], column: values})
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in ("data.pkl", "data.jsonl"):
            options = ReadOptions(cache=tmp_path / "cache")
            with pytest.raises(ValueError, match=f"column '{column}' is not known .* --ignore_columns {column} if it"):
                open_examples(tmp_path / name, 8, 10, read_options=options)
            ignored = replace(options, ignored_columns=(column, "text"))
            examples = open_examples(tmp_path / name, 8, 10, read_options=ignored)
            assert examples[1].input_ids.tolist() == [4, 5] and not any("ignored" in note for note in examples.notes)


def test_columns_of_a_pickle_are_read_under_other_names(tmp_path: Path) -> None:
    options = ReadOptions(renamed_columns={"tokens": "input_ids"})
    for content in ({"tokens": [[1, 2, 3]]}, [{"tokens": [1, 2, 3]}]):
        path = pickle_file(tmp_path / "data.pkl", content)
        assert open_examples(path, 8, 10, read_options=options)[0].input_ids.tolist() == [1, 2, 3]
        with pytest.raises(ValueError, match="has no column 'ids', which --columns reads as 'input_ids'; it has: tok"):
            open_examples(path, 8, 10, read_options=replace(options, renamed_columns={"ids": "input_ids"}))


def test_a_pickled_data_set_trains_as_typed(tmp_path: Path) -> None:
    """The experiments' own data is a tokenized data set with its texts."""
    ids = [[3 + (i * j) % 250 for j in range(1, 70 + i)] for i in range(1, 9)]
    content = {"text": ["a text"] * 8, "input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    path = pickle_file(tmp_path / "data.pkl", {**content, "mystery": [1] * 8})
    config = LlamaConfig(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.save_pretrained(tmp_path / "model")
    words = f"--model_name_or_path {tmp_path}/model --random_init --data_path {path} --model_max_length 64 "
    words += f"--max_steps 1 --save_strategy no --output_dir {tmp_path}"
    ignoring = alone(f"{words}/ignoring --ignore_columns mystery")
    pickle_file(path, content)
    end = alone(f"{words}/typed")
    assert (ignoring.status, end.status) == (0, 0), ignoring.err + end.err
    run = json.loads((tmp_path / "typed" / "run.json").read_text())
    assert any(note.endswith("which are trained: text") for note in run["notes"])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_is_read_and_a_truncated_pickle_is_one_line(tmp_path: Path, protocol: int) -> None:
    rows = [[1, 300, 70_000, 2], [5] * 3000, [], [-1, 2**40]]
    others = {"ids": ["ä", "x" * 300], "notes": [0.5, None, True, False], "seed": 2**70, "source": b"\x00r"}
    if protocol < 3:
        del others["source"]
    for content in (
        {"input_ids": rows, **others},
        {"input_ids": tuple(map(tuple, rows)), "meta": [{"a": 1}, {"a": (2, 3, 4, 5)}]},
    ):
        path = pickle_file(tmp_path / "data.pkl", content, protocol)
        assert [ids.tolist() for ids, _ in read_pickle(path)] == rows
        assert load_plain(path) == content
    whole = pickle.dumps({"input_ids": [[1, 2, 300, 70000]], "s": "text", "f": 0.5}, protocol)
    for cut in range(len(whole) - 1):
        path.write_bytes(whole[:cut])
        refusal(path, vocab_size=100_000)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_runs_no_code(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "trap"
    path = pickle_file(tmp_path / "data.pkl", {"input_ids": [[1, 2]], "x": Hostile(trap)}, protocol)
    assert "it builds" in refusal(path) and not trap.exists()
    pickle.loads(path.read_bytes())  # the trap works
    assert trap.exists()


def nested_lists() -> bytes:
    row = [1]
    for _ in range(40):
        row = [row, row]  # type: ignore[list-item]
    return pickle.dumps({"input_ids": [row]})


NO_PICKLE = "cannot be read as a pickle"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", NO_PICKLE),  # GLOBAL, REDUCE
        (b"(S'true'\nios\nsystem\n.", NO_PICKLE),  # INST
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", NO_PICKLE),  # STACK_GLOBAL
        (b"\x82\x01.", NO_PICKLE),  # EXT1: a registered extension
        (b"P1\n.", NO_PICKLE),  # PERSID: an object outside the file
        (b"K\x01K\x02R.", NO_PICKLE),  # REDUCE of a number
        (b"S'int'\n)\x81.", NO_PICKLE),  # NEWOBJ of a string
        (b"]}S'a'\nK\x01sb.", NO_PICKLE),  # BUILD of a list
        (b"}]K\x01s.", NO_PICKLE),  # a list as a key
        (b"h\x07.", NO_PICKLE),  # a memo that was never set
        (b"Xtoo little.", NO_PICKLE),
        (b"not a pickle", NO_PICKLE),
        (pickle.dumps({"input_ids": [np.array([1, 2])]}), "numpy"),
        # Python's unpickler would allocate 64 GiB for the memo.
        (b"}r" + (2**32 - 1).to_bytes(4, "little") + b".", "is not a dict with"),
        (b"}p4294967295\n.", "is not a dict with"),
        # The hash of the first would overflow the stack, the hash of the second never end.
        (b"\x80\x04})" + b"\x85" * 300_000 + b"Ns.", "a dict key is a tuple"),
        (b"\x80\x04})" + b"q\x00h\x00\x86" * 60 + b"Ns.", "a dict key is a tuple"),
        (nested_lists(), "is not a list of integers"),
    ],
    ids=lambda x: repr(x[:20]),
)
def test_a_damaged_or_hostile_pickle_is_one_line_at_once(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "data.pkl"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert reason in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.pkl")
    assert "not a regular file" in refusal(tmp_path / "data.pkl")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([[1, 2]], "is not a dict with 'input_ids'"),
        ({"input_ids": [1, 2]}, "sequence 0 is not a list of integers"),
        ({"input_ids": [[1.5, 2.0]]}, "sequence 0 is not a list of integers"),
        ({"input_ids": [[True, False]]}, "sequence 0 is not a list of integers"),
        ({"input_ids": [[[1, 2], [3]]]}, "sequence 0 is not a list of integers"),
        ({"input_ids": [[1, 1 << 70]]}, "sequence 0 is not a list of integers"),
        ({"input_ids": [[1, 2]], "labels": [[1, 2], [3]]}, "'labels' is not a list with one entry for each of 1"),
        ({"input_ids": [[1, 2]], "labels": [[1]]}, "2 input_ids but 1 labels"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1]]}, "'attention_mask' is not a list with one entry"),
        ({"input_ids": [[3, 4], [1, 0]], "attention_mask": [[1, 1], [1, 0]]}, "its attention_mask masks tokens"),
        ({"input_ids": []}, "has no sequence of at least two tokens"),
        ({"input_ids": [[], [1]]}, "has no sequence of at least two tokens"),
        ({"input_ids": [[1, 2], [3, 99]]}, "sequence 1 has token id 99"),
        ({"input_ids": [[1, -5, 2]]}, "token id -5"),
        ({"input_ids": [[1, 2]], "labels": [[-100, 99]]}, "sequence 0 labels has token id 99"),
        *(
            ({"input_ids": [[5, 6]], column: [[0, 1]], "source": "web"}, f"column '{column}' is not known beside inp")
            for column in ("loss_mask", "position_ids", "mystery")
        ),
    ],
)
def test_a_pickle_of_another_shape_is_one_line(tmp_path: Path, content: object, reason: str) -> None:
    assert reason in refusal(pickle_file(tmp_path / "data.pkl", content))
