"""Predicted seconds of a training step by part, on the slowest rank."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from lightseq.architecture.flops import count_adapter_parameters, recompute_flops
from lightseq.config.recurrent_schedules import HEADS
from lightseq.config.remat_policies import STORE_LINEARS, STORE_MLP
from lightseq.memory.placement import RECOMPUTED, Placement
from lightseq.parts.attention import caps_scores
from lightseq.parts.facts import Attention, Layer, LinearMixer, attention_shape
from lightseq.plan import rates
from lightseq.plan.attention_memory import MAX_FLASH_DIM, takes_cublas
from lightseq.plan.layer_costs import tiles_mlp
from lightseq.plan.run import PlannedRun
from lightseq.plan.transfers import (
    exposed_collectives,
    exposed_copies,
    exposed_weights,
    gather_seconds,
    host_link,
    memory_rate,
    token_exchange_seconds,
    weight_copies,
    weights_of_products,
)
from lightseq.schedule.auto import estimate_choice
from lightseq.schedule.cost import BACKWARD_FLOPS
from lightseq.schedule.timing import FLOAT32_BYTES

WAITING = "waiting for the host"
_estimated = lru_cache(maxsize=4096)(estimate_choice)


def step_seconds(run: PlannedRun, placement: Placement) -> dict[str, float]:
    """Returns the seconds of each part; their sum is the step time."""
    passes, layer = run.config.gradient_accumulation_steps, layer_seconds(run, placement)
    parts = {name: passes * seconds for name, seconds in _compute_seconds(run, placement).items()}
    parts["weights: gathered and reduced, exposed"] = passes * exposed_collectives(run, layer)
    if run.config.expert_ranks > 1:
        parts["experts: tokens exchanged"] = passes * token_exchange_seconds(run)
    parts["offloading, exposed"] = passes * (exposed_copies(run, placement, layer) + exposed_weights(run, layer))
    parts["optimizer"] = update_seconds(run)
    launches = passes * len(run.layers) * rates.LAYER_LAUNCH_SECONDS[run.config.compiles]
    if more := passes * run.objective.passes_without_gradients:
        parts["passes without gradients"] = more * _seconds_without_gradients(run)
        launches *= 1 + rates.FORWARD_SHARE * run.objective.passes_without_gradients
    if (teacher := run.teacher_run) is not None:
        parts["teacher"] = passes * (_seconds_without_gradients(teacher) + _divergence_seconds(run))
        launches += rates.FORWARD_SHARE * passes * len(teacher.layers) * rates.LAYER_LAUNCH_SECONDS[run.config.compiles]
    parts[WAITING] = max(0.0, launches - sum(parts.values()))
    return parts


# ---- compute --------------------------------------------------------------------------------------------------------


def layer_seconds(run: PlannedRun, placement: Placement) -> float:
    """Returns the mean seconds of compute per layer, forward and backward, loss included."""
    return sum(_compute_seconds(run, placement).values()) / len(run.layers)


def _compute_seconds(run: PlannedRun, placement: Placement) -> dict[str, float]:
    """Returns the seconds of GPU work in one forward and backward pass, by part."""
    forward, backward = attention_seconds(run)
    logits = run.tokens * run.text.vocab_size * run.itemsize
    return {
        "matrix products": matrix_seconds(run),
        "attention": len(run.architecture.attentions) * (forward + backward)
        + _attentions_again(run, placement) * forward,
        "recurrences": _recurrence_seconds(run),
        "norms, rotation, activation": run.tokens * _elementwise_bytes(run) / memory_rate(run),
        "adapters: joined to inputs and weights": _adapter_bytes(run) / memory_rate(run),
        "loss": logits * rates.LOGIT_PASSES / memory_rate(run),
        "weights: cast and copied": weight_copies(run) / memory_rate(run),
    }


def attention_seconds(run: PlannedRun) -> tuple[float, float]:
    """Returns the seconds of the mean attention, forward and backward over all ranks, with communication.

    Packed documents and windows are assumed to save as much of the communication as of the work.
    """
    mixers, length = run.architecture.attentions, run.config.model_max_length
    share_of_documents = run.attention_share / run.architecture.attention_share(length)
    total = 0.0
    for mixer, count in Counter(mixers).items():
        total += count * _full_attention_seconds(run, mixer) * mixer.area(length) / length**2 * share_of_documents
    seconds = total / len(mixers)
    forward = seconds / (1 + BACKWARD_FLOPS)
    return forward, seconds - forward


def _full_attention_seconds(run: PlannedRun, mixer: Attention) -> float:
    """Returns the seconds of attention with a mixer's heads and kernel to a whole sequence, without documents."""
    batch, length = run.config.per_device_train_batch_size, run.config.model_max_length
    shape = attention_shape([mixer], length, batch, run.itemsize)
    head_dim = min(rates.HEAD_DIM_SHARE, key=lambda known: abs(known - mixer.heads.dim))
    share = rates.HEAD_DIM_SHARE[head_dim] * rates.KERNEL_SHARE.get(run.config.kernel_name, 1.0)
    if mixer.heads.dim == 256 and run.config.kernel_name in ("auto", "fa4") and not _takes_cudnn(run, mixer):
        share *= rates.WITHOUT_CUDNN if mixer.reach is None else rates.WINDOW_WITHOUT_CUDNN
    kernel = rates.attention_rates(run.hardware.chip, run.transport)
    speed = kernel.flops_per_second * share
    cublas = takes_cublas(run.config.kernel_name, run.hardware.chip.capability, mixer.heads.dim)
    if cublas and mixer.heads.dim <= MAX_FLASH_DIM:  # the speed of wider heads was measured
        speed = _speed_of_scores(run, mixer, speed)
    kernel = replace(kernel, flops_per_second=speed * rates.ATTENTION_SHARE)
    per_host = run.hardware.gpus_per_host
    return _estimated(run.choice, run.sequence_ranks, shape, kernel, per_host, run.keeps_gathered).seconds


def _speed_of_scores(run: PlannedRun, mixer: Attention, flops_per_second: float) -> float:
    """Returns the FLOP/s of unfused attention: matrix products at the given speed, scores through memory."""
    flops = 2 * (mixer.heads.dim + mixer.heads.value_dim) * (1 + BACKWARD_FLOPS)  # FLOPs for a score
    return flops / (flops / flops_per_second + rates.SCORE_BYTES / memory_rate(run))


def _takes_cudnn(run: PlannedRun, mixer: Attention) -> bool:
    """Returns whether fa4 leaves a mixer's backward pass to cuDNN (kernels/attention/flash_attn.py)."""
    config = run.config
    return not (mixer.reach or caps_scores(run.model) or config.deterministic or config.packing != "none")


def _attentions_again(run: PlannedRun, placement: Placement) -> int:
    """Returns the number of recomputed attention forward passes.

    All layers that share a checkpoint run again, and under `full` all but the last of each group a second time.
    """
    mixers = [len(layer.attentions) for layer in run.layers]
    if run.group_size > 1:
        lasts = sum(len(run.layers_of(group)[-1].attentions) for group in range(run.groups))
        return sum(mixers) + (sum(mixers) - lasts if run.config.remat_policy == "full" else 0)
    return sum(n for n, action in zip(mixers, placement.layers, strict=True) if action in RECOMPUTED)


def matrix_seconds(run: PlannedRun) -> float:
    """Returns the seconds of matrix products in a forward and backward pass, with recomputation and the head."""
    config, architecture = run.config, run.architecture
    passes = 2 if run.adapter_parameters else 3  # forward; backward by the input, and by the weight where it trains
    layers = 2.0 * run.tokens * passes * architecture.active
    layers += recompute_flops(
        run.model, run.tokens, 1, config.remat_policy, run.group_size, config.tiles_layers, attention_share=0.0
    )
    head = 2.0 * run.tokens * (passes + run.objective.reads_head_in_backward) * architecture.head
    return (layers * rates.FP8_TIME[config.fp8] + head) / _matrix_rate(run)


def _matrix_rate(run: PlannedRun) -> float:
    precision = 1.0 if run.itemsize == 2 else 0.5 if run.config.tf32 else 1 / 16  # relative to bfloat16
    return run.hardware.chip.peak_flops * rates.MATRIX_SHARE * precision


def _seconds_without_gradients(run: PlannedRun) -> float:
    """Returns the seconds of a forward pass without gradients, such as the reference's, with exposed gathers."""
    architecture, traffic = run.architecture, rates.ELEMENTWISE_TRAFFIC[run.config.compiles]
    layers, head = architecture.active * rates.FP8_TIME[run.config.fp8], architecture.head
    seconds = 2 * run.tokens * (layers + head) / _matrix_rate(run)
    seconds += len(architecture.attentions) * attention_seconds(run)[0]
    seconds += sum(_scan_seconds(run, mixer) for layer in run.layers for mixer in layer.linear_mixers)
    moved = run.tokens * sum(run.costs(layer).moved_forward * traffic for layer in run.layers)
    moved += run.tokens * run.text.vocab_size * run.itemsize + rates.GATHER_COPIES * run.weights.total.gathered
    seconds += moved / memory_rate(run)
    each = seconds / len(run.layers)
    gathers = [gather_seconds(run, run.exchanged(place)) for place in range(len(run.layers))]
    exposed = sum(max(0.0, gather - each) for gather in gathers) + gathers[0]
    if run.state_on_host:
        copy = run.itemsize / run.shards / host_link(run)
        exposed += sum(max(0.0, layer.parameters * copy - each) for layer in run.layers[run.layers_with_state_on_gpu :])
    return seconds + exposed + gather_seconds(run, run.weights.ends)


def _divergence_seconds(run: PlannedRun) -> float:
    """Returns the seconds of a divergence's memory traffic of float32 logits."""
    logits = run.tokens * run.text.vocab_size * FLOAT32_BYTES
    return logits * rates.DIVERGENCE_PASSES / memory_rate(run)


def _recurrence_seconds(run: PlannedRun) -> float:
    """Returns the seconds of mixers without attention in a forward and backward pass, with recomputation."""
    policy, total = run.config.remat_policy, 0.0
    for mixer in (mixer for layer in run.layers for mixer in layer.linear_mixers):
        again = policy == "full" if mixer.is_stored else policy != "none"
        total += (3 + again + (run.group_size > 1)) * _scan_seconds(run, mixer)
    return total


def _scan_seconds(run: PlannedRun, mixer: LinearMixer) -> float:
    """Returns the seconds of a mixer without attention in one forward pass."""
    work = run.tokens * mixer.token_flops / mixer.peak_share
    if mixer.scan_heads and run.sequence_ranks > 1:
        work *= rates.HEADS_TIME if run.config.recurrent_schedule == HEADS else rates.CHAIN_TIME
    return work / run.hardware.chip.peak_flops


def _elementwise_bytes(run: PlannedRun) -> float:
    """Returns the bytes that elementwise kernels move per token in all layers, forward and backward."""
    config, reruns, moved = run.config, run.group_size > 1, 0.0
    traffic, tiled = rates.ELEMENTWISE_TRAFFIC[config.compiles], rates.TILED_MLP[config.compiles]
    for layer in run.layers:
        costs = run.costs(layer)
        moved += (costs.moved_forward * (1 + reruns) + costs.moved_backward) * traffic
        if tiles_mlp(layer, config, run.tokens):  # a third is the forward pass, which a group repeats
            moved += tiled * layer.intermediate * run.itemsize * (4 / 3 if reruns else 1)
        moved += rates.FP8_CAST_BYTES[config.fp8] * (layer.linear_inputs + layer.linear_outputs)
    return moved


def _adapter_bytes(run: PlannedRun) -> float:
    """Returns the bytes that all layers move to join adapters to linears' inputs and weights, forward and backward."""
    if run.lora is None:
        return 0.0
    policy = run.config.remat_policy
    per_token = ends = 0.0
    for layer in run.layers:
        inputs, outputs = layer.linear_inputs, layer.linear_outputs
        ends += inputs + outputs
        repeated = _repeated_inputs(layer, policy) + (inputs if run.group_size > 1 else 0)
        if tiles_mlp(layer, run.config, run.tokens):
            per_token += rates.ADAPTER_MLP_HIDDEN * layer.hidden + rates.ADAPTER_MLP_INTERMEDIATE * layer.intermediate
            inputs -= 2 * layer.hidden + layer.intermediate
            outputs -= layer.hidden + 2 * layer.intermediate
            repeated -= 2 * layer.hidden if policy in ("attention", "full") else 0
        per_token += rates.ADAPTER_ENDS * (inputs + outputs) + rates.ADAPTER_REPEATS * repeated
    adapted = count_adapter_parameters(replace(run.lora, parameters=()), run.model) / (run.lora.rank * ends)
    return adapted * (per_token * run.tokens + rates.ADAPTER_WEIGHTS * weights_of_products(run)) * run.itemsize


def _repeated_inputs(layer: Layer, policy: str) -> int:
    """Returns the elements per token that linears read when a checkpoint runs them again."""
    if policy in ("none", STORE_LINEARS):
        return 0
    return layer.linear_inputs - layer.last_linear_input - (2 * layer.hidden if policy == STORE_MLP else 0)


# ---- optimizer ------------------------------------------------------------------------------------------------------


def update_seconds(run: PlannedRun) -> float:
    """Returns the seconds of an optimizer step, with the gradients' norm and clipping."""
    optim: str = run.config.optim
    moved = rates.NORM_BYTES + rates.CLIP_BYTES
    moved += rates.OPTIMIZER_BYTES.get(optim, rates.OPTIMIZER_BYTES["adamw_torch"])
    on_host = run.local_trained * run.shares_on_host.gradients
    seconds = len(run.architecture.sizes) * rates.UPDATE_LAUNCH_SECONDS.get(optim, 0.0)
    seconds += (run.local_trained - on_host) * moved / memory_rate(run)
    if not run.state_on_host:
        return seconds
    host_rate = min(run.hardware.cores_per_rank * rates.HOST_UPDATE_RATE, rates.HOST_UPDATE_MAX)
    if streamed := rates.STREAMED_UPDATE_RATE.get(optim):  # this rate includes clipping
        return seconds + on_host * rates.NORM_BYTES / host_rate + on_host / streamed
    return seconds + on_host * moved / host_rate
