"""Plans of a training run: placements within budgets, memory and time, lengths that fit, suggestions, refusals."""

import copy
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_plan_training import planned_run
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from lightseq.architecture.family import preset_config
from lightseq.architecture.flops import total_parameters
from lightseq.cli import BOTH, main
from lightseq.distributed.host_memory import FREE_SHARE
from lightseq.kernels.attention.base import KernelSpec
from lightseq.kernels.attention.tile_kernel_choice import select
from lightseq.memory.offload import device_lifetimes
from lightseq.memory.placement import (
    ACTIONS,
    KEEP,
    OFFLOAD,
    OFFLOADED,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    ActionCost,
    Placement,
    in_order,
    place,
)
from lightseq.parts.facts import Heads, distinct
from lightseq.plan.advice import changes_to_fit, faster_change, longest, one_sequence_per_gpu
from lightseq.plan.attention_memory import AttentionMemory, attention_memory, takes_cublas
from lightseq.plan.breakdown import GIB, Breakdown
from lightseq.plan.make_plan import SAME_SPEED, fast_options, frugal_options, make_plan, plan_from_earlier
from lightseq.plan.memory import attention_of, saved_by_layer, snapshots, state_bytes_on_host
from lightseq.plan.plan import Plan, on_smaller_gpus, placement_of, plan_as_given, usable_gpu_bytes
from lightseq.plan.rates import (
    CHIPS,
    CLIP_BYTES,
    MATRIX_SHARE,
    NORM_BYTES,
    PROCESS_BYTES,
    SCORE_BYTES,
    STREAMED_UPDATE_RATE,
    UPDATE_LAUNCH_SECONDS,
    chip_of_device,
)
from lightseq.plan.run import PlannedRun
from lightseq.plan.step_time import attention_seconds
from lightseq.plan.transfers import copy_waits, host_link
from lightseq.schedule.auto import MAX_GATHERED_BYTES, ScheduleChoice, choose_by_time, estimate_choice, possible_choices
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import FLOAT32_BYTES, RATES
from lightseq.training.setup_checks import bfloat16_warning

LLAMA = preset_config(BOTH, "llama3-8b")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
PHI = Phi3Config(**{name: getattr(LLAMA, name) for name in SIZES}, pad_token_id=0)
WORDS = "--model_name_or_path llama3-8b --bf16 --torch_compile --host_memory 1900"
LAYERS = LLAMA.num_hidden_layers


def plan(flags: str, gpus: int, gpu: float = 1e6, host: float = 1e6) -> Plan:
    """Plans 8B on GPUs with so many usable GiB, and hosts with so many GiB."""
    return make_plan(planned_run(LLAMA, f"--bf16 {flags}", gpus, gpu=gpu * GIB, host=host * GIB))


# ---- placement ------------------------------------------------------------------------------------------------------


def action_costs(
    kept: float = 10, layer_input: float = 4, copy: float = 0.0, attention: float = 1.0
) -> dict[str, ActionCost]:
    return {
        KEEP: ActionCost(kept, 0, 0),
        OFFLOAD: ActionCost(0, kept, copy),
        RECOMPUTE: ActionCost(layer_input, 0, attention),
        RECOMPUTE_OFFLOAD: ActionCost(0, layer_input, attention + copy / 2),
    }


@pytest.mark.parametrize(
    ("copy", "device", "host", "words"),
    [
        (0.0, 80, 1e9, "layers 0-7 keep"),
        (0.0, 59, 1e9, "layers 0-2 offload, 3-7 keep"),
        (2.0, 59, 1e9, "layers 0-3 recompute, 4-7 keep"),  # recomputing attention is faster than the copy
        (0.0, 59, 0, "layers 0-3 recompute, 4-7 keep"),
    ],
)
def test_layers_are_kept_then_offloaded_unless_recomputing_is_faster(
    copy: float, device: float, host: float, words: str
) -> None:
    found = place([action_costs(copy=copy)] * 8, device, host)
    assert found is not None and found.text == words


def summed(actions: Sequence[str], costs: Sequence[Mapping[str, ActionCost]]) -> tuple[float, float, float]:
    """Adds up device bytes in the worst layer's backward pass, host bytes and seconds, layer by layer.

    Of the offloaded layers the last two are on the GPU, or the last one beside the first that stays.
    """
    used = [cost[action] for cost, action in zip(costs, actions, strict=True)]
    worst = 0.0
    for i in range(len(actions)):
        stay = sum(cost.device_bytes for cost in used[: i + 1])
        offloaded = [
            cost[{OFFLOAD: KEEP, RECOMPUTE_OFFLOAD: RECOMPUTE}[action]].device_bytes
            for cost, action in zip(costs[: i + 1], actions[: i + 1], strict=True)
            if action in OFFLOADED
        ]
        in_flight = {0: offloaded[-2:], 1: offloaded[-1:]}.get(i + 1 - len(offloaded), [])
        worst = max(worst, stay + sum(in_flight))
    return worst, sum(cost.host_bytes for cost in used), sum(cost.seconds for cost in used)


@pytest.mark.parametrize("alike", [True, False])
def test_no_placement_within_both_budgets_is_faster(alike: bool) -> None:
    draw = random.Random(0)
    for _ in range(60):
        layers, copy, attention = draw.randint(1, 7), draw.choice((0.0, 0.5, 3.0)), draw.choice((0.1, 1.0))
        costs = [action_costs(copy=copy, attention=attention)] * layers
        if not alike:
            costs = [draw.choice((costs[0], action_costs(25, 4, 2 * copy, 3 * attention))) for _ in range(layers)]
        device, host = draw.uniform(0, 10 * layers), draw.uniform(0, 10 * layers)
        every = [
            in_order(dict(zip(ACTIONS, counts, strict=True)))
            for counts in itertools.product(range(layers + 1), repeat=len(ACTIONS))
            if sum(counts) == layers
        ]
        sums = [summed(p.layers, costs) for p in every if p.layers[-1] not in OFFLOADED]
        fit = [seconds for here, there, seconds in sums if here <= device and there <= host]
        found = place(costs, device, host)
        assert (found is None) == (not fit)
        if found is not None:
            here, there, seconds = summed(found.layers, costs)
            assert here <= device and there <= host and seconds == pytest.approx(min(fit))


@pytest.mark.parametrize(
    ("device", "words", "exposed", "contiguous"),
    [
        (110, "5 of 16 layers offload", 0.0, 5 * 0.8),
        (60, "10 of 16 layers offload", 7 * 0.8, 10 * 0.8),  # between three pairs of them a layer has room
        (20, "layers 0-13 offload, 14-15 keep", 14 * 0.8, 14 * 0.8),
    ],
)
def test_offloaded_layers_are_spread_when_a_copy_takes_longer_than_a_layer(
    device: float, words: str, exposed: float, contiguous: float
) -> None:
    costs = action_costs(attention=1e9)
    costs[OFFLOAD] = replace(costs[OFFLOAD], copy_seconds=1.8)
    costs[RECOMPUTE_OFFLOAD] = replace(costs[RECOMPUTE_OFFLOAD], copy_seconds=0.7)
    found = place([costs] * 16, device, 1e9, layer_seconds=(1.0, 2.0))
    assert found is not None and found.text == words
    assert exposed_seconds(found, 1.8) == pytest.approx(exposed)
    assert exposed_seconds(in_order(Counter(found.layers)), 1.8) == pytest.approx(contiguous)
    together = place([costs] * 16, device, 1e9, in_flight=1, layer_seconds=(1.0, 2.0))
    assert together is not None and together == in_order(Counter(together.layers))


def exposed_seconds(placement: Placement, copy: float) -> float:
    offloaded = [action in OFFLOADED for action in placement.layers]
    return copy_waits([copy * leaves for leaves in offloaded], device_lifetimes(offloaded), 1.0, 2.0)


def test_a_layer_on_the_gpu_during_the_loss_waits_for_no_copy() -> None:
    assert exposed_seconds(in_order({OFFLOAD: 15, KEEP: 1}), 1.8) == pytest.approx(14 * 0.8)
    assert exposed_seconds(in_order({OFFLOAD: 1, KEEP: 1}), 5.0) == 0


def test_copies_that_overlap_nothing_are_exposed_in_both_directions() -> None:
    offloaded = [True] * 5 + [False] * 3
    copies = [1.8 * leaves for leaves in offloaded]
    assert copy_waits(copies, device_lifetimes(offloaded, in_flight=1), 1.0, 2.0) == pytest.approx(10 * 1.8)


def test_no_offloaded_layer_is_on_the_gpu_during_the_loss_if_two_layers_stay() -> None:
    """However many layers are offloaded, and however long their copies take."""
    for layers, seconds in itertools.product((4, 7, 16, 33), (0.5, 1.2, 1.8, 2.3, 9.0)):
        costs = action_costs(attention=1e9)
        for action in OFFLOADED:
            costs[action] = replace(costs[action], copy_seconds=seconds)
        for resident in range(2, layers):
            found = place([costs] * layers, 10 * resident, 1e9, layer_seconds=(1.0, 2.0))
            assert found is not None and found.count(KEEP) == resident
            offloaded = [action == OFFLOAD for action in found.layers]
            lifetimes = device_lifetimes(offloaded)
            assert all(i + lifetime < layers for i, lifetime in enumerate(lifetimes) if lifetime)
            assert exposed_seconds(found, seconds) <= exposed_seconds(in_order(Counter(found.layers)), seconds) + 1e-9


def test_a_placement_of_many_spans_is_shown_as_counts() -> None:
    layers = (OFFLOAD, RECOMPUTE, OFFLOAD, KEEP, OFFLOAD, KEEP)
    assert Placement(layers).text == "3 of 6 layers offload, 1 recompute"
    assert Placement(layers[:4]).text == "layers 0 offload, 1 recompute, 2 offload, 3 keep"


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_planned_for_every_layer_where_offloaded_layers_are_spread() -> None:
    run = planned_run(LLAMA, "--bf16 --remat attention --model_max_length 32K", 2)
    placement = in_order({OFFLOAD: 13, KEEP: 19}, 2.0)
    saved, layer = {}, saved_by_layer(run, run.layers[0], KEEP)
    for snapshot in snapshots(run, placement):
        if found := re.fullmatch(r"backward of layer (\d+), MLP", snapshot.when):
            saved[int(found[1])] = snapshot.parts.stored_activations
        elif snapshot.when == "loss":
            assert snapshot.parts.stored_activations == 19 * layer
    staying = {i: i // 2 + 1 if i < 25 else i - 12 for i in range(32)}  # and layers on their way
    moving = {i: 0 if i > 26 else 1 if i % 2 or i in (0, 26) else 2 for i in range(32)}
    assert saved == {i: (staying[i] - (i % 2 == 0 and i < 25) + moving[i]) * layer for i in range(32)}


@pytest.mark.parametrize(("asked", "taken"), [("auto-blocking", "symmetric"), ("nccl-blocking", "nccl")])
def test_a_transport_without_overlap_takes_the_same_memory(asked: str, taken: str) -> None:
    assert planned_run(LLAMA, f"--bf16 --transport {asked}", 4).transport == taken


def test_packed_sequences_get_the_schedule_that_training_takes() -> None:
    packed = planned_run(LLAMA, "--bf16 --packing best_fit --model_max_length 512K", 4).choice
    assert (packed.schedule, packed.head_groups) == ("prefix", 2)
    assert planned_run(LLAMA, "--bf16 --remat none --model_max_length 16K", 4).choice.schedule == "ulysses"


def test_pinned_gradients_take_powers_of_two_of_host_memory() -> None:
    on_host = plan("--offload optimizer", 4)
    assert on_host.parts.parameters == on_host.parts.optimizer == 0
    took = on_host.host_bytes / 4 - PROCESS_BYTES - 4 * total_parameters(LLAMA)
    # Of weights, moments and gradients torch pins the last: 4096 x 14336 numbers over four ranks are 56 MiB of 64.
    table = 4 * LLAMA.vocab_size * LLAMA.hidden_size // 4
    assert took == pytest.approx(32 * 3 * 8 * 2**20 + 2 * (2 ** ceil(log2(table)) - table), rel=1e-3)


def test_layers_offload_into_what_weights_leave_of_host_memory() -> None:
    """The rest stays on the GPU: all of it would have been too much for the host."""
    flags = "--model_max_length 131072 --offload both --optim adamw_8bit"
    found = plan(flags, 1, gpu=74, host=125)
    left = 125 * GIB - PROCESS_BYTES - state_bytes_on_host(found.run)
    offloaded = found.placement.count(OFFLOAD)
    assert (
        found.fits
        and 4 < offloaded == int(FREE_SHARE * left // saved_by_layer(found.run, found.run.layers[0], OFFLOAD)) < 31
    )
    everything = plan(f"{flags} --host_memory_budget 125", 1, gpu=74, host=125)
    assert everything.placement.count(OFFLOAD) == 31 and everything.shortages[0].startswith("host memory, by ")


@pytest.mark.parametrize(
    ("remat", "weights"),  # whose products are saved and not repeated
    [
        ("attention+mlp", 2 * 4096 * 14336),
        pytest.param("attention+linears", 2 * 4096 * 14336 + (2 * 4096 + 2 * 1024) * 4096, marks=pytest.mark.slow),
    ],
)
def test_stored_products_take_memory_and_are_not_recomputed(remat: str, weights: int) -> None:
    flags, tokens = "--torch_compile --model_max_length 131072", 32768
    less, more = plan(flags, 4, host=1000), plan(f"{flags} --remat {remat}", 4, host=1000)
    away = plan(f"{flags} --remat {remat} --offload activations", 4, host=1000)
    outputs = tokens * 2 * weights // 4096  # of a layer, in bytes
    assert more.parts.stored_activations - less.parts.stored_activations == 32 * outputs
    saved = less.seconds["matrix products"] - more.seconds["matrix products"]
    assert saved == pytest.approx(32 * 2 * tokens * weights / (MATRIX_SHARE * 989e12))
    assert away.host_bytes - more.host_bytes >= 4 * 31 * outputs and away.parts.total < less.parts.total + 3 * outputs


def test_every_point_of_a_step_grows_with_the_length() -> None:
    for flags in ("", "--torch_compile", "--remat full", "--remat none", "--layers_per_checkpoint 4"):
        short, long = (planned_run(LLAMA, f"--bf16 {flags} --model_max_length {n}", 2) for n in (65536, 131072))
        for a, b in zip(snapshots(short, placement_of(short)), snapshots(long, placement_of(long)), strict=True):
            assert a.parts.total <= b.parts.total and a.when == b.when


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("offload", ["none", "activations"])
def test_gate_and_up_are_freed_before_attention_runs_backward(size: int, offload: str) -> None:
    flags = f"--bf16 --torch_compile --model_max_length 65536 --layers_per_checkpoint {size} --offload {offload}"
    run, without = (planned_run(LLAMA, f"{flags} --remat {remat}", 1) for remat in ("attention+mlp", "attention"))
    found, lean = ([*snapshots(x, placement_of(x))] for x in (run, without))
    products = 2 * LLAMA.intermediate_size * 2 * run.tokens
    # The last layer's own are gone, unless layers of a group hand theirs over; the rest is as it was.
    held = {("none", 1): 31, ("none", 4): 3, ("activations", 1): 1, ("activations", 4): 2}[offload, size]
    for snapshot, other in zip(found, lean, strict=True):
        assert min(vars(snapshot.parts).values()) >= 0, snapshot
        if snapshot.when == f"backward of layer {32 - size}, attention":
            assert snapshot.parts.total - other.parts.total == held * products


@pytest.mark.parametrize("name", [pytest.param("prefix", marks=pytest.mark.slow), "ring", "zigzag"])
def test_attention_memory_over_many_ranks_is_extrapolated(name: str) -> None:
    small, large, counted = (
        attention_memory(ScheduleChoice(name), world, Heads(8, 2, 64, 64), 2) for world in (8, 16, 12)
    )
    for a, b, c in zip(small, large, counted, strict=True):
        assert c == pytest.approx((a + b) / 2, rel=0.02)
    extrapolated = attention_memory(ScheduleChoice(name), 24, Heads(8, 2, 64, 64), 2)
    assert extrapolated.backward == pytest.approx(2 * large.backward - small.backward)


def test_a_layer_with_a_window_takes_less_memory_for_attention() -> None:
    sizes = {name: getattr(LLAMA, name) for name in SIZES} | {"sliding_window": 4096}
    every = MistralConfig(**sizes)
    half = Qwen2Config(**sizes, use_sliding_window=True, max_window_layers=16)

    def memory(model: PreTrainedConfig, length: str, layer: int) -> AttentionMemory:
        run = planned_run(model, f"--bf16 --schedule prefix --model_max_length {length}", 2)
        return attention_of(run, run.layers[layer])

    full, windowed = memory(LLAMA, "128K", 0), memory(every, "128K", 0)
    assert windowed.backward < 0.8 * full.backward and windowed.buffers < 0.7 * full.buffers
    assert memory(half, "128K", 0) == memory(every, "4K", 0) == full and memory(half, "128K", 31) == windowed


class HalfNarrowConfig(LlamaConfig):
    model_type = "half_narrow"


class HalfNarrowForCausalLM(LlamaForCausalLM):
    """A Llama whose second half of layers has MLPs of half the width."""

    config_class = HalfNarrowConfig

    def __init__(self, config: HalfNarrowConfig) -> None:
        super().__init__(config)
        narrow = copy.copy(config)
        narrow.intermediate_size //= 2
        for layer in self.model.layers[config.num_hidden_layers // 2 :]:
            layer.mlp = LlamaMLP(narrow)


AutoModelForCausalLM.register(HalfNarrowConfig, HalfNarrowForCausalLM)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "attention"])
def test_layers_that_differ_are_planned_one_by_one(remat: str) -> None:
    flags = f"--bf16 --torch_compile --remat {remat} --offload none --model_max_length 32K"
    models = LLAMA, HalfNarrowConfig(**{name: getattr(LLAMA, name) for name in SIZES})
    wide, half = (plan_as_given(planned_run(model, flags, 2)) for model in models)
    layers = half.run.layers
    assert [layer.place for layer in distinct(layers)] == [0, 16]
    first, second = (half.run.costs(layer) for layer in distinct(layers))
    # Compiled layers save three tensors of the MLP's width, and checkpoints none. There the MLP is one operator.
    assert first.saved - second.saved == (3 * 2 * LLAMA.intermediate_size / 2 if remat == "none" else 0)
    assert (first.moved_backward > second.moved_backward) == (remat == "none")
    saved = half.run.tokens * 16 * (first.saved - second.saved)
    assert wide.parts.stored_activations - half.parts.stored_activations == pytest.approx(saved)
    assert wide.parts.total > half.parts.total and wide.step_seconds > half.step_seconds


def test_attention_of_layers_with_two_mixers_and_with_none_is_planned() -> None:
    run = planned_run(LLAMA, "--bf16 --remat none --offload none --model_max_length 32K", 2)
    mixers = (replace(run.layers[0], mixers=()), replace(run.layers[0], mixers=run.layers[0].mixers * 2))
    with patch.object(PlannedRun, "architecture", replace(run.architecture, layers=mixers * 16)):
        found = plan_as_given(replace(run))
    # As much attention in all, though no layer has one mixer.
    assert found.seconds["attention"] == pytest.approx(plan_as_given(run).seconds["attention"])


@pytest.mark.parametrize("gpus, heads, kv_heads, length", [
    (2, 8, 2, 2**19), (4, 32, 8, 2**17), (8, 8, 2, 2**20), (8, 32, 8, 2**21), (16, 32, 8, 2**20), (16, 64, 8, 2**22),
])  # fmt: skip
@pytest.mark.parametrize("transport", RATES)
def test_head_groups_need_little_memory_or_no_more_than_the_fastest(
    gpus: int, heads: int, kv_heads: int, length: int, transport: str
) -> None:
    """Groups that share key/value heads gather them again, and add up their gradients in float32."""

    def taken(choice: ScheduleChoice) -> float:
        found = attention_memory(choice, gpus, Heads(heads, kv_heads, 128, 128), 2)
        return found.buffers + found.backward

    shape, rates = AttentionShape(length, heads, kv_heads, 128), RATES[transport]
    fastest = min(
        possible_choices(gpus, shape), key=lambda choice: estimate_choice(choice, gpus, shape, rates, 8).seconds
    )
    chosen = choose_by_time(gpus, shape, rates, 8)
    is_small = estimate_choice(chosen, gpus, shape, rates, 8).gathered_bytes <= MAX_GATHERED_BYTES
    assert is_small or taken(chosen) <= taken(fastest)


# ---- --offload auto -------------------------------------------------------------------------------------------------


def with_state_on_gpu(run: PlannedRun, layers: int) -> Plan:
    return plan_as_given(replace(run, state_offloaded=True, layers_with_state_on_gpu=layers))


def test_auto_keeps_the_state_of_as_many_layers_as_fit_on_the_gpu() -> None:
    flags = "--torch_compile --offload auto --optim adamw_8bit --model_max_length"
    found = plan(f"{flags} 128K", 1, gpu=74, host=125)
    resident, nothing_resident = found.run.layers_with_state_on_gpu, with_state_on_gpu(found.run, 0)
    assert found.fits and found.run.state_on_host and 0 < resident < LAYERS
    assert found.parts.parameters == FLOAT32_BYTES * sum(layer.parameters for layer in found.run.layers[:resident])
    assert found.parts.total > 0.9 * usable_gpu_bytes(found.run)
    assert found.step_seconds < 0.98 * nothing_resident.step_seconds
    assert found.host_bytes < nothing_resident.host_bytes - 16 * GIB
    mixed = plan(f"{flags} 192K", 1, gpu=74, host=125)
    both = make_plan(replace(mixed.run, config=replace(mixed.run.config, offload="both", remat="full")))
    assert mixed.fits and both.fits and mixed.step_seconds < 0.9 * both.step_seconds
    assert {OFFLOAD, KEEP} == set(mixed.placement.layers) and mixed.run.layers_with_state_on_gpu


@pytest.mark.parametrize(("optim", "host"), [("adamw_torch_fused", 125), ("adamw_8bit", 64)])
def test_auto_fits_where_all_state_on_the_host_does_not(optim: str, host: float) -> None:
    found = plan(f"--torch_compile --offload auto --model_max_length 128K --optim {optim}", 1, gpu=74, host=host)
    assert found.fits and not with_state_on_gpu(found.run, 0).fits


@pytest.mark.parametrize(
    ("flags", "host"), [("--model_max_length 256K", 125), ("--model_max_length 128K --optim adamw_8bit", 32)]
)
def test_a_hopeless_run_is_planned_within_the_host(flags: str, host: float) -> None:
    found = plan(f"--torch_compile --offload auto {flags}", 1, gpu=74, host=host)
    assert [shortage[:10] for shortage in found.shortages] == ["GPU memory"]


def test_a_hopeless_run_is_planned_with_the_least_memory() -> None:
    found = plan("--offload auto --model_max_length 32K", 1, gpu=6.5, host=250)
    assert not found.fits and found.run.state_on_host and found.run.layers_with_state_on_gpu == 0
    assert found.parts.total < 12 * GIB
    flags = "--torch_compile --offload auto --optim adamw_8bit --model_max_length 256K --host_memory_budget 5"
    run = planned_run(LLAMA, f"--bf16 {flags}", 1, gpu=74 * GIB, host=125 * GIB)
    bounded = plan_as_given(run)  # the budget holds the inputs of two layers
    assert not bounded.fits and bounded.placement.text == "layers 0-1 recompute and offload, 2-31 recompute"


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        pytest.param("--remat attention+mlp --host_memory_budget 3", {OFFLOAD: 1, KEEP: 31}, marks=pytest.mark.slow),
        ("--remat attention --host_memory_budget 0.001", {RECOMPUTE: 13, KEEP: 19}),
    ],
)
def test_only_as_many_layers_leave_the_gpu_as_memory_needs(flags: str, counts: dict[str, int]) -> None:
    run = planned_run(LLAMA, f"--bf16 --torch_compile --lora_rank 16 --model_max_length 64K --offload auto {flags}", 2)
    fitting = plan_as_given(run, in_order(counts))
    assert plan_as_given(on_smaller_gpus(run, fitting.parts.total)).placement == fitting.placement


def auto(model: str, flags: str, gpus: int, gpu: float, host: float, cores: int | None = None) -> PlannedRun:
    run = planned_run(preset_config(BOTH, model), f"--bf16 --offload auto {flags}", gpus, host=host * GIB)
    return replace(run, hardware=replace(run.hardware, gpu_memory=gpu * GIB, host_cores=cores))


def test_auto_finds_numbers_of_layers_between_its_steps() -> None:
    run = auto("llama3-8b", "--model_max_length 32K", 1, 75, 68)
    fits = [n for n in range(LAYERS + 1) if with_state_on_gpu(run, n).fits]
    assert fits and not {*fits} & {*range(0, 33, 4)} and make_plan(run).run.layers_with_state_on_gpu in fits


def test_auto_fits_where_state_on_the_gpu_makes_room_on_the_host() -> None:
    flags = "--model_max_length 65536 --optim adamw_8bit --host_memory_budget 60"
    run = auto("llama3-8b", flags, 2, 20.9 / 0.92, 64, cores=32)
    plans = [with_state_on_gpu(run, n) for n in range(LAYERS + 1)]
    lacks_gpu = ["GPU" in found.missing for found in plans[:20]]
    assert [*dict.fromkeys(lacks_gpu)] == [False, True] and lacks_gpu != sorted(lacks_gpu), lacks_gpu
    assert make_plan(run).fits == any(found.fits for found in plans)


def test_more_memory_never_makes_a_step_slower() -> None:
    flags = "--model_max_length 1M --torch_compile --optim sgd --gradient_accumulation_steps 4"
    seconds = [make_plan(auto("llama3-8b", flags, 4, gpu, 500)).step_seconds for gpu in range(44, 80, 3)]
    assert seconds == sorted(seconds, reverse=True), seconds


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["", "--host_memory_budget 8"])
def test_auto_offloads_no_more_than_the_host_has(budget: str) -> None:
    flags = f"--model_max_length 256K --torch_compile --gradient_accumulation_steps 4 {budget}"
    assert make_plan(auto("llama3.2-3b", flags, 8, 16, 64)).fits


def test_the_device_budget_bounds_what_auto_keeps_on_the_gpu() -> None:
    flags = "--torch_compile --model_max_length 1M --offload auto"
    free, bound = plan(flags, 8), plan(f"{flags} --device_memory_budget 50", 8)
    assert set(free.placement.layers) == {KEEP} and free.parts.total > 50 * GIB
    assert bound.fits and bound.parts.total <= usable_gpu_bytes(bound.run) == 50 * GIB


# ---- time -----------------------------------------------------------------------------------------------------------


def test_frozen_weights_on_the_host_are_copied_in_half_the_bytes() -> None:
    flags, exposed = "--model_max_length 4K --offload optimizer", "offloading, exposed"
    assert plan(f"{flags} --lora_rank 16", 1).seconds[exposed] < 0.7 * plan(flags, 1).seconds[exposed]


def test_compute_hides_copies_of_weights_except_for_tiled_layers_on_one_rank() -> None:
    def exposed(gpus: int, length: int, more: str = "") -> float:
        found = plan(f"--offload optimizer --model_max_length {length} {more}", gpus)
        return found.seconds["offloading, exposed"] * host_link(found.run) / FLOAT32_BYTES

    ends = (2 * LLAMA.vocab_size + 1) * LLAMA.hidden_size  # embeddings, head and last norm
    layers = total_parameters(LLAMA) - ends
    for length in (4096, 65536):
        assert exposed(1, length, "--tile_layers True") == pytest.approx(2 * layers + ends)
    assert exposed(1, 65536) == pytest.approx(ends)
    assert exposed(4, 262144) == pytest.approx(ends / 4)
    assert ends / 4 < exposed(4, 64) < (2 * layers + ends) / 4


def test_host_updates_use_the_cores_and_8_bit_updates_the_gpu() -> None:
    def update(flags: str, cores: int | None = None) -> float:
        run = planned_run(LLAMA, f"--bf16 {flags}", 8)
        return make_plan(replace(run, hardware=replace(run.hardware, host_cores=cores))).seconds["optimizer"]

    on_gpu, wide, narrow = "--optim adamw_8bit", "--offload optimizer", "--optim adamw_8bit --offload optimizer"
    one_core = update(wide, 8)
    assert update(wide, 4) == one_core == pytest.approx(4 * update(wide, 32))
    assert one_core == pytest.approx(8 * update(wide, 960), rel=0.05), "memory bandwidth is the limit"
    assert update(wide) == update(wide, 64)
    weights, norm = total_parameters(LLAMA) / 8, update(wide) * NORM_BYTES / (NORM_BYTES + CLIP_BYTES + 28)
    launches = len(planned_run(LLAMA, "--bf16", 8).architecture.sizes) * UPDATE_LAUNCH_SECONDS["adamw_8bit"]
    assert update(narrow) == pytest.approx(norm + weights / STREAMED_UPDATE_RATE["adamw_8bit"] + launches)
    assert update(narrow) == update(narrow.replace("adamw", "adamw_torch")) and update(on_gpu, 64) == update(on_gpu)


# ---- lengths and suggestions ----------------------------------------------------------------------------------------


def length_that_fits(flags: str, host: float = 400) -> int:
    run = planned_run(LLAMA, f"--bf16 --torch_compile {flags}", 4, gpu=80 * GIB, host=host * GIB)
    found = longest(run)
    assert found is not None and found % 1024 == 0
    assert make_plan(run.with_length(found)).fits and not make_plan(run.with_length(found + 1024)).fits
    return found


def test_the_longest_length_is_longest_under_auto_and_bounded_by_the_host() -> None:
    others = [length_that_fits(flags) for flags in ("", "--offload activations", "--remat full")]
    assert length_that_fits("--offload auto") >= max(others)
    by_host = [length_that_fits("--offload activations", host) for host in (100, 200)]
    assert by_host[0] < by_host[1] < others[1]


@pytest.mark.slow
def test_every_suggestion_makes_the_run_fit() -> None:
    run = planned_run(LLAMA, "--bf16 --model_max_length 6000000 --remat none", 8, 140 * GIB, 1900 * GIB, True)
    assert make_plan(run).shortages[0].startswith("GPU memory")
    flags, gpus, length = changes_to_fit(run, longest(run))
    assert flags.text == "leave out --remat" and gpus.text.endswith(" GPUs")
    assert length.text == f"--model_max_length {longest(run)}"
    assert flags.plan.fits and gpus.plan.fits and length.plan.fits


@pytest.mark.slow
def test_flags_that_make_a_step_slower_are_named() -> None:
    flags = "--bf16 --model_max_length 131072 --remat full"
    run = planned_run(LLAMA, flags, 4, gpu=140 * GIB, chosen=True)
    change = faster_change(run)
    assert change is not None and change.text == "leave out --remat" and change.plan.fits
    assert change.plan.run.config.remat == "attention+linears"
    assert 0.98 * make_plan(run).step_seconds >= change.plan.step_seconds
    assert faster_change(planned_run(LLAMA, "--bf16 --model_max_length 131072", 4, gpu=140 * GIB, chosen=True)) is None


@pytest.mark.slow
def test_hopeless_numbers_of_gpus_are_ruled_out_without_their_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    monkeypatch.setattr(
        "lightseq.schedule.schedule_choice.choose_by_time",
        lambda world, *a, **k: ranks.append(world) or choose_by_time(world, *a, **k),
    )
    run = planned_run(LLAMA, "--bf16 --model_max_length 65536", 8, gpu=1 * GIB)
    assert changes_to_fit(run, longest(run)) == []
    assert max(ranks) == 8
    for flags in ("--bf16", "--bf16 --schedule ring --offload activations", "--remat none --torch_compile"):
        run = planned_run(LLAMA, f"{flags} --model_max_length 262144", 16)
        assert make_plan(one_sequence_per_gpu(run)).parts.total <= make_plan(run).parts.total


def test_a_suggestion_names_the_flags_to_leave_out() -> None:
    flags = "--bf16 --model_max_length 2M --gradient_checkpointing False"
    change = changes_to_fit(planned_run(LLAMA, flags, 4, gpu=140 * GIB, chosen=True), None)[0]
    assert change.text == "leave out --gradient_checkpointing" and change.plan.fits


@pytest.mark.slow
def test_the_planner_stores_only_what_a_models_layers_can_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model whose MLP or projections are not plain is not planned with their outputs saved."""
    flags = "--bf16 --model_max_length 128K"
    for bias, best, refused in (
        ({}, "attention+linears", {}),
        ({"attention_bias": True}, "attention+mlp", {"attention+linears": "four attention projections without bias"}),
        (
            {"mlp_bias": True},
            "attention",
            dict.fromkeys(("attention+mlp", "attention+linears"), "a gated MLP of plain linear layers"),
        ),
    ):
        model = copy.deepcopy(LLAMA)
        model.update(bias)
        chosen = make_plan(planned_run(model, flags, 4, 140 * GIB, 11 * GIB, chosen=True))  # no room on the host
        assert chosen.fits and chosen.run.config.remat == best
        model.save_pretrained(tmp_path)
        for remat, reason in refused.items():
            asked = f"plan --model_name_or_path {tmp_path} --gpus 8 --model_max_length 4K --remat {remat}"
            assert main(asked.split()) == 2 and reason in capsys.readouterr().err


@pytest.mark.slow
def test_tiles_are_planned_only_for_supported_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for model, tiled in ((LLAMA, True), (PHI, False)):
        run = planned_run(model, "--bf16 --model_max_length 1536K", 1, gpu=140 * GIB, chosen=True)
        assert make_plan(run).run.config.tile_layers == tiled
    PHI.save_pretrained(tmp_path)
    assert main(f"plan --model_name_or_path {tmp_path} --gpus 8 --model_max_length 4K --tile_layers True".split()) == 2
    assert "--tile_layers supports LlamaDecoderLayer" in capsys.readouterr().err


# ---- choosing -------------------------------------------------------------------------------------------------------

SMALL = preset_config(BOTH, "llama3.2-1b")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--torch_compile False", marks=pytest.mark.slow), "--remat full", "--remat attention+mlp",
        "--gradient_checkpointing True", "--layers_per_checkpoint 2", "--tile_layers True", "--offload activations",
        "--offload both",
        "--layers_per_checkpoint 2 --remat full --offload both --torch_compile True --tile_layers True",
    ],
)  # fmt: skip
def test_given_flags_stay_and_the_rest_is_planned_around_them(flags: str) -> None:
    run = planned_run(SMALL, f"--bf16 --model_max_length 32K {flags}", 2, gpu=73 * GIB, chosen=True)
    plan = make_plan(run)
    assert plan.fits
    for name in ("torch_compile", "remat", "layers_per_checkpoint", "tile_layers"):
        given, chosen = getattr(run.config, name), getattr(plan.run.config, name)
        assert chosen is not None and given in (None, chosen)
    if run.config.gradient_checkpointing is not None:
        assert plan.run.config.remat_policy == run.config.remat_policy
    assert run.config.offload in ("auto", plan.run.config.offload)


def test_no_option_that_fits_is_faster_than_the_one_chosen() -> None:
    for length, gpu in (("32K", 30), ("32K", 20), ("128K", 40), ("512K", 40)):
        run = planned_run(SMALL, f"--bf16 --model_max_length {length}", 2, gpu=gpu * GIB, host=200 * GIB, chosen=True)
        plan = make_plan(run)
        options = [make_plan(option) for option in (*fast_options(run), *frugal_options(run))]
        assert plan.fits and len(options) > 20
        fastest = min(option.step_seconds for option in options if option.fits)
        assert plan.step_seconds <= (1 + SAME_SPEED) * fastest


def test_a_resumed_run_keeps_its_plan_unless_it_no_longer_fits_or_flags_differ() -> None:
    run = planned_run(LLAMA, "--bf16 --model_max_length 128K", 2, gpu=73 * GIB, host=250 * GIB, chosen=True)
    for gpu in (73, 30):
        plan = make_plan(on_smaller_gpus(run, gpu * GIB))
        earlier = json.loads(json.dumps(plan.to_json()))
        again = plan_from_earlier(run, earlier)
        assert again is not None and (again.placement, again.run.config) == (plan.placement, plan.run.config)
        assert again.run.layers_with_state_on_gpu == plan.run.layers_with_state_on_gpu
        assert again.run.reshard_after_forward == plan.run.reshard_after_forward
        assert plan_from_earlier(on_smaller_gpus(run, plan.parts.total - 1), earlier) is None
        other = replace(run, config=replace(run.config, remat="attention+mlp"))
        assert plan_from_earlier(other, earlier) is None
        for placement in (["keep"], ["kept"] * LAYERS, [["keep"]] * LAYERS):
            assert plan_from_earlier(run, {**earlier, "placement": placement}) is None
        assert plan_from_earlier(run, {}) is None


def test_a_resumed_run_keeps_a_plan_that_offloads_nothing_despite_a_host_budget() -> None:
    run = planned_run(LLAMA, "--bf16 --model_max_length 8K --host_memory_budget 5", 8, gpu=73 * GIB, chosen=True)
    plan = make_plan(run)
    again = plan_from_earlier(run, plan.to_json())
    assert plan.run.config.offload == "none" and again is not None and again.run == plan.run


# ---- the command ----------------------------------------------------------------------------------------------------


def as_json(flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(f"plan --model_name_or_path llama3-8b --bf16 {flags} --json".split())
    return status, json.loads(capsys.readouterr().out)


def test_the_readme_shows_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    command, sample = readme.partition("## Does it fit?")[2].split("```")[1:4:2]
    assert main(command.split()[1:]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(sample.removeprefix("text").split()) in printed


def test_the_command_prints_a_table_and_writes_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "plan.jsonl"
    words = f"plan {WORDS} --model-max-length 1M --gpus 8 --offload activations --output {file}".split()
    assert main(words) == main(words) == 0
    shown = capsys.readouterr().out
    assert "stored activations" in shown and "tokens/s" in shown and "layers 0-30 offload, 31 keep" in shown
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first == second and first["fits"] and sum(first["parts"].values()) == first["peak_bytes"]
    assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])
    assert first["tokens_per_second"] == pytest.approx(2**20 / first["step_seconds"])
    attention = first["seconds"]["attention"]  # more than 10 s
    assert re.search(rf"step time +s +%\s*\n.*\n *attention +{attention:.2f} ", shown), shown
    assert len(first["placement"]) == 32 and first["longest_length"] > 2**20


@pytest.mark.slow
def test_the_record_and_the_table_name_the_layers_with_state_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--torch_compile --offload auto --optim adamw_8bit --gpus 1 --gpu_memory 80 --host_memory 125"
    _, record = as_json(f"{flags} --model_max_length 128K", capsys)
    resident = record["layers_with_state_on_gpu"]
    assert record["state_on_host"] and 0 < resident < LAYERS
    assert main(f"plan --model_name_or_path llama3-8b --bf16 {flags} --model_max_length 128K".split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"weights and state of layers {resident}-31, embeddings and head in host memory" in shown
    _, record = as_json(f"{flags} --lora_rank 8 --model_max_length 1K", capsys)
    assert not record["state_on_host"] and record["layers_with_state_on_gpu"] == LAYERS


@pytest.mark.parametrize(
    ("flags", "note", "noted"),
    [
        pytest.param("", "planned with 8 cores per rank", False, marks=pytest.mark.slow),
        ("", "unlimited memory, for the longest length too; --host_memory GIB", True),
        pytest.param("--host_memory 400", "unlimited memory", False, marks=pytest.mark.slow),
        pytest.param("--offload none", "unlimited memory", False, marks=pytest.mark.slow),
        ("--offload both", "planned with 8 cores per rank", True),
        pytest.param("--offload both --host_cores 64", "planned with 8 cores per rank", False, marks=pytest.mark.slow),
        pytest.param("--model_max_length 128K", "positions that the model covers", True, marks=pytest.mark.slow),
        pytest.param(
            "--model_max_length 128K --rope_theta 5e6", "positions that the model covers", False, marks=pytest.mark.slow
        ),
        pytest.param("--model_max_length 8K", "reference kernel", False, marks=pytest.mark.slow),
        pytest.param("--bf16 False --kernel reference", "reference kernel", True, marks=pytest.mark.slow),
        pytest.param(
            '--model_name_or_path llama3.2-1b --rope_scaling {"rope_type":"yarn","factor":8}',
            "from 131072 to 65536",
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_notes_name_what_a_plan_assumes(flags: str, note: str, noted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = as_json(f"--gpus 8 {flags}", capsys)
    assert any(note in line for line in record["notes"]) == noted


@pytest.mark.parametrize(
    ("flags", "length"),
    [pytest.param("--lora_rank 16", 2**20, marks=pytest.mark.slow), ("--optim adamw_8bit", 768_000)],
)
def test_long_sequences_of_8b_fit_on_one_gpu_of_80_gb(flags: str, length: int) -> None:
    words = f"--bf16 --model_max_length {length} {flags}"
    found = make_plan(planned_run(LLAMA, words, 1, gpu=72.8 * GIB, host=125 * GIB, chosen=True))
    assert found.fits and found.run.config.tiles_layers


def test_gathered_weights_are_kept_only_where_that_saves_time() -> None:
    """Both have the room; a step takes seconds at 32K, and most of an hour at 1M."""

    def keeps(length: str) -> bool:
        words = f"--bf16 --lora_rank 16 --remat attention --model_max_length {length}"
        run = planned_run(LLAMA, words, 1, gpu=72.8 * GIB, host=125 * GIB, chosen=True)
        return not make_plan(run).run.reshard_after_forward

    assert keeps("32K") and not keeps("1M")


@pytest.mark.parametrize(
    ("flags", "gpus", "slices", "groups"),
    [
        ("--tile_layers True", 1, 8, 1), ("--tile_layers True", 4, 8, 1), ("--tile_layers False", 4, 1, 8),
        ("--tile_layers True --schedule ulysses", 4, 2, 4), ("--tile_layers True --fp8 rowwise", 4, 1, 8),
    ],
)  # fmt: skip
def test_tiled_layers_hold_one_group_of_heads_around_attention(flags: str, gpus: int, slices: int, groups: int) -> None:
    run = planned_run(LLAMA, f"--bf16 --remat attention --model_max_length 1M {flags}", gpus)
    assert (run.head_slices, run.choice.head_groups) == (slices, groups)
    whole = planned_run(LLAMA, "--bf16 --remat attention --model_max_length 1M --tile_layers True --fp8 rowwise", gpus)
    if gpus == 1:
        layer = run.layers[0]
        assert attention_of(run, layer).backward == attention_of(whole, layer).backward / slices


def test_a_run_that_does_not_fit_ends_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = as_json(
        "--host_memory 1900 --model_max_length 32M --gpus 8 --torch_compile False --remat full", capsys
    )
    assert status == 1 and not found["fits"] and found["lacks"][0].startswith("GPU memory")
    gpus, length = (change["change"] for change in found["to_fit"])
    assert gpus.endswith(" GPUs") and length == f"--model_max_length {found['longest_length']}"
    status, found = as_json("--offload optimizer --gpus 8 --host_memory 64 --torch_compile False", capsys)
    assert status == 1 and found["lacks"][0].startswith("host memory, by ")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--gpus 0", "--gpus 0: give at least 1"),
        ("--gpus 8 --host_cores 0", "--host_cores 0: give at least 1"),
        ("--gpus 8 --chip h2000", "--chip 'h2000' is unknown; choose from h200"),
        ("--gpus 8 --model_max_length 1.5T", "--model_max_length: 1.5T is not a number of tokens"),
        ("--gpus 12 --bf16", "--gpus 12 is not a multiple of --gpus_per_host 8; give 8 or 16 GPUs, or another"),
        ("--gpus 100000", "100000 ranks per sequence are too many to plan"),
        ("--gpus 8 --gpu_memory 0", "--gpu_memory 0: give a number of GiB above 0"),
        ("--gpus 8 --gpu_memory inf", "--gpu_memory inf: give a number of GiB above 0"),
        ("--gpus 8 --host_memory nan", "--host_memory nan: give a number of GiB above 0"),
        ("--gpus 8 --bf16 --output /dev/null/plan.jsonl", "--output /dev/null/plan.jsonl cannot be written ("),
        (
            "--gpus 8 --bf16 --sequence_parallel_size 3",
            "--sequence_parallel_size 3 does not divide 8 GPUs; use 1, 2, 4 or 8",
        ),
        ("--gpus 8 --deepspeed ds.json", "only FSDP2 can be planned"),
        ("--gpus 8 --ofload both", "unknown flag --ofload; did you mean --offload?"),
        ("--gpus 7 --bf16 --schedule ulysses", "heads"),
        ("--gpus 8", "attention in float32 has no fused kernel on a GPU"),
        ("--model_max_length 8K", "--gpus"),
        ("--gpus 8 --bf16 --fp8 rowwise --chip a100-80gb", "needs a GPU of compute capability 8.9 or newer"),
        ("--gpus 8 --bf16 --kernel fa4 --chip a100-80gb", "does not run on compute capability 8.0"),
        ("--gpus 8 --bf16 --kernel fa3 --chip l40s", "does not run on compute capability 8.9"),
        ("--gpus 8 --bf16 --kernel cpu", "needs a CPU"),
        ("--gpus 8 --kernel fa4", "needs bfloat16 or float16, not float32"),
        ("--gpus 8 --bf16 --router_aux_loss_coef 0.1", "has no router loss in transformers; leave it out"),
        ("--gpus 8 --bf16 --router_bias_update_rate 0.1", "needs routers with a buffer e_score_correction_bias"),
    ],
)
def test_an_impossible_plan_is_refused_in_one_line(flags: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan --model_name_or_path llama3-8b {flags}".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and reason in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_kernel_without_windows_is_refused_for_a_model_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MistralConfig(sliding_window=4096, num_hidden_layers=2).save_pretrained(tmp_path)
    flags = f"--model_name_or_path {tmp_path} --gpus 2 --bf16 --kernel cudnn --chip h100-80gb"
    assert main(f"plan {flags} --model_max_length 32K".split()) == 2
    assert "--kernel cudnn cannot run on NVIDIA H100 80GB HBM3: has no sliding windows" in capsys.readouterr().err
    assert main(f"plan {flags} --model_max_length 4K".split()) == 0


def test_chips_are_found_by_torchs_device_name() -> None:
    for chip in CHIPS.values():
        assert chip_of_device(chip.device) == chip and chip.peak_flops > 5e13
    assert chip_of_device("NVIDIA A100-PCIE-40GB") is not None and chip_of_device("Radeon") is None
    assert usable_gpu_bytes(planned_run(LlamaConfig(), "", 1, gpu=10 * GIB)) == pytest.approx(10 * GIB)
    assert CHIPS["h200"].memory_bytes > 139 * GIB


def test_the_plan_knows_which_gpus_have_no_flash_kernel() -> None:
    for capability, dim in itertools.product([(7, 5), (8, 0), (9, 0)], [64, 256, 512]):
        chosen = select("auto", KernelSpec("cuda", capability, torch.float16, dim)).kernel.name
        assert takes_cublas("auto", capability, dim) == (chosen == "cublas"), (capability, dim)


def test_attention_on_a_t4_is_planned_at_the_speed_of_its_memory() -> None:
    flags, model = "--fp16 --model_max_length 16K", LlamaConfig(num_hidden_layers=1)  # 32 heads of 128
    run = planned_run(model, flags, 2)
    run = run.changed(hardware=replace(run.hardware, chip=CHIPS["t4"]))
    scores = 32 * (2**14) ** 2 / 2 / 2  # of the heads, and of the queries and keys of a GPU's half
    moving = scores * SCORE_BYTES / (0.75 * 300e9)
    assert moving < sum(attention_seconds(run)) < 1.5 * moving


def test_bfloat16_is_warned_about_where_tensor_cores_lack_it() -> None:
    for dtype, chip, warned in (("--bf16", "t4", True), ("--fp16", "t4", False), ("--bf16", "l40s", False)):
        config = planned_run(LlamaConfig(), dtype, 1).config
        found = bfloat16_warning(config, CHIPS[chip].device, CHIPS[chip].capability)
        assert ["--fp16 in its place" in line for line in found] == [True] * warned, (dtype, chip)
    (found,) = bfloat16_warning(planned_run(LlamaConfig(), "--bf16", 1).config, "CPU", (0, 0))
    assert found.endswith("on a CPU; give --bf16 False to try things out")
    assert not bfloat16_warning(planned_run(LlamaConfig(), "", 1).config, "CPU", (0, 0))


@pytest.mark.parametrize(
    ("gradients", "stored", "peak", "found"),
    [
        (10, 30, 100, (10, 30, 40)),  # all of them at once, the rest is working memory
        (10, 30, 55, (5, 30, 0)),  # before most gradients came
        (10, 30, 50, (0, 30, 0)),
        (30, 10, 52, (30, 2, 0)),  # after most activations went
    ],
)
def test_parts_of_a_measured_peak_add_up_to_it(
    gradients: int, stored: int, peak: int, found: tuple[int, int, int]
) -> None:
    parts = Breakdown(5, gradients, 10, stored, 3, 2, working=0).at_peak(peak)
    assert (parts.gradients, parts.stored_activations, parts.working) == found
    assert parts.total == peak


@pytest.mark.slow
def test_the_plan_splits_experts_where_gathering_them_takes_longer() -> None:
    experts = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, num_experts=64, num_experts_per_tok=4, vocab_size=32000,
    )  # fmt: skip
    dense = Qwen2Config(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4
    )
    chosen, whole, small = (
        make_plan(planned_run(model, f"--bf16 --model_max_length 8192 --remat none {given}", 8, chosen=True))  # type: ignore[arg-type]
        for model, given in ((experts, ""), (experts, "--expert_parallel_size 1"), (dense, ""))
    )
    assert chosen.run.config.expert_ranks > 1
    assert chosen.step_seconds < whole.step_seconds
    assert (whole.run.config.expert_ranks, small.run.config.expert_ranks) == (1, 1)
    split = whole.run.changed(config=replace(whole.run.config, expert_parallel_size=chosen.run.config.expert_ranks))
    assert plan_as_given(split).parts == plan_as_given(replace(split)).parts  # nothing is taken over that differs
    again = plan_from_earlier(planned_run(experts, "--bf16 --model_max_length 8192", 8, chosen=True), chosen.to_json())  # type: ignore[arg-type]
    assert again is not None
    assert again.run.config.expert_ranks == chosen.run.config.expert_ranks
