"""Copies and sums of many tensors at once: on a GPU in few launches, prepared once; elsewhere one by one."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MAX_LAUNCHES = 4096  # prepared launches; more means that addresses do not repeat

Pairs = Sequence[tuple[Tensor, Tensor]]  # (to, from), alike in shape and dtype
TotalsAndParts = tuple[
    Sequence[Tensor], Sequence[Sequence[Tensor]]
]  # totals alike in shape, dtype and strides; parts of each


class Launch:
    """A Triton kernel with all its arguments but the tensors it is called with.

    The first call compiles. Later ones hand their arguments to what that gave, past the search for what to compile,
    which takes the host longer than the launch: for tensors of the same device, dtypes and `alignments`. Of other
    tensors it holds addresses, and keeps none alive but its table.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any],
        num_warps: int,
    ) -> None:  # fmt: skip
        """`constants` by name, in the order in which they follow the arguments in the kernel's signature."""
        self._kernel, self._grid, self._arguments = kernel, grid, arguments
        self._constants, self._num_warps = constants, num_warps
        self._again: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self._again is not None:
            self._again(*tensors, *self._arguments)
            return
        compiled = self._kernel[self._grid](*tensors, *self._arguments, **self._constants, num_warps=self._num_warps)
        if compiled is not None:  # Triton's interpreter has nothing to give
            self._again, self._arguments = compiled[self._grid], (*self._arguments, *self._constants.values())


class Launches:
    """`key` stands for all that a call touches, as `addresses` describes it; only for a new key is `build` called."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Launch] = {}
        self._collected: list[Launch] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Launch]]:
        """What is launched within: a recording of it reads their tables as long as it lasts."""
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
            self._keep(key, launch)
        self._run(launch)

    def add(self, key: Hashable, build: Callable[[], TotalsAndParts], fresh: bool) -> None:
        """Adds to every total its parts, in float32 or wider. `fresh`: the totals hold nothing yet."""
        launch = self._known.get((key, fresh))
        if launch is None:
            totals, parts = build()
            fused = fused_kernels(totals[0])
            if fused is None:
                for total, pieces in zip(totals, parts, strict=True):
                    wide = torch.promote_types(total.dtype, torch.float32)
                    terms = [x.to(wide) for x in ([] if fresh else [total]) + list(pieces)]
                    total.copy_(sum(terms[1:], start=terms[0]))
                return
            launch = fused.add_launch(totals, parts, fresh)
            self._keep((key, fresh), launch)
        self._run(launch)

    def _run(self, launch: Launch) -> None:
        if self._collected is not None:
            self._collected.append(launch)
        launch()

    def _keep(self, key: Hashable, launch: Launch) -> None:
        if len(self._known) >= MAX_LAUNCHES:
            self._known.clear()
        self._known[key] = launch


def addresses(tensors: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """A key: where tensors lie, and how."""
    return tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors)


def alignments(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """What a compiled kernel takes for granted of addresses: which are multiples of sixteen."""
    return tuple(x.data_ptr() % 16 == 0 for x in tensors)


def fused_kernels(x: Tensor, module: str = "fused") -> ModuleType | None:
    """The Triton kernels of a module beside this one, where they can run on a tensor like this."""
    return _with_triton(module) if x.is_cuda and x.dtype is not torch.float64 else None


@cache  # find_spec searches the file system
def _with_triton(module: str) -> ModuleType | None:
    return import_module(f"lightseq.kernels.{module}") if find_spec("triton") else None
