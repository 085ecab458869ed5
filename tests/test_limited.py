"""Foreign code runs in a child process, within limits of time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightseq.utils import limited
from lightseq.utils.limited import LimitError, limited_map


def test_results_come_in_order_from_one_child() -> None:
    found = list(limited_map(lambda x: (x * x, os.getpid()), [[1, 2], [3], []]))
    assert [[square for square, _ in batch] for batch in found] == [[1, 4], [9], []]
    assert len({process for batch in found for _, process in batch} - {os.getpid()}) == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: time.sleep(30 * x), "takes more than 1 s"),
        (lambda x: len(bytearray(x << 33)), "takes more than 2 GiB"),
        (lambda x: os._exit(1) if x else None, "ends its process"),
    ],
)
def test_an_item_beyond_a_limit_is_named(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[int], Any], reason: str
) -> None:
    monkeypatch.setattr(limited, "MAX_SECONDS", 1.0 if "1 s" in reason else 60.0)
    with pytest.raises(LimitError, match=reason) as caught:
        list(limited_map(function, [[0, 0], [0, 1]]))
    assert caught.value.item == 1


def test_errors_reach_the_caller_and_the_child_ends() -> None:
    def fail(x: int) -> int:
        if x == 2:
            raise ValueError(f"line {x}")
        return os.getpid()

    results = limited_map(fail, [[1], [2]])
    (child,) = next(results)
    with pytest.raises(ValueError, match="line 2"):
        next(results)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
