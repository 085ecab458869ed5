"""Token directories and their windows: written whole or not at all, and refused in one line if they are corrupt."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lightseq.data.open_examples import open_examples
from lightseq.data.token_directory import open_token_directory, write_token_directory
from lightseq.utils.tensors import IGNORE_INDEX


def token_directory(path: Path, *documents: Sequence[int], vocab_size: int = 1000, force: bool = False) -> Path:
    write_token_directory(path, (np.asarray(ids, np.int64) for ids in documents), vocab_size, dict, force)
    return path


def refusal(path: Path, vocab_size: int = 1000) -> str:
    with pytest.raises(ValueError) as caught:
        open_examples(path, 4, vocab_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_target_of_every_document_is_in_exactly_one_window_and_no_window_crosses_a_document(
    tmp_path: Path,
) -> None:
    documents = [[10 * d + i for i in range(n)] for d, n in enumerate([5, 1, 9, 2, 4, 8])]
    for length in (1, 2, 3, 4, 20):
        path = token_directory(tmp_path / f"t{length}", *documents)
        examples = open_examples(path, length, vocab_size=1000)
        targets = []
        for example in examples:  # type: ignore[attr-defined]  # ends with an IndexError
            assert example.input_ids.dtype == example.labels.dtype == np.int64
            ids, labels = example.input_ids.tolist(), example.labels.tolist()
            assert len({token // 10 for token in [*ids, *labels] if token != IGNORE_INDEX}) == 1
            assert labels[:-1] == ids[1:]
            targets += [label for label in labels if label != IGNORE_INDEX]
        assert sorted(targets) == sorted(token for ids in documents for token in ids[1:])
        assert examples.notes == (f"{path}: skipped 1 document of fewer than two tokens",)


def test_the_token_type_is_the_smallest_that_holds_the_vocabulary(tmp_path: Path) -> None:
    for vocab_size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "uint32")):
        source = open_token_directory(token_directory(tmp_path / dtype, [0, vocab_size - 1], vocab_size=vocab_size))
        assert source.meta["dtype"] == dtype and source.document(0).tolist() == [0, vocab_size - 1]


def test_a_directory_is_replaced_only_by_force_and_only_if_it_holds_tokens(tmp_path: Path) -> None:
    path = token_directory(tmp_path / "t", [1, 2])
    with pytest.raises(ValueError, match="exists"):
        token_directory(path, [3, 4])
    token_directory(path, [5, 6], force=True)
    with pytest.raises(ValueError, match="document 1"):
        token_directory(path, [3, 4], [10], vocab_size=10, force=True)
    assert open_token_directory(path).document(0).tolist() == [5, 6], "a write that fails leaves what was there"
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        token_directory(path, [5, 6], force=True)


def test_leftovers_of_a_killed_process_with_the_same_pid_do_not_stop_a_write(tmp_path: Path) -> None:
    left = tmp_path / f".t.partial-{os.getpid()}"
    left.mkdir()
    path = token_directory(tmp_path / "t", [1, 2])
    assert path.stat().st_mode == left.stat().st_mode, "others may read it"
    token_directory(path, [5, 6], force=True)
    assert open_token_directory(path).document(0).tolist() == [5, 6]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
def test_a_corrupt_token_directory_is_one_line_naming_the_file(tmp_path: Path, name: str) -> None:
    path = token_directory(tmp_path / "t", range(9), range(4))
    whole = (path / name).read_bytes()
    if name == "documents.bin":
        np.array([0, 20, 13], dtype="<i8").tofile(path / name)  # offsets that fall
        assert "documents.bin is corrupt" in refusal(path)
    (path / name).write_bytes(whole[:-3])
    assert str(path / name) in refusal(path)
    (path / name).unlink()
    assert name in refusal(path)


@pytest.mark.parametrize("key", ["dtype", "tokens", "documents", "max_token_id", "tokenizer", "targets"])
@pytest.mark.parametrize("value", [None, True, -1, "x", [], {}, [3], [{"document": []}], {"a": 1}], ids=str)
def test_a_meta_file_of_odd_types_is_read_or_one_line(tmp_path: Path, key: str, value: object) -> None:
    path = token_directory(tmp_path / "t", range(7))
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {key: value}))
    try:
        open_examples(path, 3, 1000)
    except ValueError as error:
        assert " is corrupt: " in str(error) and "\n" not in str(error)


def test_ids_outside_the_vocabulary_are_refused_even_if_meta_json_is_wrong(tmp_path: Path) -> None:
    path = token_directory(tmp_path / "t", [1, 2, 3], [4, 5, 6, 7, 99])  # 99 is a label only, one past its window
    assert f"{path} has token id 99" in refusal(path, vocab_size=99)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"max_token_id": 5}))
    examples = open_examples(path, 4, vocab_size=10)
    with pytest.raises(ValueError, match="document 1 has token id 99"):
        examples[1]
