"""Predicts the seconds of a training step, part by part, on the slowest rank."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from lightseq.config.remat_policies import KEEP_LINEARS, KEEP_MLP
from lightseq.memory.planner.estimate import in_flight, kept_by_layer
from lightseq.memory.planner.placement import OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, Placement
from lightseq.memory.planner.rates import (
    ADAMW_BYTES,
    ATTENTION_SHARE,
    CLIP_BYTES,
    EAGER_TILED_MLP,
    FORWARD_SHARE,
    FP8_CAST_BYTES,
    FP8_TIME,
    GLUE,
    HEAD_DIM_SHARE,
    HOST_LINK_SHARE,
    HOST_SECONDS,
    HOST_UPDATE_MOST,
    HOST_UPDATE_RATE,
    KERNEL_SHARE,
    LINEAR_ENDS,
    LOGIT_PASSES,
    MATRIX_SHARE,
    MEMORY_SHARE,
    NETWORK_RATE,
    NORM_BYTES,
    PASSED_UPDATE_WEIGHTS,
    PEER_SHARE,
    UPDATE_LAUNCH_SECONDS,
    WEIGHT_COPIES,
    attention_rates,
)  # fmt: skip
from lightseq.memory.planner.run import PlannedRun
from lightseq.models.flops import projection_weights, unread_weights
from lightseq.modules.mlp import TILE_TOKENS
from lightseq.schedule.auto import ScheduleChoice, estimate_choice
from lightseq.schedule.cost import BACKWARD_FLOPS, AttentionShape
from lightseq.schedule.timing import Estimate, Rates

FLOAT32 = 4
Seconds = Mapping[str, float]
WAITING = "waiting for the host"


def step_seconds(run: PlannedRun, placement: Placement) -> dict[str, float]:
    """By part; they add up to the step."""
    passes, busy = run.config.gradient_accumulation_steps, layer_seconds(run, placement)
    parts = {name: passes * seconds for name, seconds in _computing(run, placement).items()}
    parts["weights: gathered and reduced, exposed"] = passes * exposed_collectives(run, busy)
    parts["offloading, exposed"] = passes * (exposed_copies(run, placement, busy) + exposed_weights(run, busy))
    parts["optimizer"] = update_seconds(run)
    launched = passes * run.layers * HOST_SECONDS[run.config.torch_compile]
    parts[WAITING] = max(0.0, launched - sum(parts.values()))
    return parts


def layer_seconds(run: PlannedRun, placement: Placement) -> float:
    """Of a layer's computing, forward and backward."""
    return sum(_computing(run, placement).values()) / run.layers


def _computing(run: PlannedRun, placement: Placement) -> dict[str, float]:
    """What one forward and backward pass keeps a GPU busy with."""
    forward, backward = attention_seconds(run)
    return {
        "matrix products": matrix_seconds(run),
        "attention": run.layers * (forward + backward) + _attention_again(run, placement) * forward,
        "norms, rotation, activation": run.layers * run.tokens * _glue_bytes(run) / memory_rate(run),
        "loss": run.tokens * run.model.vocab_size * run.element * LOGIT_PASSES / memory_rate(run),
        "weights: cast and copied": _weight_copies(run) / memory_rate(run),
    }


def attention_seconds(run: PlannedRun) -> tuple[float, float]:
    """One layer's forward and backward over all ranks, its exchange included."""
    share = _nearest(HEAD_DIM_SHARE, run.head_dim) * KERNEL_SHARE.get(run.config.kernel_name, 1.0) * ATTENTION_SHARE
    rates = attention_rates(run.hardware.chip, run.transport)
    found = _estimate(
        run.choice, run.sequence_ranks, run.shape, rates, share, run.hardware.gpus_per_host, run.keeps_gathered
    )
    forward = found.seconds / (1 + BACKWARD_FLOPS)
    return forward, found.seconds - forward


@lru_cache(maxsize=4096)
def _estimate(
    choice: ScheduleChoice,
    ranks: int,
    shape: AttentionShape,
    rates: Rates,
    share: float,
    per_host: int,
    keep_gathered: bool,
) -> Estimate:
    scaled = replace(rates, flops_per_second=rates.flops_per_second * share)
    return estimate_choice(choice, ranks, shape, scaled, per_host, keep_gathered)


def matrix_seconds(run: PlannedRun) -> float:
    """Of a forward and a backward pass: what remat repeats, and the head's three products, included."""
    linear, (hidden, _, _, intermediate) = run.layer_linears, run.widths
    passes = 2.0 if run.adapters else 3.0  # by the input, and backward by the gradient, for input and weight
    products = passes * linear
    lasts = run.groups / run.layers if run.group > 1 else 0.0  # of groups, which keep what attention gives
    if run.config.tile_layers:  # layers once more, and the projections twice
        products += linear + projection_weights(run.model) * (2 - lasts if run.config.remat_policy == "full" else 1)
    elif run.config.remat_policy not in ("none", KEEP_LINEARS):
        products += linear - run.made_of.ending_linears / run.layers  # what ends a layer is never needed again
        if run.config.remat_policy == KEEP_MLP:
            products -= 2 * hidden * intermediate
        elif _mlp_over_tiles(run) and not (run.config.torch_compile or run.made_of.mlp_is_last):
            products += 3 * hidden * intermediate  # what follows needs the whole operator once more
    if run.group > 1:
        ends_early = run.config.tile_layers or _mlp_over_tiles(run)
        unread = unread_weights(run.model, run.config.remat_policy, run.config.tile_layers) if ends_early else 0
        products += linear - lasts * unread
    layers = run.layers * products * FP8_TIME[run.config.fp8]
    flops = 2 * run.tokens * (layers + passes * run.head_parameters)
    return flops / (run.hardware.chip.peak_flops * MATRIX_SHARE * _precision(run))


def exposed_collectives(run: PlannedRun, layer_seconds: float) -> float:
    """Gathers and reductions that the layers' computing does not hide; those of the embeddings hide nothing."""
    ends = run.head_parameters * (1 if run.tied else 2)
    hidden = max(0.0, collective_seconds(run, run.layer_parameters) - layer_seconds)
    first = collective_seconds(run, run.layer_parameters) / 2
    return run.layers * hidden + first + collective_seconds(run, ends)


def collective_seconds(run: PlannedRun, parameters: int) -> float:
    """Gathered twice in the compute dtype, reduced once in float32, over the shards; copies add their sums."""
    away = (run.shards - 1) / run.shards
    seconds = parameters * away * (2 * run.element + FLOAT32) / _collective_rate(run, run.shards)
    copies = run.hardware.gpus // run.shards
    if copies > 1:
        sent = 2 * parameters / run.shards * FLOAT32 * (copies - 1) / copies
        seconds += sent / _collective_rate(run, run.hardware.gpus)
    return seconds


def _collective_rate(run: PlannedRun, ranks: int) -> float:
    return NETWORK_RATE if ranks > run.hardware.gpus_per_host else run.hardware.chip.peer_rate * PEER_SHARE


def exposed_copies(run: PlannedRun, placement: Placement, layer_seconds: float) -> float:
    """Of layers that hand over what they keep: there and back, beyond what the layers' own computing hides."""
    seconds = 0.0
    for state in (OFFLOAD, RECOMPUTE_OFFLOAD):
        seconds += placement.count(state) / run.group * copy_seconds(run, state, layer_seconds)
    return seconds


def copy_seconds(run: PlannedRun, state: str, layer_seconds: float) -> float:
    """Of one layer: out beside its forward pass, back beside its backward pass."""
    copied = kept_by_layer(run, RECOMPUTE_OFFLOAD if run.group > 1 else state) / host_link(run)
    if in_flight(run) == 1:  # nothing is copied beside the computing
        return 2 * copied
    forward, backward = (share * run.group * layer_seconds for share in (FORWARD_SHARE, 1 - FORWARD_SHARE))
    return max(0.0, copied - forward) + max(0.0, copied - backward)


def exposed_weights(run: PlannedRun, layer_seconds: float) -> float:
    """Of weights that wait on the host: a layer's come for its forward and for its backward pass, in float32 those that
    train.

    They do beside the computing of another layer, if they come ahead; those of the ends never do.
    """
    if not run.state_on_host:
        return 0.0
    width = run.element if run.adapters else FLOAT32
    layer, ends = (width * size / run.shards / host_link(run) for size in (run.layer_parameters, run.head_parameters))
    shares = (FORWARD_SHARE, 1 - FORWARD_SHARE) if run.weights_ahead else (0.0, 0.0)
    exposed = sum(max(0.0, layer - share * layer_seconds) for share in shares)
    return (run.layers - run.state_stays) * exposed + ends * (1 if run.tied else 2)


def update_seconds(run: PlannedRun) -> float:
    moved = NORM_BYTES + CLIP_BYTES + ADAMW_BYTES.get(run.config.optim, ADAMW_BYTES["adamw_torch"])
    away = run.local_trained * run.share_on_host
    launches = len(run.made_of.sizes) * UPDATE_LAUNCH_SECONDS.get(run.config.optim, 0.0)
    seconds = launches + (run.local_trained - away) * moved / memory_rate(run)
    if not run.state_on_host:
        return seconds
    rate = min(run.hardware.cores_per_rank * HOST_UPDATE_RATE, HOST_UPDATE_MOST)
    if passed := PASSED_UPDATE_WEIGHTS.get(run.config.optim):
        return seconds + away * NORM_BYTES / rate + away / passed  # which clips as well
    return seconds + away * moved / rate


def memory_rate(run: PlannedRun) -> float:
    return run.hardware.chip.memory_rate * MEMORY_SHARE


def host_link(run: PlannedRun) -> float:
    return run.hardware.chip.host_rate * HOST_LINK_SHARE


def _attention_again(run: PlannedRun, placement: Placement) -> float:
    """Layers whose attention's forward runs once more; under shared checkpoints all do, and with `full` once again but
    for the last, which keeps it then."""
    if run.group > 1:
        return run.layers + (run.layers - run.groups if run.config.remat_policy == "full" else 0.0)
    return placement.count(RECOMPUTE) + placement.count(RECOMPUTE_OFFLOAD)


def _glue_bytes(run: PlannedRun) -> float:
    """Of one token in one layer, forward and backward."""
    again = run.config.remat_policy != "none"
    once, repeated = GLUE[run.config.torch_compile]
    if _mlp_over_tiles(run) and not run.config.torch_compile:  # a third of it forward, once more in a group
        mlp = EAGER_TILED_MLP * (4 / 3 if run.group > 1 else 1)
        once, repeated = replace(once, intermediate=mlp), replace(repeated, intermediate=0)
    width = once.elements(*run.widths) + again * repeated.elements(*run.widths) * (2 if run.group > 1 else 1)
    return width * run.element + FP8_CAST_BYTES[run.config.fp8] * LINEAR_ENDS.elements(*run.widths)


def _mlp_over_tiles(run: PlannedRun) -> bool:
    """Whether the operator stands for the module's own forward (`tile_mlps`)."""
    config = run.config
    elsewhere = config.remat_policy == "none" or config.tile_layers or config.fp8 is not None
    return run.made_of.gated_mlp and run.tokens > TILE_TOKENS and not elsewhere


def _weight_copies(run: PlannedRun) -> float:
    """Bytes that FSDP reads and writes beside its collectives."""
    return WEIGHT_COPIES * run.made_of.total


def _precision(run: PlannedRun) -> float:
    """float32 products run in TF32 at half the rate of bfloat16, else at a sixteenth."""
    return 1.0 if run.element == 2 else 0.5 if run.config.tf32 else 1 / 16


def _nearest(shares: Mapping[int, float], dim: int) -> float:
    return shares[min(shares, key=lambda known: abs(known - dim))]
