"""The table of what moved in profiled steps and how fast."""

from collections.abc import Mapping
from statistics import median
from typing import Final

from rich import box
from rich.table import Table

from lightseq.profiling.traffic import Transfers

LEAST: Final = 2**20  # bytes from which on a rate says something of a link


def table(kinds: Mapping[str, Transfers], steps: int) -> Table:
    """A row a kind."""
    out = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="what moved",
        caption="GB/s include the wait for the last rank: the highest is nearest to the link's",
    )  # fmt: skip
    out.add_column("", no_wrap=True)
    for heading in ("calls", "MiB a step", "MiB each", "GB/s", "highest"):
        out.add_column(heading, justify="right", no_wrap=True)
    for name, kind in kinds.items():
        size, rates = median(kind.sizes), kind.rates
        cells = (sum(kind.sizes) / steps / 2**20, size / 2**20, median(rates) / 1e9, max(rates) / 1e9)
        # What is small takes the time of a launch, and no rate.
        shown = [f"{x:,.0f}" if x >= 1 else f"{x:.2f}" for x in (cells if size >= LEAST else cells[:2])]
        out.add_row(name, f"{len(kind.sizes) / steps:.0f}", *shown)
    return out
