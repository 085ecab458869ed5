"""Runs a schedule's tables on one rank: one executor for every schedule, forward and backward.

Shape suffixes: B batch, S local sequence, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightseq.comm import Transport
from lightseq.kernels import Kernel, backward_tile, forward_tile, merge
from lightseq.layout import Layout
from lightseq.schedule import Move, Schedule, Step, Tile

Key = tuple[str, int, int]  # item, chunk, head group
Bundle = tuple[Tensor, ...]


class Chunks:
    """Local tensors addressed by chunk and head group: views, never copies. (B, S, heads, D) or (B, heads, S)."""

    def __init__(self, schedule: Schedule, rank: int, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._index = {chunk: i for i, chunk in enumerate(schedule.layout.chunks(rank))}
        self._groups = schedule.head_groups

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._index

    def read(self, chunks: tuple[int, ...], heads: int) -> Bundle | None:
        """Neighbouring local chunks as one view; None where a chunk is remote or they are not neighbours."""
        places = [self._index.get(chunk) for chunk in chunks]
        if places[0] is None or places != list(range(places[0], places[0] + len(places))):
            return None
        return tuple(self._view(x, places[0], len(places), heads) for x in self._tensors)

    def _view(self, x: Tensor, place: int, count: int, heads: int) -> Tensor:
        size = x.shape[seq_dim(x)] // len(self._index)
        group = x.shape[head_dim(x)] // self._groups
        return x.narrow(seq_dim(x), place * size, count * size).narrow(head_dim(x), heads * group, group)


def seq_dim(x: Tensor) -> int:
    return 1 if x.ndim == 4 else 2


def head_dim(x: Tensor) -> int:
    return 2 if x.ndim == 4 else 1


class Exchange:
    """The moves of one pass: sends local chunks and finished results, keeps what arrived for the next step."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        local: dict[str, Chunks],
        templates: dict[str, Bundle],
    ) -> None:
        self._rank, self._transport, self._local = rank, transport, local
        self._templates = templates  # what one chunk of an item looks like
        self._schedule = schedule
        self._arrived: dict[Key, Bundle] = {}
        self._to_send: dict[Key, Bundle] = {}

    def operand(self, item: str, chunks: tuple[int, ...], heads: int) -> Bundle:
        """Chunks of an item side by side, as one tensor each."""
        whole = self._local[item].read(chunks, heads)
        if whole is not None:
            return whole
        parts = [self._local[item].read((c,), heads) or self._arrived[item, c, heads] for c in chunks]
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(pieces, seq_dim(pieces[0])) for pieces in zip(*parts, strict=True))

    def post(self, item: str, chunk: int, heads: int, result: Bundle) -> None:
        """A result for another rank; it leaves beside the next step. Gradients of one chunk add up until then."""
        key = (item, chunk, heads)
        if key in self._to_send:
            for total, x in zip(self._to_send[key], result, strict=True):
                total += x
        else:
            self._to_send[key] = tuple(
                x.to(like.dtype, copy=item != "out") for x, like in zip(result, self._templates[item], strict=True)
            )

    def start(self, step: Step) -> Callable[[], list[tuple[Move, Bundle]]]:
        """Starts a step's moves; the returned function waits and gives the results that came home."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        landing: list[tuple[Move, Bundle]] = []
        for move in step.moves:
            if move.src == self._rank:
                sends += [(move.dst, x.contiguous()) for x in self._outgoing(move)]
            elif move.dst == self._rank:
                landing.append(
                    (
                        move,
                        tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self._templates[move.item]),
                    )
                )
                receives += [(move.src, x) for x in landing[-1][1]]
        wait = self._transport.exchange(sends, receives)

        def finish() -> list[tuple[Move, Bundle]]:
            wait()
            self._arrived = {(m.item, m.chunk, m.heads): x for m, x in landing if not m.is_result}
            return [(m, x) for m, x in landing if m.is_result]

        return finish

    def _outgoing(self, move: Move) -> Bundle:
        if move.is_result:
            return self._to_send.pop((move.item, move.chunk, move.heads))
        bundle = self._local[move.item].read((move.chunk,), move.heads)
        assert bundle is not None, f"rank {self._rank} does not hold {move}"
        return bundle


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, rank: int, kernel: Kernel, transport: Transport, scale: float
) -> tuple[Tensor, Tensor]:
    """(out (B, S, H, D) in q's dtype, lse (B, H, S)) of the local queries over the whole causal sequence."""
    wide = torch.promote_types(q.dtype, torch.float32)
    merges = _most_results_per_chunk(schedule.forward, schedule.layout, rank) > 1
    out = torch.empty(q.shape, dtype=wide if merges else q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide, device=q.device)
    chunks = {"q": Chunks(schedule, rank, [q]), "kv": Chunks(schedule, rank, [k, v])}
    home = Chunks(schedule, rank, [out, lse])
    templates = {
        "q": _template(schedule, [q]),
        "kv": _template(schedule, [k, v]),
        "out": (*_template(schedule, [q]), *_template(schedule, [lse])),
    }
    exchange = Exchange(schedule, rank, transport, chunks, templates)
    begun: set[tuple[int, int]] = set()

    def add(chunk: int, heads: int, part: Bundle) -> None:
        total = home.read((chunk,), heads)
        assert total is not None
        if (chunk, heads) in begun:
            part = merge(*total, *part)
        begun.add((chunk, heads))
        for x, value in zip(total, part, strict=True):
            x.copy_(value)

    for step in schedule.forward:
        finish = exchange.start(step)
        for tile in step.tiles[rank]:
            (q_,), (k_, v_) = exchange.operand("q", tile.q, tile.heads), exchange.operand("kv", tile.kv, tile.heads)
            result = forward_tile(kernel, q_, k_, v_, tile.mask, scale)
            for chunk, part in _split(tile.q, result):
                if chunk in home:
                    add(chunk, tile.heads, part)
                else:
                    exchange.post("out", chunk, tile.heads, part)
        for move, part in finish():
            add(move.chunk, move.heads, part)
    return out.to(q.dtype), lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    schedule: Schedule, rank: int, kernel: Kernel, transport: Transport, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of the local chunks, in the inputs' dtypes; partial gradients add up in float32 or wider."""
    grads = [
        torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (q, k, v)
    ]
    chunks = {"q": Chunks(schedule, rank, [q, dout, out, lse]), "kv": Chunks(schedule, rank, [k, v])}
    home = {"dq": Chunks(schedule, rank, grads[:1]), "dkv": Chunks(schedule, rank, grads[1:])}
    templates = {
        "q": _template(schedule, [q, dout, out, lse]),
        "kv": _template(schedule, [k, v]),
        "dq": _template(schedule, grads[:1]),
        "dkv": _template(schedule, grads[1:]),
    }
    exchange = Exchange(schedule, rank, transport, chunks, templates)

    def add(item: str, chunk: int, heads: int, part: Bundle) -> None:
        total = home[item].read((chunk,), heads)
        assert total is not None
        for x, value in zip(total, part, strict=True):
            x += value

    for step in schedule.backward:
        finish = exchange.start(step)
        for tile in step.tiles[rank]:
            for item, made in _backward_results(exchange, tile, kernel, scale):
                for chunk, part in made:
                    keep = add if chunk in home[item] else exchange.post
                    keep(item, chunk, tile.heads, part)
        for move, part in finish():
            add(move.item, move.chunk, move.heads, part)
    dq, dk, dv = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _backward_results(
    exchange: Exchange, tile: Tile, kernel: Kernel, scale: float
) -> list[tuple[str, list[tuple[int, Bundle]]]]:
    q, dout, out, lse = exchange.operand("q", tile.q, tile.heads)
    k, v = exchange.operand("kv", tile.kv, tile.heads)
    dq, dk, dv = backward_tile(kernel, dout, q, k, v, out, lse, tile.mask, scale)
    return [("dq", _split(tile.q, (dq,))), ("dkv", _split(tile.kv, (dk, dv)))]


def _split(chunks: tuple[int, ...], bundle: Bundle) -> list[tuple[int, Bundle]]:
    """A tile's result, chunk by chunk."""
    parts = zip(*(x.chunk(len(chunks), seq_dim(x)) for x in bundle), strict=True)
    return list(zip(chunks, parts, strict=True))


def _template(schedule: Schedule, tensors: Sequence[Tensor]) -> Bundle:
    """One chunk and head group of each tensor: shape and dtype for receive buffers, no memory."""

    def one(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[seq_dim(x)] //= schedule.layout.chunks_per_rank
        shape[head_dim(x)] //= schedule.head_groups
        return x.new_empty(1).expand(shape)

    return tuple(map(one, tensors))


def _most_results_per_chunk(steps: Sequence[Step], layout: Layout, rank: int) -> int:
    """How many tiles, on any rank, contribute to the output of the local query chunk that gets most."""
    counts: dict[tuple[int, int], int] = {}
    for step in steps:
        for tiles in step.tiles:
            for tile in tiles:
                for chunk in tile.q:
                    if layout.home(chunk) == rank:
                        counts[chunk, tile.heads] = counts.get((chunk, tile.heads), 0) + 1
    return max(counts.values())
