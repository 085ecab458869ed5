"""Kernels of a pass: the memory that they read and write, and the order in which a compiler runs them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

LAYER_INPUT: Final = "primals_1"  # name of the node, as AOT autograd gives it


@dataclass(eq=False)
class Value:
    """Memory that a kernel writes, or that a pass begins with."""

    bytes: int  # per token; 0 if the size does not depend on the tokens, as for weights
    weights: int = 0  # elements, if it is a matrix of the layer


@dataclass(eq=False)
class Kernel:
    """A kernel of a pass, which computes the operator `op`."""

    op: Any
    reads: list[Value]
    writes: list[Value]
    is_elementwise: bool  # or a reduction: work that a compiler fuses
    reduces: bool = False  # some of that work is a reduction
    function: int | None = None  # the autograd function that runs it, which frees its temporaries when it returns

    @property
    def moved(self) -> int:
        """Returns the bytes per token that the kernel reads and writes."""
        return sum(value.bytes for value in (*self.reads, *self.writes))


@dataclass
class Pass:
    """Kernels of a pass in order, with its inputs and outputs."""

    compiled: bool
    kernels: list[Kernel]
    inputs: dict[str, Value]  # by the names of their nodes
    outputs: list[Value]

    def live_bytes(self, held: Collection[Value]) -> Iterator[tuple[Kernel, int]]:
        """Yields each kernel with the bytes per token that are live while it runs, its results included.

        A value is freed after the last kernel that reads it, unless it is `held` or returned. An element-wise
        kernel of a compiled pass writes one result over what the forward pass saved, if it is the last to read that.
        """
        last = {
            x: self._freed_after(i) for i, kernel in enumerate(self.kernels) for x in (*kernel.writes, *kernel.reads)
        }
        dying: dict[int, list[Value]] = {}
        for value in last.keys() - {*held, *self.outputs}:
            dying.setdefault(last[value], []).append(value)
        saved = {value for name, value in self.inputs.items() if name != LAYER_INPUT}
        live = sum(value.bytes for value in {*self.inputs.values(), *held})
        for i, kernel in enumerate(self.kernels):
            reused = 0
            if self.compiled and kernel.is_elementwise:
                free = {value.bytes for value in dying.get(i, ()) if value in saved}
                reused = max((value.bytes for value in kernel.writes if value.bytes in free), default=0)
            live += sum(value.bytes for value in kernel.writes) - reused
            yield kernel, live
            live -= sum(value.bytes for value in dying.get(i, ())) - reused

    def _freed_after(self, i: int) -> int:
        """Returns the kernel after which kernel i's last-read memory is freed."""
        function = self.kernels[i].function
        while not self.compiled and function is not None and i + 1 < len(self.kernels):
            if self.kernels[i + 1].function != function:
                break
            i += 1
        return i

    def scheduled(self) -> "Pass":
        """Returns a compiled pass with its kernels as the compiler arranges them.

        Element-wise kernels of one size that share something they read run as one, as soon as all that they read is
        there. Reductions that only the caller reads, such as gradients of norms, run at the end.
        """
        merged = _merged(self.kernels)
        ordered = _in_order_of_need(merged)
        if len(ordered) < len(merged):  # groups wait for each other
            ordered = _in_order_of_need(self.kernels)
        return replace(self, kernels=ordered)


def _in_order_of_need(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Orders kernels by what they read. Returns fewer if some wait for each other."""
    read = {value for kernel in kernels for value in kernel.reads}
    waiting = sorted(kernels, key=lambda kernel: kernel.is_elementwise and not read.intersection(kernel.writes))
    missing = {value for kernel in kernels for value in kernel.writes}
    ordered: list[Kernel] = []
    while (ready := next((kernel for kernel in waiting if missing.isdisjoint(kernel.reads)), None)) is not None:
        waiting.remove(ready)
        missing.difference_update(ready.writes)
        ordered.append(ready)
    return ordered


def _merged(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Merges element-wise kernels of one size that share something they read."""
    groups, after = list[list[Kernel]](), _dependencies(kernels)
    readers: dict[Value, list[list[Kernel]]] = {}  # groups that read a value
    for kernel in kernels:
        near = (group for value in kernel.reads for group in readers.get(value, ()))
        group = next((group for group in near if all(_can_merge(kernel, other, after) for other in group)), None)
        if group is None:
            groups.append(group := [])
        group.append(kernel)
        for value in kernel.reads:
            readers.setdefault(value, []).append(group)
    return [
        Kernel(
            op=group[0].op,
            reads=list(dict.fromkeys(value for kernel in group for value in kernel.reads)),
            writes=[value for kernel in group for value in kernel.writes],
            is_elementwise=group[0].is_elementwise,
        )
        for group in groups
    ]


def _can_merge(x: Kernel, y: Kernel, after: Mapping[Kernel, set[Kernel]]) -> bool:
    shared = {value.bytes for value in x.reads if value in y.reads}
    same_size = shared & {value.bytes for value in x.writes} & {value.bytes for value in y.writes} - {0}
    alike = x.is_elementwise and y.is_elementwise and not (x.reduces or y.reduces)
    return alike and bool(same_size) and x not in after[y] and y not in after[x]


def _dependencies(kernels: Sequence[Kernel]) -> dict[Kernel, set[Kernel]]:
    """Returns the kernels that each kernel waits for."""
    makers = {value: kernel for kernel in kernels for value in kernel.writes}
    found: dict[Kernel, set[Kernel]] = {}
    for kernel in kernels:
        direct = {makers[value] for value in kernel.reads if value in makers}
        found[kernel] = direct.union(*(found[other] for other in direct))
    return found
