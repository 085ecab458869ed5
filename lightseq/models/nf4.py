"""Frozen weight in four bits, NF4 of QLoRA (arXiv 2305.14314), with the values and the memory layout of bitsandbytes.

FSDP2 shards and gathers the bytes. Every rank holds all scales of scales, which take 0.0002 bytes an element.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightseq.models.nf4_bytes import BLOCK, NESTED_BLOCK, Nf4Bytes, dequantize, empty_bytes, quantize

aten: Final = torch.ops.aten


class Nf4Weight(Tensor):
    """Weight in four bits that any operator reads as a dense one, made for the operator alone.

    Copies, transposition and parts of its rows stay in four bits. What autograd saves does, too, so that a backward
    pass makes the dense matrix again. Nothing writes to it but `copy_`, which quantizes.
    """

    raw: Nf4Bytes
    whole: torch.Size  # of the weight that these are rows of
    first_row: int | None  # None: a shard that FSDP2 fills later, and which has to be gathered before it is read
    transposed: bool
    from_host: bool = False  # a copy of a shard in host memory, as FSDP2 makes before it gathers

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors

    @staticmethod
    def __new__(
        cls,
        raw: Nf4Bytes,
        shape: Sequence[int],
        dtype: torch.dtype,
        whole: torch.Size,
        first_row: int | None = 0,
        transposed: bool = False,
    ) -> "Nf4Weight":
        shape = tuple(shape)
        strides = torch._prims_common.make_contiguous_strides_for(shape)
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        self: Nf4Weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=raw.nibbles.device
        )
        self.raw, self.whole, self.transposed = raw, whole, transposed
        self.first_row = 0 if shape == tuple(whole) else first_row
        return self

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, double: bool = True) -> "Nf4Weight":
        """Allocates a matrix, for `double` quantization or not. Raises ValueError for rows that are no whole blocks."""
        check_rows(shape)
        raw = empty_bytes(shape.numel(), -(-shape.numel() // (BLOCK * NESTED_BLOCK)) if double else 0, device)
        return cls(raw, shape, dtype, shape)

    @classmethod
    def quantize(cls, dense: Tensor) -> "Nf4Weight":
        """Returns a dense matrix in four bits. Raises ValueError as `empty` does."""
        check_rows(dense.shape)
        return cls(quantize(dense), dense.shape, dense.dtype, dense.shape)

    def fill_rows(self, whole: Tensor, first_row: int) -> None:
        """Keeps the rows that this shard has, from `first_row` on, of a weight in four bits, or of a dense one.

        A dense one is quantized on the accelerator.
        """
        found = whole
        if not isinstance(whole, Nf4Weight):
            # Without the check, torch's builds for CUDA name a GPU on machines without one.
            device = torch.accelerator.current_accelerator(check_available=True) or self.device
            found = Nf4Weight.quantize(whole.to(device, self.dtype))
        self.copy_(found[first_row : first_row + len(self)])

    def dense(self) -> Tensor:
        """Returns the matrix, in memory of its own."""
        assert self.first_row is not None, "gather a shard before reading it"
        shape = self.shape[::-1] if self.transposed else self.shape
        start = self.first_row * self.row_elements // BLOCK
        backward = torch._C._current_graph_task_id() != -1
        found: Tensor = dequantize(*self.raw.tensors, [*shape], start, self.dtype, backward)
        return found.T if self.transposed else found

    def like(self, raw: Nf4Bytes, **changed: Any) -> "Nf4Weight":
        """Returns a weight with other bytes, and the same facts but for those `changed`."""
        shape = self.shape[::-1] if self.transposed else self.shape
        facts = dict[str, Any](shape=shape, dtype=self.dtype, whole=self.whole, first_row=self.first_row)
        return Nf4Weight(raw, **(facts | {"transposed": self.transposed} | changed))

    def rows(self, start: int, end: int) -> "Nf4Weight":
        """Returns some rows, sharing the memory."""
        first = None if self.first_row is None else self.first_row + start
        raw = self.raw.elements(start * self.row_elements, end * self.row_elements)
        return self.like(raw, shape=(end - start, *self.whole[1:]), first_row=first)

    @property
    def row_elements(self) -> int:
        return self.whole[1:].numel()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Nf4Weight(shape={[*self.shape]}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        shape = self.shape[::-1] if self.transposed else self.shape
        facts = (shape, self.dtype, self.whole, self.first_row, self.transposed)
        return ["nibbles", "scales", "nested", "offset"], facts

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], facts: Any, *_: Any) -> "Nf4Weight":
        return Nf4Weight(Nf4Bytes(**inner), *facts)

    nibbles = property(lambda self: self.raw.nibbles)
    scales = property(lambda self: self.raw.scales)
    nested = property(lambda self: self.raw.nested)
    offset = property(lambda self: self.raw.offset)

    # FSDP2 calls this form, with the mesh alone, for shards of unequal sizes, too.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Returns the bytes to gather, equally many on every rank.

        One rank alone has all, and gathers none, or the nibbles if FSDP2 has to free them: it takes one tensor then.
        """
        if mesh.size() == 1:
            return (self.raw.nibbles if self.from_host else self.raw.nibbles[:0],), self.raw
        raw = _padded(self, -(-self.whole[0] // mesh.size())).raw
        return (raw.nibbles, raw.scales), raw

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Returns the whole matrix, in the gathered memory, which FSDP2 frees and fills again."""
        assert out is None or isinstance(out, Nf4Weight)
        raw: Nf4Bytes = metadata
        freed = gathered
        if len(gathered) == 2:
            raw = replace(raw, nibbles=gathered[0], scales=gathered[1]).elements(0, self.whole.numel())
        elif len(gathered[0]):  # one rank's copy from the host, whose first scales FSDP2 has allocated again
            scales = raw.scales if out is None else out.raw.scales.copy_(raw.scales)
            raw, freed = replace(raw, nibbles=gathered[0], scales=scales), (*gathered, scales)
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
            if written and isinstance(value, Nf4Weight):
                raise ValueError(f"{func} writes to a weight in four bits, which is frozen; train adapters instead")
        args, kwargs = tree_map_only(Nf4Weight, Nf4Weight.dense, (args, kwargs))
        return func(*args, **kwargs)


def plain_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that hold the bytes of a weight in four bits, or a plain tensor itself."""
    return tensor.raw.tensors if isinstance(tensor, Nf4Weight) else (tensor,)


def sharded_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors of `plain_tensors` that grow with the shard; the others take at most some kilobytes."""
    return plain_tensors(tensor)[:2]


def check_rows(shape: torch.Size) -> None:
    if len(shape) < 2 or shape[-1] % BLOCK:
        raise ValueError(f"a weight of shape {[*shape]} has no rows of whole blocks of {BLOCK} elements")


# Operators that keep the bytes. None: the arguments need the dense matrix.


def _alias(x: Nf4Weight, *_: Any) -> Nf4Weight:
    return x.like(x.raw)


def _transpose(x: Nf4Weight, *dims: int) -> Nf4Weight | None:
    swapped = x.ndim == 2 and (not dims or {dim % 2 for dim in dims} == {0, 1})
    return x.like(x.raw, transposed=not x.transposed) if swapped else None


def _permute(x: Nf4Weight, dims: Sequence[int]) -> Nf4Weight | None:
    return _transpose(x) if [dim % 2 for dim in dims] == [1, 0] else None


def _split(x: Nf4Weight, size: int, dim: int = 0) -> list[Nf4Weight] | None:
    if x.transposed or x.ndim < 2 or dim:
        return None
    return [x.rows(start, min(start + size, len(x))) for start in range(0, len(x), size)]


def _slice(
    x: Nf4Weight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Nf4Weight | None:
    if x.transposed or x.ndim < 2 or dim or step != 1:
        return None
    start, end, _ = slice(start, end).indices(len(x))
    return x.rows(start, max(start, end))


def _view(x: Nf4Weight, size: Sequence[int], *_: Any) -> Nf4Weight | None:
    if tuple(size) == x.shape:
        return _alias(x)
    return x.like(x.raw, shape=(x.numel(),)) if len(size) == 1 and not x.transposed else None


def _as_strided(x: Nf4Weight, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Nf4Weight | None:
    return _alias(x) if (tuple(size), tuple(stride), offset) == (x.shape, x.stride(), 0) else None


def _empty_like(x: Nf4Weight, **given: Any) -> Nf4Weight | None:
    if given.get("dtype") not in (None, x.dtype):
        return None
    device = given.get("device") or x.device
    return x.like(x.raw.map(lambda part: torch.empty_like(part, device=device)))


def _new_zeros(x: Nf4Weight, size: Sequence[int], **given: Any) -> Tensor:
    if len(size) < 2 or tuple(size[1:]) != x.whole[1:] or given.get("dtype") not in (None, x.dtype):
        return _new_empty(x, size, **given).zero_()
    # FSDP2 pads shards so. It copies nothing to a rank without rows, which needs the scales of the matrix, too.
    elements = size[0] * x.row_elements
    nibbles, scales = (x.raw.nibbles.new_zeros(count) for count in (elements // 2, x.raw.scale_bytes(elements)))
    raw = replace(x.raw, nibbles=nibbles, scales=scales)
    return x.like(raw, shape=size, first_row=None, transposed=False)


def _new_empty(x: Nf4Weight, size: Sequence[int], **given: Any) -> Tensor:
    return torch.empty(size, dtype=given.get("dtype") or x.dtype, device=given.get("device") or x.device)


def _clone(x: Nf4Weight, **_: Any) -> Nf4Weight:
    return x.like(x.raw.map(Tensor.clone))


def _to_copy(x: Nf4Weight, **given: Any) -> Nf4Weight | None:
    if given.get("dtype") not in (None, x.dtype):
        return None
    device, non_blocking = given.get("device") or x.device, given.get("non_blocking", False)
    found = x.like(x.raw.map(lambda part: part.to(device, non_blocking=non_blocking, copy=True)))
    found.from_host = x.device.type == "cpu" and found.device.type != "cpu"
    return found


def _copy(x: Tensor, source: Tensor, *_: Any) -> Tensor | None:
    if not isinstance(x, Nf4Weight):
        return None
    if not isinstance(source, Nf4Weight):
        assert not x.transposed and x.shape == x.whole, "a shard is filled by `fill_rows`"
        source = Nf4Weight.quantize(source.to(x.device, x.dtype))
    for mine, other in zip(x.raw.tensors, source.raw.tensors, strict=True):
        mine.copy_(other)
    x.first_row = source.first_row
    return x


def _is_pinned(x: Nf4Weight, *_: Any, **__: Any) -> bool:
    return x.raw.nibbles.is_pinned()


def _pin_memory(x: Nf4Weight, *_: Any, **__: Any) -> Nf4Weight:
    return x.like(x.raw.map(Tensor.pin_memory))


def _pad_rows(x: Nf4Weight, pad: Sequence[int], value: float = 0) -> Nf4Weight | None:
    if x.transposed or x.ndim < 2 or len(pad) != 2 * x.ndim or any(pad[:-1]):
        return None
    return _padded(x, len(x) + pad[-1])


def _padded(x: Nf4Weight, rows: int) -> Nf4Weight:
    raw, missing = x.raw, rows * x.row_elements - x.numel()
    if not missing:
        return x
    nibbles = torch.cat([raw.nibbles, raw.nibbles.new_zeros(missing // 2)])
    scales = torch.cat([raw.scales, raw.scales.new_zeros(raw.scale_bytes(missing))])
    return x.like(replace(raw, nibbles=nibbles, scales=scales), shape=(rows, *x.whole[1:]), first_row=None)


def _all_gather(x: Nf4Weight, ranks: int, group: Any) -> Nf4Weight | None:
    if x.transposed or x.ndim < 2:
        return None
    nibbles, scales = (_gather(part, ranks, group) for part in (x.raw.nibbles, x.raw.scales))
    raw = replace(x.raw, nibbles=nibbles, scales=scales)
    return x.like(raw, shape=(len(x) * ranks, *x.whole[1:]), first_row=0)


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
