"""Runs a schedule's tables on one rank: one executor for every schedule, forward and backward.

Shape suffixes: B batch, S local sequence, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache, wraps

import torch
from torch import Tensor

from lightseq.attention.accumulate import Home, Merge, Sum, wide
from lightseq.attention.buffers import Bundle, Form, form
from lightseq.attention.cuda_graphs import Recordings, is_short
from lightseq.attention.gathered import Gathered
from lightseq.attention.passes import Pass, Place, make_pass
from lightseq.attention.program import Operand, Program, Room, StepProgram, Taking, TileProgram, make_program, takings
from lightseq.comm.transport import Exchange, Outbox, Receive, Transport
from lightseq.kernels import Kernel, Launches, addresses, backward_tile, forward_tile, row_terms
from lightseq.schedule.documents import MOST_PACKED
from lightseq.schedule.table import Schedule, Tile

MOST_PROGRAMS = 128  # kept for an outbox: a forward and a backward pass for every length that data may have

HOMES: Mapping[str, type[Home]] = {"out": Merge, "dq": Sum, "dkv": Sum}  # of an item's results

Arenas = Mapping[tuple[str, int], Bundle]  # by item and head group
Compute = Callable[[Tile, Bundle, Bundle, Mapping[str, Bundle]], dict[str, Bundle]]


class Run:
    """One pass under way: what the rank holds, what it gathered, and results that have yet to be taken in."""

    def __init__(self, program: Program, operands: Mapping[str, Bundle], homes: Mapping[str, Home], forms: Mapping,
                 transport: Transport, compute: Compute, launches: Launches, arenas: Arenas) -> None:  # fmt: skip
        self._program, self._operands, self._homes, self._forms = program, operands, homes, forms
        self._arenas = arenas
        self._transport, self._compute, self._launches = transport, compute, launches
        self._gathered: dict[int, Bundle] = {}  # by arena
        # Results of this rank for itself, taken in beside the next step.
        self._own: list[tuple[str, Place, Bundle]] = []

    def run(self) -> None:
        if self._program.staged:
            operands = tuple(addresses(self._operands[item]) for item, _ in self._program.staged)
            self._launches.copy((self._program, operands), self._staging)
        for step in self._program.steps:
            finish = self._exchange(step)
            for tile in step.tiles:
                self._run_tile(tile)
            finish()
            for arena in step.closes:
                del self._gathered[arena]
        for home in self._homes.values():
            home.open()
        self._take(takings(self._own))
        for home in self._homes.values():
            home.finish()

    def _staging(self) -> list[tuple[Tensor, Tensor]]:
        staged = self._program.staged
        return [pair for item, into in staged for pair in self._forms[item].stage(into, self._operands[item])]

    def _exchange(self, step: StepProgram) -> Callable[[], None]:
        slots: dict[int, list[Bundle]] = {}
        for i in step.opens:
            arena = self._program.arenas[i]
            self._gathered[i] = self._arenas.get((arena.item, arena.heads)) or self._forms[arena.item].empty(
                len(arena.chunks), self._operands[arena.item][0].device
            )
        receives = []
        for i, slot, src, there in step.fills:
            if i not in slots:
                slots[i] = self._forms[self._program.arenas[i].item].split(self._gathered[i])
            receives += [Receive(src, x, y) for x, y in zip(there, slots[i][slot], strict=True)]
        filled = len(receives)
        receives += step.receives
        own, self._own = self._own, []
        for item in step.lands:
            self._homes[item].open()

        def then(received: list[Tensor]) -> None:
            came = received[filled:]
            if step.takes is not None and all(x is r.there for x, r in zip(came, step.receives, strict=True)):
                self._take(step.takes)
                return
            rest, arrived = iter(came), []
            for item, place, _, there, unpacked in step.arrivals:
                here = tuple(next(rest) for _ in there)
                arrived.append((item, place, unpacked if here[0] is there[0] else self._forms[item].unpacked(here)))
            self._take(takings(own + arrived))

        if not step.travels:
            return lambda: then([])
        copy, idle = self._launches.copy, not step.tiles
        return self._transport.exchange(Exchange(step.sends, receives, then, step.fresh, copy, idle))

    def _take(self, takes: Sequence[Taking]) -> None:
        for taking in takes:
            self._homes[taking.item].take(taking, self._launches)

    def _run_tile(self, program: TileProgram) -> None:
        rooms = {room.item: self._room(room) for room in program.rooms}
        q, kv = self._operand("q", program.q), self._operand("kv", program.kv) if program.kv else ()
        made = self._compute(program.tile, q, kv, rooms)
        for room in program.rooms:
            item, into, result = room.item, rooms[room.item], made[room.item]
            for dst, x in zip(into, result, strict=bool(into)):
                if dst is not x:
                    _deliver(dst, x)
            for c, place, posted in room.own:
                self._own.append((item, place, posted or self._forms[item].local(result, c, 1, 0)))

    def _room(self, room: Room) -> Bundle:
        if room.posted is not None:
            return room.posted
        if room.final is not None:
            _, start, count, group = room.final
            self._homes[room.item].open()
            return self._forms[room.item].local(self._homes[room.item].finals, start, count, group)
        return ()

    def _operand(self, item: str, operand: Operand) -> Bundle:
        arena, start, count, group = operand
        item_form = self._forms[item]
        if arena is None:
            return item_form.local(self._operands[item], start, count, group)
        return item_form.unpacked(item_form.slots(self._gathered[arena], start, count))


def _deliver(dst: Tensor, x: Tensor) -> None:
    """dst.copy_(x), by chunk where dst is the lse of several in an outbox: (chunks, B, N, R) from (B, N, S)."""
    by_chunk = dst.ndim > x.ndim
    dst.copy_(x.unflatten(2, (dst.shape[0], -1)).permute(2, 0, 1, 3) if by_chunk else x)


def _run(
    asked: Pass, transport: Transport, operands: Mapping[str, Bundle], compute: Compute, like: Hashable,
    kept: Tensor | None = None, arenas: Callable[[], Arenas] = dict,
) -> list[Tensor]:  # fmt: skip
    """The output and its lse, or the gradients. What is gathered comes into `arenas`, else into memory of the pass.

    `like` stands for what `compute` does, which touches `kept` besides.
    """
    forms, device = asked.forms, operands["q"][0].device
    homes = {item: HOMES[item](forms[item], device, at_once) for item, at_once in asked.at_once.items()}
    with transport.outbox(asked.outbox_bytes) as outbox:
        program, launches = _prepared(asked, transport, outbox)

        def run() -> None:
            for home in homes.values():
                home.begin()
            Run(program, operands, homes, forms, transport, compute, launches, arenas()).run()

        if not (transport.records and is_short(asked)):
            run()
        else:
            for home in homes.values():
                home.open()
            touched = [*operands.values(), *(home.finals for home in homes.values())]
            places = addresses([x for bundle in touched for x in bundle] + ([] if kept is None else [kept]))
            recordings = outbox.known.get(Recordings) or outbox.known.setdefault(Recordings, Recordings())
            recordings.run(asked, (like, places), run, launches, transport)
    return [x for home in homes.values() for x in home.finals]


def _prepared(asked: Pass, transport: Transport, outbox: Outbox) -> tuple[Program, Launches]:
    """A pass in this outbox, and what was launched for it before. The oldest goes where there are too many."""
    packed = bool(asked.schedule.boundaries)
    known: dict[Pass, tuple[Program, Launches]] = outbox.known.setdefault((Program, packed), {})
    if asked not in known:
        if len(known) >= (MOST_PACKED if packed else MOST_PROGRAMS):
            del known[next(iter(known))]
        known[asked] = make_program(asked, outbox.memory, transport.at), outbox.known.get(Launches, Launches)()
    return known[asked]


def _made_once(make: Callable[..., Pass]) -> Callable[..., Pass]:
    """A pass is the same for all layers. Few of packed sequences are kept, for with each goes its table."""
    whole, packed = lru_cache(MOST_PROGRAMS)(make), lru_cache(MOST_PACKED)(make)
    return wraps(make)(lambda schedule, *more: (packed if schedule.boundaries else whole)(schedule, *more))


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, rank: int, kernel: Kernel, transport: Transport, scale: float,
    kept: Gathered | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B, S, H, D) in q's dtype, lse (B, H, S)) of the local queries over the whole causal sequence.

    What is gathered stays in `kept`, for the backward pass of a schedule that keeps.
    """
    asked = _forward_pass(schedule, rank, q.shape, k.shape[2], q.dtype)

    def compute(tile: Tile, q: Bundle, kv: Bundle, room: Mapping[str, Bundle]) -> dict[str, Bundle]:
        (q_,), (k_, v_) = q, kv
        into = room["out"][0] if room["out"] else None
        return {"out": forward_tile(kernel, q_, k_, v_, tile.mask, scale, into)}

    like, operands = (kernel, scale), {"q": (q,), "kv": (k, v)}
    if kept is None:
        out, lse = _run(asked, transport, operands, compute, like)
    else:
        out, lse = _run(
            asked, transport, operands, compute, like, kept.memory, lambda: kept.bundles(schedule, rank, asked.forms)
        )
    return out, lse


@_made_once
def _forward_pass(schedule: Schedule, rank: int, shape: torch.Size, kv_heads: int, dtype: torch.dtype) -> Pass:
    """`shape` is that of q."""
    of_q, of_out = form(schedule, shape, dtype), form(schedule, shape, dtype, lse=wide(dtype))
    return make_pass(schedule, False, rank, {"q": of_q, "kv": _of_kv(schedule, shape, kv_heads, dtype), "out": of_out})


def _of_kv(schedule: Schedule, shape: torch.Size, kv_heads: int, dtype: torch.dtype) -> Form:
    batch, length, _, dim = shape
    return form(schedule, (batch, length, kv_heads, dim), dtype, tensors=2)


def attention_backward(
    dout: Tensor, own: tuple[Tensor, Tensor, Tensor] | Gathered, out: Tensor, lse: Tensor,
    schedule: Schedule, rank: int, kernel: Kernel, transport: Transport, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of the local chunks, in the inputs' dtypes; partial gradients add up in float32 or wider.

    `own` are the rank's q, k and v, or what a schedule that keeps has gathered of all ranks' in the forward pass.
    """
    with_terms = schedule.queries_travel and not kernel.needs_out
    of_rows = (dout, row_terms(dout, out, lse)) if with_terms else (dout, out, lse)
    if isinstance(own, Gathered):
        kv_heads, operands = own.kv_heads, {"q": of_rows}
    else:
        kv_heads, operands = own[1].shape[2], {"q": (own[0], *of_rows), "kv": own[1:]}
    travelling = len(operands["q"]) - 1
    asked = _backward_pass(schedule, rank, dout.shape, kv_heads, dout.dtype, travelling, of_rows[-1].dtype)
    of_own = {"q": asked.forms["dq"], "kv": asked.forms["dkv"]}

    @cache
    def kept() -> Mapping[tuple[str, int], Bundle]:
        gathered = own.bundles(schedule, rank, of_own) if isinstance(own, Gathered) else {}
        return {key: of_own[key[0]].unpacked(bundle) for key, bundle in gathered.items()}

    def compute(tile: Tile, q: Bundle, kv: Bundle, room: Mapping[str, Bundle]) -> dict[str, Bundle]:
        q_, dout_, *out_, lse_ = kept().get(("q", tile.heads), ()) + q
        k_, v_ = kept().get(("kv", tile.heads), kv)
        (dq_,), (dk_, dv_) = room["dq"] or (None,), room["dkv"] or (None, None)
        made = backward_tile(
            kernel, dout_, q_, k_, v_, out_[0] if out_ else dout_, lse_, tile.mask, scale, (dq_, dk_, dv_)
        )
        return {"dq": made[:1], "dkv": made[1:]}

    touched = own.memory if isinstance(own, Gathered) else None
    dq, dk, dv = _run(asked, transport, operands, compute, (kernel, scale), touched)
    return dq, dk, dv


@_made_once
def _backward_pass(
    schedule: Schedule, rank: int, shape: torch.Size, kv_heads: int, dtype: torch.dtype, travelling: int,
    lse: torch.dtype,
) -> Pass:  # fmt: skip
    """`shape` is that of dout. So many tensors like it travel beside their lse."""
    of_q, of_kv = form(schedule, shape, dtype), _of_kv(schedule, shape, kv_heads, dtype)
    forms = {"q": form(schedule, shape, dtype, travelling, lse), "kv": of_kv, "dq": of_q, "dkv": of_kv}
    return make_pass(schedule, True, rank, forms)
