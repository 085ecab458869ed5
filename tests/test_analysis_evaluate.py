"""Evaluations as tables and pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import refusal, shown

from analysis.__main__ import main
from analysis.evaluate import needle_figure, perplexity_figure, read

LOSS = {"evaluation": "loss", "loss": 2.3, "perplexity": 9.97}
BINS = [
    {"first": 0, "last": 0, "loss": 9.9, "perplexity": 19930.4, "valid_tokens": 1},
    {"first": 1, "last": 1, "loss": None, "perplexity": None, "valid_tokens": 0},
    {"first": 2, "last": 1023, "loss": 2.0, "perplexity": 7.389, "valid_tokens": 900},
]
NEEDLE = {"evaluation": "needle", "score": "likelihood", "choices": 8, "trials": 4, "accuracy": 0.5}
CELLS = [
    {"length": length, "depth": depth, "accuracy": accuracy}
    for length, depth, accuracy in ((1024, 0.0, 1.0), (1024, 0.5, 0.25), (4096, 0.0, 0.75))
]


def write(directory: Path, summary: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    directory.mkdir()
    (directory / "evaluation.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (summary, *rows)))
    return directory


def test_tables_have_a_row_a_bin_or_a_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loss, needle = write(tmp_path / "books", LOSS, BINS), write(tmp_path / "search", NEEDLE, CELLS)
    assert main(["evaluate", str(loss), str(needle)]) == 0
    said = capsys.readouterr()
    assert said.err.endswith(
        "drawing 2 results into outputs/figures/evaluate-books-search; --output DIR names another\n"
    )
    assert said.out.splitlines() == [
        "| perplexity at positions |  books |",
        "|-------------------------|-------:|",
        "| 0                       | 19,930 |",
        "| 1                       |        |",
        "| 2 to 1,023              |  7.389 |",
        "| all                     |  9.970 |",
        "",
        "search: share of texts where the right answer ranks first of 8 (chance 0.125); 4 texts per cell",
        "",
        "| depth | 1K tokens | 4K tokens |",
        "|-------|----------:|----------:|",
        "| 0%    |      1.00 |      0.75 |",
        "| 50%   |      0.25 |           |",
        "",
        "outputs/figures/evaluate-books-search/perplexity.png",
        "outputs/figures/evaluate-books-search/needle.png",
    ]
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in said.out.splitlines()[-2:])
    assert not [*loss.glob("*.png"), *needle.glob("*.png")]


def test_one_evaluation_is_drawn_where_it_lies(tmp_path: Path) -> None:
    loss, broken = write(tmp_path / "books", LOSS, BINS), write(tmp_path / "books2", LOSS, BINS)
    (broken / "evaluation.jsonl").write_text("garbled\n")
    assert shown(main, "evaluate", broken, loss).splitlines()[-1] == str(loss / "perplexity.png")


def test_each_bin_is_drawn_at_the_context_it_ends_with(tmp_path: Path) -> None:
    first, second = (read(write(tmp_path / name, LOSS, BINS), name, []) for name in ("a", "b"))
    (axes,) = perplexity_figure([first, second]).axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1, 1024]] * 2
    assert axes.lines[0].get_ydata().tolist() == [19930.4, 7.389]
    assert axes.get_ylim()[1] == pytest.approx(3 * 9.97) and "up to 19,930" in axes.get_title(loc="right")


def test_a_map_shows_the_score_of_every_cell(tmp_path: Path) -> None:
    evaluation = read(write(tmp_path / "search", NEEDLE, CELLS), "search", [])
    (axes,) = needle_figure([evaluation]).axes
    words = {text.get_position(): text.get_text() for text in axes.texts if text.get_text()[0].isdigit()}
    assert words == {(0.5, 0.5): "1.00", (0.5, 1.5): "0.25", (1.5, 0.5): "0.75"}
    assert axes.get_ylim() == (2.0, 0.0), "depth grows downwards"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "4K"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "50%"]


def test_greedy_answers_have_their_own_words(tmp_path: Path) -> None:
    directory = write(tmp_path / "g", {**NEEDLE, "score": "greedy", "choices": None}, CELLS)
    lines = shown(main, "evaluate", directory).splitlines()
    assert "g: share of texts whose greedy answer is right; 4 texts per cell" in lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no evaluation.jsonl in"),
        ("{", "line 1 is cut off"),
        ('{"evaluation": "loss"}\n', "is not an evaluation"),
        ('{"evaluation": "loss"}\n{"first": 0}\n', "is not an evaluation"),
        ('{"evaluation": "taste"}\n{"first": 0}\n', "is not an evaluation"),
    ],
)
def test_other_files_are_one_line_and_exit_2(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "evaluation.jsonl").write_text(content)
    err = refusal(main, "evaluate", tmp_path)
    assert words in err
    assert "lightseq evaluate" in err or "evaluate again" in err
