"""Refusals of a training run: one line over all ranks with the value and the remedy, status 2, nothing written."""

import json
import pickle
import shutil
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple

import forked
import psutil
import pytest
import small
import torch
import torch.distributed as dist
from hostile_pickles import Hostile
from huggingface_hub import constants
from programs import Ended, program, programs
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

from lightseq.config.command_line import parse
from lightseq.training import setup_checks

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 64
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
# A run that nothing is wrong with; what a case adds wins. {files} is the folder that `files` makes.
GOOD = (
    "--model_name_or_path {files}/model --data_path {files}/data.pkl --output_dir {files}/new "
    "--model_max_length 32 --max_steps 1 --save_strategy no"
)
RANDOM = "--random_init --model_name_or_path"

# Name of the case, what it adds to GOOD, what its line has to say: the value, and the remedy.
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    # the data
    "no data": ("--data_path {files}/gone", ("{files}/gone does not exist", "lightseq data")),
    "data of no known kind": ("--data_path {files}/file.tsv", ("file.tsv is not a token directory", "lightseq data")),
    "a directory without tokens": ("--data_path {files}/model", ("(no meta.json)", "lightseq data")),
    "a pickle that runs code": ("--data_path {files}/hostile.pkl", ("posix.system", "plain lists")),
    "a pickle cut short": ("--data_path {files}/cut.pkl", ("cut.pkl cannot be read", "write it again")),
    "ids outside the vocabulary": ("--data_path {files}/outside.pkl", ("token id 64", "vocabulary of 64", "tokenize")),
    "no evaluation data": (
        "--eval_data_path {files}/gone --eval_strategy steps",
        ("{files}/gone does not exist", "lightseq data"),
    ),
    "a limit without evaluation data": (
        "--max_eval_samples 3",
        ("--max_eval_samples 3 limits evaluation data, but there is none", "add --eval_data_path"),
    ),
    "evaluation data without a target": (
        "--eval_data_path {files}/targetless.pkl --eval_strategy steps",
        ("targetless.pkl has no target", "-100"),
    ),
    # the model
    "no model": ("--model_name_or_path /no/such/model", ("/no/such/model is not a directory", "preset", "tiny-llama3")),
    "unknown preset": (f"{RANDOM} llama3-9b", ("llama3-9b is no", "did you mean llama3-8b or ")),
    "a preset has no weights": ("--model_name_or_path tiny-llama3", ("tiny-llama3 is a preset", "add --random_init")),
    "the other family's preset": (f"{RANDOM} llama2-7b", ("a preset of llama2", "use llama2/train.py")),
    "directory without a model": (
        "--model_name_or_path {files}/empty",
        ("{files}/empty is a directory without", "give"),
    ),
    "directory without weights": ("--model_name_or_path {files}/bare", ("{files}/bare has no", "--random_init")),
    "attention dropout": (f"{RANDOM} {{files}}/dropout", ("attention_dropout 0.1", "set it to 0")),
    "no attention heads": (f"{RANDOM} {{files}}/headless", ("its config cannot be read", "give another model")),
    "sliding window": (
        f"{RANDOM} {{files}}/window --schedule zigzag",
        ("schedule zigzag does not support sliding windows", "use prefix"),
    ),
    "another architecture": (f"{RANDOM} {{files}}/gpt2", ("GPT2LMHeadModel has weights outside linear layers",)),
    "another layer": (
        "--fsdp_transformer_layer_cls_to_wrap GPT2Block",
        ("are of the class LlamaDecoderLayer; give that, or leave it out",),
    ),
    "heads that cannot share": (f"{RANDOM} {{files}}/heads", ("4 attention heads", "3 key/value heads", "use another")),
    "config that is no JSON": (f"{RANDOM} {{files}}/broken", ("{files}/broken", "cannot be read", "another model")),
    "missing tensor": (
        "--model_name_or_path {files}/missing",
        ("{files}/missing", "missing tensors ['lm_head.weight']"),
    ),
    "extra tensor": ("--model_name_or_path {files}/extra", ("{files}/extra", "unknown tensors ['surplus']")),
    "another shape": (
        "--model_name_or_path {files}/shape",
        ("lm_head.weight has shape [65, 32]", "the model's [64, 32]"),
    ),
    "weights cut short": ("--model_name_or_path {files}/short", ("{files}/short", "cannot be read", "again")),
    "weights without an index": ("--model_name_or_path {files}/index", ("{files}/index", "cannot be read", "again")),
    "a hub without a network": (
        "--model_name_or_path unsloth/Llama-3.2-1B",
        ("unsloth/Llama-3.2-1B", "cannot be fetched", "network", "add --random_init"),
    ),
    "a hub id that is no preset's": (
        f"{RANDOM} someone/some-llama",
        ("someone/some-llama", "cannot be fetched", "network", "a preset, such as"),
    ),
    # numbers and names
    "no length": ("--model_max_length 0", ("--model_max_length 0", "at least 1")),
    "ranks that do not divide": (
        "--sequence_parallel_size 3",
        ("--sequence_parallel_size 3 does not divide 2 ranks", "use 1 or 2"),
    ),
    "kernel not here": ("--kernel fa4", ("kernel fa4 cannot run here", "auto")),
    "transport not here": ("--transport nccl", ("transport nccl does not run on cpu", "gloo")),
    "unknown flag": ("--learning-rat 1", ("unknown flag --learning_rat", "did you mean --learning_rate?")),
    "profiled after the end": ("--profile_steps 2:3", ("--profile_steps 2:3", "last step, 1", "earlier")),
    "allocations of no GPU": ("--profile_steps 1:1 --profile_memory", ("--profile_memory", "no", "leave it out")),
    "FP8 without its cores": (
        "--bf16 --fp8 tensorwise",
        ("--fp8 tensorwise", "CPU has no FP8", "leave it out", "--fp8_emulate"),
    ),
    # how ranks share a sequence
    "ranks that ulysses_size does not divide": ("--ulysses_size 3", ("ulysses_size 3 does not divide 2", "use 1 or 2")),
    "ranks that do not divide, in a plan": ("--ulysses_size 3 --offload auto", ("ulysses_size 3 does not divide 2",)),
    "two levels in too few ranks": ("--schedule usp", ("2 ranks cannot form them; use prefix",)),
    "heads that cannot be split": (
        f"--schedule ulysses {RANDOM} {{files}}/odd",
        ("3 query and 3 key/value heads do not allow", "prefix takes any number"),
    ),
    "a transport of GPUs": ("--transport symmetric", ("symmetric does not run on cpu", "use gloo")),
    # DeepSpeed
    "no such DeepSpeed file": ("--deepspeed {files}/gone.json", ("gone.json cannot be read", "give a DeepSpeed JSON")),
    "a DeepSpeed file against a flag": (
        "--deepspeed {files}/zero2.json --max_grad_norm 0.5",
        ("zero2.json: gradient_clipping is 2.0, but --max_grad_norm is 0.5", 'write "auto"'),
    ),
    "a precision that DeepSpeed has not here": (
        "--deepspeed {files}/zero2.json --max_grad_norm 2 --fp16",
        ("--fp16 under --deepspeed does not run on cpu", "give --bf16"),
    ),
    "a key that DeepSpeed itself refuses": (
        "--deepspeed {files}/unknown.json",
        ("unknown.json: DeepSpeedZeroConfig.no_such_key: Extra inputs are not permitted", "correct it, or remove it"),
    ),
    "FSDP2's checkpoint under DeepSpeed": (
        "--deepspeed {files}/zero2.json --max_grad_norm 2 --resume_from_checkpoint {files}/run/checkpoint-2",
        ("checkpoint-2 was saved by FSDP2", "DeepSpeed ZeRO-2 on 2", "--model_name_or_path {files}/run/checkpoint-2"),
    ),
    # the output, and what was written before
    "output that holds a run": (
        "--output_dir {files}/run",
        ("{files}/run already holds a run", "--resume_from_checkpoint True", "--overwrite_output_dir"),
    ),
    "output that is a file": (
        "--output_dir {files}/data.pkl",
        ("data.pkl cannot be written (Not a directory)", "give another"),
    ),
    "output below a file": (
        "--output_dir {files}/data.pkl/out",
        ("out cannot be created in {files}/data.pkl (Not a directory)", "give another"),
    ),
    "output whose name is too long": ("--output_dir {files}/" + 300 * "x", ("File name too long",)),
    "output that cannot be made": (
        "--save_strategy steps --output_dir /proc/no/such",
        ("/proc/no/such cannot be created in /proc (No such file or directory)", "give another"),
    ),
    "nothing to resume": (
        "--output_dir {files}/empty --resume_from_checkpoint True",
        ("{files}/empty has no checkpoint", "leave it out, or give auto"),
    ),
    "no checkpoint there": (
        "--resume_from_checkpoint {files}/model",
        ("{files}/model is not a checkpoint directory", "give one"),
    ),
    "an older checkpoint": (
        "--output_dir {files}/run --resume_from_checkpoint {files}/run/checkpoint-1",
        ("has the later checkpoint-2", "--resume_from_checkpoint True", "--output_dir"),
    ),
    "resumed over another run": (
        "--output_dir {files}/other --resume_from_checkpoint {files}/run/checkpoint-2",
        ("{files}/other already holds a run", "--overwrite_output_dir"),
    ),
    "another model's checkpoint": (
        f"{RANDOM} tiny-llama3 --max_steps 3 --resume_from_checkpoint {{files}}/run/checkpoint-2",
        ("checkpoint-2 was trained with rope_parameters", "the model that it was trained with"),
    ),
    "a checkpoint of a larger model": (
        f"{RANDOM} {{files}}/wider --max_steps 3 --resume_from_checkpoint {{files}}/run/checkpoint-2",
        ("checkpoint-2 has model.model.", "resume with the model"),
    ),
    "a checkpoint of later steps": (
        "--resume_from_checkpoint {files}/run/checkpoint-2",
        ("checkpoint-2 was saved after step 2, but this run ends at step 1", "a larger --max_steps"),
    ),
    "a checkpoint without its state": (
        "--resume_from_checkpoint {files}/stateless/checkpoint-1",
        ("checkpoint-1 is damaged: state/__0_0.distcp is missing", "give another"),
    ),
    "an optimizer that has no place for what was saved": (
        "--optim sgd --max_steps 3 --resume_from_checkpoint {files}/run/checkpoint-2",
        ("has the state of --optim adamw_torch_fused, not of sgd", "give --optim adamw_torch_fused"),
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the cases name, and one run with two checkpoints."""
    folder = tmp_path_factory.mktemp("refusals")
    data = {"input_ids": [list(range(20)), list(range(30))]}
    for name, content in (
        ("data", data),
        ("outside", {"input_ids": [[1, VOCABULARY]]}),
        ("hostile", Hostile(folder / "ran")),
    ):
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(content))
    targetless = {"input_ids": [[1, 2, 3]], "labels": [[-100, -100, -100]]}
    (folder / "targetless.pkl").write_bytes(pickle.dumps(targetless))
    (folder / "cut.pkl").write_bytes(pickle.dumps(data)[:-9])
    (folder / "file.tsv").write_text("1,2\n")
    (folder / "empty").mkdir()
    for name, zero in (("zero2", {"stage": 2}), ("unknown", {"stage": 3, "no_such_key": 1})):
        clipping = {"gradient_clipping": 2.0 if name == "zero2" else "auto"}
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": zero, **clipping}))
    _write_models(folder)
    flags = "--max_steps 2 --save_strategy steps --save_steps 1"
    outputs = ("{files}/run", "{files}/other --optim sgd")
    runs = [f"{GOOD} {flags} --output_dir {output}".format(files=folder) for output in outputs]
    assert all(end.status == 0 for ends in spawn(2, programs, "llama3", runs) for end in ends)
    shutil.copytree(folder / "run" / "checkpoint-1", folder / "stateless" / "checkpoint-1")
    shutil.rmtree(folder / "stateless" / "checkpoint-1" / "state")
    return folder


def _write_models(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "model")
    whole = load_file(folder / "model" / "model.safetensors")
    tensors = {
        "missing": {name: x for name, x in whole.items() if name != "lm_head.weight"},
        "extra": whole | {"surplus": torch.zeros(1)},
        "shape": whole | {"lm_head.weight": torch.zeros(VOCABULARY + 1, 32)},
    }
    changes = {
        "dropout": {"attention_dropout": 0.1},
        "window": {"model_type": "mistral", "sliding_window": 16},
        "odd": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
        "wider": {"intermediate_size": 128},
        "headless": {"num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": None},
        "heads": {"num_key_value_heads": 3},
        "gpt2": {"model_type": "gpt2", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        **{"bare": {}, "short": {}, "index": {}},
        **{name: {} for name in tensors},
    }
    for name, change in changes.items():
        (folder / name).mkdir()
        config = json.loads((folder / "model" / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | change))
    for name, content in tensors.items():
        save_file(content, folder / name / "model.safetensors", metadata={"format": "pt"})
    (folder / "short" / "model.safetensors").write_bytes((folder / "model" / "model.safetensors").read_bytes()[:-9])
    (folder / "index" / "model.safetensors.index.json").write_text("{}")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")


class Refusal(NamedTuple):
    """The end of a program on one rank, and its changes on disk."""

    end: Ended
    changed: set[tuple[str, int]]


def refused_programs(rank: int, files: str, runs: list[str]) -> list[Refusal]:
    constants.HF_HUB_OFFLINE = True  # the hub's client reads the environment once, when it is imported
    found = []
    for words in runs:
        if "--deepspeed" in words and "--fp16" in words:
            _compute_without_float16()
        before = _tree(Path(files))
        dist.barrier()
        try:
            end = program(rank, "llama3", words)
        except Exception:  # as wrong as can be, but no other case's fault
            end = Ended(1, "", traceback.format_exc())
        found.append(Refusal(end, _tree(Path(files)) ^ before))
        dist.barrier()
        shutil.rmtree(f"{files}/new", ignore_errors=True)  # what one case should not have written is in no other's way
    return found


def _compute_without_float16() -> None:
    """Makes DeepSpeed refuse float16, as it does on most CPUs."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda accelerator: False


def _tree(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def refusals(files: Path) -> dict[str, list[Refusal]]:
    """By case, one for each of two ranks: one world runs them all, which shows too that none leaves it waiting."""
    runs = [f"{GOOD} {added}".format(files=files) for added, _ in REFUSED.values()]
    by_rank = spawn(2, refused_programs, str(files), runs)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(REFUSED)}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    case: str, files: Path, refusals: dict[str, list[Refusal]]
) -> None:
    found = refusals[case]
    assert [refusal.end.status for refusal in found] == [2, 2], found
    said = "".join(refusal.end.err for refusal in found)
    assert said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n"), said
    for part in REFUSED[case][1]:
        assert part.format(files=files) in said
    assert not any(refusal.end.out for refusal in found)
    assert not any(refusal.changed for refusal in found)


def test_the_ways_out_of_a_directory_that_holds_a_run_are_open(files: Path) -> None:
    flags = f"--output_dir {files}/other --optim sgd --max_steps 3 --save_strategy steps --save_steps 1"
    output = f"{GOOD.format(files=files)} {flags}"
    ends = spawn(2, programs, "llama3", [f"{output} --resume_from_checkpoint True", f"{output} --overwrite_output_dir"])
    assert [end.status for rank_ends in ends for end in rank_ends] == [0, 0, 0, 0]
    resumed, anew = (end.out for end in ends[0])
    assert "step 3/3" in resumed and "step 1/3" not in resumed
    assert "step 1/3" in anew
    assert sorted(path.name for path in (files / "other").glob("checkpoint*")) == [f"checkpoint-{i}" for i in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_launcher_shows_the_line_of_its_workers_once(ranks: int, files: Path, tmp_path: Path) -> None:
    launched = f"-m torch.distributed.run --standalone --nproc_per_node={ranks} llama3/train.py"
    done = forked.run(f"{launched} {GOOD} --sequence_parallel_size 3".format(files=files), tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: --sequence_parallel_size 3 does not")]
    assert len(ours) == 1
    assert "rank      : 0 (local_rank: 0)" in root_cause(done.stderr)
    assert f"  traceback : {ours[0]}\n" in root_cause(done.stderr)
    assert not (files / "new").exists()


def root_cause(said: str) -> str:
    """The end of the report of torch's launcher."""
    return said.rpartition("Root Cause (first observed failure):")[2]


def cause_after_a_kill(folder: Path, attempt: int) -> str:
    """Kills rank 1 of two in training. Returns what torch's launcher reports as the cause."""
    output = f"out-{attempt}"
    flags = small.words(folder, output, "--max_steps 100000 --save_strategy no").split()
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "llama3/train.py"]
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen([*launched, *flags], cwd=ROOT, stderr=said) as launcher,
    ):
        until = time.monotonic() + 100
        while not (folder / output / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.1)
        ranks = psutil.Process(launcher.pid).children()
        next(process for process in ranks if process.environ().get("RANK") == "1").kill()
        assert launcher.wait(60) == 1
    return root_cause((folder / "said").read_text())


@pytest.mark.slow
def test_the_launcher_gives_the_line_of_the_ranks_that_miss_a_killed_one_as_the_cause(tmp_path: Path) -> None:
    """The launcher looks every 100 ms. On a busy machine it may see the killed rank before the others have ended."""
    small.write_inputs(tmp_path)
    causes = []
    for attempt in range(4):
        causes.append(cause_after_a_kill(tmp_path, attempt))
        if "traceback : error: no sign of life from rank 1 on" in causes[-1]:
            return
    pytest.fail("\n".join(causes))


@pytest.mark.parametrize("program", ["-m llama3.train", "llama2/train.py"])
def test_a_single_process_refuses_what_its_world_cannot_do(files: Path, tmp_path: Path, program: str) -> None:
    done = forked.run(f"{program} {GOOD} --sequence_parallel_size 2".format(files=files), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --sequence_parallel_size 2 does not divide 1 rank; use 1\n"


@pytest.mark.parametrize(
    ("flags", "package"),
    [("--report_to wandb", "wandb"), ("--optim adamw_8bit", "torchao"), ("--deepspeed zero.json", "deepspeed")],
)
def test_a_missing_package_is_named(flags: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(setup_checks, "version", missing)
    line = f"^{flags} needs {package}, which is not installed; pip install {package}$"
    with pytest.raises(ValueError, match=line):
        setup_checks.check_packages(parse(f"{GOOD} {flags}".split(), "program"))
    setup_checks.check_packages(parse(GOOD.split(), "program"))
