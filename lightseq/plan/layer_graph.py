"""Kernels of a layer's forward and backward pass, found by tracing the layer on fake tensors.

Nothing here knows what a layer consists of. AOT autograd traces it once, with the operators that training puts into it.
The compiler's own partitioner splits the graph of a compiled layer, whose element-wise nodes are fused into the kernels
that read them. An eager layer runs every node.
"""

import operator
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightseq.plan.layer_kernels import LAYER_INPUT, Kernel, Pass, Value

TOKENS: Final = 16_381  # a prime: only tensors with rows for tokens have a size that is a multiple of it
VIEWS: Final = (torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default)  # not marked as views


class LayerGraph:
    """Forward and backward pass of a layer in one graph of aten operators."""

    def __init__(self, layer: nn.Module, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Traces a layer on the meta device with these arguments. The first tensor needs a gradient.

        The first tensor that the layer returns is its output.
        """
        # Layers that share keys get them in a mapping, which torch treats as one object (Gemma 4).
        given = tree_map(lambda x: dict(x) if isinstance(x, UserDict) else x, (tuple(args), keywords))
        leaves, shape = tree_flatten(given)

        def run(tensors: Sequence[Tensor], *state: Tensor) -> Tensor:
            replacing = iter(tensors)
            filled = [next(replacing) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, keywords = tree_unflatten(filled, shape)
            output = functional_call(layer, dict(zip(names, state, strict=True)), args, keywords)
            return tree_leaves(output)[0]  # type: ignore[no-any-return]

        with FakeTensorMode(allow_non_fake_inputs=True), preserve_node_meta():
            tensors = [_fake(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            tensors[0].requires_grad_()
            parameters = {name: _fake(x).requires_grad_() for name, x in layer.named_parameters()}
            buffers = {name: _fake(x) for name, x in layer.named_buffers()}
            names = [*parameters, *buffers]
            self._joint, count = _joint_graph(run, tensors, *parameters.values(), *buffers.values())
        matrices = {
            f"primals_{i}": x.numel() for i, x in enumerate(parameters.values(), len(tensors) + 1) if x.ndim > 1
        }
        for node in self._joint.graph.nodes:
            node.meta["weights"] = matrices.get(node.name, 0)
        graph = fx.Graph()  # a copy, because the partitioner changes its own
        results: list[Any] = tree_leaves(graph.graph_copy(self._joint.graph, {}))
        self._outputs, self._gradients = results[:count], [x for x in results[count:] if isinstance(x, fx.Node)]
        self._output_count = count
        nodes, needed = list(graph.nodes), set(_with_dependencies(self._outputs))
        end = 1 + max(i for i, node in enumerate(nodes) if node in needed)
        self._forward, self._backward = nodes[:end], nodes[end:]

    def forward(self, compiled: bool) -> Pass:
        """Returns the forward pass, which is the same in a checkpoint."""
        return _pass_of(self._forward, self._outputs, fuses=compiled)

    def backward(self, compiled: bool) -> Pass:
        """Returns the backward pass outside a checkpoint, which begins with what the forward pass saved.

        The compiler's own partitioner cuts a compiled one.
        """
        if compiled:
            _, backward = min_cut_rematerialization_partition(self._joint, None, num_fwd_outputs=self._output_count)
            *nodes, output = backward.graph.nodes
            return _pass_of(nodes, output.all_input_nodes, fuses=True).scheduled()
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
        return found.scheduled() if compiled else found


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


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
    """Exception that ends AOT autograd after tracing. Nothing runs the graph."""


def _with_dependencies(nodes: Iterable[fx.Node], stored: Collection[Any] = ()) -> list[fx.Node]:
    """Orders nodes after their inputs. Leaves out nodes that only compute results of `stored` operators."""
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


def _pass_of(nodes: Sequence[fx.Node], returned: Sequence[fx.Node], fuses: bool, stored: Collection[Any] = ()) -> Pass:
    """Returns the kernels of nodes. With `fuses`, elementwise nodes join the kernels that read them.

    The results of `stored` operators exist before the pass.
    """
    whole = _materialized_nodes(nodes, returned)
    found = Pass(compiled=fuses, kernels=[], inputs={}, outputs=[])
    sources: dict[fx.Node, list[Value]] = {}  # values that a kernel reads for each input node
    reducing = set[fx.Node]()  # fused nodes that contain a reduction
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
                values[node] = Value(0, node.meta["weights"])
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
    """Returns the nodes whose results exist in memory, because the caller or an unfused kernel reads them."""
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
    """Returns whether a node is elementwise or a reduction, not a matrix product or a custom operator."""
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
