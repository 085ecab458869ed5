"""Kernels of a layer's forward and backward pass, found by tracing the layer on fake tensors.

Nothing here knows what a layer consists of. AOT autograd traces it once, with the operators that training puts into it.
The compiler's own partitioner splits the graph of a compiled layer, whose element-wise nodes are fused into the kernels
that read them. An eager layer runs every node.
"""

import operator
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

TOKENS: Final = 16_381  # a prime: only tensors with rows for tokens have a size that is a multiple of it
LAYER_INPUT: Final = "primals_1"  # as AOT autograd names it
VIEWS: Final = (torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default)  # their schemas do not say so


@dataclass(eq=False)
class Value:
    """Memory that a kernel writes, or that a pass begins with."""

    bytes: int  # per token; 0 if the size does not depend on the tokens, as for weights


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
    """Kernels of a pass in order, with the values that exist before it and those that it returns."""

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
        """Returns the kernel after which memory is freed that kernel i is the last to read."""
        function = self.kernels[i].function
        while not self.compiled and function is not None and i + 1 < len(self.kernels):
            if self.kernels[i + 1].function != function:
                break
            i += 1
        return i


class LayerGraph:
    """Forward and backward pass of a layer in one graph of aten operators."""

    def __init__(self, layer: nn.Module, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Traces a layer on the meta device with these arguments. The first tensor needs a gradient.

        The first tensor that the layer returns is its output.
        """
        arguments, shape = tree_flatten((tuple(args), keywords))
        # Keys that layers share come in a mapping that torch takes for one object (Gemma 4).
        kinds = [type(x) if isinstance(x, UserDict) else None for x in arguments]
        leaves, inner_shape = tree_flatten([dict(x) if isinstance(x, UserDict) else x for x in arguments])

        def run(tensors: Sequence[Tensor], *state: Tensor) -> Tensor:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            inner = tree_unflatten(filled, inner_shape)
            args, keywords = tree_unflatten(
                [x if kind is None else kind(x) for kind, x in zip(kinds, inner, strict=True)], shape
            )
            output = functional_call(layer, dict(zip(names, state, strict=True)), args, keywords)
            return tree_leaves(output)[0]  # type: ignore[no-any-return]

        with FakeTensorMode(allow_non_fake_inputs=True), preserve_node_meta():
            tensors = [_fake(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            tensors[0].requires_grad_()
            parameters = {name: _fake(x).requires_grad_() for name, x in layer.named_parameters()}
            buffers = {name: _fake(x) for name, x in layer.named_buffers()}
            names = [*parameters, *buffers]
            self._joint, count = _joint_graph(run, tensors, *parameters.values(), *buffers.values())
        graph = fx.Graph()  # a copy, because the partitioner changes its own
        results: list[Any] = tree_leaves(graph.graph_copy(self._joint.graph, {}))
        self._outputs, self._gradients = results[:count], [x for x in results[count:] if isinstance(x, fx.Node)]
        self._output_count = count
        nodes, needed = list(graph.nodes), set(_with_dependencies(self._outputs))
        end = 1 + max(i for i, node in enumerate(nodes) if node in needed)
        self._forward, self._backward = nodes[:end], nodes[end:]

    @cached_property
    def _partitioned_backward(self) -> Pass:
        """Returns the backward pass as the compiler's own partitioner cuts it."""
        _, backward = min_cut_rematerialization_partition(self._joint, None, num_fwd_outputs=self._output_count)
        *nodes, output = backward.graph.nodes
        return _pass_of(nodes, output.all_input_nodes, fuses=True)

    def forward(self, compiled: bool) -> Pass:
        """Returns the forward pass, which is the same in a checkpoint."""
        return _pass_of(self._forward, self._outputs, fuses=compiled)

    def backward(self, compiled: bool) -> Pass:
        """Returns the backward pass outside a checkpoint, which begins with what the forward pass saved."""
        if compiled:
            return _scheduled(self._partitioned_backward)
        whole = _pass_of([*self._forward, *self._backward], self._gradients, fuses=False)
        kernels = whole.kernels[len(self.forward(compiled=False).kernels) :]
        written = {value for kernel in kernels for value in kernel.writes}
        saved = dict.fromkeys(value for kernel in kernels for value in kernel.reads if value not in written)
        names = {value: name for name, value in whole.inputs.items()}
        inputs = {names.get(x, f"saved {i}"): x for i, x in enumerate(saved)}
        return Pass(compiled=False, kernels=kernels, inputs=inputs, outputs=whole.outputs)

    def backward_of_checkpoint(self, stored: Collection[Any], compiled: bool) -> Pass:
        """Returns the backward pass of a checkpoint, which stores the layer's input and the results of some operators.

        It computes the others again if they are read: autograd all at its beginning, a compiler each in its turn.
        """
        nodes = _with_dependencies([*self._backward, *self._gradients], stored)
        if not compiled:
            needed = set(nodes)
            nodes = [*(node for node in self._forward if node in needed), *self._backward]
        found = _pass_of(nodes, self._gradients, compiled, stored)
        return _scheduled(found) if compiled else found


def _joint_graph(function: Callable[..., Tensor], *inputs: Any) -> tuple[fx.GraphModule, int]:
    """Returns the graph of a function's forward and backward pass, and the number of results of the forward pass."""

    def stop(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        raise _Traced(joint, num_fwd_outputs)

    try:
        aot_function(function, fw_compiler=nop, partition_fn=stop)(*inputs)
    except _Traced as traced:
        return traced.args[0], traced.args[1]
    raise AssertionError("the function has no backward pass")


class _Traced(Exception):
    """Ends AOT autograd once it has traced a graph, which nothing runs."""


def _with_dependencies(nodes: Iterable[fx.Node], stored: Collection[Any] = ()) -> list[fx.Node]:
    """Returns nodes in order, each after those that it reads. Leaves out what results of `stored` operators need."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        pending = [node]
        while pending:
            reads = () if pending[-1].target in stored else pending[-1].all_input_nodes
            missing = [read for read in reads if read not in found]
            if missing:
                pending += reversed(missing)
            else:
                found[pending.pop()] = None
    return list(found)


# ---- what a compiler does with kernels ------------------------------------------------------------------------------


def _scheduled(found: Pass) -> Pass:
    """Returns a compiled pass with its kernels as the compiler arranges them.

    Element-wise kernels of one size that share something they read run as one, as soon as all that they read is there.
    Reductions that only the caller reads, such as gradients of norms, run at the end.
    """
    merged = _merged(found.kernels)
    ordered = _in_order_of_need(merged)
    if len(ordered) < len(merged):  # groups wait for each other
        ordered = _in_order_of_need(found.kernels)
    return replace(found, kernels=ordered)


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


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


# ---- from nodes to kernels ------------------------------------------------------------------------------------------


def _pass_of(nodes: Sequence[fx.Node], returned: Sequence[fx.Node], fuses: bool, stored: Collection[Any] = ()) -> Pass:
    """Returns the kernels that run nodes. With `fuses`, element-wise nodes are part of the kernels that read them.

    The results of `stored` operators exist before the pass.
    """
    whole = _materialized_nodes(nodes, returned)
    found = Pass(compiled=fuses, kernels=[], inputs={}, outputs=[])
    sources: dict[fx.Node, list[Value]] = {}  # what a kernel that reads a node reads
    reducing = set[fx.Node]()  # fused nodes with a reduction among what they compute
    here = set(nodes)
    for node in nodes:
        if _is_view(node):
            sources[node] = sources[node.all_input_nodes[0]]
            reducing |= {node} if node.all_input_nodes[0] in reducing else set()
            continue
        if node.target is operator.getitem:  # one of several results of another node
            continue
        several = isinstance(node.meta["val"], tuple | list)
        results = [x for x in node.users if x in here and x.target is operator.getitem] if several else [node]
        values = {x: Value(_bytes_per_token(x)) for x in results}
        if node.op != "call_function":
            if node.name.startswith("primals_") and node.name != LAYER_INPUT:  # weights, and inputs of all layers
                values[node].bytes = 0
            found.inputs[node.name] = values[node]
        elif node.target in stored:
            found.inputs |= {x.name: value for x, value in values.items()}
        else:
            reads = list(dict.fromkeys(value for x in node.all_input_nodes for value in sources[x]))
            kernel = Kernel(
                op=node.target,
                reads=reads,
                writes=[*values.values()],
                is_elementwise=_is_elementwise(node),
                function=node.meta.get("seq_nr"),
            )
            kernel.reduces = kernel.is_elementwise and (_is_reduction(node) or bool(reducing & {*node.all_input_nodes}))
            if fuses and kernel.is_elementwise and not several and node not in whole:
                sources[node] = reads
                reducing |= {node} if kernel.reduces else set()
                continue
            found.kernels.append(kernel)
        sources |= {x: [value] for x, value in values.items()}
    found.outputs += [value for node in returned for value in sources[node]]
    return found


def _materialized_nodes(nodes: Sequence[fx.Node], returned: Sequence[fx.Node]) -> set[fx.Node]:
    """Returns the nodes whose results exist in memory, because the caller or a kernel that fuses nothing reads them."""
    readers = [x for x in nodes if x.op == "call_function" and not (_is_view(x) or _is_elementwise(x))]
    found = set[fx.Node]()
    for read in (*returned, *(read for reader in readers for read in reader.all_input_nodes)):
        while _is_view(read):
            read = read.all_input_nodes[0]
        found.add(read)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [result.alias_info for result in node.target._schema.returns]
    return node.target in VIEWS or any(alias is not None and not alias.is_write for alias in aliases)


def _is_elementwise(node: fx.Node) -> bool:
    """Returns whether a node computes element by element or a reduction, rather than products or an own operator."""
    if node.target is operator.getitem:
        return False
    op = node.target
    assert isinstance(op, torch._ops.OpOverload), op
    return op.namespace == "aten" and not any(part in op._opname for part in ("mm", "convolution", "attention"))


def _is_reduction(node: fx.Node) -> bool:
    return any(part in node.target._opname for part in ("sum", "mean", "amax", "softmax", "var"))  # type: ignore[union-attr]


def _bytes_per_token(node: fx.Node) -> int:
    values = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return sum(x.numel() // TOKENS * x.element_size() for x in values if x.numel() % TOKENS == 0)
