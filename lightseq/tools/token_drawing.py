"""Drawing of rows that share prefixes: their tokens as trees, and which rank computes which pair of tokens."""

from collections.abc import Sequence

import torch

from lightseq.schedule.documents import packed_schedule, padded_length
from lightseq.schedule.proof import add_pairs, validate
from lightseq.schedule.table import Schedule
from lightseq.sequence.shared_prefixes import share_prefixes

MOST_TOKENS = 60
LEGEND = "number: rank that computes this pair of a query (row) and a key (column); · no pair"


def draw_rows(schedule: Schedule, rows: Sequence[str]) -> str:
    """Validates a schedule's table of rows, a letter for each token, and returns it as text.

    Raises ValueError for an empty row, and for more tokens than a terminal is wide.
    """
    if (longest := sum(map(len, rows))) > MOST_TOKENS:
        raise ValueError(f"--rows has {longest} letters; give at most {MOST_TOKENS}, which a terminal can show")
    shared = share_prefixes([[*map(ord, row)] for row in rows])
    nodes = shared.nodes.padded(padded_length(schedule, shared.nodes.length))
    table = packed_schedule(schedule, nodes)
    validate(table)
    letters, count = [chr(token) for token in shared.ids], len(shared.ids)
    cells = [["·"] * count for _ in letters]
    for rank in range(table.world):
        met = torch.zeros(nodes.length, nodes.length, dtype=torch.int32)
        for step in table.forward:
            for tile in step.tiles[rank]:
                add_pairs(met, table.layout, tile)
        for query, key in met[:count, :count].nonzero().tolist():
            cells[query][key] = str(rank)
    width = max(len(cell) for row in cells for cell in row)
    starts = {*shared.nodes.boundaries}

    def line(values: Sequence[str]) -> str:
        gaps = ("  " if place in starts and place else " " for place in range(count))
        return "".join(gap + value.rjust(width) for gap, value in zip(gaps, values, strict=True))

    whole = sum(map(len, rows))
    tokens = f"{count} tokens instead of {whole}" if count < whole else f"{count} tokens, of which rows share none"
    lines = [f"{tokens}; {LEGEND}", "", "   " + line(letters)]
    for place, row in enumerate(cells):
        lines += [""] if place in starts and place else []
        lines.append(f"{letters[place]:>3}{line(row)}")
    return "\n".join(lines)
