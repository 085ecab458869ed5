"""Functions on several processes, as most tests start them."""

import os

import pytest
from worlds import spawn


def returned(rank: int) -> int:
    return 10 * rank


def ended(rank: int) -> None:
    if rank:
        os._exit(0)


def failed(rank: int) -> None:
    assert rank == 0, "this one"


def test_results_come_in_the_order_of_ranks() -> None:
    assert spawn(3, returned) == [0, 10, 20]


@pytest.mark.timeout(60)
def test_a_rank_that_ends_or_fails_is_named_at_once() -> None:
    for function, line in ((ended, "rank 1 of 2:\nended without a result"), (failed, "this one")):
        with pytest.raises(AssertionError, match=line):
            spawn(2, function)
