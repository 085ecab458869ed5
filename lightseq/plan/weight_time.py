"""Predicted traffic of weights in a step, and the time that layers wait for weights."""

from math import ceil

from lightseq.architecture.flops import recompute_flops
from lightseq.parts.mlp import TILE_TOKENS
from lightseq.plan import rates
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


def collective_seconds(run: PlannedRun, weights: Weights) -> float:
    """Returns the seconds of gathers, and of a float32 reduction of gradients over shards, then replicas."""
    gathers, gradients = 1 + run.reshard_after_forward, FLOAT32_BYTES * weights.trained
    seconds = gathers * gather_seconds(run, weights)
    seconds += gradients * (run.shards - 1) / run.shards / collective_rate(run, run.shards)
    replicas = run.hardware.gpus // run.shards
    if replicas > 1:
        sent = 2 * gradients / run.shards * (replicas - 1) / replicas
        seconds += sent / collective_rate(run, run.hardware.gpus)
    return seconds


def gather_seconds(run: PlannedRun, weights: Weights) -> float:
    others = (run.shards - 1) / run.shards
    return weights.gathered * others / collective_rate(run, run.shards)


def collective_rate(run: PlannedRun, ranks: int) -> float:
    across_hosts = ranks > run.hardware.gpus_per_host
    return rates.NETWORK_RATE if across_hosts else run.hardware.chip.peer_rate * rates.PEER_SHARE


def host_link(run: PlannedRun) -> float:
    """Returns the bytes per second between GPU and host in one direction."""
    return run.hardware.chip.host_rate * rates.HOST_LINK_SHARE


def memory_rate(run: PlannedRun) -> float:
    return run.hardware.chip.memory_rate * rates.MEMORY_SHARE
