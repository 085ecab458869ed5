"""Frozen weights in fewer bits than they compute in: bytes that FSDP2 shards and gathers, and operators read as dense.

A format (`nf4`, `fp8_blocks`) says which bytes a weight has, and makes it dense. Every rank holds some tensors whole,
such as scales of scales, which take at most 0.0003 bytes an element.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightseq.models.packed_bytes import PackedBytes

aten: Final = torch.ops.aten


class PackedWeight(Tensor):
    """Packed weight that any operator reads as a dense one, made for the operator alone.

    Copies, transposition and parts of its rows stay packed. What autograd saves does, too, so that a backward
    pass makes the dense matrix again. Nothing writes to it but `copy_`, which quantizes.
    """

    raw: PackedBytes
    whole: torch.Size  # size of the weight that has these rows
    first_row: int | None  # None: a shard that FSDP2 fills later, and which has to be gathered before it is read
    transposed: bool
    from_host: bool = False  # a copy of a shard in host memory, as FSDP2 makes before it gathers

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @staticmethod
    def __new__(
        cls,
        raw: PackedBytes,
        shape: Sequence[int],
        dtype: torch.dtype,
        whole: torch.Size,
        first_row: int | None = 0,
        transposed: bool = False,
    ) -> "PackedWeight":
        shape = tuple(shape)
        strides = torch._prims_common.make_contiguous_strides_for(shape)
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        self: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=raw.codes.device
        )
        self.raw, self.whole, self.transposed = raw, whole, transposed
        self.first_row = 0 if shape == tuple(whole) else first_row
        return self

    def fill_rows(self, whole: Tensor, first_row: int) -> None:
        """Fills this shard with its rows, from `first_row` on, of a packed or dense weight.

        A dense one is quantized on the accelerator.
        """
        found = whole
        if not isinstance(whole, PackedWeight):
            # Without the check, torch's builds for CUDA name a GPU on machines without one.
            device = torch.accelerator.current_accelerator(check_available=True) or self.device
            found = packed(type(self.raw), whole.to(device, self.dtype))
        self.copy_(found[first_row : first_row + len(self)])

    def dense(self) -> Tensor:
        """Returns the matrix in new memory."""
        assert self.first_row is not None, "gather a shard before reading it"
        shape = self.shape[::-1] if self.transposed else self.shape
        rows = [self.numel() // self.row_elements, *self.whole[1:]]
        backward = torch._C._current_graph_task_id() != -1
        found = self.raw.dense(rows, self.first_row, self.dtype, backward).view(shape)
        return found.T if self.transposed else found

    def like(self, raw: PackedBytes, **changed: Any) -> "PackedWeight":
        """Returns a copy with other bytes and `changed` facts."""
        shape = self.shape[::-1] if self.transposed else self.shape
        facts = dict[str, Any](shape=shape, dtype=self.dtype, whole=self.whole, first_row=self.first_row)
        return PackedWeight(raw, **(facts | {"transposed": self.transposed} | changed))

    def rows(self, start: int, end: int) -> "PackedWeight":
        """Returns some rows, sharing the memory."""
        first = None if self.first_row is None else self.first_row + start
        raw = self.raw.elements(start * self.row_elements, end * self.row_elements)
        return self.like(raw, shape=(end - start, *self.whole[1:]), first_row=first)

    @property
    def row_elements(self) -> int:
        return self.whole[1:].numel()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({self.raw.WORDS}, shape={[*self.shape]}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        shape = self.shape[::-1] if self.transposed else self.shape
        facts = (shape, self.dtype, self.whole, self.first_row, self.transposed)
        return [field.name for field in fields(self.raw)], (type(self.raw), facts)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], facts: Any, *_: Any) -> "PackedWeight":
        kind, others = facts
        return PackedWeight(kind(**inner), *others)

    codes = property(lambda self: self.raw.codes)
    scales = property(lambda self: self.raw.scales)
    nested = property(lambda self: self.raw.nested)  # NF4 only
    offset = property(lambda self: self.raw.offset)

    # FSDP2 calls this form, with the mesh alone, for shards of unequal sizes, too.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Returns the bytes to gather, equally many on every rank.

        A single rank gathers nothing. If FSDP2 must free the gathered memory, it gathers only the codes.
        """
        if mesh.size() == 1:
            return (self.raw.codes if self.from_host else self.raw.codes[:0],), (self.raw, False)
        raw = _padded(self, -(-self.whole[0] // mesh.size())).raw
        return raw.sharded, (raw, True)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Returns the whole matrix, in the gathered memory, which FSDP2 frees and fills again."""
        assert out is None or isinstance(out, PackedWeight)
        raw, several_ranks = metadata
        freed = gathered
        if several_ranks:
            raw = raw.with_sharded(gathered).elements(0, self.whole.numel())
        elif len(gathered[0]):  # one rank's copy from the host; FSDP2 has allocated the first copy's others again
            _, *others = raw.sharded
            if out is not None:
                others = [mine.copy_(x) for mine, x in zip(out.raw.sharded[1:], others, strict=True)]
            raw, freed = raw.with_sharded((gathered[0], *others)), (*gathered, *others)
        if out is not None:
            out.raw = raw
            return None
        return self.like(raw, shape=self.whole, dtype=dtype, first_row=0), freed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _RAW and (found := _RAW[func](*args, **kwargs)) is not None:
            return found
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, PackedWeight):
                raise ValueError(
                    f"{func} writes to a weight in {value.raw.WORDS}, which is frozen; train adapters instead"
                )
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.dense, (args, kwargs))
        return func(*args, **kwargs)


def packed(kind: type[PackedBytes], dense: Tensor) -> PackedWeight:
    """Returns a dense weight in a format. Raises ValueError as `quantize` of the format does."""
    return PackedWeight(kind.quantize(dense), dense.shape, dense.dtype, dense.shape)


def plain_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that hold the bytes of a packed weight, or a plain tensor itself."""
    return tensor.raw.tensors if isinstance(tensor, PackedWeight) else (tensor,)


def sharded_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors of `plain_tensors` that grow with the shard; the others take at most some kilobytes."""
    return tensor.raw.sharded if isinstance(tensor, PackedWeight) else (tensor,)


# Operators that keep the bytes. None: the arguments need the dense matrix.


def _alias(x: PackedWeight, *_: Any) -> PackedWeight:
    return x.like(x.raw)


def _transpose(x: PackedWeight, *dims: int) -> PackedWeight | None:
    swapped = x.ndim == 2 and (not dims or {dim % 2 for dim in dims} == {0, 1})
    return x.like(x.raw, transposed=not x.transposed) if swapped else None


def _permute(x: PackedWeight, dims: Sequence[int]) -> PackedWeight | None:
    return _transpose(x) if [dim % 2 for dim in dims] == [1, 0] else None


def _split(x: PackedWeight, size: int, dim: int = 0) -> list[PackedWeight] | None:
    if x.transposed or x.ndim < 2 or dim:
        return None
    return [x.rows(start, min(start + size, len(x))) for start in range(0, len(x), size)]


def _slice(
    x: PackedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> PackedWeight | None:
    if x.transposed or x.ndim < 2 or dim or step != 1:
        return None
    start, end, _ = slice(start, end).indices(len(x))
    return x.rows(start, max(start, end))


def _view(x: PackedWeight, size: Sequence[int], *_: Any) -> PackedWeight | None:
    if tuple(size) == x.shape:
        return _alias(x)
    return x.like(x.raw, shape=(x.numel(),)) if len(size) == 1 and not x.transposed else None


def _as_strided(x: PackedWeight, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> PackedWeight | None:
    return _alias(x) if (tuple(size), tuple(stride), offset) == (x.shape, x.stride(), 0) else None


def _empty_like(x: PackedWeight, **given: Any) -> PackedWeight | None:
    if given.get("dtype") not in (None, x.dtype):
        return None
    device = given.get("device") or x.device
    return x.like(x.raw.map(lambda part: torch.empty_like(part, device=device)))


def _new_zeros(x: PackedWeight, size: Sequence[int], **given: Any) -> Tensor:
    if len(size) < 2 or tuple(size[1:]) != x.whole[1:] or given.get("dtype") not in (None, x.dtype):
        return _new_empty(x, size, **given).zero_()
    # FSDP2's way of padding shards. A rank without rows gets no copy, but still needs the matrix's scales.
    return x.like(x.raw.zeros(size[0] * x.row_elements), shape=size, first_row=None, transposed=False)


def _new_empty(x: PackedWeight, size: Sequence[int], **given: Any) -> Tensor:
    return torch.empty(size, dtype=given.get("dtype") or x.dtype, device=given.get("device") or x.device)


def _clone(x: PackedWeight, **_: Any) -> PackedWeight:
    return x.like(x.raw.map(Tensor.clone))


def _to_copy(x: PackedWeight, **given: Any) -> PackedWeight | None:
    if given.get("dtype") not in (None, x.dtype):
        return None
    device, non_blocking = given.get("device") or x.device, given.get("non_blocking", False)
    found = x.like(x.raw.map(lambda part: part.to(device, non_blocking=non_blocking, copy=True)))
    found.from_host = x.device.type == "cpu" and found.device.type != "cpu"
    return found


def _copy(x: Tensor, source: Tensor, *_: Any) -> Tensor | None:
    if not isinstance(x, PackedWeight):
        return None
    if not isinstance(source, PackedWeight):
        assert not x.transposed and x.shape == x.whole, "a shard is filled by `fill_rows`"
        source = packed(type(x.raw), source.to(x.device, x.dtype))
    for mine, other in zip(x.raw.tensors, source.raw.tensors, strict=True):
        mine.copy_(other)
    x.first_row = source.first_row
    return x


def _is_pinned(x: PackedWeight, *_: Any, **__: Any) -> bool:
    return x.raw.codes.is_pinned()


def _pin_memory(x: PackedWeight, *_: Any, **__: Any) -> PackedWeight:
    return x.like(x.raw.map(Tensor.pin_memory))


def _pad_rows(x: PackedWeight, pad: Sequence[int], value: float = 0) -> PackedWeight | None:
    if x.transposed or x.ndim < 2 or len(pad) != 2 * x.ndim or any(pad[:-1]):
        return None
    return _padded(x, len(x) + pad[-1])


def _padded(x: PackedWeight, rows: int) -> PackedWeight:
    missing = rows * x.row_elements - x.numel()
    if not missing:
        return x
    return x.like(x.raw.padded(missing), shape=(rows, *x.whole[1:]), first_row=None)


def _all_gather(x: PackedWeight, ranks: int, group: Any) -> PackedWeight | None:
    if x.transposed or x.ndim < 2:
        return None
    raw = x.raw.with_sharded([_gather(part, ranks, group) for part in x.raw.sharded])
    return x.like(raw, shape=(len(x) * ranks, *x.whole[1:]), first_row=0)


def _stack(parts: Sequence[Tensor], dim: int = 0) -> PackedWeight | None:
    return None if dim else _joined(parts, None, (len(parts), *parts[0].shape))


def _cat(parts: Sequence[Tensor], dim: int = 0) -> PackedWeight | None:
    shape, dim = [*parts[0].shape], dim % parts[0].ndim
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _joined(parts, dim, shape)


def _joined(parts: Sequence[Tensor], dim: int | None, shape: Sequence[int]) -> PackedWeight | None:
    known = [x for x in parts if isinstance(x, PackedWeight) and not x.transposed and x.shape == x.whole]
    if len(known) < len(parts) or len({(type(x.raw), x.dtype) for x in known}) > 1:
        return None
    raw = known[0].raw.joined([x.raw for x in known], [x.whole for x in known], dim)
    return None if raw is None else PackedWeight(raw, shape, known[0].dtype, torch.Size(shape))


def _gather(part: Tensor, ranks: int, group: Any) -> Tensor:
    op = torch.ops._c10d_functional
    gathered: Tensor = op.wait_tensor(op.all_gather_into_tensor(part, ranks, group))
    return gathered


_RAW: Final[dict[Any, Callable[..., Any]]] = {
    aten.detach.default: _alias,
    aten.constant_pad_nd.default: _pad_rows,
    torch.ops._c10d_functional.all_gather_into_tensor.default: _all_gather,
    torch.ops._c10d_functional.wait_tensor.default: _alias,  # `_all_gather` waited
    aten.alias.default: _alias,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten.as_strided.default: _as_strided,
    aten.empty_like.default: _empty_like,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_empty,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.is_pinned.default: _is_pinned,
    aten._pin_memory.default: _pin_memory,
}
