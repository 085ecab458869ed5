"""Files of plain text as training data: the rows of `lightseq data text`, and one line for what is no text."""

from pathlib import Path

import numpy as np
import pytest

from data_gen.__main__ import main as data_gen
from lightseq.data.content import hash_content
from lightseq.data.examples import Examples
from lightseq.data.open_examples import open_examples
from lightseq.data.packing import open_packed
from lightseq.data.sources import ReadOptions

LENGTH = 16


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return folder


def opened(path: Path, packed: bool = False) -> Examples:
    options = ReadOptions(cache=path.parent / "cache")
    return (open_packed if packed else open_examples)(path, LENGTH, 300, "byte", False, False, options)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        opened(path)
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["", "b.txt"])
def test_texts_are_the_rows_that_the_data_command_makes(tmp_path: Path, name: str, packed: bool) -> None:
    texts = write(tmp_path / "texts", b_txt="naïve ∑\r\n" * 9, a_md="# A title\n\nand a text", c_txt="", z_txt="x")
    output = tmp_path / "tokens"
    assert data_gen(["text", str(texts / name), "--tokenizer", "byte", "--output", str(output)]) == 0
    direct, made = opened(texts / name, packed), opened(output, packed)
    assert len(direct) == len(made) > 2
    for index in range(len(direct)):
        assert np.array_equal(direct[index].input_ids, made[index].input_ids)
        assert np.array_equal(direct[index].labels, made[index].labels)
    if name:
        assert hash_content(direct) == hash_content(made)


def test_a_folder_says_which_texts_are_empty_and_which_files_are_not_read(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts", a_txt="a text", b_txt="", c_pdf="%PDF")
    notes = "\n".join(opened(texts).notes)
    assert f"{texts}: 1 text row as tokens" in notes
    assert f"{texts}: skipped rows: 1 empty ({texts}/b.txt: empty)" in notes
    assert f"{texts}: skipped 1 file (c.pdf); of a folder, only .txt or .md files are read" in notes


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "has no row with a target; skipped rows: 1 empty"),
        (b"caf\xe9", "is not UTF-8 text (byte 3 is 0xe9); convert it, or move it away"),
        (b"ELF\0\1\2", "is a binary file (character 3 is NUL); give text, or move it away"),
    ],
)
def test_a_file_that_is_no_text_is_refused_in_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert line in refusal(path)


def test_rows_and_texts_in_one_folder_are_refused_but_a_readme_is_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "both", a_txt="a text", b_jsonl='{"text": "a row"}', README_md="# About")
    assert "holds rows (b.jsonl) and texts (a.txt); keep one kind in a folder" in refusal(folder)
    (folder / "a.txt").unlink()
    assert len(opened(folder)) == 1
