"""Predicts a rank's memory: what a step holds at each of the moments at which it may hold most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from lightseq.config.remat_policies import STORE_LINEARS, STORE_MLP, STORES_MLP
from lightseq.memory.offload import layers_in_flight
from lightseq.memory.planner.attention_memory import AttentionMemory, attention_memory
from lightseq.memory.planner.breakdown import Breakdown, checkpoint_bytes, loss_bytes, moments_of, projection_widths
from lightseq.memory.planner.placement import (
    AGAIN,
    AWAY,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    Placement,
)
from lightseq.memory.planner.rates import (
    AFTER_LAYERS,
    KEPT_WITHOUT_REMAT,
    LAYER_MOMENTS,
    MOMENTS_WITHOUT_REMAT,
    PROCESS_BYTES,
    TILE_HIDDEN,
    TILED_MOMENTS,
    UNTILED_BUFFERS,
    LayerMoment,
    Widths,
)
from lightseq.memory.planner.run import PlannedRun
from lightseq.modules.mlp import TILE_TOKENS

FLOAT32 = 4
TOKEN_BYTES = 3 * 8  # ids, positions and labels


@dataclass(frozen=True)
class Moment:
    """What a step holds at one time. The largest is the peak."""

    when: str
    parts: Breakdown


def peak(run: PlannedRun, placement: Placement) -> Moment:
    return max(moments(run, placement), key=lambda moment: moment.parts.total)


def moments(run: PlannedRun, placement: Placement) -> Iterator[Moment]:
    yield _loss(run, placement)
    last = run.groups - 1
    # Between the first and the last layer's backward everything is on a line between what it is at these two.
    for group in {0, 1, last // 2, last - 1, last} & set(range(run.groups)):
        for name in layer_moments(run):
            yield _backward(run, placement, group, name)
    yield _end_of_backward(run)


def at_backward_begin(run: PlannedRun) -> float:
    """The most that is taken beside what layers keep, while all of them still do."""
    names, last = layer_moments(run), run.groups - 1
    nothing = Placement((RECOMPUTE,) * run.layers)
    found = [_loss(run, nothing), *(_backward(run, nothing, last, name) for name in names)]
    return max(moment.parts.total - moment.parts.kept_activations for moment in found)


def layer_moments(run: PlannedRun) -> Mapping[str, LayerMoment]:
    if run.config.tile_layers:
        return TILED_MOMENTS
    table = MOMENTS_WITHOUT_REMAT if run.config.remat_policy == "none" else LAYER_MOMENTS
    return table[run.config.torch_compile]


def attention_of(run: PlannedRun) -> AttentionMemory:
    """Bytes for every local token."""
    sizes = (run.sequence_ranks, run.heads, run.kv_heads, run.head_dim, run.element)
    return attention_memory(run.choice, *sizes, keep_gathered=run.keeps_gathered)


def kept_by_layer(run: PlannedRun, state: str) -> float:
    """Bytes that one layer keeps from its forward to its backward, wherever they wait."""
    policy = "full" if state in (RECOMPUTE, RECOMPUTE_OFFLOAD) else run.config.remat_policy
    if policy == "none":
        widths = KEPT_WITHOUT_REMAT[run.config.torch_compile]
        return run.tokens * (_bytes(run, widths) + FLOAT32 * run.heads)
    return checkpoint_bytes(run.model, policy, run.element) * run.tokens


def host_by_layer(run: PlannedRun, state: str) -> float:
    """Of what a layer keeps, what it hands over."""
    return float(sum(_leaving(run, state)))


def _leaving(run: PlannedRun, state: str) -> list[int]:
    """Bytes of each tensor that a layer hands over."""
    hidden, attention, _, intermediate = run.widths
    if run.config.remat_policy == "none":
        return [int(kept_by_layer(run, state))]
    kept = [hidden * run.element]
    if state == OFFLOAD and run.config.remat_policy != "full":
        kept += [attention * run.element, FLOAT32 * run.heads]
        kept += [intermediate * run.element] * (2 if run.config.remat_policy in STORES_MLP else 0)
        if run.config.remat_policy == STORE_LINEARS:
            kept += [width * run.element for width in projection_widths(run.model)]
    return [run.tokens * size for size in kept]


def host_bytes(run: PlannedRun, placement: Placement) -> float:
    """Of one rank: its process, what layers hand over, weights with their gradients and optimizer state."""
    away = [size for group in range(run.groups) for size in _waits(run, placement, group)]
    if run.group > 1 and set(placement.layers) & set(AWAY):
        away += (run.group - 1) * _leaving(run, OFFLOAD)  # of a group that runs again
    return PROCESS_BYTES + sum(away) + state_bytes_on_host(run)


def state_bytes_on_host(run: PlannedRun) -> float:
    """Bytes of weights with their gradients and optimizer state that a rank has in host memory."""
    return run.share_on_host * (sum(_states(run)) + _rounded_gradients(run))


def _rounded_gradients(run: PlannedRun) -> float:
    """What torch, which pins gradients as they come, takes beyond them: every piece is a power of two of bytes."""
    if run.adapters:  # small
        return 0.0
    shards = [FLOAT32 * ceil(size / run.shards) for size in run.made_of.sizes]
    return float(sum(pinned_by_torch(size) - size for size in shards))


def pinned_by_torch(size: int) -> int:
    """Bytes that a piece of so many takes."""
    return 1 << (size - 1).bit_length()


def _waits(run: PlannedRun, placement: Placement, group: int) -> list[int]:
    """On the host, of what a group of layers keeps."""
    state = placement.layers[group * run.group]
    if state not in (OFFLOAD, RECOMPUTE_OFFLOAD):
        return []
    return _leaving(run, RECOMPUTE_OFFLOAD if run.group > 1 else state)


def _kept_here(run: PlannedRun, placement: Placement, up_to: int) -> float:
    """On the device, of the groups up to one: those that stay, and those on their way."""
    here, away, since = 0.0, [], 0
    for group in range(up_to + 1):
        waits = _waits(run, placement, group)
        size = kept_by_layer(run, RECOMPUTE if run.group > 1 else placement.layers[group])
        here += 0 if waits else size
        away += [size] if waits else []
        since = 0 if waits else since + 1
    there = max(0, in_flight(run) - since)  # a layer that stays stands for one of them
    return here + sum(away[max(0, len(away) - there) :])


def in_flight(run: PlannedRun) -> int:
    """Layers whose tensors are there at a time, of those that leave and come back."""
    return layers_in_flight(run.config.tile_layers)


def _states(run: PlannedRun) -> tuple[float, float, float]:
    """Parameters, gradients, optimizer state, wherever they are."""
    gradients = float(FLOAT32 * run.local_trained)
    return run.weight_bytes, gradients, moments_of(run.config) * gradients


def _loss(run: PlannedRun, placement: Placement) -> Moment:
    """The chunks of the loss: all layers keep what they keep, and the head is gathered."""
    logits, gradients = loss_bytes(run.model, run.config, run.tokens)
    gathered = (run.head_parameters + run.group * run.layer_parameters) * run.element  # the last layer's buffer is kept
    working = gathered + run.tokens * _bytes(run, AFTER_LAYERS[run.config.torch_compile])
    return _moment(run, "loss", _kept_here(run, placement, run.groups - 1), logits + gradients, working, 0.0)


def _backward(run: PlannedRun, placement: Placement, group: int, name: str) -> Moment:
    """A layer's backward pass: what it computes with, its weights, the next one's if they come ahead, its gradients."""
    moment = layer_moments(run)[name]
    unit = run.group * run.layer_parameters
    last = group == run.groups - 1
    trains = run.adapters == 0  # gradients of adapters alone are not worth counting
    leaving = run.head_parameters if last and not run.tied else 0 if last else unit
    working = run.tokens * _bytes(run, moment.widths) + (1 + run.weights_ahead) * unit * run.element
    # Of layers over tiles, gradients are there when all tiles are done, and before that their sums.
    summed = run.layer_parameters if run.config.tile_layers else 0
    working += trains * ((unit - summed) * run.element + summed * FLOAT32 + leaving * FLOAT32)
    if run.tied:  # the embeddings stay gathered, and their gradient is there since the loss
        working += (1 + trains) * run.head_parameters * run.element
    if moment.in_mlp:
        working += _tiles(run)
    if moment.in_attention:
        working += attention_of(run).backward * run.tokens
    if (moment.in_attention or run.config.tile_layers) and placement.layers[group * run.group] in AGAIN:
        # Its output and lse are there again.
        both, layer_input = (checkpoint_bytes(run.model, x, run.element) for x in ("attention", "full"))
        working += run.tokens * (both - layer_input)
    kept, kept_again = _kept_here(run, placement, group), _kept_again(run, placement)
    if moment.in_attention and not _comes_back(run, placement, group):
        # Its MLP ran backward before its attention, and let go of gate and up; one that came back has them to its end.
        let_go = run.tokens * _products(run)
        kept, kept_again = (kept, kept_again - let_go) if run.group > 1 else (kept - let_go, kept_again)
    working += kept_again
    when = f"backward of layer {group * run.group}, {name}"
    return _moment(run, when, kept, 0.0, working, trains * _gradients_after(run, group))


def _gradients_after(run: PlannedRun, group: int) -> float:
    """Bytes on the GPU of gradients that are done, once the layers above a group have run backward."""
    below = (group + 1) * run.group
    if run.state_on_host:
        return FLOAT32 * max(0, run.state_stays - below) * run.layer_parameters / run.shards
    done = (run.layers - below) * run.layer_parameters + (0 if run.tied else run.head_parameters)
    return FLOAT32 * min(done / run.shards, run.local_trained)


def _kept_again(run: PlannedRun, placement: Placement) -> float:
    """By layers of a group, which run forward again before they run backward: by all of them, or by those in flight."""
    if run.group == 1:
        return 0.0
    if set(placement.layers) & set(AWAY):
        return min(run.group, in_flight(run)) * kept_by_layer(run, KEEP)
    return run.group * kept_by_layer(run, KEEP) - kept_by_layer(run, RECOMPUTE)  # the first one's input is the group's


def _comes_back(run: PlannedRun, placement: Placement, group: int) -> bool:
    """Whether a layer of a group had handed over what its backward pass begins with."""
    return bool(_waits(run, placement, group) if run.group == 1 else set(placement.layers) & set(AWAY))


def _products(run: PlannedRun) -> float:
    """Bytes of a token that a layer keeps of its gate and up."""
    both, attention = (checkpoint_bytes(run.model, x, run.element) for x in (STORE_MLP, "attention"))
    return both - attention if run.config.remat_policy in STORES_MLP else 0.0


def _end_of_backward(run: PlannedRun) -> Moment:
    """The embeddings' gradient, whole, on its way to its shards."""
    copies = run.element + FLOAT32
    working = (run.adapters == 0) * run.head_parameters * copies + run.tokens * run.model.hidden_size * run.element
    return _moment(run, "backward of the embeddings", 0.0, 0.0, working, FLOAT32 * run.local_trained)


def _moment(run: PlannedRun, when: str, kept: float, loss: float, working: float, gradients: float) -> Moment:
    weights, all_gradients, states = (size * (1 - run.share_on_host) for size in _states(run))
    gradients = min(gradients, all_gradients)
    if run.accumulates:
        gradients = all_gradients
    buffers = attention_of(run).buffers * run.tokens if run.transport == "symmetric" else 0.0
    inside = 0.0 if run.transport == "symmetric" else attention_of(run).buffers * run.tokens
    rotation = 2 * run.head_dim * run.element * run.tokens
    working += inside + rotation + TOKEN_BYTES * run.tokens
    parts = (weights, gradients, states, kept, loss, buffers, working)
    return Moment(when, Breakdown(*(int(x) for x in parts)))


def _tiles(run: PlannedRun) -> float:
    """Of an MLP over tiles of tokens: three buffers as wide as it is, and its weights' gradients in float32; or with
    adapters, whose weights have none, inputs and weights of the widest product side by side."""
    hidden, _, _, intermediate = run.widths
    if run.config.tile_layers:  # the layer's own MLP, and what is around it
        tokens = min(run.tokens, TILE_TOKENS)
        return tokens * run.element * (intermediate * UNTILED_BUFFERS[run.config.torch_compile] + TILE_HIDDEN * hidden)
    if run.tokens <= TILE_TOKENS or run.config.fp8:
        return run.tokens * intermediate * run.element * UNTILED_BUFFERS[run.config.torch_compile]
    if run.adapters:
        return (4 * TILE_TOKENS + hidden) * intermediate * run.element
    return 3 * TILE_TOKENS * intermediate * run.element + 3 * hidden * intermediate * FLOAT32


def _bytes(run: PlannedRun, widths: Widths) -> float:
    """Of one token."""
    return run.element * widths.elements(*run.widths)
