"""Progress of long loops: lines in a log, a bar on a terminal."""

from functools import partial

import pytest
from rich.console import Console

from lightseq.utils.progress import progress_bar


def test_progress_in_a_log_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(progress_bar(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""  # too fast for a line
    monkeypatch.setattr("lightseq.utils.progress.LINE_SECONDS", -1.0)
    assert list(progress_bar(range(2), description="needle, 8 tokens")) == list(progress_bar(range(2), progress=False))
    assert capsys.readouterr().err.splitlines() == ["needle, 8 tokens 1/2, 0 s", "needle, 8 tokens 2/2, 0 s"]


@pytest.mark.parametrize(("total", "left"), [(2, True), (None, False)])
def test_progress_on_a_terminal_is_a_bar_with_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, total: int | None, left: bool
) -> None:
    terminal = partial(Console, force_terminal=True, width=100)
    monkeypatch.setattr("lightseq.utils.progress.Console", terminal)
    assert list(progress_bar(iter(range(2)), total, description="evaluating")) == [0, 1]
    shown = capsys.readouterr().err
    assert "evaluating" in shown and "2/2" in shown and ("left" in shown) is left
