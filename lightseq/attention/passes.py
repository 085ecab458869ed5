"""A pass before its outbox is open: how its bundles lie, how much the outbox holds and where, what comes at once."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lightseq.attention.buffers import Form
from lightseq.schedule.layout import Layout
from lightseq.schedule.placement import blocks
from lightseq.schedule.table import Schedule, Step

ALIGNMENT = 256  # bytes; what the widest loads and the copy engines like
REGIONS = 3  # of results in the outbox, used in turn: `Transport.exchange` says how long what was sent has to stay

Forms = Mapping[str, Form]
Place = tuple[int, int]  # (where a chunk lies in its rank's tensors, head group of the item)
Counts = Mapping[Place, Counter[int]]  # of every local result: how many are made, by the step that makes them


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of one rank over a schedule, as far as shapes say what it is. Made once for all layers."""

    schedule: Schedule
    backward: bool
    rank: int
    forms: Forms
    parts: Mapping[str, Counts]
    at_once: Mapping[str, bool]  # by result item
    staged: Mapping[str, int]  # where in every outbox the operands lie that travel, in bytes
    regions: Mapping[int, int]  # and the results of each step
    outbox_bytes: int

    @cached_property
    def flops(self) -> float:
        """Of one rank: the causal half of its share, the backward as 2.5 forwards."""
        q = self.forms["q"]
        forward = 2 * q.batch * (q.rows * q.chunks) ** 2 * self.schedule.world * q.heads * q.groups * q.dim
        return 2.5 * forward if self.backward else forward


def make_pass(schedule: Schedule, backward: bool, rank: int, forms: Forms) -> Pass:
    parts = _parts_at_home(schedule, backward, rank, forms)
    at_once = {item: _comes_at_once(item, found) for item, found in parts.items()}
    return Pass(schedule, backward, rank, forms, parts, at_once, *_outbox(schedule, backward, forms))


def passes(schedule: Schedule, backward: bool) -> tuple[Step, ...]:
    return schedule.backward if backward else schedule.forward


def item_group(form: Form, schedule: Schedule, heads: int) -> int:
    """Which of an item's own head groups one of the schedule's is: they differ for replicated key/value heads."""
    return heads * form.groups // schedule.head_groups


def _comes_at_once(item: str, parts: Counts) -> bool:
    """Whether results can go straight to the final tensor: sums whose parts all come in one step, unmerged outputs."""
    if item == "out":
        return all(steps.total() == 1 for steps in parts.values())
    return all(len(steps) == 1 for steps in parts.values())


def _parts_at_home(schedule: Schedule, backward: bool, rank: int, forms: Forms) -> Mapping[str, Counts]:
    mine = {chunk: i for i, chunk in enumerate(schedule.layout.chunks(rank))}
    found: dict[str, dict[Place, Counter[int]]] = {"dq": {}, "dkv": {}} if backward else {"out": {}}
    for t, step in enumerate(passes(schedule, backward)):
        for tile in (tile for tiles in step.tiles for tile in tiles):
            for item, places in found.items():
                group = item_group(forms[item], schedule, tile.heads)
                for chunk in tile.kv if item == "dkv" else tile.q:
                    if chunk in mine:
                        places.setdefault((mine[chunk], group), Counter())[t] += 1
    return found


def _outbox(schedule: Schedule, backward: bool, forms: Forms) -> tuple[dict[str, int], dict[int, int], int]:
    """The places of operands and results, and the size."""
    layout, steps = schedule.layout, passes(schedule, backward)
    end, staged = 0, {}
    for item in sorted({move.item for step in steps for move in step.moves if not move.is_result}):
        staged[item] = end
        end += aligned(forms[item].staged_chunks * forms[item].chunk_bytes)
    posting = [t for t, step in enumerate(steps) if t + 1 < len(steps) and any(m.is_result for m in steps[t + 1].moves)]
    largest = max((_posted_bytes(steps[t], layout, backward, forms) for t in posting), default=0)
    regions = {t: end + i % REGIONS * largest for i, t in enumerate(posting)}
    return staged, regions, end + min(REGIONS, len(posting)) * largest


def _posted_bytes(step: Step, layout: Layout, backward: bool, forms: Forms) -> int:
    """What the rank that posts most posts in one step."""
    return max(
        sum(aligned(len(b.chunks) * forms[b.item].chunk_bytes) for b in blocks(step, layout, rank, backward))
        for rank in range(layout.world)
    )


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
