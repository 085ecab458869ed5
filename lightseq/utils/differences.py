"""Comparison of what ranks were given."""

from collections.abc import Mapping, Sequence
from typing import Any


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes entries that differ from those of rank 0, with the ranks."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for name in sorted({*theirs, *everyone[0]}):
            a, b = theirs.get(name, "none"), everyone[0].get(name, "none")
            if a != b:
                found.setdefault((name, str(a), str(b)), []).append(rank)
    return [
        f"{name} is {a} on rank {', '.join(map(str, ranks))} and {b} on rank 0" for (name, a, b), ranks in found.items()
    ]
