"""The picture of a layer's attention: which layer it shows, what it says was hidden, and what it refuses."""

import gzip
import json
from pathlib import Path

import pytest

from analysis import __main__ as analysis
from analysis.timeline import WAITS, Window, attentions, shares, windows
from lightseq.profiling.trace import Span, kind_of

FORWARD, BACKWARD, PRODUCT = "FlashAttentionForward", "FlashAttentionBackward", "nvjet_sm90"
COPY, WAIT, GATHER = "Memcpy PtoP (Device -> Device)", "symmetric_memory::barrier_kernel", "ncclDevKernel_AllGather"


def spans(*given: tuple[str, float, float]) -> list[Span]:
    """Of (name, start, end) in ms, in order of time."""
    found = [Span(kind_of(name), name, "", start * 1e3, end * 1e3) for name, start, end in given]
    return sorted(found, key=lambda span: span.start)


LAYERS = (
    (PRODUCT, 0, 1), (FORWARD, 1, 3), (FORWARD, 3, 4), (PRODUCT, 4, 6), (FORWARD, 6, 9), (PRODUCT, 9, 10),
    (PRODUCT, 10, 11), (BACKWARD, 11, 13), (BACKWARD, 14, 16), (PRODUCT, 16, 17), (BACKWARD, 17, 20), (PRODUCT, 20, 21),
)  # fmt: skip


def test_calls_with_no_product_between_them_are_one_layers() -> None:
    found = spans(*LAYERS)
    assert attentions(found, kind_of(FORWARD), [kind_of(PRODUCT)]) == [(1e3, 4e3), (6e3, 9e3)]
    assert attentions(spans((FORWARD, 1, 5), (FORWARD, 2, 3)), kind_of(FORWARD), []) == [(1e3, 5e3)], "side by side"
    assert attentions(found, kind_of(BACKWARD), [kind_of(PRODUCT)]) == [(11e3, 16e3), (17e3, 20e3)]
    assert [(w.start, w.end) for w in windows(found)] == [(5.85e3, 9.15e3), (16.85e3, 20.15e3)], "one in the middle"


def test_a_picture_reaches_from_one_matrix_product_to_the_next() -> None:
    alone = spans((COPY, 0, 1), (FORWARD, 2, 4))
    assert [(w.start, w.end) for w in windows(alone)] == [(1.9e3, 4.1e3)], "no product"
    among = spans((PRODUCT, 0, 1), (PRODUCT, 1, 2), (COPY, 5, 6), (FORWARD, 7, 11), (COPY, 11, 12), (PRODUCT, 12, 13))
    assert [(w.start, w.end) for w in windows(among)] == [(1.5e3, 12.5e3)]


def test_passes_of_attention_alone_end_where_the_others_begin() -> None:
    layers = [(FORWARD, 0, 3), (BACKWARD, 3, 9), (COPY, 9, 10), (FORWARD, 10, 13), (COPY, 13, 14), (BACKWARD, 14, 20)]
    assert [(w.start, w.end) for w in windows(spans(*layers))] == [(8.75e3, 14.25e3), (12.65e3, 20.35e3)]


def test_communication_counts_once_and_bare_only_where_no_kernel_runs() -> None:
    window = Window("", 0, 10e3)
    found = spans(
        (FORWARD, 1, 5), (COPY, 0, 3), (COPY, 2, 4), (GATHER, 4.5, 7), (WAIT, 8, 9), (PRODUCT, 6, 8.5), (COPY, 9, 12)
    )
    assert shares(found, window) == (pytest.approx(4 + 2.5 + 1), pytest.approx(1 + 1 + 1))
    assert shares(found, window, [WAITS]) == (pytest.approx(1), pytest.approx(0.5))


def trace(directory: Path, found: list[Span]) -> Path:
    events = [{"ph": "X", "cat": "kernel", "name": s.name, "ts": s.start, "dur": s.end - s.start} for s in found]
    path = directory / "profile" / "rank0.json.gz"
    path.parent.mkdir()
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_the_picture_lies_beside_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path, spans(*LAYERS, (COPY, 7, 8), (WAIT, 8, 9)))
    assert analysis.main(["profile", str(tmp_path), "--timeline", "--format", "both"]) == 0
    written = [path.parent / f"timeline.{suffix}" for suffix in ("png", "svg")]
    assert capsys.readouterr().out.splitlines()[-2:] == [str(x) for x in written]
    assert "1.0 ms of communication, 0.0 of it beside no kernel" in written[1].read_text().replace("<!--", "").replace(
        "-->", ""
    )


def test_a_trace_without_attention_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path, spans((PRODUCT, 0, 1)))
    assert analysis.main(["profile", str(tmp_path), "--timeline"]) == 2
    assert "no attention kernel" in capsys.readouterr().err and sorted(path.parent.iterdir()) == [path]
