"""Marks the slow cases of a test."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns cases as test parameters; all but the quick ones are slow. A case of several arguments is a tuple."""
    every = list(cases)
    missing = [case for case in quick if case not in every]
    assert not missing, f"no cases of this test: {missing}"
    return [case if case in quick else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
