"""Drawing of a schedule as text: one row a step, one column a rank."""

from lightseq.schedule.cost import AttentionShape, cost
from lightseq.schedule.table import Mask, Schedule, Step, Tile

SYMBOL = {Mask.FULL: "■", Mask.CAUSAL: "◣", Mask.STRICT: "◺"}
LEGEND = "q2·k0-1 ■  query chunk 2 against key chunks 0 to 1 (■ full, ◣ causal, ◺ causal without the diagonal)"


def render(schedule: Schedule) -> str:
    """Returns the forward and backward tables with their moves and their cost."""
    layout = schedule.layout
    groups = f", {schedule.total_head_groups} head groups" if schedule.total_head_groups > 1 else ""
    head = f"{schedule.name}: {schedule.world} ranks, {layout.kind} layout, {layout.chunk_count} chunks{groups}"
    held = [_span(layout.chunks(rank)) for rank in range(schedule.world)]
    parts = [head, LEGEND, "", *_table("forward", schedule.forward, held)]
    parts += ["", "backward: the same tiles", *_moves(schedule.backward)]
    return "\n".join([*parts, "", *_price(schedule)])


def _table(title: str, steps: tuple[Step, ...], held: list[str]) -> list[str]:
    rows = [[title, *(f"rank {r}" for r in range(len(held))), "moves"], ["holds", *held, ""]]
    for t, step in enumerate(steps):
        rows.append([f"step {t}", *(" ".join(map(_cell, tiles)) or "·" for tiles in step.tiles), _count(step)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _moves(steps: tuple[Step, ...]) -> list[str]:
    return [f"step {t}  {_count(step)}" for t, step in enumerate(steps)]


def _cell(tile: Tile) -> str:
    head_group = f"h{tile.head_group}:" if tile.head_group else ""
    mask = SYMBOL[tile.mask] if isinstance(tile.mask, Mask) else f"({len(tile.mask.table)} segments)"
    return f"{head_group}q{_span(tile.q)}·k{_span(tile.kv)} {mask}"


def _span(chunks: tuple[int, ...]) -> str:
    """Formats chunks: (2,) → 2, (0, 1, 2) → 0-2, (0, 7) → 0,7."""
    if len(chunks) > 1 and chunks == tuple(range(chunks[0], chunks[-1] + 1)):
        return f"{chunks[0]}-{chunks[-1]}"
    return ",".join(map(str, chunks))


def _count(step: Step) -> str:
    items = [move.item for move in step.moves]
    return ", ".join(f"{items.count(i)} {i}" for i in ("kv", "q", "out", "dq", "dkv") if i in items) or "none"


def _price(schedule: Schedule) -> list[str]:
    """Returns ratios that hold for any length: balance, and bytes in units of one rank's own keys and values."""
    shape = AttentionShape(length=8192 * schedule.world, heads=32, kv_heads=8, head_dim=128)
    c = cost(schedule, shape)
    shard = 2 * shape.length // schedule.world * shape.kv_heads * shape.head_dim * shape.element_bytes
    moved = (c.forward_bytes + c.backward_bytes) / shard / schedule.world
    return [
        f"busy {100 * c.busy:.1f}% of the critical path",
        f"moved per rank, forward and backward: {moved:.2f} times its keys and values (bf16, 32 query, 8 KV heads)",
    ]
