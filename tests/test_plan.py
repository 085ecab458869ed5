"""The plan of a training run: placements within budgets, lengths that fit, what would make it fit, what is refused."""

import copy
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
from test_plan_training import planned_run
from transformers import LlamaConfig, Phi3Config

from lightseq.cli import BOTH, main
from lightseq.distributed.mesh import FREE_SHARE
from lightseq.memory.planner.attention_memory import attention_memory
from lightseq.memory.planner.breakdown import GIB
from lightseq.memory.planner.estimate import host_by_layer, host_bytes, moments, state_bytes_on_host
from lightseq.memory.planner.placement import (
    AWAY,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    STATES,
    Placement,
    State,
    in_order,
    place,
)
from lightseq.memory.planner.plan import Plan, _plan_as_it_is, make_plan, placement_of, placement_words, usable
from lightseq.memory.planner.rates import (
    CHIPS,
    CLIP_BYTES,
    NORM_BYTES,
    PASSED_UPDATE_WEIGHTS,
    PROCESS_BYTES,
    UPDATE_LAUNCH_SECONDS,
    chip_named,
    chip_of_device,
)
from lightseq.memory.planner.remedies import _changes, _without_a_table, faster, longest, remedies
from lightseq.memory.planner.run import PlannedRun
from lightseq.memory.planner.step_time import FLOAT32, host_link
from lightseq.models.family import preset_config
from lightseq.models.flops import total_parameters
from lightseq.schedule.auto import ScheduleChoice, choose_by_time, estimate_choice, possible_choices
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import RATES
from lightseq.tools.plan.report import record

LLAMA = preset_config(BOTH, "llama3-8b")
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "num_key_value_heads",
)
PHI = Phi3Config(**{name: getattr(LLAMA, name) for name in SIZES}, pad_token_id=0)
YARN = '{"rope_type":"yarn","factor":8}'
WORDS = "--model_name_or_path llama3-8b --bf16 --torch_compile --host_memory 1900"


def states(kept: float = 10, layer_input: float = 4, copy: float = 0.0, again: float = 1.0) -> dict[str, State]:
    return {
        KEEP: State(kept, 0, 0),
        OFFLOAD: State(0, kept, copy),
        RECOMPUTE: State(layer_input, 0, again),
        RECOMPUTE_OFFLOAD: State(0, layer_input, again + copy / 2),
    }


# ---- placement ------------------------------------------------------------------------------------------------------


def test_where_there_is_room_every_layer_keeps() -> None:
    assert place(8, states(), 80, 1e9) == Placement((KEEP,) * 8)


def test_what_lacks_room_leaves_first_layers_first_as_long_as_the_host_has_room() -> None:
    found = place(8, states(), 59, 1e9)
    assert found is not None and found.layers == (OFFLOAD,) * 3 + (KEEP,) * 5
    assert found.words == "layers 0-2 offload, 3-7 keep"


def test_copies_that_cost_more_than_attention_are_not_made() -> None:
    found = place(8, states(copy=2.0), 59, 1e9)
    assert found is not None and set(found.layers) == {RECOMPUTE, KEEP} and found.count(RECOMPUTE) == 4


def test_without_a_host_layers_compute_again_and_without_room_for_inputs_nothing_fits() -> None:
    assert place(8, states(), 59, 0) == Placement((RECOMPUTE,) * 4 + (KEEP,) * 4)
    assert place(8, states(), 31, 0) is None


def plain_sums(layers: Sequence[str], costs: Mapping[str, State]) -> tuple[float, float, float]:
    """Device bytes in the worst layer's backward pass, host bytes, seconds: added up layer by layer.

    There is what the layers up to it keep; of those that leave, the last two (the last, beside the first that stays).
    """
    worst = 0.0
    for i in range(len(layers)):
        stay = sum(costs[s].device_bytes for s in layers[: i + 1])
        away = [
            costs[{OFFLOAD: KEEP, RECOMPUTE_OFFLOAD: RECOMPUTE}[s]].device_bytes for s in layers[: i + 1] if s in AWAY
        ]
        there = {0: away[-2:], 1: away[-1:]}.get(i + 1 - len(away), [])
        worst = max(worst, stay + sum(there))
    used = [costs[s] for s in layers]
    return worst, sum(c.host_bytes for c in used), sum(c.seconds for c in used)


def test_no_placement_within_both_budgets_is_faster() -> None:
    draw = random.Random(0)
    for _ in range(60):
        layers, copy, again = draw.randint(1, 7), draw.choice((0.0, 0.5, 3.0)), draw.choice((0.1, 1.0))
        costs, device, host = states(copy=copy, again=again), draw.uniform(0, 10 * layers), draw.uniform(0, 10 * layers)
        every = [
            in_order(dict(zip(STATES, counts, strict=True)))
            for counts in itertools.product(range(layers + 1), repeat=len(STATES))
            if sum(counts) == layers
        ]
        sums = [plain_sums(p.layers, costs) for p in every if p.layers[-1] not in AWAY]
        fit = [seconds for here, there, seconds in sums if here <= device and there <= host]
        found = place(layers, costs, device, host)
        assert (found is None) == (not fit)
        if found is not None:
            assert plain_sums(found.layers, costs)[2] == pytest.approx(min(fit))


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("auto", "symmetric"),
        ("auto-blocking", "symmetric"),
        ("symmetric-blocking", "symmetric"),
        ("nccl-blocking", "nccl"),
    ],
)
def test_a_transport_without_overlap_takes_the_same_memory(asked: str, taken: str) -> None:
    assert planned_run(LLAMA, f"--bf16 --transport {asked}", 4).transport == taken


def test_the_schedule_of_packed_sequences_is_the_one_that_training_takes() -> None:
    asked = planned_run(LLAMA, "--bf16 --packing best_fit --model_max_length 512K", 4)
    assert asked.choice[:1] + asked.choice[2:] == ("prefix", 2)
    unpacked = planned_run(LLAMA, "--bf16 --remat none --model_max_length 16K", 4)
    assert unpacked.choice.schedule == "ulysses"


def test_states_are_those_of_float32_masters_and_adamw_over_all_ranks() -> None:
    parts = make_plan(planned_run(LLAMA, "--bf16", 4)).parts
    weights = 4 * total_parameters(LLAMA) // 4
    assert parts.parameters == pytest.approx(weights, rel=1e-3) and parts.optimizer == 2 * parts.parameters
    eight_bit = make_plan(planned_run(LLAMA, "--bf16 --optim adamw_8bit", 4)).parts
    assert eight_bit.optimizer == pytest.approx(weights / 2, rel=1e-3)
    on_host = planned_run(LLAMA, "--bf16 --offload optimizer", 4)
    assert make_plan(on_host).parts.parameters == make_plan(on_host).parts.optimizer == 0
    took = host_bytes(on_host, placement_of(on_host)) - PROCESS_BYTES - 4 * weights
    # torch pins gradients, each in a power of two of bytes: 4096 x 14336 numbers over four ranks are 56 MiB of 64.
    table = 4 * LLAMA.vocab_size * LLAMA.hidden_size // 4
    assert took == pytest.approx(32 * 3 * 8 * 2**20 + 2 * (2 ** ceil(log2(table)) - table), rel=1e-3)


def test_what_leaves_the_device_is_on_the_host_and_the_budget_bounds_it() -> None:
    here, away = (planned_run(LLAMA, f"--bf16 --model_max_length 131072 {x}", 8) for x in ("", "--offload activations"))
    kept, left = make_plan(here), make_plan(away)
    layer = kept.parts.kept_activations / 32 if "layer 31" in kept.when else 16384 * (2 * 4096 * 2 + 128)
    assert left.host_bytes - kept.host_bytes == pytest.approx(8 * 31 * layer, rel=1e-6)
    assert left.parts.total < kept.parts.total
    words = "--bf16 --model_max_length 131072 --offload activations --host_memory_budget 1"
    assert make_plan(planned_run(LLAMA, words, 8)).placement.count(OFFLOAD) == int(GIB // layer)


def test_layers_hand_over_what_weights_leave_of_the_host() -> None:
    """Unasked; what finds no room stays, and the run fits where all of it would have been too much for the host."""
    words = "--bf16 --model_max_length 131072 --offload both --optim adamw_8bit"
    plan = make_plan(planned_run(LLAMA, words, 1, gpu=74 * GIB, host=125 * GIB))
    run = plan.run
    left = 125 * GIB - PROCESS_BYTES - state_bytes_on_host(run)
    layer = host_by_layer(run, OFFLOAD)
    assert plan.fits and 4 < plan.placement.count(OFFLOAD) == int(FREE_SHARE * left // layer) < 31
    all_of_it = make_plan(planned_run(LLAMA, f"{words} --host_memory_budget 125", 1, gpu=74 * GIB, host=125 * GIB))
    assert all_of_it.placement.count(OFFLOAD) == 31 and all_of_it.lacks[0].startswith("host memory, by ")


def test_auto_has_weights_wait_on_the_host_where_nothing_fits_otherwise() -> None:
    def plan(length: int, more: str = "", host: float = 125 * GIB) -> Plan:
        words = f"--bf16 --torch_compile --offload auto --model_max_length {length} {more}"
        return make_plan(planned_run(LLAMA, words, 1, gpu=74 * GIB, host=host))

    eight_bit, long = "--optim adamw_8bit", 131072
    found = plan(long, eight_bit)
    assert found.fits and found.run.state_on_host and "; weights and state of layers" in placement_words(found)
    assert record(found, None, [])["state_on_host"]
    stays, all_away = found.run.state_stays, _plan_as_it_is(replace(found.run, state_stays=0))
    assert 0 < stays < LLAMA.num_hidden_layers and f"of layers {stays}-31, embeddings" in placement_words(found)
    assert found.parts.parameters == FLOAT32 * stays * found.run.layer_parameters
    assert record(found, None, [])["layers_with_state_on_gpu"] == stays
    assert found.parts.total > 0.9 * found.usable_gpu_bytes and found.step_seconds < 0.98 * all_away.step_seconds
    assert found.host_bytes < all_away.host_bytes - 16 * GIB
    mixed = plan(196608, eight_bit)
    both = make_plan(replace(mixed.run, config=replace(mixed.run.config, offload="both", remat="full")))
    assert mixed.fits and both.fits and mixed.step_seconds < 0.9 * both.step_seconds
    assert {OFFLOAD, KEEP} == set(mixed.placement.layers) and mixed.run.state_stays
    for fits in (plan(long), plan(long, eight_bit, host=64 * GIB)):  # states of 32 bits; a small host
        assert fits.fits and not _plan_as_it_is(replace(fits.run, state_stays=0)).fits
    for hopeless in (plan(2 * long), plan(long, eight_bit, host=32 * GIB)):
        assert [lack[:10] for lack in hopeless.lacks] == ["GPU memory"], "of the host there is enough"
    bounded = plan(2 * long, f"{eight_bit} --host_memory_budget 5")  # of which a layer's input takes two
    bounded = _plan_as_it_is(replace(bounded.run, state_leaves=False, state_stays=0))
    assert not bounded.fits and set(bounded.placement.layers[2:]) == {RECOMPUTE}
    assert bounded.placement.count(RECOMPUTE_OFFLOAD) == 2
    small = plan(1024, f"{eight_bit} --lora_rank 8")
    assert small.fits and not small.run.state_on_host and not record(small, None, [])["state_on_host"]


def auto(model: str, words: str, gpus: int, gpu: float, host: float) -> PlannedRun:
    run = planned_run(preset_config(BOTH, model), f"--bf16 --offload auto {words}", gpus, host=host * GIB)
    return replace(run, hardware=replace(run.hardware, gpu_memory=gpu * GIB))


def test_state_stays_for_as_many_layers_as_let_the_rest_fit() -> None:
    """Also where that is none of the numbers that are looked at first."""
    run = auto("llama3-8b", "--model_max_length 32K", 1, 75, 68)
    fits = [n for n in range(33) if _plan_as_it_is(replace(run, state_leaves=True, state_stays=n)).fits]
    assert fits and not {*fits} & {*range(0, 33, 4)} and make_plan(run).run.state_stays in fits


def test_state_may_stay_for_more_layers_where_it_may_not_for_fewer() -> None:
    """What stays leaves the host room, for what layers keep."""
    words = "--model_max_length 65536 --optim adamw_8bit --host_memory_budget 60"
    run = auto("llama3-8b", words, 2, 24, 64)
    run = replace(run, hardware=replace(run.hardware, host_cores=32))
    of_gpu = [_plan_as_it_is(replace(run, state_leaves=True, state_stays=n)).lacks_of[0] for n in range(20)]
    assert [*dict.fromkeys(of_gpu)] == [False, True] and of_gpu != sorted(of_gpu), of_gpu
    assert make_plan(run).fits == any(
        _plan_as_it_is(replace(run, state_leaves=True, state_stays=n)).fits for n in range(33)
    )


def test_more_memory_never_makes_a_step_slower() -> None:
    words = "--model_max_length 1M --torch_compile --optim sgd --gradient_accumulation_steps 4"
    seconds = [make_plan(auto("llama3-8b", words, 4, gpu, 500)).step_seconds for gpu in range(44, 80, 3)]
    assert seconds == sorted(seconds, reverse=True), seconds


def test_where_nothing_fits_the_least_is_planned() -> None:
    found = make_plan(auto("llama3-8b", "--model_max_length 32K", 1, 9.5, 250))
    assert not found.fits and found.run.state_on_host and found.run.state_stays == 0
    assert found.parts.total < 12 * GIB


def test_what_layers_may_hand_over_ends_with_the_host() -> None:
    words = "--model_max_length 256K --torch_compile --gradient_accumulation_steps 4"
    for budget in ("", " --host_memory_budget 8"):
        assert make_plan(auto("llama3.2-3b", words + budget, 8, 16, 64)).fits, budget


def test_frozen_weights_on_the_host_come_in_half_the_bytes() -> None:
    words = "--bf16 --model_max_length 4K --offload optimizer"
    all_train, few_train = (make_plan(planned_run(LLAMA, f"{words} {more}", 1)) for more in ("", "--lora_rank 16"))
    exposed = "offloading, exposed"
    assert few_train.seconds[exposed] < 0.7 * all_train.seconds[exposed]


def test_products_that_are_kept_take_memory_here_or_there_and_are_not_made_again() -> None:
    def plan(flags: str) -> Plan:
        words = f"--bf16 --torch_compile --model_max_length 131072 {flags}"
        return make_plan(planned_run(LLAMA, words, 4, host=1000 * GIB))

    less, more, away = (plan(x) for x in ("", "--remat attention+mlp", "--remat attention+mlp --offload activations"))
    products = 2 * 14336 * 2 * 32768  # of a layer
    assert more.parts.kept_activations - less.parts.kept_activations == 32 * products
    flops = 32 * 2 * 32768 * 2 * 4096 * 14336
    assert less.seconds["matrix products"] - more.seconds["matrix products"] == pytest.approx(flops / (0.7 * 989e12))
    assert away.host_bytes - more.host_bytes >= 4 * 31 * products and away.parts.total < less.parts.total + 3 * products
    most, all_away = (plan(f"--remat attention+linears {x}") for x in ("", "--offload activations"))
    projections = (2 * 4096 + 2 * 1024) * 2 * 32768  # of a layer: q and the output, k and v
    assert most.parts.kept_activations - more.parts.kept_activations == 32 * projections
    flops = 32 * 2 * 32768 * (2 * 4096 + 2 * 1024) * 4096
    assert more.seconds["matrix products"] - most.seconds["matrix products"] == pytest.approx(flops / (0.7 * 989e12))
    assert all_away.host_bytes - away.host_bytes == pytest.approx(4 * 31 * projections)


def test_flags_that_fit_as_well_and_are_faster_are_named() -> None:
    words = "--bf16 --model_max_length 131072"
    found = faster(planned_run(LLAMA, words, 4, gpu=140 * GIB))
    fastest = "--torch_compile True --remat attention+linears"
    assert [change.words for change in found] == ["--torch_compile True", fastest]
    asked = make_plan(planned_run(LLAMA, words, 4, gpu=140 * GIB)).step_seconds
    assert all(change.plan.fits for change in found)
    assert (
        0.98 * asked >= found[0].plan.step_seconds and 0.98 * found[0].plan.step_seconds >= found[1].plan.step_seconds
    )
    assert not faster(planned_run(LLAMA, f"{words} {fastest}", 4, gpu=140 * GIB))


def test_every_moment_grows_with_the_length() -> None:
    for flags in ("", "--torch_compile", "--remat full", "--remat none", "--layers_per_checkpoint 4"):
        short, long = (planned_run(LLAMA, f"--bf16 {flags} --model_max_length {n}", 2) for n in (65536, 131072))
        for a, b in zip(moments(short, placement_of(short)), moments(long, placement_of(long)), strict=True):
            assert a.parts.total <= b.parts.total and a.when == b.when


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("offload", ["none", "activations"])
def test_gate_and_up_are_let_go_where_they_are_kept(size: int, offload: str) -> None:
    flags = f"--bf16 --torch_compile --model_max_length 65536 --layers_per_checkpoint {size} --offload {offload}"
    run, without = (planned_run(LLAMA, f"{flags} --remat {remat}", 1) for remat in ("attention+mlp", "attention"))
    found, lean = ([*moments(x, placement_of(x))] for x in (run, without))
    products = 2 * LLAMA.intermediate_size * 2 * run.tokens
    # The last layer's own are gone at its attention, unless layers of a group hand theirs over; the rest is as it was.
    there = {("none", 1): 31, ("none", 4): 3, ("activations", 1): 1, ("activations", 4): 2}[offload, size]
    for moment, other in zip(found, lean, strict=True):
        assert min(vars(moment.parts).values()) >= 0, moment
        if moment.when == f"backward of layer {32 - size}, attention":
            assert moment.parts.total - other.parts.total == there * products


@pytest.mark.parametrize("name", ["prefix", "ring", "zigzag"])
def test_attention_over_many_ranks_is_drawn_out_from_fewer(name: str) -> None:
    small, large, counted = (attention_memory(ScheduleChoice(name), world, 8, 2, 64, 2) for world in (8, 16, 12))
    for a, b, c in zip(*(vars(x).values() for x in (small, large, counted)), strict=True):
        assert c == pytest.approx((a + b) / 2, rel=0.02)
    drawn = attention_memory(ScheduleChoice(name), 24, 8, 2, 64, 2)
    assert drawn.backward == pytest.approx(2 * large.backward - small.backward)


@pytest.mark.parametrize("gpus, heads, kv_heads, length", [
    (2, 8, 2, 2**19), (4, 32, 8, 2**17), (8, 8, 2, 2**20), (8, 32, 8, 2**21), (16, 32, 8, 2**20), (16, 64, 8, 2**22),
])  # fmt: skip
@pytest.mark.parametrize("transport", RATES)
def test_heads_take_no_turns_that_need_more_memory(
    gpus: int, heads: int, kv_heads: int, length: int, transport: str
) -> None:
    """Turns that share key/value heads gather them again, and add up their gradients in float32."""

    def taken(choice: ScheduleChoice) -> float:
        found = attention_memory(choice, gpus, heads, kv_heads, 128, 2)
        return found.buffers + max(found.forward, found.backward)

    shape, rates = AttentionShape(length, heads, kv_heads, 128), RATES[transport]
    fastest = min(
        possible_choices(gpus, shape), key=lambda choice: estimate_choice(choice, gpus, shape, rates, 8).seconds
    )
    assert taken(choose_by_time(gpus, shape, rates, 8)) <= taken(fastest)


# ---- lengths and remedies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "--offload activations", "--offload auto"])
def test_the_longest_length_fits_and_the_next_one_does_not(flags: str) -> None:
    run = planned_run(LLAMA, f"--bf16 --torch_compile {flags}", 4, gpu=80 * GIB, host=400 * GIB)
    found = longest(run)
    assert found is not None and found % 1024 == 0
    assert make_plan(run.at(found)).fits and not make_plan(run.at(found + 1024)).fits


def test_auto_is_as_long_as_either_and_keeps_what_has_room() -> None:
    def run(flags: str) -> int:
        return longest(planned_run(LLAMA, f"--bf16 --torch_compile {flags}", 4, gpu=80 * GIB, host=400 * GIB)) or 0

    assert run("--offload auto") >= max(run(""), run("--offload activations"), run("--remat full"))
    short = planned_run(LLAMA, "--bf16 --torch_compile --offload auto --model_max_length 65536", 4, gpu=80 * GIB)
    assert set(placement_of(short).layers) == {KEEP}


def test_the_budget_of_a_gpu_bounds_what_auto_keeps_there() -> None:
    words = "--bf16 --torch_compile --model_max_length 1048576 --offload auto"
    free, bound = (make_plan(planned_run(LLAMA, f"{words} {x}", 8)) for x in ("", "--device_memory_budget 50"))
    assert set(free.placement.layers) == {KEEP} and free.parts.total > 50 * GIB
    assert bound.fits and bound.parts.total <= bound.usable_gpu_bytes == 50 * GIB


def test_host_memory_bounds_the_length_as_the_gpus_does() -> None:
    lengths = [
        longest(planned_run(LLAMA, "--bf16 --torch_compile --offload activations", 4, gpu=80 * GIB, host=host * GIB))
        for host in (100, 200, 400)
    ]
    assert None not in lengths and lengths == sorted(lengths) and len(set(lengths)) == 3


def test_every_remedy_makes_the_run_fit() -> None:
    run = planned_run(LLAMA, "--bf16 --model_max_length 4000000", 8, gpu=140 * GIB, host=1900 * GIB)
    assert make_plan(run).lacks and make_plan(run).lacks[0].startswith("GPU memory")
    found = remedies(run)
    assert "GPUs" in found[1].words and found[2].words.startswith("--model_max_length")
    assert all(r.plan.fits for r in found)
    assert found[0].words.startswith("--") and found[2].plan.run.config.model_max_length == longest(run)


def test_what_no_number_of_gpus_helps_is_known_without_tables_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[int] = []
    monkeypatch.setattr(
        "lightseq.memory.planner.run.choose_by_time",
        lambda ranks, *a, **k: tables.append(ranks) or choose_by_time(ranks, *a, **k),
    )
    assert remedies(planned_run(LLAMA, "--bf16 --model_max_length 65536", 8, gpu=1 * GIB)) == []
    assert max(tables) == 8
    for flags in ("--bf16", "--bf16 --schedule ring --offload activations", "--remat none --torch_compile"):
        run = planned_run(LLAMA, f"{flags} --model_max_length 262144", 16)
        assert make_plan(_without_a_table(run)).parts.total <= make_plan(run).parts.total


@pytest.mark.parametrize(
    ("model", "gpus", "flags", "changes", "without"),
    [
        ("llama3-8b", 4, "--model_max_length 128K --gradient_checkpointing True", faster, "--gradient_checkpointing"),
        ("llama3-8b", 4, "--model_max_length 2M --gradient_checkpointing False", remedies, "--gradient_checkpointing"),
        (
            "llama3.2-1b", 1, "--model_max_length 512K --offload auto --host_memory_budget 1 --device_memory_budget 36",
            remedies, "--device_memory_budget",
        ),
    ],
)  # fmt: skip
def test_flags_that_would_be_refused_beside_a_change_are_named(
    model: str, gpus: int, flags: str, changes: Any, without: str
) -> None:
    config, words = preset_config(BOTH, model), f"--bf16 --torch_compile {flags.split(' --')[0]}"
    change = changes(planned_run(config, f"--bf16 --torch_compile {flags}", gpus, gpu=140 * GIB))[0]
    assert f" without {without}" in change.words and change.plan.fits
    asked = re.sub(r" without --\w+", "", change.words)
    assert make_plan(planned_run(config, f"{words} {asked}", gpus, gpu=140 * GIB)).fits


def test_where_host_memory_is_what_lacks_its_size_is_a_remedy() -> None:
    words = "--bf16 --torch_compile --model_max_length 131072 --sequence_parallel_size 1"
    change = remedies(planned_run(LLAMA, words, 1, gpu=80 * GIB, host=16 * GIB))[0]
    size = re.match(r"(\d+) GiB of memory a host, (--.*)", change.words)
    assert size is not None, change.words
    memory = int(size[1]) * GIB
    assert make_plan(planned_run(LLAMA, f"{words} {size[2]}", 1, gpu=80 * GIB, host=memory)).fits
    assert not make_plan(planned_run(LLAMA, f"{words} {size[2]}", 1, gpu=80 * GIB, host=memory - 2 * GIB)).fits


def test_what_an_mlp_makes_is_kept_where_there_is_gate_and_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    biased = copy.deepcopy(LLAMA)
    biased.mlp_bias = True
    for model, offered in ((LLAMA, True), (biased, False)):
        changed = [run.config.remat for _, run in _changes(planned_run(model, "--bf16", 8))]
        assert ("attention+mlp" in changed) == offered
    biased.save_pretrained(tmp_path)
    asked = f"plan --model_name_or_path {tmp_path} --gpus 8 --model_max_length 4K --remat"
    for remat in ("attention+mlp", "attention+linears"):
        assert main([*asked.split(), remat]) == 2
        assert f"{remat} keeps gate and up of an MLP of plain linears, and Llama" in capsys.readouterr().err


def test_what_projections_make_is_kept_where_they_are_plain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    biased = copy.deepcopy(LLAMA)
    biased.attention_bias = True
    for model, offered in ((LLAMA, True), (biased, False)):
        changed = [run.config.remat for _, run in _changes(planned_run(model, "--bf16", 8))]
        assert ("attention+linears" in changed) == offered and "attention+mlp" in changed
    biased.save_pretrained(tmp_path)
    asked = f"plan --model_name_or_path {tmp_path} --gpus 8 --model_max_length 4K --remat attention+linears"
    assert main(asked.split()) == 2 and "LlamaDecoderLayer has others; give --remat attention+mlp" in (
        capsys.readouterr().err
    )


def test_tiles_are_for_layers_that_can_be_cut(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither offered to a model of other layers nor planned for it; and no change is tried twice."""
    for model, offered in ((LLAMA, {False, True}), (PHI, {False})):
        runs = [changed for _, changed in _changes(planned_run(model, "--bf16 --torch_compile", 8))]
        assert {run.config.tile_layers for run in runs} == offered
        assert len({repr(run.config) for run in runs}) == len(runs)
    PHI.save_pretrained(tmp_path)
    assert main(f"plan --model_name_or_path {tmp_path} --gpus 8 --model_max_length 4K --tile_layers True".split()) == 2
    assert "--tile_layers knows LlamaDecoderLayer" in capsys.readouterr().err


def test_adapters_leave_the_weights_without_gradients_and_hosts_need_no_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"plan {WORDS.partition(' --host')[0]} --model_max_length 32K --gpus 2 --offload activations --json".split()
    assert main(words) == 0 and main([*words, "--lora_rank", "16"]) == 0
    whole, adapted = (json.loads(text + "}") for text in capsys.readouterr().out.split("\n}\n")[:2])
    assert whole["placement"] == adapted["placement"] == [OFFLOAD] * 31 + [KEEP]
    assert adapted["parts"]["parameters"] == pytest.approx(whole["parts"]["parameters"] / 2, rel=0.02)
    assert adapted["parts"]["optimizer"] < 0.02 * whole["parts"]["optimizer"]
    assert adapted["step_seconds"] < whole["step_seconds"] and adapted["longest_length"] > whole["longest_length"]


def test_too_little_host_memory_is_said() -> None:
    run = planned_run(LLAMA, "--bf16 --offload optimizer", 8, gpu=140 * GIB, host=64 * GIB)
    assert make_plan(run).lacks[0].startswith("host memory, by ")


def test_weights_on_the_host_come_beside_the_computing_but_for_layers_over_tiles_of_a_rank_that_is_alone() -> None:
    def exposed(gpus: int, length: int, more: str = "") -> float:
        run = planned_run(LLAMA, f"--bf16 --offload optimizer --model_max_length {length} {more}", gpus, gpu=1e12)
        return make_plan(run).seconds["offloading, exposed"] * host_link(run) / FLOAT32

    ends = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    layers = total_parameters(LLAMA) - ends - LLAMA.hidden_size  # but for the last norm
    for length in (4096, 65536):
        assert exposed(1, length, "--tile_layers True") == pytest.approx(2 * layers + ends)
    assert exposed(1, 65536) == pytest.approx(ends)
    assert exposed(4, 262144) == pytest.approx(ends / 4)
    assert ends / 4 < exposed(4, 64) < (2 * layers + ends) / 4


def test_an_update_on_the_host_has_cores_and_of_8_bits_the_gpu() -> None:
    def update(flags: str, cores: int | None = None) -> float:
        run = planned_run(LLAMA, f"--bf16 {flags}", 8)
        return make_plan(replace(run, hardware=replace(run.hardware, host_cores=cores))).seconds["optimizer"]

    here, wide, narrow = "--optim adamw_8bit", "--offload optimizer", "--optim adamw_8bit --offload optimizer"
    one = update(wide, 8)  # core for each rank; less is not reckoned with, nor more than memory feeds
    assert (
        update(wide, 4) == one == pytest.approx(4 * update(wide, 32)) == pytest.approx(8 * update(wide, 960), rel=0.05)
    )
    assert update(wide) == update(wide, 64)
    weights, norm = total_parameters(LLAMA) / 8, update(wide) * NORM_BYTES / (NORM_BYTES + CLIP_BYTES + 28)
    launches = len(planned_run(LLAMA, "--bf16", 8).made_of.sizes) * UPDATE_LAUNCH_SECONDS["adamw_8bit"]
    assert update(narrow) == pytest.approx(norm + weights / PASSED_UPDATE_WEIGHTS["adamw_8bit"] + launches)
    assert update(narrow) == update(narrow.replace("adamw", "adamw_torch")) and update(here, 64) == update(here)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_leaves_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "plan.jsonl"
    words = f"plan {WORDS} --model-max-length 1M --gpus 8 --offload activations --output {file}".split()
    assert main(words) == main(words) == 0
    shown = capsys.readouterr().out
    assert "kept activations" in shown and "tokens/s" in shown and "layers 0-30 offload, 31 keep" in shown
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first == second and first["fits"] and sum(first["parts"].values()) == first["peak_bytes"]
    assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])
    assert first["tokens_per_second"] == pytest.approx(2**20 / first["step_seconds"])
    assert len(first["placement"]) == 32 and first["longest_length"] > 2**20


def test_how_many_cores_an_update_on_the_host_is_reckoned_with_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in (("", False), (" --offload both", True), (" --offload both --host_cores 64", False)):
        assert main(f"plan {WORDS} --gpus 8{more}".split()) == 0
        assert ("reckoned with 8 cores a rank" in " ".join(capsys.readouterr().out.split())) == said, more


def test_a_scaling_that_shortens_the_context_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --model_name_or_path llama3.2-1b --bf16 --gpus 8 --json --rope_scaling {YARN}"
    assert main(words.split()) == 0
    assert "leaves 65536 of the 131072 positions" in " ".join(json.loads(capsys.readouterr().out)["notes"])


def test_a_larger_base_reaches_the_length_that_is_planned_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model_name_or_path llama3-8b --bf16 --model_max_length 128K --gpus 8 --json"
    for flags, warned in ("", True), (" --rope_theta 5e6", False):
        assert main((words + flags).split()) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any("positions that the model covers" in note for note in notes) == warned


def test_what_does_not_fit_ends_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {WORDS} --model_max_length 4M --gpus 8 --json".split()) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["lacks"][0].startswith("GPU memory")
    assert any("positions that the model covers" in note for note in found["notes"])
    assert [x["change"].split()[-1] for x in found["to_fit"]][1] == "GPUs"
    assert found["to_fit"][2]["change"] == f"--model_max_length {found['longest_length']}"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--gpus 0", "--gpus 0: give at least 1"),
        ("--gpus 8 --host_cores 0", "--host_cores 0: give at least 1"),
        ("--gpus 8 --chip h2000", "--chip 'h2000' is unknown; choose from h200"),
        ("--gpus 8 --model_max_length 1.5T", "--model_max_length: 1.5T is no number of tokens"),
        ("--gpus 12", "--gpus 12 do not fill hosts of 8"),
        ("--gpus 100000", "100000 ranks on one sequence take a table that is too large to make"),
        ("--gpus 8 --gpu_memory 0", "--gpu_memory 0: give a number of GiB above 0"),
        ("--gpus 8 --gpu_memory inf", "--gpu_memory inf: give a number of GiB above 0"),
        ("--gpus 8 --host_memory nan", "--host_memory nan: give a number of GiB above 0"),
        ("--gpus 8 --output /dev/null/plan.jsonl", "--output /dev/null/plan.jsonl cannot be written ("),
        ("--gpus 8 --sequence_parallel_size 3", "--sequence_parallel_size 3 does not divide the 8 GPUs"),
        ("--gpus 8 --deepspeed ds.json", "the plan knows FSDP2 alone"),
        ("--gpus 8 --ofload both", "unknown flag --ofload; did you mean --offload?"),
        ("--gpus 7 --schedule ulysses", "heads"),
        ("--model_max_length 8K", "--gpus"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(
    flags: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"plan --model_name_or_path llama3-8b {flags}".split()) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_chips_are_found_by_the_name_that_torch_gives_them() -> None:
    for chip in CHIPS.values():
        assert chip_of_device(chip.device) == chip and chip.peak_flops > 1e14
    assert chip_of_device("NVIDIA A100-PCIE-40GB") is not None and chip_of_device("Radeon") is None
    assert usable(planned_run(LlamaConfig(), "", 1, gpu=10 * GIB)) == pytest.approx(10 * GIB)
    assert chip_named("h200").memory_bytes > 139 * GIB


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--bf16 --fp8 rowwise --chip a100-80gb", "needs a GPU of compute capability 8.9 or newer"),
        ("--bf16 --kernel fa4 --chip a100-80gb", "does not run on compute capability 8.0"),
        ("--bf16 --kernel fa3 --chip l40s", "does not run on compute capability 8.9"),
        ("--bf16 --kernel cpu", "needs a CPU"),
        ("--kernel fa4", "needs bfloat16 or float16, not float32"),
    ],
)
def test_what_no_such_chip_runs_is_not_planned(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *f"--model_name_or_path llama3-8b --gpus 8 {words}".split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --") and said in error and error.count("\n") == 1


def test_float32_is_planned_with_a_word_of_warning(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for words in ("", "--bf16", "--bf16 --kernel fa4 --chip h100-80gb"):
        assert main(["plan", *f"--model_name_or_path llama3-8b --gpus 8 --model_max_length 8K {words}".split()]) == 0
        said[words] = " ".join(capsys.readouterr().out.split())
    assert ["no fused kernel" in line for line in said.values()] == [True, False, False]
