"""data_gen: every kind has its structure, and lightseq reads what is written."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from programs import refusal

from data_gen.__main__ import main
from data_gen.sources import SkippedTexts, expand_sources, read_texts
from data_gen.synthetic import KINDS, Synthetic, draw_document, needle_depths
from lightseq.data.open_examples import open_examples
from lightseq.data.token_directory import open_token_directory
from lightseq.data.tokenizer import ByteTokenizer

NEEDLES = ("synthetic", "--kind", "needle", "--documents", 3, "--length", 10)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def drawn(kind: str, length: int, vocab_size: int, count: int = 20, seed: int = 0) -> list[np.ndarray]:
    spec = Synthetic(kind, count, length, vocab_size, seed)
    return [draw_document(spec, index) for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_depends_on_seed_and_index_and_fills_its_length(kind: str) -> None:
    for length in (5, 8, 101):
        for ids in drawn(kind, length, vocab_size=11):
            assert ids.shape == (length,) and ids.min() >= 0 and ids.max() < 11
    few, many = drawn(kind, 64, 100, count=3), drawn(kind, 64, 100, count=9)
    assert all((a == b).all() for a, b in zip(few, many, strict=False))
    assert (many[0] != many[1]).any() and (many[0] != drawn(kind, 64, 100, seed=1)[0]).any()


def test_copy_repeats_its_first_half() -> None:
    for length, half in ((8, 4), (9, 5)):
        ids = drawn("copy", length, 1000)[0]
        assert (ids[half:] == ids[: length - half]).all() and len(set(ids[:half].tolist())) > 1


def test_uniform_is_flat_and_zipf_falls_with_the_id() -> None:
    uniform = np.bincount(drawn("uniform", 100_000, 4, count=1)[0], minlength=4) / 100_000
    zipf = np.bincount(drawn("zipf", 100_000, 4, count=1)[0], minlength=4) / 100_000
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert np.abs(uniform - 0.25).max() < 0.01
    assert np.abs(zipf - 1 / np.arange(1, 5) / harmonic).max() < 0.01


def test_a_needle_stands_at_its_depth_and_at_the_end() -> None:
    spec = Synthetic("needle", 200, 16, 40, 5)
    depths = needle_depths(spec)
    for index in range(spec.documents):
        ids = draw_document(spec, index)
        position = round(depths[index] * (spec.length - 4))
        assert (ids[position : position + 2] == ids[-2:]).all()
        hay = np.delete(ids, [position, position + 1, 14, 15])
        assert hay.max() < 20 <= min(ids[-2:])
    assert min(depths) == 0.0 and max(depths) == 1.0
    for ids in drawn("needle", 5, 4):  # the smallest sizes
        assert ids[-2:].tolist() in (ids[0:2].tolist(), ids[1:3].tolist())


def test_lengths_double_from_the_shortest_with_equal_tokens() -> None:
    spec = Synthetic("needle", 6000, 256, 40, 5, shortest=16)
    documents = [draw_document(spec, index) for index in range(spec.documents)]
    for ids, depth in zip(documents, needle_depths(spec), strict=True):
        position = round(depth * (len(ids) - 4))
        assert (ids[position : position + 2] == ids[-2:]).all()
    counts = np.bincount([len(ids) for ids in documents])
    assert np.flatnonzero(counts).tolist() == [16, 32, 64, 128, 256]
    tokens = counts[[16, 32, 64, 128, 256]] * [16, 32, 64, 128, 256]
    assert np.abs(tokens / tokens.sum() - 1 / 5).max() < 0.03


def test_targets_answer_trains_on_the_answer_only(tmp_path: Path) -> None:
    assert run(*NEEDLES, "--targets", "answer", "--output", tmp_path / "data") == 0
    examples = open_examples(tmp_path / "data", 10, 512)
    for index in range(3):
        ids, labels = examples[index].input_ids, examples[index].labels
        assert labels.tolist() == [-100] * 8 + [ids[9], -100]


def test_token_directories_and_pickles_hold_the_drawn_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, output = (*NEEDLES, "--vocab_size", 70_000, "--seed", 3), tmp_path / "needle"
    assert run(*made, "--output", output) == 0
    assert capsys.readouterr().out == f"3 documents, 30 tokens (uint32) in {output}\n"
    spec, source = Synthetic("needle", 3, 10, 70_000, 3), open_token_directory(output)
    assert all((source.document(i) == draw_document(spec, i)).all() for i in range(3))
    assert source.meta["seed"] == 3 and source.meta["needle_depth"] == needle_depths(spec)

    assert run(*made, "--output", tmp_path / "data.pkl") == 0
    content = pickle.loads((tmp_path / "data.pkl").read_bytes())
    assert content["input_ids"] == [source.document(i).tolist() for i in range(3)]
    assert content["needle_depth"] == source.meta["needle_depth"]
    assert len(open_examples(tmp_path / "data.pkl", 8, 70_000)) == 3


def corpus(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / "sub" / "b.md").write_text("beta ∑")
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n')
    (folder / "empty.py").write_text("")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".git" / "hidden").write_text("hidden")
    return folder


def test_a_folder_is_read_in_name_order_and_skipped_files_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = corpus(tmp_path / "corpus"), tmp_path / "out"
    assert run("text", folder, "--tokenizer", "byte", "--output", output) == 0
    source = open_token_directory(output)
    texts = [ByteTokenizer().decode(source.document(i)) for i in range(source.meta["documents"])]
    assert texts == ["alpha", "one", "two", "beta ∑"]
    assert source.meta["skipped"] == {"empty": 2, "not UTF-8": 1} and source.meta["tokenizer"] == "byte"
    left_out = ["empty.py: empty", "picture.png: not UTF-8", "rows.jsonl line 2: empty"]
    assert source.meta["skipped_rows"] == [f"{folder}/{row}" for row in left_out]
    shown = capsys.readouterr()
    assert shown.out.endswith("left out: 2 empty, 1 not UTF-8\n") and "picture.png" in shown.err


def test_bad_rows_are_skipped_and_later_rows_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = tmp_path / "rows.jsonl", ['{"text": "one"}', '{"text": 3}', '{"text": "tw', "[]", '{"text": "two"}']
    path.write_text("\n".join(rows))
    assert run("text", path, "--output", tmp_path / "out") == 0
    meta = open_token_directory(tmp_path / "out").meta
    assert meta["documents"] == 2 and meta["skipped"] == {"unreadable": 3} and meta["cut_short"] == []
    assert meta["skipped_rows"] == [f"{path} line {number}: unreadable" for number in (2, 3, 4)]
    shown = capsys.readouterr()
    assert "line 2: 'text' is 3, not text" in shown.err and shown.out.endswith("; left out: 3 unreadable\n")


def test_a_truncated_file_keeps_its_first_rows_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["one"] * 257}), path, row_group_size=256)
    content, second = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    content[second : second + 8] = b"\xff" * 8
    path.write_bytes(content)
    assert run("text", path, "--output", tmp_path / "out") == 0
    meta = open_token_directory(tmp_path / "out").meta
    assert meta["documents"] == 256 and meta["skipped"] == {"cut short": 1} and meta["cut_short"] == [str(path)]
    shown = capsys.readouterr()
    assert "past row 256: " in shown.err and "; the rest of the file, after 256 rows, was not read\n" in shown.err


def test_globs_columns_and_max_tokens_choose_what_is_read(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "corpus")
    assert expand_sources([f"{folder}/**/*.md", f"{folder}/a.*"]) == [folder / "sub" / "b.md", folder / "a.txt"]
    (tmp_path / "rows.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert list(read_texts(tmp_path / "rows.jsonl", "body", SkippedTexts())) == ["yes"]
    assert run("text", folder, "--max_tokens", 8, "--output", tmp_path / "out") == 0
    source = open_token_directory(tmp_path / "out")
    assert [source.document(i).tolist() for i in range(2)] == [[*b"alpha", 256], [*b"on"]]
    assert source.meta["tokens"] == 8


@pytest.mark.slow
def test_the_standard_library_is_read_without_its_tests(tmp_path: Path) -> None:
    files = [path for path in expand_sources(["stdlib"]) if isinstance(path, Path)]
    assert "argparse.py" in {path.name for path in files} and files == sorted(files)
    assert not [path for path in files if {"test", "tests", "site-packages"} & set(path.parts[-4:])]
    assert run("text", "stdlib", "--max_tokens", 200_000, "--output", tmp_path / "out") == 0
    assert len(open_examples(tmp_path / "out", 4096, 512)) > 40


def test_a_data_set_of_the_hub_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((name, split, streaming))
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run("text", "hf:org/name", "--output", tmp_path / "out") == 2
    assert "pip install datasets" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert run("text", "hf:org/name:validation", "hf:other", "--output", tmp_path / "out") == 0
    assert asked == [("org/name", "validation", True), ("other", "train", True)]
    assert open_token_directory(tmp_path / "out").meta["documents"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: command"),
        (("synthetic", "--kind", "haystack"), "haystack"),
        ((*NEEDLES, "--documents", 0), "--documents 0"),
        ((*NEEDLES, "--length", 4), "--length 4"),
        ((*NEEDLES, "--vocab_size", 3), "--vocab_size 3"),
        ((*NEEDLES, "--vocab_size", 1 << 40), "32-bit"),
        ((*NEEDLES, "--seed", -1), "--seed -1"),
        ((*NEEDLES, "--kind", "zipf", "--targets", "answer"), "--targets answer needs --kind needle, not zipf"),
        ((*NEEDLES, "--targets", "answer", "--output", "x.pkl"), "--targets answer needs a directory, but"),
        ((*NEEDLES, "--length", 24, "--shortest", 8), "--length 24 is not --shortest 8 times a power of two"),
        ((*NEEDLES, "--shortest", 16), "--length 10 is not --shortest 16 times a power of two"),
        ((*NEEDLES, "--shortest", 4), "--shortest 4 is too small for needle; give 5 or more"),
        (("text", "nowhere/at/all"), "nowhere/at/all"),
        (("text", "stdlib", "--max_tokens", 0), "--max_tokens 0"),
        (("text", "stdlib", "--colunm", "x"), "--colunm"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    arguments: tuple[object, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = () if not arguments or "--output" in arguments else ("--output", tmp_path / "out")
    shown = refusal(main, *arguments, *where)
    assert shown.startswith("data_gen: error: ") and said in shown and list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for output in (tmp_path / "data", tmp_path / "data.pkl"):
        assert run(*NEEDLES, "--output", output) == 0
        assert run(*NEEDLES, "--output", output) == 2
        assert "--force" in capsys.readouterr().err
        assert run(*NEEDLES, "--documents", 4, "--output", output, "--force") == 0
        assert len(open_examples(output, 10, 512)) == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "data.pkl"]


def test_sources_without_text_write_nothing_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": "a"}))
    assert run("text", tmp_path / "rows.jsonl", "--output", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert "has no column 'text'; it has: body" in shown and "no document to write" in shown
    assert not (tmp_path / "out").exists()
