"""Cost of a schedule, counted in its table: FLOPs, critical path, and bytes on the wire."""

from dataclasses import dataclass

from lightseq.schedule.table import Mask, Move, Schedule, Tile

BACKWARD_FLOPS = 2.5  # five matrix products against two


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer: global sequence length in tokens, head counts, element size in bytes.

    A schedule is chosen for the layers that take most time; it must also allow the heads of `other_layers`.
    """

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    element_bytes: int = 2
    value_dim: int | None = None  # elements of a head's values (default: head_dim)
    other_layers: tuple["AttentionShape", ...] = ()  # with other heads

    @property
    def values(self) -> int:
        """Returns the dimension of a head's values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def pair_dims(self) -> int:
        """Returns the elements of a key and a value of one head."""
        return self.head_dim + self.values


@dataclass(frozen=True)
class Cost:
    """Cost of one layer, forward and backward. FLOPs count the causal half.

    `busy` is the mean share of the critical path in which a rank computes.
    """

    flops: float
    critical_flops: float
    busy: float
    forward_bytes: int
    backward_bytes: int
    max_rank_bytes: int  # forward + backward, received by the rank that receives most
    exposed_bytes: int  # received in steps without tiles, by the rank that waits longest


def cost(schedule: Schedule, shape: AttentionShape) -> Cost:
    """Counts the FLOPs and bytes of a schedule's tiles and moves."""
    per_step: list[float] = []
    total = 0.0
    for weight, steps in ((1.0, schedule.forward), (BACKWARD_FLOPS, schedule.backward)):
        for step in steps:
            work = [weight * sum(tile_flops(schedule, shape, tile) for tile in tiles) for tiles in step.tiles]
            total += sum(work)
            per_step.append(max(work))
    received = [0] * schedule.world
    passes = []
    for backward, steps in ((False, schedule.forward), (True, schedule.backward)):
        passes.append(sum(move_bytes(schedule, shape, move, backward) for step in steps for move in step.moves))
        for step in steps:
            for move in step.moves:
                received[move.dst] += move_bytes(schedule, shape, move, backward)
    return Cost(
        flops=total,
        critical_flops=sum(per_step),
        busy=total / (sum(per_step) * schedule.world),
        forward_bytes=passes[0],
        backward_bytes=passes[1],
        max_rank_bytes=max(received),
        exposed_bytes=sum(_exposed(schedule, shape, backward) for backward in (False, True)),
    )


def tile_flops(schedule: Schedule, shape: AttentionShape, tile: Tile) -> float:
    """Returns the FLOPs of a tile's forward pass: two matrix products, 2 FLOPs per multiply-add, no masked pairs."""
    assert isinstance(tile.mask, Mask), "segments have their own area, for one length only"
    chunk = shape.length / schedule.layout.chunk_count
    area = chunk * chunk * (len(tile.q) * len(tile.kv))
    if tile.mask is not Mask.FULL:
        area -= (chunk * len(tile.q)) ** 2 / 2
    return 2 * area * shape.pair_dims * shape.heads / schedule.total_head_groups * shape.batch


def move_bytes(schedule: Schedule, shape: AttentionShape, move: Move, backward: bool) -> int:
    """Returns the bytes of one move. Tensors travel in the dtype of the kernels, log-sum-exps in float32."""
    rows = shape.batch * shape.length / schedule.layout.chunk_count
    query_rows = rows * shape.heads / schedule.total_head_groups
    q, out, lse = query_rows * shape.head_dim, query_rows * shape.values, 4 * query_rows
    kv = rows * max(shape.kv_heads / schedule.total_head_groups, 1) * shape.pair_dims
    e = shape.element_bytes
    travels = 0 if backward and schedule.reuses_gathered else 1  # reused q, k and v do not move again
    sizes = {
        "kv": travels * kv * e,
        "q": (travels * q + 2 * out) * e + lse if backward else q * e,  # backward: dout and out too
        "out": out * e + lse,
        "dq": q * e,
        "dkv": kv * e,
    }
    return round(sizes[move.item])


def _exposed(schedule: Schedule, shape: AttentionShape, backward: bool) -> int:
    """Counts the bytes of a pass that the busiest rank receives in steps without a tile, which nothing hides."""
    waits = [0] * schedule.world
    for step in schedule.steps(backward):
        if not any(step.tiles):
            for move in step.moves:
                waits[move.dst] += move_bytes(schedule, shape, move, backward)
    return max(waits)
