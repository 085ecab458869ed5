"""DeepSpeed's ZeRO in the place of FSDP2: the same losses and weights, resumed and offloaded too."""

import json
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from cases import slow_except
from programs import Ended, program
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small import CONFIG, losses, words, write_inputs
from transformers import AutoModelForCausalLM
from worlds import spawn

from lightseq.checkpoint.checkpoints import read_trainer_state
from lightseq.config.train_config import TrainConfig
from lightseq.distributed import host_memory
from lightseq.distributed.host_memory import MemoryBytes
from lightseq.memory import offload
from lightseq.models import weight_files, weights
from lightseq.models.random_weights import initialize
from lightseq.models.weights import materialize
from lightseq.parts.chosen_experts import build_to_train
from lightseq.training import build
from lightseq.training.deepspeed_engine import DeepSpeedEngine
from lightseq.training.metrics import read_records

CPU = {"device": "cpu", "pin_memory": False}  # where there is nothing to pin for
HOST_BYTES = 2**26
HOST_BUFFERS = (  # of DeepSpeed's optimizers
    *("single_partition_of_fp32_groups", "param_buffer_of_bit16_for_cpu_offload_groups"),
    *("temp_grad_buffer_for_cpu_offload", "accumulated_grads_in_cpu"),
    *("fp32_partitioned_groups_flat", "grad_partitions_flat_buffer", "param_groups_fp16_flat_cpu_memory"),
)
FILES: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    # everything open that Hugging Face's own examples leave open; what is above the last threshold is split
    "zero3": {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {
            "stage": 3,
            **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
            "stage3_param_persistence_threshold": "auto",
        },
    },
    "offload2": {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
    "offload3": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": CPU,
            "offload_param": CPU,
            "stage3_param_persistence_threshold": 0,
        }
    },
}
SAVED = "zero1", "zero2", "zero3"  # and resumed
QUICK = "fsdp2", "zero3", "offload3", "resumed-zero3"
STEPS = 3
# Two data-parallel ranks, three passes a step: a third of the sequences are short, and the norm is clipped.
COMMON = f"--max_steps {STEPS} --save_steps 2 --sequence_parallel_size 1 --gradient_accumulation_steps 3"
CLIPPED = "--max_grad_norm 0.5 --optim adamw_torch"
ADAM = "--adam_beta1 0.5 --adam_beta2 0.6 --adam_epsilon 1e-3 --weight_decay 0.3"  # of resumed runs


class Remembering(DeepSpeedEngine):
    """Leaves the master weights that a run starts from beside its output."""

    def __init__(self, config: TrainConfig, *others: Any) -> None:
        super().__init__(config, *others)
        masters = dict(self.full_parameters())
        if torch.distributed.get_rank() == 0:
            save_file({name: tensor.clone() for name, tensor in masters.items()}, f"{config.output_dir}.masters")


def write_settings(folder: Path, *names: str) -> Path:
    """Writes inputs and DeepSpeed's settings."""
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(FILES[name]))
    return write_inputs(folder)


def run(rank: int, runs: list[str]) -> list[Ended]:
    build.DeepSpeedEngine = Remembering  # type: ignore[misc]
    offload.MIN_BYTES = 0
    return [program(rank, "llama3", line) for line in runs]


def with_a_nonfinite_second_step(rank: int, line: str) -> Ended:
    backward = DeepSpeedEngine.backward

    def planted(self: DeepSpeedEngine, share: torch.Tensor, last: bool) -> None:
        nonfinite = self._engine.global_steps == 1 and rank == 1
        backward(self, share * (float("nan") if nonfinite else 1.0), last)

    DeepSpeedEngine.backward = planted  # type: ignore[method-assign]
    return program(rank, "llama3", line)


def with_a_full_disk(rank: int, line: str) -> Ended:
    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    weight_files.save_file, weights.SHARD_BYTES = full, 1  # at the first of many tensors
    return program(rank, "llama3", line)


def holding_on_the_host(rank: int, files: Path, runs: list[str]) -> list[tuple[float, int]]:
    """By run, what layers leave of the host's memory beyond FREE_SHARE, and what DeepSpeed has there after a step."""
    engines: list[DeepSpeedEngine] = []

    class Kept(DeepSpeedEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

    build.DeepSpeedEngine = Kept  # type: ignore[misc]
    host_memory.host_memory = lambda: MemoryBytes(HOST_BYTES, HOST_BYTES)  # type: ignore[assignment]
    found = []
    for name in runs:
        line = words(files, name, f"{COMMON} --max_steps 1 --save_strategy no --deepspeed {files}/{name}.json")
        ended = program(rank, "llama3", f"{line} --offload activations")
        assert ended.status == 0, ended.err
        limit = json.loads((files / name / "run.json").read_text())["host_memory_bytes"]
        optimizer = engines[-1].optimizer
        held = [getattr(optimizer, buffers, None) for buffers in HOST_BUFFERS]
        found.append(
            (HOST_BYTES / 2 - limit / host_memory.FREE_SHARE, storage([*held, dict(optimizer.optimizer.state)]))
        )
    return found


def storage(held: Any) -> int:
    """Bytes of all tensors in it, each memory once, with their gradients."""
    found: dict[int, int] = {}

    def look(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            look(x.grad)
        elif isinstance(x, dict | list | tuple):
            for each in x.values() if isinstance(x, dict) else x:
                look(each)

    look(held)
    return sum(found.values())


def trained(world: int, runs: list[str]) -> list[Ended]:
    """Programs one after the other on one world; what rank 0 said."""
    ends = spawn(world, run, runs)
    for i, line in enumerate(runs):
        assert [rank_ends[i].status for rank_ends in ends] == [0] * world, f"{line}: {[e[i].err for e in ends]}"
    assert not any(end.out for rank_ends in ends[1:] for end in rank_ends), "only rank 0 speaks"
    return ends[0]


def command_lines(folder: Path) -> dict[str, str]:
    """Returns flags by output: of FSDP2, of every stage, resumed, offloaded, in bfloat16."""
    evaluated = f"--eval_data_path {folder}/data.pkl --eval_strategy steps --eval_steps 2"
    lines = {"fsdp2": f"{CLIPPED} {evaluated}", "bf16-fsdp2": "--bf16"}
    for name in FILES:
        engine = f"--deepspeed {folder}/{name}.json"
        lines[name] = f"{CLIPPED} {evaluated} {engine}"
        if name in SAVED:
            lines[f"resumed-{name}"] = f"{CLIPPED} {engine} --resume_from_checkpoint {folder}/{name}/checkpoint-2"
            lines[f"bf16-{name}"] = f"--bf16 {engine}"
    for name, engine in {"fsdp2": "", **{name: f"--deepspeed {folder}/{name}.json" for name in SAVED}}.items():
        lines[f"betas-{name}"] = f"{CLIPPED} {ADAM} {engine} --resume_from_checkpoint {folder}/{name}/checkpoint-2"
    start = f"--model_name_or_path {folder}/fsdp2/checkpoint-{STEPS} --random_init False --max_steps 1"
    return lines | {"tuned-fsdp2": start, "tuned-zero3": f"{start} --deepspeed {folder}/zero3.json"}


def train_missing(folder: Path, outputs: Iterable[str]) -> None:
    """Trains those of the outputs that do not exist, on two ranks, in the order of `command_lines`."""
    lines = {output: more for output, more in command_lines(folder).items() if output in outputs}
    missing = {output: more for output, more in lines.items() if not (folder / output).exists()}
    if missing:
        ends = trained(2, [words(folder, output, f"{COMMON} {more}") for output, more in missing.items()])
        for output, end in zip(missing, ends, strict=True):
            (folder / output / "said.txt").write_text(end.out)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick outputs; slow tests add theirs."""
    folder = write_settings(tmp_path_factory.mktemp("deepspeed"), *FILES)
    train_missing(folder, QUICK)
    return folder


def weights_of(files: Path, output: str, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(files / output / f"checkpoint-{step}" / "model.safetensors")  # type: ignore[no-any-return]


def assert_equal_runs(files: Path, got: str, want: str, step: int = STEPS) -> None:
    """Losses, evaluations, norms before clipping, rates and all weights, to 1e-5."""
    mine, theirs = (read_records(files / output / "metrics.jsonl") for output in (got, want))
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        for key in {"loss", "eval_loss", "grad_norm", "learning_rate", "valid_tokens"} & b.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-5), (got, key, b["step"])
    mine, theirs = (weights_of(files, output, step) for output in (got, want))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() < 1e-5 * tensor.norm(), (got, name)


@pytest.mark.parametrize("name", slow_except(["zero3", "offload3"], FILES))
def test_training_under_zero_equals_fsdp2(files: Path, name: str) -> None:
    train_missing(files, [name])
    assert_equal_runs(files, name, "fsdp2")
    norms = [record["grad_norm"] for record in read_records(files / name / "metrics.jsonl") if "loss" in record]
    assert all(norm > 0.5 for norm in norms), "nothing was clipped"
    stage = FILES[name]["zero_optimization"]["stage"]
    moved = [key for key in ("offload_optimizer", "offload_param") if key in FILES[name]["zero_optimization"]]
    said = ", ".join([f"DeepSpeed ZeRO-{stage} over all ranks", *(f"{key} cpu" for key in moved)])
    assert f"{said}\n" in (files / name / "said.txt").read_text()
    facts = json.loads((files / name / "run.json").read_text())
    assert facts["parameters"] == said and facts["deepspeed"]["gradient_clipping"] == 0.5


@pytest.mark.parametrize("name", slow_except(["zero3"], SAVED))
def test_a_resumed_run_equals_one_that_never_stopped(files: Path, name: str) -> None:
    train_missing(files, [name, f"resumed-{name}"])
    assert losses(files, f"resumed-{name}") == losses(files, name)[2:]  # to the bit
    whole, resumed = weights_of(files, name), weights_of(files, f"resumed-{name}")
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())


@pytest.mark.parametrize("name", slow_except([], SAVED))
def test_a_resumed_run_has_the_optimizer_settings_of_its_flags(files: Path, name: str) -> None:
    train_missing(files, [name, f"betas-{name}", "betas-fsdp2"])
    assert_equal_runs(files, f"betas-{name}", "betas-fsdp2")
    changed, before = weights_of(files, f"betas-{name}"), weights_of(files, name)
    assert all(
        (changed[key] - tensor).norm() > 1e-4 * tensor.norm() for key, tensor in before.items() if tensor.ndim > 1
    )
    assert "resumed with --adam_beta1 0.5 (was 0.9), --adam_beta2" in (files / f"betas-{name}" / "said.txt").read_text()


def test_a_checkpoint_with_its_states_on_nvme_is_refused(files: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(files / "zero3" / "checkpoint-2", tmp_path / "checkpoint-2")
    (saved / "state" / "deepspeed" / "offloaded_tensors").mkdir()
    line = words(files, "nvme", f"{COMMON} --deepspeed {files}/zero3.json --resume_from_checkpoint {saved}")
    ends = spawn(2, run, [line])
    assert [end.status for (end,) in ends] == [2, 2]
    why = "was saved with its optimizer state on nvme, which is not supported; start from its weights with"
    assert f"error: --resume_from_checkpoint {saved} {why} --model_name_or_path" in ends[0][0].err


def assert_fresh(masters: dict[str, torch.Tensor]) -> None:
    """Equal to the seed's weights to the bit, in any compute dtype."""
    model = build_to_train(CONFIG)
    materialize(model, torch.device("cpu"))
    initialize(model, seed=42)
    assert masters.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name], parameter.detach()), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_zero_skips_is_counted_and_noted(files: Path, stage: int) -> None:
    line = words(files, f"nonfinite{stage}", f"{COMMON} --deepspeed {files}/zero{stage}.json")
    ends = spawn(2, with_a_nonfinite_second_step, line)
    assert [end.status for end in ends] == [0, 0], ends[0].err
    records = [r for r in read_records(files / f"nonfinite{stage}" / "metrics.jsonl") if "loss" in r]
    assert [r["skipped_steps"] for r in records] == [0, 1, 0] and records[1]["grad_norm"] is None
    assert "step 2: a gradient is not finite; the step was skipped" in ends[0].out


@pytest.mark.parametrize("name", slow_except([], SAVED))
def test_bfloat16_under_zero_follows_fsdp2(files: Path, name: str) -> None:
    """Masters start from float32 and gradients add up in float32; what is left is the order of bfloat16 sums."""
    train_missing(files, ["bf16-fsdp2", f"bf16-{name}"])
    assert_fresh(load_file(files / f"bf16-{name}.masters"))
    expected, got = losses(files, "bf16-fsdp2"), losses(files, f"bf16-{name}")
    assert got == pytest.approx(expected, rel=2e-3)
    assert (files / f"bf16-{name}" / "run.json").read_text().count('"fp32"') == 2


@pytest.mark.slow
def test_zero_starts_from_the_weights_of_a_checkpoint(files: Path) -> None:
    train_missing(files, ["tuned-fsdp2", "tuned-zero3"])
    assert_equal_runs(files, "tuned-zero3", "tuned-fsdp2", step=1)


def test_a_checkpoint_is_a_model_of_hugging_face(files: Path) -> None:
    opened = AutoModelForCausalLM.from_pretrained(files / "zero3" / f"checkpoint-{STEPS}")
    assert opened.dtype == torch.float32
    state = read_trainer_state(files / "zero3" / "checkpoint-2")
    assert state["engine"] == "DeepSpeed ZeRO-3" and state["ranks"] == 2
    assert sorted(path.name for path in (files / "zero3").glob("checkpoint*")) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.slow
def test_offload_leaves_room_for_deepspeed_in_host_memory(tmp_path: Path) -> None:
    runs = ["offload2", "offload3"]
    write_settings(tmp_path, *runs)
    for ends in spawn(2, holding_on_the_host, tmp_path, runs):
        for left, held in ends:
            assert held <= left * 1.001 and left <= 1.25 * held, (left, held)


@pytest.mark.slow
def test_three_ranks_on_one_sequence_equal_fsdp2(files: Path) -> None:
    """Parameters that three ranks cannot split evenly, tied embeddings, every remat policy, layers that offload."""
    tied = {**json.loads((files / "model" / "config.json").read_text()), "tie_word_embeddings": True}
    (files / "tied").mkdir()
    (files / "tied" / "config.json").write_text(json.dumps(tied | {"num_hidden_layers": 3}))
    # At 1e-3 AdamW, which makes whole steps of what rounding leaves of a gradient near zero, drifted apart by 1.2e-5.
    common = f"--model_name_or_path {files}/tied --max_steps 2 --learning_rate 3e-4"
    kept = {
        "three-fsdp2": "--remat none",
        "three-zero3": f"--remat full --deepspeed {files}/zero3.json",
        "three-away3": f"--remat attention+linears --offload activations --deepspeed {files}/offload3.json",
        "three-away2": f"--remat none --offload activations --deepspeed {files}/zero2.json",
    }
    trained(3, [words(files, output, f"{common} {flags}") for output, flags in kept.items()])
    for output in kept:
        assert_equal_runs(files, output, "three-fsdp2", step=2)
        away = [r["offloaded_bytes"] for r in read_records(files / output / "metrics.jsonl") if "offloaded_bytes" in r]
        assert any(away) == ("away" in output), output


# The files of rank 1 end at a quota.
DISK = """
import os, resource, sys
import llama3
from lightseq.training import command
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
command.main(llama3.FAMILY, sys.argv[1:])
"""


def test_a_failed_save_of_one_rank_under_zero_ends_all_with_its_cause(tmp_path: Path) -> None:
    write_settings(tmp_path, "zero3")
    (tmp_path / "disk.py").write_text(DISK)
    flags = f"--max_steps 1 --sequence_parallel_size 1 --step_timeout 30 --deepspeed {tmp_path}/zero3.json"
    ends = forked.World(2, f"{tmp_path}/disk.py {words(tmp_path, 'run', flags)}", tmp_path).end(60)
    assert [end.returncode for end in ends] == [1, 1], ends
    (line,) = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {tmp_path}/run/checkpoint-1 could not be saved: ")
    assert f"File too large (rank 1 on {socket.gethostname()}); free some space, then resume" in line
    assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.slow
def test_a_full_disk_keeps_no_rank_waiting_for_weights_to_gather(tmp_path: Path) -> None:
    write_settings(tmp_path, "zero3")
    line = words(tmp_path, "full", f"{COMMON} --deepspeed {tmp_path}/zero3.json --step_timeout 20")
    ends = spawn(2, with_a_full_disk, line)
    assert [end.status for end in ends] == [1, 1]
    assert "checkpoint-2 could not be saved: I/O error: No space left on device" in ends[0].err
