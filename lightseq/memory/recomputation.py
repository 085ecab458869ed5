"""Checkpoints, compilation and offload of a model's layers, each as its placement says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightseq.config.train_config import TrainConfig
from lightseq.memory.offload import HostBufferPool, Offload, layers_in_flight
from lightseq.memory.placement import KEEP, OFFLOAD, OFFLOADED, RECOMPUTED, Placement
from lightseq.memory.remat import apply_remat, capture_forwards, checkpoint_groups
from lightseq.parts.changes import Changes
from lightseq.parts.compilation import allow_graphs_per_length
from lightseq.parts.fp8 import FP8_COMPILE_OPTIONS
from lightseq.parts.tiled import tile_layers
from lightseq.utils.source import source_digest


@dataclass(frozen=True)
class MemorySettings:
    """Settings of weights, optimizer state and activations in host memory."""

    state_on_host: bool = False  # weights, gradients and optimizer state
    layers_with_state_on_gpu: int = 0  # the first layers, whose state stays on the device
    reshard_after_forward: bool = True  # False keeps the layers' gathered weights for the backward pass
    placement: Placement | None = None  # each layer's activations, with --offload auto
    activation_bytes: float = math.inf  # limit of this rank's host memory for offloaded activations


def apply_recomputation(
    groups: Sequence[Sequence[nn.Module]],
    norm: nn.Module,
    changes: Changes,
    config: TrainConfig,
    device: torch.device,
    memory: MemorySettings,
) -> Offload | None:
    """Checkpoints, compiles and offloads each layer as its placement says. Returns the offload, None without one.

    Each group of neighbouring layers is one checkpoint. `norm` runs after the last layer, and is compiled only.
    """
    layers, grouped = [layer for group in groups for layer in group], config.group_size > 1
    placements = _layer_placements(config, memory, len(layers))
    offload, rerun_offload = _make_offloads(config, device, memory)
    options = FP8_COMPILE_OPTIONS if config.fp8 else None
    # One graph for each batch length: a graph for all lengths would be slower at each.
    compiled = partial(torch.compile, dynamic=False, options=options) if config.compiles else lambda forward: forward
    if config.compiles:
        allow_graphs_per_length()
        # torch's disk cache knows our operators only by name, not the shapes and backward passes that they declare.
        torch.compiler.config.cache_key_tag = f"lightseq {source_digest()}"

    def rematerialize(chosen: Sequence[nn.Module], policy: str) -> None:
        if config.tiles_layers:
            stores = policy == "attention"
            tile_layers(chosen, changes, store_attention=stores, compiled=config.compiles, options=options)
            return
        apply_remat(chosen, policy, config.compiles, rerun_offload or offload)
        for layer in chosen:
            layer.forward = compiled(layer.forward)  # type: ignore[method-assign]

    rerun_forwards = None
    if grouped and config.remat_policy == "full":  # see `checkpoint_groups`
        last_layers = [group[-1] for group in groups]
        rerun_forwards = capture_forwards(last_layers, lambda: rematerialize(last_layers, "attention"))
    placed = list(zip(layers, placements, strict=True))
    rematerialize([layer for layer, placement in placed if placement in RECOMPUTED], "full")
    rematerialize([layer for layer, placement in placed if placement not in RECOMPUTED], config.remat_policy)
    norm.forward = compiled(norm.forward)  # type: ignore[method-assign]
    if grouped:
        checkpoint_groups(groups, rerun_offload, rerun_forwards)
    if offload is not None:
        first_layers = [group[0] for group in groups]
        by_group = zip(first_layers, placements[:: config.group_size], strict=True)
        staying = [first for first, placement in by_group if placement not in OFFLOADED]
        if len(staying) < len(first_layers):
            offload.wrap(first_layers[:-1], first_layers[-1], staying)
    return offload


def _layer_placements(config: TrainConfig, memory: MemorySettings, layers: int) -> tuple[str, ...]:
    """Returns each layer's activation placement, such as KEEP.

    The last group stays on the GPU, because the backward pass begins with it.
    """
    if memory.placement is not None:
        return memory.placement.layers
    size, offloads = config.group_size, config.offload in ("activations", "both")
    return tuple(OFFLOAD if offloads and i % size == 0 and i + size < layers else KEEP for i in range(layers))


def _make_offloads(
    config: TrainConfig, device: torch.device, memory: MemorySettings
) -> tuple[Offload | None, Offload | None]:
    """Returns the offload between forward and backward pass, and the one while a group is recomputed."""
    placed_on_host = memory.placement is not None and set(memory.placement.layers) & set(OFFLOADED)
    if config.offload not in ("activations", "both") and not placed_on_host:
        return None, None
    host = HostBufferPool(memory.activation_bytes, device.type == "cuda")
    make = partial(Offload, device, host, layers_in_flight(config.tiles_layers))
    return make(), make() if config.group_size > 1 else None
