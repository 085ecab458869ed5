"""Training by its plan: layers that keep, offload and compute again give one loss; what found no room is told why."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import run_in
from safetensors.torch import load_file
from small import CONFIG, LENGTH, losses, words, write_inputs
from transformers import LlamaConfig
from worlds import spawn

from lightseq.architecture.flops import total_parameters
from lightseq.config.command_line import parse
from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.host_memory import FREE_SHARE, MemoryBytes, free_host_memory, host_memory
from lightseq.distributed.world import World
from lightseq.memory import offload
from lightseq.memory.placement import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD
from lightseq.plan.advice import out_of_memory
from lightseq.plan.breakdown import GIB
from lightseq.plan.hardware import Hardware
from lightseq.plan.make_plan import make_plan
from lightseq.plan.memory import (
    host_bytes,
    saved_by_layer,
    state_bytes_on_host,
)
from lightseq.plan.plan import placement_of, plan_as_given
from lightseq.plan.rates import CHIPS, MARGIN, PROCESS_BYTES
from lightseq.plan.run import PlannedRun
from lightseq.plan.run import planned_run as run_on_this_machine
from lightseq.tools.verify.machines import machine
from lightseq.training.host_budget import host_memory_for_layers
from lightseq.training.metrics import read_records
from lightseq.training.setup_checks import warn_unreached

LAYERS = 8
ADAPTERS = "--lora_rank 2"  # without gradients of weights it is at the end of the layers that memory is short


@pytest.mark.slow
def test_every_placement_gives_the_losses_of_keeping_all_activations(tmp_path: Path) -> None:
    files = write_inputs(tmp_path)
    config = LlamaConfig.from_pretrained(files / "model")
    config.num_hidden_layers = LAYERS
    config.save_pretrained(files / "model")
    whole = "--max_steps 3 --save_strategy no"
    steps = f"{whole} {ADAPTERS}"
    hopeless = "--max_steps 1 --save_strategy no --offload auto --device_memory_budget 0.001"
    runs = {
        "kept": steps, "planned": f"{steps} {_tight(config)}", "hopeless": hopeless,
        "whole": whole, "state-away": f"{whole} {_no_room_for_state(config)}",
        "some-away": f"{whole} {_room_for_state(config, 5, 2)}",
    }  # fmt: skip
    spawn(2, _train, [words(files, name, flags) for name, flags in runs.items()])
    facts = {name: json.loads((files / name / "run.json").read_text()) for name in runs}
    warned = {name for name in runs if "too little GPU memory, by" in " ".join(facts[name]["notes"])}
    assert warned == {"hopeless"}
    found = {name for name in runs if "nothing faster fits" in " ".join(facts[name]["notes"])}
    assert found == {"state-away", "some-away"}
    placement = facts["planned"]["placement"]
    assert {OFFLOAD, KEEP} <= set(placement) and set(placement) & {RECOMPUTE, RECOMPUTE_OFFLOAD}, placement
    assert len(losses(files, "kept")) == 3
    assert losses(files, "planned") == pytest.approx(losses(files, "kept"), rel=1e-6)
    for name in ("state-away", "some-away"):
        assert losses(files, name) == pytest.approx(losses(files, "whole"), rel=1e-6)
    away = {name: facts[name]["parameters"].partition(", ")[2] for name in runs if "host" in facts[name]["parameters"]}
    assert away.keys() == found | {"hopeless"} and away["state-away"] == "in host memory"
    last = int(away["some-away"].removeprefix("in host memory except layers 0-"))
    said = f"state of layers {last + 1}-{LAYERS - 1}, embeddings and head are in host memory; nothing faster fits"
    assert said in " ".join(facts["some-away"]["notes"])
    for name in ("planned", "state-away"):
        record = json.loads((files / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert record["offloaded_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_keeping_gathered_weights_changes_no_loss_evaluation_or_weight(ranks: int, tmp_path: Path) -> None:
    files = write_inputs(tmp_path)
    evaluation = f"--eval_data_path {files}/data.pkl --eval_strategy steps --eval_steps 1"
    steps = f"--max_steps 4 --gradient_accumulation_steps 2 --save_steps 4 {evaluation}"
    runs = {"twice": "", "once": "--offload auto --device_memory_budget 64"}
    spawn(ranks, _train, [words(files, name, f"{steps} {flags}") for name, flags in runs.items()])
    plan = json.loads((files / "once" / "run.json").read_text())["memory_plan"]
    assert not plan["reshard_after_forward"] and set(plan["placement"]) == {KEEP}
    records = {name: read_records(files / name / "metrics.jsonl") for name in runs}
    for key in ("loss", "eval_loss", "grad_norm"):
        once, twice = ([record[key] for record in records[name] if key in record] for name in ("once", "twice"))
        assert len(once) == 4 and once == twice, key
    saved = [load_file(files / name / "checkpoint-4" / "model.safetensors") for name in runs]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def _train(rank: int, commands: list[str], device: str = "cpu") -> None:
    offload.MIN_BYTES = 0
    size = dist.get_world_size()
    world = World(rank, size, rank, size, torch.device(device, rank) if device == "cuda" else torch.device(device))
    for command in commands:
        ended = run_in(world, "llama3", command)
        assert ended.status == 0, ended.err


def _tight(model: LlamaConfig) -> str:
    """Budgets that hold what four layers keep less than all of it, and on the host what three layers keep."""
    run = planned_run(model, f"--model_max_length {LENGTH} {ADAPTERS}", 2)
    layer = saved_by_layer(run, run.layers[0], KEEP)
    device, host = (plan_as_given(run).parts.total - 3.9 * layer) / GIB, 3.05 * layer / GIB
    return f"--offload auto --device_memory_budget {device:.12f} --host_memory_budget {host:.12f}"


def _room_for_state(model: LlamaConfig, layers: int, ranks: int, flags: str = "") -> str:
    """A budget that holds the weights of so many layers with their state, and not of one more."""
    run = planned_run(model, f"--model_max_length {LENGTH} --offload auto {flags}", ranks)
    runs = [replace(run, state_offloaded=True, layers_with_state_on_gpu=n) for n in (layers, layers + 1)]
    less, more = (plan_as_given(x).parts.total for x in runs)
    assert less < more < plan_as_given(run).parts.total
    return f"--offload auto --device_memory_budget {(less + 1) / GIB:.12f}"  # not rounded below it


def _no_room_for_state(model: LlamaConfig) -> str:
    """A budget that holds what most layers keep, and nothing of the weights."""
    run = replace(planned_run(model, f"--model_max_length {LENGTH} --offload auto", 2), state_offloaded=True)
    budget = 0.97 * make_plan(run).parts.total
    assert budget < state_bytes_on_host(run)
    return f"--offload auto --device_memory_budget {budget / GIB:.12f}"


def test_as_many_layers_as_fit_keep_their_state_on_the_gpu() -> None:
    model = LlamaConfig.from_dict({**CONFIG.to_dict(), "num_hidden_layers": LAYERS})
    flags = f"--model_max_length {LENGTH} --bf16 {_room_for_state(model, 5, 1, '--bf16')}"
    plan = make_plan(planned_run(model, flags, 1))
    assert plan.fits and plan.run.state_offloaded and plan.run.layers_with_state_on_gpu == 5


def planned_run(
    model: LlamaConfig, flags: str, gpus: int, gpu: float = 1e15, host: float = 1e15, chosen: bool = False
) -> PlannedRun:
    """Returns a run on GPUs with so many usable bytes; with `chosen`, the planner decides flags that are not given."""
    given = parse(f"--model_name_or_path m --data_path d --output_dir o {flags}".split(), "")
    if not chosen:
        offload = given.offload if "--offload" in flags else "none"
        given = replace(given.with_default_memory_flags(), offload=offload)
    return PlannedRun(model, given, Hardware(CHIPS["h200"], gpus, 8, gpu / (1 - MARGIN), host))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adamw_8bit"])
def test_state_of_some_layers_on_the_host_gives_the_same_losses_on_a_gpu(optim: str, tmp_path: Path) -> None:
    """A run with a part of its state there, and one that goes on from its checkpoint with all of it on the GPU."""
    files = write_inputs(tmp_path)
    config = LlamaConfig.from_pretrained(files / "model")
    config.num_hidden_layers = LAYERS
    config.save_pretrained(files / "model")
    rate = 0.3 if optim == "sgd" else 3e-3
    steps = (
        f"--bf16 --max_steps 6 --save_steps 3 --per_device_train_batch_size 16 --learning_rate {rate} --optim {optim}"
    )
    goes_on = f"{steps} --resume_from_checkpoint {files}/some-away/checkpoint-3"
    runs = {"whole": steps, "some-away": f"{steps} {_room_for_state(config, 5, 1, steps)}", "goes-on": goes_on}
    spawn(1, _train, [words(files, name, flags) for name, flags in runs.items()], "cuda", device="cuda")
    facts = json.loads((files / "some-away" / "run.json").read_text())
    assert "in host memory except layers 0-" in facts["parameters"]
    expected = losses(files, "whole")
    assert expected[-1] < 0.93 * expected[0]
    assert losses(files, "some-away") == pytest.approx(expected, rel=2e-3)
    assert losses(files, "goes-on") == pytest.approx(expected[3:], rel=2e-3)


def test_a_run_is_planned_with_the_cores_of_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(24)))
    config = parse(["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"], "")
    hardware = run_on_this_machine(config, LlamaConfig(), World(0, 4, 0, 4, torch.device("cpu"))).hardware
    assert hardware.host_cores == 24 and hardware.cores_per_rank == 6


V2, CGROUP_V2 = "0::/slurm/step_0\n", ("memory.max", "memory.current", "anon 1\ninactive_file")
V1 = "5:cpu,cpuacct:/\n4:memory:/slurm/step_0\n0::/\n"
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 1\ntotal_inactive_file")


@pytest.mark.parametrize(
    ("membership", "names", "groups", "expected"),
    [
        (V2, CGROUP_V2, {"slurm/step_0": (32, 10, 4)}, (32, 26)),  # page cache makes room
        (V2, CGROUP_V2, {"slurm/step_0": ("max", 10, 4), "slurm": (40, 30, 0)}, (40, 10)),
        (V2, CGROUP_V2, {"slurm/step_0": (32, 31, 0), "slurm": (20, 2, 0), "": (70, 60, 0)}, (20, 1)),
        (V2, CGROUP_V2, {"": (16, 17, 0)}, (16, 0)),  # as in a container that does not see its group's name
        (V2, CGROUP_V2, {"slurm/step_0": (90, 1, 0)}, (80, 64)),
        (V2, CGROUP_V2, {}, (80, 64)),
        (V1, CGROUP_V1, {"memory/slurm/step_0": (32, 10, 4)}, (32, 26)),
        (V1, CGROUP_V1, {"memory/slurm/step_0": (2**33, 10, 4), "memory/slurm": (40, 30, 0)}, (40, 10)),
        ("4:memory:/docker/a7\n", CGROUP_V1, {"memory": (16, 6, 0)}, (16, 10)),
        (None, CGROUP_V2, {"slurm": (32, 10, 4)}, (80, 64)),
    ],
)
def test_host_memory_is_what_every_cgroup_leaves(
    membership: str | None,
    names: tuple[str, str, str],
    groups: dict[str, tuple[int | str, int, int]],
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB, total=80 * GIB))
    if membership is not None:
        (tmp_path / "self").write_text(membership)
    for group, (limit, taken, cache) in groups.items():
        directory = tmp_path / "fs" / group
        directory.mkdir(parents=True, exist_ok=True)
        limit = limit if limit == "max" else int(limit) << 30
        values = (limit, taken << 30, f"{names[2]} {cache << 30}\nslab 3")
        for name, value in zip((*names[:2], "memory.stat"), values, strict=True):
            (directory / name).write_text(f"{value}\n")
    found = host_memory(tmp_path / "self", tmp_path / "fs")
    assert (found.total / GIB, found.free / GIB) == expected


def test_all_readers_of_host_memory_respect_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("distributed.host_memory", "plan.hardware", "tools.verify.machines"):
        monkeypatch.setattr(f"lightseq.{module}.host_memory", lambda: MemoryBytes(80 * GIB, 64 * GIB))
    world = World(0, 4, 0, 4, torch.device("cpu"))
    config = parse(["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"], "")
    assert free_host_memory(world) == FREE_SHARE * 16 * GIB
    assert run_on_this_machine(config, LlamaConfig(), world).hardware.host_memory == 80 * GIB
    assert machine(world.device).items() >= {"memory_bytes": 80 * GIB, "free_bytes": 64 * GIB}.items()


def test_layers_offload_into_what_state_leaves_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 4, 0, 4, torch.device("cpu"))

    def bytes_of(flags: str) -> float:
        return host_memory_for_layers(planned_run(model, flags, 4), world)

    model = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=False)
    monkeypatch.setattr("lightseq.distributed.host_memory.host_memory", lambda: MemoryBytes(80 * GIB, 64 * GIB))
    run = planned_run(model, "--offload both", 4)
    states = host_bytes(run, placement_of(run)) - PROCESS_BYTES - saved_by_layer(run, run.layers[0], OFFLOAD)
    assert states > 16 * total_parameters(model) / 4  # weights, gradients and two snapshots
    assert bytes_of("--offload activations") == pytest.approx(FREE_SHARE * 16 * GIB)
    assert bytes_of("--offload both") == pytest.approx(FREE_SHARE * (16 * GIB - states))
    assert bytes_of("--offload both --host_memory_budget 20") == 20 * GIB


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize(
    ("stage", "parts", "bytes_of_a_weight"),
    [
        (2, (), 0),
        (2, ("offload_optimizer",), 18),  # masters, gradients, snapshots, and weights in bfloat16
        (3, ("offload_optimizer",), 20),  # gradients twice instead
        (3, ("offload_param",), 2),
        (3, ("offload_optimizer", "offload_param"), 22),
    ],
)
def test_layers_offload_into_what_deepspeed_leaves_of_the_host(
    stage: int, parts: tuple[str, ...], bytes_of_a_weight: int, pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightseq.distributed.host_memory.host_memory", lambda: MemoryBytes(80 * GIB, 64 * GIB))
    model = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=False)
    offloads = {part: {"device": "cpu", "pin_memory": pins} for part in parts}
    zero = {"stage": stage, "sub_group_size": 1e7, **offloads}
    settings = DeepSpeedSettings("ds.json", stage, {"zero_optimization": zero})

    def bytes_of(flags: str) -> float:
        run = planned_run(model, f"--bf16 --deepspeed ds.json --offload activations {flags}", 4)
        return host_memory_for_layers(run, World(0, 4, 0, 4, torch.device("cpu")), settings)

    taken = 16 * GIB - bytes_of("") / FREE_SHARE
    least = bytes_of_a_weight * total_parameters(model) / 4
    # Beside these a buffer for the largest gradient. What torch pins takes up to twice as much, and weights are there
    # twice.
    most = (1 + pins) * (2 if parts == ("offload_param",) else 1.1)
    assert least <= taken <= most * least + 0.5 * GIB * bool(parts)
    assert bytes_of("--host_memory_budget 20") == 20 * GIB


@pytest.mark.parametrize(
    ("flags", "total", "said"),
    [
        ("--eval_strategy steps --eval_steps 9 --eval_data_path d", 4, ["evaluation runs every 9 steps"]),
        ("--eval_strategy steps --eval_steps 4 --eval_data_path d", 4, []),
        ("--eval_strategy epoch --eval_data_path d", 4, ["evaluation runs at the end of an epoch"]),
        ("--eval_strategy epoch --eval_data_path d", 5, []),
        ("--warmup_steps 5", 4, ["--warmup_steps 5 is past the last step, 4"]),
        ("--warmup_steps 4", 4, []),
        ("--eval_strategy epoch --eval_data_path d --warmup_steps 5", 0, []),
    ],
)
def test_unreached_evaluations_and_warmup_are_noted(flags: str, total: int, said: list[str]) -> None:
    config = parse(f"--model_name_or_path m --data_path d --output_dir o --learning_rate 1 {flags}".split(), "")
    stream: Any = SimpleNamespace(first_step=0, epochs_after=lambda steps: steps / 5)
    notes = warn_unreached(config, stream, total)
    assert len(notes) == len(said) and all(want in note for want, note in zip(said, notes, strict=True)), notes


@pytest.mark.slow
def test_an_out_of_memory_error_names_settings_that_fit() -> None:
    model = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    words = "--model_name_or_path m --data_path d --output_dir o --bf16 --model_max_length 6000000 --remat none"
    asked = parse(words.split(), "")
    *parts, remedy = out_of_memory(_h200(model, asked))
    assert parts[0].startswith("planned peak memory") and any("stored activations" in line for line in parts)
    assert remedy.startswith("to fit: leave out --remat (") and " GPUs (" in remedy
    fitting = replace(asked, model_max_length=2**17, offload="activations")
    assert make_plan(_h200(model, fitting)).fits
    *_, remedy = out_of_memory(_h200(model, fitting))  # though the plan sees enough memory
    assert remedy.startswith("to fit: leave out --remat --offload (") and " GPUs (" in remedy
    chosen = replace(fitting, offload="auto")
    *_, remedy = out_of_memory(_h200(model, chosen))
    budget = 0.9 * make_plan(_h200(model, chosen)).parts.total / GIB
    assert remedy.startswith(f"to fit: --device_memory_budget {budget:.1f}"), "the planner then plans with less"
    deepspeed = replace(asked, deepspeed="d.json")
    assert "offload_optimizer and offload_param in d.json" in out_of_memory(_h200(model, deepspeed))[0]


def _h200(model: LlamaConfig, config: TrainConfig) -> PlannedRun:
    return PlannedRun(model, config, Hardware(CHIPS["h200"], 8, 8, CHIPS["h200"].memory_bytes, 2000 * GIB))
