"""A resumed run recognizes all of its data: every token, every target and their order."""

import json
import pickle
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import slow_except
from programs import programs
from small import VOCABULARY, words, write_inputs
from worlds import spawn

from data_gen.__main__ import main as data_gen
from lightseq.checkpoint import manifest
from lightseq.data.batches import BatchStream
from lightseq.data.content import hash_content
from lightseq.data.open_examples import open_examples
from lightseq.data.packing import open_packed
from lightseq.data.sources import ReadOptions
from lightseq.data.token_directory import META, SHA256, TARGETS, TOKENS, write_token_directory

LENGTH, ROWS = 8, 400
REFUSED = "was trained on other data with as many examples; resume with the same data"
Rows = list[list[int]]


def rows_of_ids(seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH)).tolist()


def as_directory(path: Path, rows: Rows, targets: Any = None) -> Path:
    masks = [None] * len(rows) if targets is None else [mask > 0 for mask in targets]
    documents = [(np.array(ids), mask) for ids, mask in zip(rows, masks, strict=True)]
    write_token_directory(path, documents, VOCABULARY, dict, with_targets=targets is not None)
    return path


def as_pickle(path: Path, rows: Rows, **more: Any) -> Path:
    path.write_bytes(pickle.dumps({"input_ids": rows, **more}))
    return path


def as_rows(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    return path


def as_texts(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps({"text": "".join(chr(97 + i % 26) for i in ids)}) + "\n" for ids in rows))
    return path


def stream(path: Path, packed: bool = False, lazy: bool = False) -> BatchStream:
    options = ReadOptions(cache=path.parent / "cache")
    open_data = open_packed if packed else open_examples
    examples = open_data(path, LENGTH, VOCABULARY + 300, "byte", lazy, False, options)
    return BatchStream(examples, LENGTH, 1, content=hash_content(examples))


def resumes(before: BatchStream, after: BatchStream) -> tuple[str, ...]:
    return after.resume_at(1, before.state(1), Path("/checkpoint"))[1]


def swapped(rows: Rows) -> Rows:
    return [rows[0], rows[2], rows[1], *rows[3:]]


def one_changed(rows: Rows) -> Rows:
    return [*rows[:9], [*rows[9][:-1], (rows[9][-1] + 1) % VOCABULARY], *rows[10:]]


def nearly_all_replaced(rows: Rows) -> Rows:
    same = set(np.linspace(0, ROWS - 1, 16).astype(int).tolist())
    return [ids if i in same else other for i, (ids, other) in enumerate(zip(rows, rows_of_ids(1), strict=True))]


@pytest.mark.parametrize(
    ("change", "write"),
    slow_except(
        [(swapped, as_directory), (one_changed, as_pickle), (one_changed, as_rows), (nearly_all_replaced, as_texts)],
        product((swapped, one_changed, nearly_all_replaced), (as_directory, as_pickle, as_rows, as_texts)),
    ),
)
def test_data_that_differ_anywhere_are_refused(
    write: Callable[[Path, Rows], Path], change: Callable[[Rows], Rows], tmp_path: Path
) -> None:
    rows, suffix = rows_of_ids(), {as_directory: "", as_pickle: ".pkl"}.get(write, ".jsonl")
    paths = [write(tmp_path / f"{name}{suffix}", x) for name, x in (("a", rows), ("b", rows), ("c", change(rows)))]
    for packed, lazy in ((False, False), (True, False), *([(False, True)] if write is as_texts else [])):
        before, same, other = (stream(path, packed, lazy) for path in paths)
        assert resumes(before, same) == (), "the same, wherever it lies"
        with pytest.raises(ValueError, match=REFUSED):
            resumes(before, other)


def test_other_targets_or_borders_of_documents_are_refused(tmp_path: Path) -> None:
    rows, targets = rows_of_ids(), np.ones((ROWS, LENGTH), int)
    before = stream(as_directory(tmp_path / "a", rows, targets))
    targets[9, 4] = 0
    with pytest.raises(ValueError, match=REFUSED):
        resumes(before, stream(as_directory(tmp_path / "b", rows, targets)))
    moved = [[*rows[0], rows[1][0]], rows[1][1:], *rows[2:]]  # the border between the first two documents
    with pytest.raises(ValueError, match=REFUSED):
        resumes(stream(as_directory(tmp_path / "c", rows)), stream(as_directory(tmp_path / "d", moved)))
    labels = [list(ids) for ids in rows]
    first = stream(as_pickle(tmp_path / "a.pkl", rows, labels=labels))
    labels[9][4] = -100
    with pytest.raises(ValueError, match=REFUSED):
        resumes(first, stream(as_pickle(tmp_path / "b.pkl", rows, labels=labels)))


def test_another_packing_of_the_same_data_is_refused(tmp_path: Path) -> None:
    rows = rows_of_ids()
    rows[1] = rows[1][:-1]  # packed last, between two of the examples that are compared one by one
    path = as_pickle(tmp_path / "a.pkl", rows)
    assert len(stream(path).examples) == len(stream(path, packed=True).examples)
    with pytest.raises(ValueError, match="the same --packing"):
        resumes(stream(path), stream(path, packed=True))


def edit(path: Path, index: int = 75) -> None:
    tokens = np.memmap(path / TOKENS, dtype=np.uint16, mode="r+")
    tokens[index] = (tokens[index] + 1) % VOCABULARY
    tokens.flush()


def test_a_token_directory_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = as_directory(tmp_path / "a", rows_of_ids())
    before, copy = stream(path), shutil.copytree(path, tmp_path / "copy")
    assert resumes(before, stream(copy)) == ()
    (path / TOKENS).write_bytes((path / TOKENS).read_bytes())
    assert resumes(before, stream(path)) == (), "written again, but the same"
    edited = bytearray((path / TOKENS).read_bytes())
    edited[75] ^= 1
    (path / TOKENS).write_bytes(edited)
    with pytest.raises(ValueError, match=REFUSED):
        resumes(before, stream(path))
    assert resumes(stream(path), stream(path)) == (), "a run that began with the edited tokens"


def test_data_gen_writes_the_hashes_of_all_files(tmp_path: Path) -> None:
    line = f"synthetic --kind needle --documents 3 --length 64 --targets answer --output {tmp_path}/n"
    assert data_gen(line.split()) == 0
    written = json.loads((tmp_path / "n" / META).read_text())[SHA256]
    assert written == {name: manifest.describe(tmp_path / "n" / name).sha256 for name in written}
    assert TARGETS in written and len(written) == 3


def without_hashes(path: Path) -> Path:
    meta = json.loads((path / META).read_text())
    del meta[SHA256]
    (path / META).write_text(json.dumps(meta))
    return path


def test_a_directory_without_hashes_is_read(tmp_path: Path) -> None:
    path = as_directory(tmp_path / "a", rows_of_ids())
    before = stream(path)
    assert resumes(before, stream(without_hashes(path))) == ()


def test_data_read_in_another_way_and_old_checkpoints_are_compared_by_examples(tmp_path: Path) -> None:
    path = as_texts(tmp_path / "a.jsonl", [ids[:-1] for ids in rows_of_ids()])
    beforehand, on_access = stream(path), stream(path, lazy=True)
    told = "compared 16 examples with the checkpoint's, not all the data: "
    assert resumes(beforehand, on_access) == (told + "the data was read in another way",)
    state = beforehand.state(1)
    del state["content"]
    assert beforehand.resume_at(1, state, Path("/c"))[1] == (told + "the checkpoint has no hash of it",)
    with pytest.raises(ValueError, match=REFUSED):
        beforehand.resume_at(1, state | {"fingerprint": 1}, Path("/c"))


@pytest.mark.slow
def test_a_run_refuses_an_edited_token_directory_and_goes_on_from_an_old_checkpoint(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    as_directory(tmp_path / "tokens", rows_of_ids())
    first = words(tmp_path, "run", f"--data_path {tmp_path}/tokens --max_steps 2 --save_steps 1")
    assert [end.status for end in spawn(2, programs, "llama3", [first])[0]] == [0]
    again = first.replace("--max_steps 2", "--max_steps 3") + " --resume_from_checkpoint True"
    edit(tmp_path / "tokens")
    (end,) = spawn(2, programs, "llama3", [again])[0]
    assert end.status == 2 and REFUSED in end.err and end.err.count("\n") == 1
    checkpoint = tmp_path / "run" / "checkpoint-2"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["data"]["content"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    manifest.write(checkpoint, manifest.describe_all(checkpoint, manifest.files_below(checkpoint)))
    (end,) = spawn(2, programs, "llama3", [again])[0]
    assert end.status == 0 and "compared 16 examples" in end.out
