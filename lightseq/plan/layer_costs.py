"""Memory and traffic of a layer under each checkpointing policy, read from the layer itself."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.architecture.inspection import inspect_architecture
from lightseq.architecture.meta_run import layer_inputs
from lightseq.attention.context import one_rank_context
from lightseq.attention.module_attention import attention_function
from lightseq.config.train_config import TrainConfig
from lightseq.kernels.grouped_products import grouped_product
from lightseq.memory.remat import stored_operators
from lightseq.models.decoder import attending_part, decoder_layers
from lightseq.parts import attention, mlp, recurrences
from lightseq.parts.attention import IMPLEMENTATION, attend_with, reaches_of_masks
from lightseq.parts.changes import Changes, changes_of
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import run_experts
from lightseq.parts.facts import Layer
from lightseq.parts.fit import PARTS, fit
from lightseq.parts.mlp import TILE_TOKENS
from lightseq.parts.part import Choices, Ranks, choices_of_policy
from lightseq.parts.recurrences import registered_mixers
from lightseq.plan.layer_graph import TOKENS, LayerGraph
from lightseq.plan.layer_kernels import LAYER_INPUT, Pass
from lightseq.schedule.reach import Reach

TRACED: Final = f"{IMPLEMENTATION}_traced"  # in transformers' registry of attention functions
# Points of a layer's backward pass: operators whose own memory is counted elsewhere, and all others.
ATTENTION, MLP, SCAN = attention.PART.name, mlp.PART.name, recurrences.PART.name
POINTS: Final[Mapping[Any, str]] = {part.backward: part.name for part in PARTS if part.backward is not None}
OTHERS: Final = "norms and linears"


@dataclass(frozen=True)
class LayerCosts:
    """Bytes per token of a layer under one checkpointing policy.

    `working` holds, for each point of the backward pass, the peak beyond `saved`: temporaries, the gradient of the
    layer's output and what is recomputed. Operators in POINTS and attention's gradients are counted elsewhere.
    `weights_read` holds the elements of matrices that one operator reads there, the most at a time. `moved_forward` and
    `moved_backward` are the traffic of element-wise work.
    """

    saved: float
    working: Mapping[str, float]
    weights_read: Mapping[str, int]
    moved_forward: float
    moved_backward: float


@dataclass(frozen=True)
class Treatment:
    """Choices of training that change what a layer saves and computes."""

    policy: str  # value of --remat
    compiled: bool
    tiles_mlp: bool  # its MLP runs over tiles of tokens


def tiles_mlp(layer: Layer, config: TrainConfig, tokens: int) -> bool:
    """Returns whether the tiled MLP operator replaces the forward of a layer's MLP (`tile_mlps`)."""
    other = config.remat_policy == "none" or config.tiles_layers or config.fp8 is not None
    return layer.gated_mlp and tokens > TILE_TOKENS and not other


class LayerTable:
    """Costs of a model's layers in one dtype, each traced when it is first asked for."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, expert_ranks: int = 1) -> None:
        self._expert_ranks = expert_ranks  # that hold different experts
        self._config, self._dtype = copy.deepcopy(config), dtype  # building a model changes its config
        self._graphs: dict[tuple[int, Choices], LayerGraph] = {}
        self._costs: dict[tuple[int, Treatment], LayerCosts] = {}

    def __reduce__(self) -> Any:
        """Sends only the config to another process, which traces layers itself if it asks for them."""
        return layer_table, (self._config, self._dtype, self._expert_ranks)

    def costs(self, place: int, treatment: Treatment) -> LayerCosts:
        """Returns the costs of the layer at this place in the model."""
        key = place, treatment
        if key not in self._costs:
            graph, compiled = self._graph(place, treatment), treatment.compiled
            if treatment.policy == "none":
                backward = graph.backward(compiled)
            else:
                backward = graph.backward_of_checkpoint(stored_operators(treatment.policy), compiled)
            self._costs[key] = _costs(graph.forward(compiled), backward)
        return self._costs[key]

    def _graph(self, place: int, treatment: Treatment) -> LayerGraph:
        """Returns the graph of a layer that is fitted as in training, alone in its sequence."""
        ends_with_mlp = inspect_architecture(self._config).ends_with_mlps
        choices = choices_of_policy(treatment.policy, ends_with_mlp, treatment.tiles_mlp)
        key = place, choices
        if key not in self._graphs:
            layers, inputs, reaches = self._layers
            layer, experts = copy.deepcopy(layers[place]), None
            if self._expert_ranks > 1:
                experts = _TracedGroup(self._expert_ranks, self._dtype)
            fit([layer], replace(choices, reaches=reaches), Ranks(one_rank_context(), experts), Changes())
            self._graphs[key] = LayerGraph(layer, *inputs[place])
        return self._graphs[key]

    @cached_property
    def _layers(self) -> tuple[nn.ModuleList, list[tuple[tuple[Any, ...], dict[str, Any]]], tuple[Reach | None, ...]]:
        """Returns one layer of each kind and all before it, on the meta device, their arguments, and their reaches."""
        last = max(layer.place for layer in inspect_architecture(self._config).layers)
        model = build_to_train(self._config)
        layers = decoder_layers(model)[: last + 1]
        inputs = layer_inputs(model.to(self._dtype), layers, TOKENS)
        ALL_ATTENTION_FUNCTIONS.register(TRACED, attention_function)
        attend_with(attending_part(model), TRACED, changes_of(model))
        return layers, inputs, reaches_of_masks(model)


class _TracedGroup:
    """Simulated group of ranks with different experts, each with this rank's tokens."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        self._ranks, self.dtype = ranks, dtype

    def weight(self, parameter: Tensor) -> Tensor:
        return parameter[: len(parameter) // self._ranks]

    def product(self, x_RI: Tensor, parameter: Tensor, ends_E: Tensor, transposed: bool, stored: bool) -> Tensor:
        return grouped_product(x_RI, self.weight(parameter), ends_E, transposed, stored)

    def forward(self, module: Any, *tokens: Tensor) -> Tensor:
        hidden, experts, weights = (x.repeat(self._ranks, 1) for x in tokens)
        out = run_experts(module, hidden, experts, weights, module.num_experts // self._ranks)
        return out.view(self._ranks, -1, out.shape[-1]).sum(0)


_tables: dict[tuple[Any, ...], LayerTable] = {}


def layer_table(model: PreTrainedConfig, dtype: torch.dtype, expert_ranks: int = 1) -> LayerTable:
    """Returns the costs of a model's layers in a dtype; equal configs share a table."""
    key = type(model), repr(vars(model)), dtype, expert_ranks, registered_mixers()
    if key not in _tables:
        _tables[key] = LayerTable(model, dtype, expert_ranks)
    return _tables[key]


def _costs(forward: Pass, backward: Pass) -> LayerCosts:
    gradients = [value for name, value in backward.inputs.items() if name.startswith("tangents")]
    saved = sum(value.bytes for value in backward.inputs.values()) - sum(value.bytes for value in gradients)
    working, weights_read = dict[str, float](), dict[str, int]()
    # Autograd holds the gradient of a compiled layer's output, and a checkpoint its input, until the pass is over.
    held = gradients if backward.compiled else [x for name, x in backward.inputs.items() if name == LAYER_INPUT]
    for kernel, live in backward.live_bytes(held):
        point = POINTS.get(kernel.op, OTHERS)
        own = sum(value.bytes for value in kernel.writes) if point == ATTENTION else 0
        working[point] = max(working.get(point, -saved), live - own - saved)
        read = sum(value.weights for value in kernel.reads)
        weights_read[point] = max(weights_read.get(point, 0), read)
    moved = [sum(kernel.moved for kernel in each.kernels if kernel.is_elementwise) for each in (forward, backward)]
    return LayerCosts(float(saved), working, weights_read, *map(float, moved))
