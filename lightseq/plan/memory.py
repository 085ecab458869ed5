"""Predicted memory of a rank at each point of a step where it may peak."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from lightseq.config.optimizers import OPTIMIZERS
from lightseq.config.remat_policies import STORES_MLP
from lightseq.memory.offload import IN_FLIGHT, device_lifetimes, layers_in_flight
from lightseq.memory.placement import KEEP, OFFLOADED, RECOMPUTE, RECOMPUTED, Placement
from lightseq.parts.facts import Layer, distinct
from lightseq.parts.mlp import TILE_TOKENS
from lightseq.plan.attention_memory import SCORE_BLOCK_BYTES, AttentionMemory, attention_memory, takes_cublas
from lightseq.plan.breakdown import Breakdown, State
from lightseq.plan.layer_costs import ATTENTION, MLP, SCAN
from lightseq.plan.rates import LAST_NORM, PROCESS_BYTES
from lightseq.plan.run import PlannedRun
from lightseq.schedule.timing import FLOAT32_BYTES

TOKEN_BYTES = 3 * 8  # id, position and label


@dataclass(frozen=True)
class Snapshot:
    """Memory of one GPU at one point of a step."""

    when: str
    parts: Breakdown


def peak(run: PlannedRun, placement: Placement) -> Snapshot:
    """Returns the point of a step with the most memory on the GPU."""
    return max(snapshots(run, placement), key=lambda snapshot: snapshot.parts.total)


def snapshots(run: PlannedRun, placement: Placement) -> Iterator[Snapshot]:
    """Yields the points of a step where memory may peak: the loss, each group's backward pass, and the embeddings'."""
    step = _Step(run, placement)
    yield step.loss()
    if run.teacher_run is not None:
        yield step.teacher(run.teacher_run)
    last, groups = run.groups - 1, set(range(run.groups))
    if max(step.lifetimes) <= IN_FLIGHT and len(run.architecture.kinds) == 1:  # no layer stays between offloaded ones
        # Memory changes linearly from the second to the second-to-last group.
        groups &= {0, 1, last // 2, last - 1, last}
    for group in sorted(groups):
        for layer in distinct(run.layers_of(group)):
            yield from step.backward(group, layer)
    yield step.end_of_backward()


def tiled_elements(layer: Layer, head_slices: int, runs_again: bool) -> Mapping[str, float]:
    """Returns the temporaries of a layer under --tile_layers, in elements per token (counted).

    All points hold the gradient of the layer's output. Attention also holds q, k, v and the gradient of its output for
    one slice of heads, and the gradients of k and v of the slices before it. If a group of layers first runs forward
    again (`runs_again`), the output of a layer is there too.
    """
    width = sum(mixer.width for mixer in layer.attentions)
    key_value = sum(mixer.key_width + mixer.value_width for mixer in layer.attentions)
    return {
        MLP: layer.hidden * (1 + runs_again),
        ATTENTION: layer.hidden + 2 * width / head_slices + key_value,
    }


def lifetimes_of(run: PlannedRun, placement: Placement) -> list[int]:
    """Returns the lifetime on the GPU of each group's tensors, in groups; 0 for a group that stays there."""
    offloaded = [action in OFFLOADED for action in placement.layers[:: run.group_size]]
    return device_lifetimes(offloaded, layers_in_flight(run.config.tiles_layers))


# ---- saved activations ----------------------------------------------------------------------------------------------


def saved_by_layer(run: PlannedRun, layer: Layer, action: str) -> float:
    """Returns the bytes that a layer saves between its forward and backward pass, on GPU or host."""
    return run.tokens * run.costs(layer, "full" if action in RECOMPUTED else None).saved


def saved_by_groups(run: PlannedRun, placement: Placement) -> list[float]:
    """Returns the bytes saved for each group of layers: its input, or for a group of one all that the layer saves."""
    firsts = zip(run.layers[:: run.group_size], placement.layers[:: run.group_size], strict=True)
    return [saved_by_layer(run, layer, RECOMPUTE if run.group_size > 1 else action) for layer, action in firsts]


def offloaded_by_rerun(run: PlannedRun, action: str) -> float:
    """Returns the bytes that the largest group offloads in its rerun, for all its layers but one."""
    groups = map(run.layers_of, range(run.groups))
    return max(sum(saved_by_layer(run, layer, action) for layer in group[1:]) for group in groups)


def loss_bytes(run: PlannedRun) -> int:
    """Returns the bytes of a chunk's logits, and of the gradients of the head (float32) and hidden states."""
    text, hidden = run.text, run.text.hidden_size
    logits = run.objective.logit_bytes(run.tokens, text.vocab_size, run.itemsize)
    head = 0 if run.lora else FLOAT32_BYTES * text.vocab_size * hidden
    return logits + head + run.tokens * hidden * run.itemsize


# ---- points of a step -----------------------------------------------------------------------------------------------


class _Step:
    """Memory at the points of a step under a placement, and its constant parts."""

    def __init__(self, run: PlannedRun, placement: Placement) -> None:
        self.run, self.offloads = run, placement.offloads
        self.actions = placement.layers[:: run.group_size]
        self.lifetimes, self.sizes = lifetimes_of(run, placement), saved_by_groups(run, placement)
        sizes = zip(_state_bytes(run), run.shares_on_host, strict=True)
        self.parameters, self.gradients, self.optimizer = (int(size - share * size) for size, share in sizes)
        self.parameters += 0 if run.state_on_host else int(run.teacher_bytes)
        buffers = max(attention_of(run, layer).buffers for layer in run.architecture.kinds) * run.tokens
        rope = 2 * max(mixer.heads.dim for mixer in run.architecture.attentions) * run.itemsize
        mapped = run.transport == "symmetric"
        self.attention_buffers = int(buffers if mapped else 0.0)
        self.inputs = (rope + TOKEN_BYTES) * run.tokens + (0.0 if mapped else buffers)  # positions' cosines and sines

    def loss(self) -> Snapshot:
        """Returns memory during the loss: all activations are saved, and the head and last layer are gathered."""
        run, last = self.run, self.run.groups - 1
        last_norm = LAST_NORM[run.config.compiles] * run.tokens * run.text.hidden_size
        working = (run.architecture.head + last_norm) * run.itemsize
        if (teacher := run.teacher_run) is not None:  # its hidden states and its whole head
            working += (teacher.tokens * teacher.text.hidden_size + teacher.architecture.head) * run.itemsize
        working += run.gathered_bytes(last if run.reshard_after_forward else 0, last, runs=False)
        return self._snapshot("loss", saved=self._on_gpu(last), loss=loss_bytes(run), working=working)

    def teacher(self, run: PlannedRun) -> Snapshot:
        """Returns memory in the largest layer of the teacher's forward pass, before the trained model's."""
        largest = max(run.gathered_bytes(group) for group in range(run.groups))
        per_token = max(max(run.costs(layer, "full").working.values()) for layer in run.architecture.kinds)
        working = 2 * largest + run.tokens * per_token
        return self._snapshot("forward of the teacher", working=working)

    def backward(self, group: int, layer: Layer) -> Iterator[Snapshot]:
        """Yields memory at each point of a layer's backward pass."""
        run, action, saved = self.run, self.actions[group], self._on_gpu(group)
        weights, rerun = _weights_and_gradients(run, group, layer), self._saved_by_rerun(group)
        gradients = 0.0 if run.adapter_parameters else _finished_gradients(run, group)
        costs = run.costs(layer, "full" if action in RECOMPUTED else None)
        points = costs.working  # apart from operators' own memory
        if run.config.tiles_layers:
            elements = tiled_elements(layer, run.head_slices, runs_again=run.group_size > 1)
            points = {name: run.itemsize * count for name, count in elements.items()}

        def saves(policy: str) -> float:
            return run.tokens * run.costs(layer, policy).saved

        for name, per_token in points.items():
            working = run.tokens * per_token + weights + _unpacked_bytes(run, layer, costs.weights_read, name)
            if name == MLP:
                working += _tiled_mlp_bytes(run, layer)
            if name == SCAN:
                working += max(x.token_elements for x in layer.linear_mixers) * run.itemsize * run.tokens
            if name == ATTENTION:
                working += attention_of(run, layer).backward * run.tokens
            if run.config.tiles_layers and action in RECOMPUTED:  # output and log-sum-exp, recomputed
                working += saves("attention") - saves("full")
            was_offloaded = action in OFFLOADED if run.group_size == 1 else self.offloads
            if name == ATTENTION and was_offloaded and run.config.remat_policy in STORES_MLP:
                # Fetched activations live until the layer's end.
                working += saves(run.config.remat_policy) - saves("attention")
            when = f"backward of layer {group * run.group_size}, {name}"
            yield self._snapshot(when, saved=saved, working=working + rerun, gradients=gradients)

    def end_of_backward(self) -> Snapshot:
        """Returns memory at the end of the backward pass, before the embeddings' whole gradient is sharded."""
        run = self.run
        working = run.tokens * run.text.hidden_size * run.itemsize
        if not run.adapter_parameters:
            working += run.architecture.head * (run.itemsize + FLOAT32_BYTES)
        gradients = FLOAT32_BYTES * run.local_trained
        return self._snapshot("backward of the embeddings", working=working, gradients=gradients)

    def _snapshot(
        self, when: str, *, working: float, saved: float = 0.0, loss: float = 0.0, gradients: float = 0.0
    ) -> Snapshot:
        accumulates = self.run.config.gradient_accumulation_steps > 1
        parts = Breakdown(
            parameters=self.parameters,
            gradients=self.gradients if accumulates else min(int(gradients), self.gradients),
            optimizer=self.optimizer,
            stored_activations=int(saved),
            loss=int(loss),
            attention_buffers=self.attention_buffers,
            working=int(working + self.inputs),
        )
        return Snapshot(when, parts)

    def _on_gpu(self, last: int) -> float:
        """Returns the bytes of groups up to `last` on the GPU: resident groups, and offloaded ones in flight."""
        lifetimes = enumerate(self.lifetimes[: last + 1])
        return sum(self.sizes[i] for i, lifetime in lifetimes if not lifetime or i + lifetime > last)

    def _saved_by_rerun(self, group: int) -> float:
        """Returns the bytes that a group's layers save in its rerun, without their input if that is freed."""
        run = self.run
        if run.group_size == 1:
            return 0.0
        sizes = sorted((saved_by_layer(run, layer, KEEP) for layer in run.layers_of(group)), reverse=True)
        if self.offloads:
            stays = group == 0 and run.adapter_parameters  # the output of frozen embeddings is not freed
            return sum(sizes[: layers_in_flight(run.config.tiles_layers)]) - (0.0 if stays else self.sizes[group])
        return sum(sizes) - self.sizes[group]  # the input is counted already


def _weights_and_gradients(run: PlannedRun, group: int, layer: Layer) -> float:
    """Returns the bytes of the gathered weights and the unreduced gradients in the backward pass of a group.

    Besides the group, the next one is gathered, or all groups that are still to come.
    """
    trains = run.adapter_parameters == 0  # gradients of adapters are too small to count
    unit = run.gathered_bytes(group)
    following = max(0, group - 1)
    others = run.gathered_bytes(following, runs=False) * run.prefetches_weights
    if not run.reshard_after_forward:
        others = run.gathered_bytes(0, group - 1, runs=False)
    taken = float(unit + others)
    if run.architecture.ties_embeddings:  # the embeddings stay gathered, and have had a gradient since the loss
        taken += (1 + trains) * run.architecture.head * run.itemsize
    if trains:
        summed = layer.parameters if run.config.tiles_layers else 0  # tiles accumulate gradients in float32
        taken += unit + summed * (FLOAT32_BYTES - run.itemsize)
        if group < run.groups - 1:  # the next group's gradients, being reduced
            taken += run.gathered_bytes(group + 1) / run.itemsize * FLOAT32_BYTES
        elif not run.architecture.ties_embeddings:
            taken += run.architecture.head * FLOAT32_BYTES
    return taken


def _unpacked_bytes(run: PlannedRun, layer: Layer, read: Mapping[str, int], point: str) -> float:
    """Returns the bytes of dequantized weights at a point of a layer's backward pass."""
    held, experts = run.weights.layers[layer.place], run.weights.experts[layer.place]
    if not held.dense and not experts.dense:
        return 0.0
    elements = read[point] if not run.config.tiles_layers else max(read.values())
    if run.config.tiles_layers and point == ATTENTION:  # projections of a slice of heads, output included
        elements = layer.projections // run.head_slices + layer.hidden * layer.attention_width
    return (held.dense / layer.linears or run.itemsize) * elements  # or experts alone are packed


def _finished_gradients(run: PlannedRun, group: int) -> float:
    """Returns the bytes of finished gradients on the GPU, which belong to the layers after a group."""
    resident = run.layers_with_state_on_gpu if run.state_on_host else len(run.layers)
    done = sum(layer.parameters for layer in run.layers[(group + 1) * run.group_size : resident])
    if not run.state_on_host and not run.architecture.ties_embeddings:
        done += run.architecture.head
    return FLOAT32_BYTES * min(done / run.shards, run.local_trained)


def _tiled_mlp_bytes(run: PlannedRun, layer: Layer) -> float:
    """Returns the bytes of a tile's MLP-wide buffers and of the float32 gradients of the MLP's weights.

    With adapters there are no such gradients, but five weights joined to them: gate and up forward, all three backward.
    """
    hidden, intermediate = layer.hidden, layer.intermediate
    if run.config.tiles_layers:  # a tile's own forward and backward pass
        return min(run.tokens, TILE_TOKENS) * max(run.costs(layer, "full").working.values())
    if run.adapter_parameters:
        return (3 * TILE_TOKENS + 5 * hidden) * intermediate * run.itemsize
    return 3 * TILE_TOKENS * intermediate * run.itemsize + 3 * hidden * intermediate * FLOAT32_BYTES


def attention_of(run: PlannedRun, layer: Layer) -> AttentionMemory:
    """Returns the attention memory of a layer's largest mixer, for one slice of heads."""
    largest, slices, length = AttentionMemory(0.0, 0.0), run.head_slices, run.config.model_max_length
    for heads, reach in ((mixer.heads, mixer.reach) for mixer in layer.attentions):
        memory = attention_memory(
            run.choice,
            run.sequence_ranks,
            replace(heads, query=heads.query // slices, key_value=heads.key_value // slices),
            run.itemsize,
            keep_gathered=run.keeps_gathered,
            window_share=reach.tokens / length if reach is not None and reach.tokens < length else None,
        )
        if takes_cublas(run.config.kernel_name, run.hardware.chip.capability, heads.dim):
            memory = memory._replace(backward=memory.backward + SCORE_BLOCK_BYTES / run.tokens)
        largest = AttentionMemory(*map(max, largest, memory))
    return largest


# ---- host memory ----------------------------------------------------------------------------------------------------


def host_bytes(run: PlannedRun, placement: Placement) -> float:
    """Returns one rank's host memory: its process, offloaded activations, weights, gradients and optimizer state."""
    saved = zip(saved_by_groups(run, placement), placement.layers[:: run.group_size], strict=True)
    activations = sum(size for size, action in saved if action in OFFLOADED)
    if run.group_size > 1 and placement.offloads:  # the group that runs again
        activations += offloaded_by_rerun(run, KEEP)
    return PROCESS_BYTES + activations + state_bytes_on_host(run)


def state_bytes_on_host(run: PlannedRun) -> float:
    """Returns the bytes of a rank's weights, gradients and optimizer state in host memory."""
    if not run.state_on_host:
        return 0.0
    state = sum(share * size for size, share in zip(_state_bytes(run), run.shares_on_host, strict=True))
    if not run.adapter_parameters:  # with adapters the padding is negligible
        state += run.shares_on_host.gradients * _gradient_padding(run.architecture.sizes, run.shards)
    return state + run.teacher_bytes


def _state_bytes(run: PlannedRun) -> State:
    """Returns the bytes of one rank's state, on GPU and host together."""
    copies = sum(frozen.source is None for frozen in run.objective.frozen_models)
    weights = float(run.weights.total.stored + run.itemsize * run.local_parameters * copies)
    gradients = float(FLOAT32_BYTES * run.local_trained)
    return State(weights, gradients, OPTIMIZERS[run.config.optim].moments * gradients)


@lru_cache(maxsize=64)  # every plan of a search asks for the same
def _gradient_padding(sizes: tuple[int, ...], shards: int) -> float:
    """Returns the bytes that torch's pinned allocator adds by rounding up each gradient to a power of two."""
    parts = [FLOAT32_BYTES * ceil(size / shards) for size in sizes]
    return float(sum((1 << (size - 1).bit_length()) - size for size in parts))
