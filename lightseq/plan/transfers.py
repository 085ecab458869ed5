"""Predicted traffic of weights, and the time that layers wait for collectives and for copies between GPU and host."""

from collections.abc import Sequence
from math import ceil

from lightseq.architecture.flops import recompute_flops
from lightseq.memory.placement import OFFLOADED, Placement
from lightseq.parts.facts import Experts
from lightseq.parts.mlp import TILE_TOKENS
from lightseq.plan import rates
from lightseq.plan.memory import lifetimes_of, saved_by_groups
from lightseq.plan.run import PlannedRun
from lightseq.plan.weights import Weights
from lightseq.schedule.timing import FLOAT32_BYTES


def weights_of_products(run: PlannedRun) -> float:
    """Counts the weights that frozen linears read in a forward and backward pass, once per read."""
    config = run.config
    again = recompute_flops(
        run.model, 1, 1, config.remat_policy, run.group_size, config.tiles_layers, attention_share=0.0
    )
    weights = 2 * run.architecture.linears + again / 2
    return weights * (ceil(run.tokens / TILE_TOKENS) if config.tiles_layers else 1)


def weight_copies(run: PlannedRun) -> float:
    """Returns the bytes moved in a pass to cast and copy gathered weights and reduced gradients."""
    held = run.weights.total
    gathers = 1 + run.reshard_after_forward
    return rates.GATHER_COPIES * gathers * held.gathered + rates.REDUCE_COPIES * held.trained


def host_link(run: PlannedRun) -> float:
    """Returns the bytes per second between GPU and host in one direction."""
    return run.hardware.chip.host_rate * rates.HOST_LINK_SHARE


def memory_rate(run: PlannedRun) -> float:
    return run.hardware.chip.memory_rate * rates.MEMORY_SHARE


# ---- collectives -----------------------------------------------------------------------------------------------------


def exposed_collectives(run: PlannedRun, layer_seconds: float) -> float:
    """Returns the seconds by which gathers and reductions lengthen a pass.

    Nothing hides the first gather, nor the gathers of embeddings and head. The others slow the kernels beside them.
    """
    layers = [collective_seconds(run, run.exchanged(place)) for place in range(len(run.layers))]
    exposed = sum(max(0.0, seconds - layer_seconds) for seconds in layers)
    exposed += rates.COLLECTIVE_SHARE * sum(min(seconds, layer_seconds) for seconds in layers)
    experts = sum(_experts_seconds(run, layer.experts) for layer in run.layers if layer.experts is not None)
    return exposed + layers[0] / 2 + collective_seconds(run, run.weights.ends) + experts


def _experts_seconds(run: PlannedRun, experts: Experts) -> float:
    """Returns the exposed seconds of gathering and reducing experts among ranks with the same experts."""
    ranks = run.config.expert_ranks
    if ranks == 1:  # FSDP2 gathers and reduces these experts
        return 0.0
    reduced = 0 if run.adapter_parameters else FLOAT32_BYTES
    moved = experts.weights / ranks * ((1 + run.gathers_experts_again) * run.itemsize + reduced)
    return _collective(run, moved, run.hardware.gpus // ranks, run.hardware.gpus)


def token_exchange_seconds(run: PlannedRun) -> float:
    """Returns the seconds of token exchange under expert parallelism: twice per pass, recomputation included."""
    ranks = run.config.expert_ranks
    sent = run.tokens * run.itemsize * (ranks - 1)
    passes = 2 + (run.config.remat_policy != "none")
    width = sum(layer.hidden for layer in run.layers if layer.experts is not None)
    return 2 * passes * width * sent / _collective_rate(run, ranks)


def collective_seconds(run: PlannedRun, weights: Weights) -> float:
    """Returns the seconds of gathers, and of a float32 reduction of gradients over shards, then replicas."""
    gradients, gpus = FLOAT32_BYTES * weights.trained, run.hardware.gpus
    over_shards = (1 + run.reshard_after_forward) * weights.gathered + gradients
    seconds = _collective(run, over_shards, run.shards, run.shards)
    return seconds + _collective(run, 2 * gradients / run.shards, gpus // run.shards, gpus)


def gather_seconds(run: PlannedRun, weights: Weights) -> float:
    """Returns the seconds of one gather."""
    return _collective(run, weights.gathered, run.shards, run.shards)


def _collective(run: PlannedRun, size: float, ranks: int, span: int) -> float:
    """Returns the seconds in which `ranks` of `span` neighbouring ranks exchange equal parts of `size` bytes."""
    return size * (ranks - 1) / ranks / _collective_rate(run, span)


def _collective_rate(run: PlannedRun, span: int) -> float:
    across_hosts = span > run.hardware.gpus_per_host
    return rates.NETWORK_RATE if across_hosts else run.hardware.chip.peer_rate * rates.PEER_SHARE


# ---- copies between GPU and host -------------------------------------------------------------------------------------


def exposed_copies(run: PlannedRun, placement: Placement, layer_seconds: float) -> float:
    """Returns the seconds of activation copies, in both directions, that the layers' compute does not hide."""
    if not placement.offloads:
        return 0.0
    forward, backward = (share * run.group_size * layer_seconds for share in rates.FORWARD_AND_BACKWARD)
    saved = zip(saved_by_groups(run, placement), placement.layers[:: run.group_size], strict=True)
    copies = [size / host_link(run) if action in OFFLOADED else 0.0 for size, action in saved]
    return copy_waits(copies, lifetimes_of(run, placement), forward, backward)


def copy_waits(copies: Sequence[float], lifetimes: Sequence[int], forward: float, backward: float) -> float:
    """Returns the seconds for which layers wait for copies, forward and backward.

    `copies` are each layer's seconds in one direction, `lifetimes` come from `device_lifetimes`. Copies run one after
    another. One to the host begins after the layer's forward pass, and the first layer past the lifetime waits for it.
    One back begins with the backward pass of the lifetime's last layer, and the layer itself waits for it.
    """
    layers, ends = len(copies), {i + lifetime: i for i, lifetime in enumerate(lifetimes) if lifetime}
    copied, now, link = [0.0] * layers, 0.0, 0.0  # ends of each copy, of compute so far, and of all copies so far
    for i in range(layers):
        now = max(now, copied[ends[i]] if i in ends else 0.0) + forward
        if lifetimes[i]:
            copied[i] = link = max(link, now) + copies[i]
    exposed = now - layers * forward
    copied, now, link = [0.0] * layers, 0.0, 0.0
    for i in reversed(range(layers)):
        if i + 1 < layers and i + 1 in ends:  # a layer that is on the GPU during the loss needs no copy
            earlier = ends[i + 1]
            copied[earlier] = link = max(link, now) + copies[earlier]
        now = max(now, copied[i]) + backward
    return max(0.0, exposed + now - layers * backward)


def exposed_weights(run: PlannedRun, layer_seconds: float) -> float:
    """Returns the exposed seconds of weight copies from the host, for forward and backward.

    Weights are copied in their stored dtype. Prefetched layers hide behind another layer's compute; embeddings and
    head do not.
    """
    if not run.state_on_host:
        return 0.0
    shares = rates.FORWARD_AND_BACKWARD if run.prefetches_weights else (0.0, 0.0)
    places = range(run.layers_with_state_on_gpu, len(run.layers))
    copies = [run.exchanged(place).stored / host_link(run) for place in places]
    exposed = sum(max(0.0, copy - share * layer_seconds) for copy in copies for share in shares)
    return exposed + run.weights.ends.stored / host_link(run)
