"""Choice of how a recurrence spans ranks: states in a chain (scan.py), or heads exchanged (head_exchange.py)."""

from lightseq.config.recurrent_schedules import AUTO, CHAIN, HEADS
from lightseq.schedule.layout import MAX_FRAGMENTS


def choose(requested: str, ranks: int, heads: int, fragments: int) -> str:
    """Returns `chain` or `heads` for a scan of this many value heads, over ranks of at most `fragments` fragments.

    All ranks choose alike. Raises ValueError if heads are requested, but do not divide by the ranks.
    """
    if requested == HEADS:
        check_heads_divide(heads, ranks)
    if requested != AUTO:
        return requested
    return CHAIN if fragments <= MAX_FRAGMENTS or heads % ranks else HEADS


def check_heads_divide(heads: int, ranks: int, kind: str = "a scan") -> None:
    """Raises ValueError unless every rank can take the same number of value heads."""
    if heads % ranks:
        raise ValueError(
            f"--recurrent_schedule heads needs the {heads} value heads of {kind} to divide by {ranks} ranks; use chain"
        )
