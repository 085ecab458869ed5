"""Copies and sums of many tensors: on a GPU in a few prepared launches, elsewhere one by one."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MAX_LAUNCHES = 4096  # in a cache; more would mean that addresses do not repeat

Pairs = Sequence[tuple[Tensor, Tensor]]  # (to, from), of equal shape and dtype
# Totals of equal shape, dtype and strides; the parts of each.
TotalsAndParts = tuple[Sequence[Tensor], Sequence[Sequence[Tensor]]]


class Launch:
    """A Triton kernel with all its arguments except the tensors it is called with.

    The first call compiles. Later calls go straight to the compiled kernel, past Triton's look-up, which takes the host
    longer than the launch; so tensors must have the same device, dtypes and `alignments` each time. Its table holds
    addresses of other tensors, but does not keep them alive.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any],
        num_warps: int,
    ) -> None:  # fmt: skip
        """Stores a launch. `constants` are named, in the order of the kernel's signature after its arguments."""
        self._kernel, self._grid, self._arguments = kernel, grid, arguments
        self._constants, self._num_warps = constants, num_warps
        self._again: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self._again is not None:
            self._again(*tensors, *self._arguments)
            return
        compiled = self._kernel[self._grid](*tensors, *self._arguments, **self._constants, num_warps=self._num_warps)
        if compiled is not None:  # Triton's interpreter returns nothing
            self._again, self._arguments = compiled[self._grid], (*self._arguments, *self._constants.values())


class Launches:
    """Cache of prepared launches.

    `key` identifies all memory that a call touches (see `addresses`); `build` is called for a new key only.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Launch] = {}
        self._collected: list[Launch] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Launch]]:
        """Yields a list of the launches made inside. A CUDA graph of them must keep it: it reads their tables."""
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    def copy(self, key: Hashable, build: Callable[[], Pairs]) -> None:
        """Copies every pair."""
        launch = self._known.get(key)
        if launch is None:
            pairs = build()
            fused = fused_kernels(pairs[0][0])
            launch = fused.copy_launch(pairs) if fused else None
            if launch is None:
                for to, x in pairs:
                    to.copy_(x)
                return
            self._remember(key, launch)
        self._run(launch)

    def add(self, key: Hashable, build: Callable[[], TotalsAndParts], overwrite: bool) -> None:
        """Adds its parts to every total, in float32 or wider; with `overwrite` the totals hold nothing yet."""
        launch = self._known.get((key, overwrite))
        if launch is None:
            totals, parts = build()
            fused = fused_kernels(totals[0])
            if fused is None:
                for total, pieces in zip(totals, parts, strict=True):
                    wide = torch.promote_types(total.dtype, torch.float32)
                    terms = [x.to(wide) for x in ([] if overwrite else [total]) + list(pieces)]
                    total.copy_(sum(terms[1:], start=terms[0]))
                return
            launch = fused.add_launch(totals, parts, overwrite)
            self._remember((key, overwrite), launch)
        self._run(launch)

    def _run(self, launch: Launch) -> None:
        if self._collected is not None:
            self._collected.append(launch)
        launch()

    def _remember(self, key: Hashable, launch: Launch) -> None:
        if len(self._known) >= MAX_LAUNCHES:
            self._known.clear()
        self._known[key] = launch


def addresses(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Returns a key of the addresses, dtypes, shapes and strides of tensors."""
    return tuple([(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors])


def alignments(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Returns whether each address is a multiple of 16, which a compiled Triton kernel assumes."""
    return tuple(x.data_ptr() % 16 == 0 for x in tensors)


def fused_kernels(x: Tensor, module: str = "copies") -> ModuleType | None:
    """Imports a module of Triton kernels in this package; returns None if they cannot run on such a tensor."""
    return _with_triton(module) if x.is_cuda and x.dtype is not torch.float64 else None


@cache  # find_spec searches the file system
def _with_triton(module: str) -> ModuleType | None:
    return import_module(f"lightseq.kernels.fused.{module}") if find_spec("triton") else None
