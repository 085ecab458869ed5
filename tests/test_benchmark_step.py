"""The benchmark of whole steps: what it measures and records, that its peers train alike, and what it survives."""

import importlib.util
import json
import os
import sys
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from programs import refusal
from transformers import Gemma3TextConfig, LlamaConfig
from worlds import spawn

from analysis import step as step_analysis
from benchmarks import step, step_records
from benchmarks.processes import Failed, reason, run
from benchmarks.step import parse
from benchmarks.step_models import model_of
from benchmarks.step_peers import worker
from benchmarks.step_peers.accelerate_context_parallel import fsdp2
from benchmarks.step_peers.peer import Job, TrainerPeer, measure
from benchmarks.step_peers.sft import fully_sharded, own_row_reason
from benchmarks.step_peers.worker import prepare_of, stream_of
from benchmarks.step_trials import Trial, setting_of, trials, write_inputs
from lightseq.architecture.flops import model_flops
from lightseq.architecture.inspection import inspect_architecture
from lightseq.data.batches import BatchStream
from lightseq.data.open_examples import open_examples
from lightseq.distributed.world import World
from lightseq.kernels.attention.torch_native import CpuKernel
from lightseq.parts.attention import layer_reaches
from lightseq.schedule.reach import sliding

LENGTH, STEPS = 64, 3
ON_H200 = {"commit": "c", "date": "d", "hardware": {"device": "NVIDIA H200"}, "versions": {"torch": "2"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "m", tied=True)


def save_model(path: Path, tied: bool) -> Path:
    LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    ).save_pretrained(path)  # fmt: skip
    return path


def save_gemma(path: Path) -> Path:
    """Saves a small Gemma 3: two layers see 24 tokens and one sees all."""
    Gemma3TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=24, initializer_range=0.1,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ).save_pretrained(path)  # fmt: skip
    return path


def flags(model: Path, tmp_path: Path, more: str = "") -> list[str]:
    words = f"--model {model} --lengths {LENGTH} --nproc_per_node 2 --warmup 1 --steps {STEPS - 1}"
    return [*words.split(), "--output", str(tmp_path / "out" / "s.jsonl"), *more.split()]


def trials_of(model: Path, tmp_path: Path, words: str, on_gpu: bool, *more: str) -> list[Trial]:
    return trials(setting_of(parse([*flags(model, tmp_path, words), *more]), on_gpu=on_gpu))


def read(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "s.jsonl").read_text().splitlines()]


# ---- for real -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lightseq_and_the_plain_step_run_for_real_and_train_alike(model: Path, tmp_path: Path) -> None:
    assert step.main(flags(model, tmp_path, "--implementations lightseq,plain --layers 2 --timeout 120")) == 0
    ours, plain = read(tmp_path)
    check_alike(ours, plain, layers=2)
    assert ours.keys() == plain.keys() >= {*step_analysis.KEYS, *step_analysis.SETTING} - {"device"}
    config = LlamaConfig.from_pretrained(model, num_hidden_layers=2)
    for point, label in ((ours, "lightseq"), (plain, "plain")):
        assert (point["label"], point["world"], point["remat"], point["compile"]) == (label, 2, "attention", False)
        assert (point["hardware"]["device"], point["versions"]["torch"]) == ("cpu", version("torch"))
        assert point["tokens_per_second"] == pytest.approx(LENGTH / point["step_seconds"])
        flops = model_flops(config, LENGTH, 1) / point["step_seconds"] / 2
        assert point["model_tflops_per_gpu"] == pytest.approx(flops / 1e12)
        assert point["tokens_per_second_lowest"] <= point["tokens_per_second"] <= point["tokens_per_second_highest"]


def train(rank: int, peer: str, tmp_path: Path, model: Path) -> tuple[dict[str, Any], int]:
    """Takes a peer's steps in the test's group. Returns their outcome, and calls of attention's forward in each."""
    calls: list[int] = []
    forward = CpuKernel.forward
    CpuKernel.forward = lambda *args: calls.append(1) or forward(*args)  # type: ignore[assignment, method-assign]
    config, size = LlamaConfig.from_pretrained(model), dist.get_world_size()
    job = Job(config, LENGTH, World(rank, size, rank, size, torch.device("cpu")), learning_rate=1e-3)
    prepared = fsdp2(job, context_ranks=1) if peer == "fsdp2" else prepare_of(peer)(job)
    batches = stream(tmp_path, config)
    if isinstance(prepared, TrainerPeer):
        return prepared.train([batches.batch(index) for index in range(STEPS)]), 0
    outcome = measure(lambda index: prepared.step(batches.batch(index)), range(STEPS), job.world.device)
    return outcome, len(calls) // STEPS


def stream(tmp_path: Path, config: LlamaConfig) -> BatchStream:
    return BatchStream(open_examples(tmp_path / "out" / "s" / f"data-{LENGTH}", LENGTH, config.vocab_size), LENGTH, 1)


def first_by_hand(model: Path, tmp_path: Path, last_target: bool = True) -> tuple[float, float]:
    """Returns loss and gradient norm of the first step by transformers, in this process."""
    config = LlamaConfig.from_pretrained(model)
    batch = stream(tmp_path, config).batch(0)
    net = Job(config, LENGTH, World(0, 1, 0, 1, torch.device("cpu"))).whole_model()
    labels = {"labels": batch.labels, "shift_labels": batch.labels} if last_target else {"labels": batch.input_ids}
    loss = net(input_ids=batch.input_ids, **labels).loss
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()


PACKAGES = {"plain": "torch", "rows": "torch", "fsdp2": "accelerate", "deepspeed-offload": "deepspeed"}


@pytest.mark.parametrize(
    ("peer", "tied"),
    slow_except(
        [("rows", True), ("trl", False)],
        [("plain", True), ("rows", True), ("fsdp2", False), ("deepspeed-offload", False)]
        + [*product(("trl", "deepspeed"), (True, False))],
    ),
)
def test_every_peer_takes_the_step_that_one_process_takes(tmp_path: Path, peer: str, tied: bool) -> None:
    pytest.importorskip(PACKAGES.get(peer, peer))
    model = save_model(tmp_path / "m", tied)
    write_inputs(setting_of(parse(flags(model, tmp_path)), on_gpu=False))
    loss, norm = first_by_hand(model, tmp_path)
    (outcome, calls), *others = spawn(1 if peer == "trl" else 2, train, peer, tmp_path, model)
    assert outcome["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert outcome["grad_norms"][0] == pytest.approx(norm, rel=1e-4)
    assert outcome["losses"][-1] < outcome["losses"][0]  # some learning: the steps are taken
    assert len(outcome["losses"]) == len(outcome["step_seconds"]) == STEPS
    assert all(other["losses"] == outcome["losses"] for other, _ in others)
    if peer == "plain":
        assert calls == 3  # once a layer: the backward pass keeps what it computed


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--implementations lightseq,trl --nproc_per_node 1",
        "--implementations lightseq,trl",
        "--implementations lightseq,lightseq-sft --packed_rows 16",
    ],
)
def test_trainers_train_on_the_weights_and_tokens_of_lightseq(model: Path, tmp_path: Path, words: str) -> None:
    pytest.importorskip("trl")
    assert step.main(flags(model, tmp_path, f"{words} --timeout 120")) == 0
    ours, trainer = read(tmp_path)
    check_alike(ours, trainer)
    if trainer["label"] == "trl":
        assert "without Liger, which needs a GPU" in trainer["note"]


def check_alike(ours: dict[str, Any], *others: dict[str, Any], layers: int = 3) -> None:
    for point in (ours, *others):
        assert (point["skipped"], point["layers"], point["losses_finite"]) == (None, layers, True)
        assert point["first_loss"] == pytest.approx(ours["first_loss"], abs=5e-5)
        assert point["last_loss"] == pytest.approx(ours["last_loss"], abs=5e-5)
        assert point["first_grad_norm"] == pytest.approx(ours["first_grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_model_with_windows_trains_alike_in_every_implementation_that_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    words = "--lengths 256 --implementations lightseq,trl,accelerate,plain,lightseq-sft --timeout 120"
    assert step.main(flags(save_gemma(tmp_path / "gemma"), tmp_path, words)) == 0
    ours, trl, accelerate, plain, trainer = read(tmp_path)
    assert accelerate["skipped"] == "context parallel drops masks, so it has no sliding windows"
    assert plain["skipped"] == "plain is measured with Llama only, not with gemma3_text"
    check_alike(ours, trl, trainer)
    assert ours["trial_command"].split()[5:8] == ["-m", "lightseq", "train"]


@pytest.mark.slow
def test_unsloth_takes_the_step_that_one_process_takes_or_is_missing(model: Path, tmp_path: Path) -> None:
    assert step.main(flags(model, tmp_path, "--implementations unsloth --nproc_per_node 1 --timeout 120")) == 0
    [unsloth] = read(tmp_path)
    if importlib.util.find_spec("unsloth") is None:
        assert unsloth["skipped"] == "No module named 'unsloth'"
        return
    loss, norm = first_by_hand(model, tmp_path, last_target=False)
    assert unsloth["first_loss"] == pytest.approx(loss, abs=1e-4)
    assert unsloth["first_grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["", "--lora_rank 4"])
def test_packed_documents_are_trained_as_each_alone(model: Path, tmp_path: Path, adapters: str) -> None:
    implementations = "lightseq,trl" if importlib.util.find_spec("trl") else "lightseq"
    words = f"--implementations {implementations} --packed_rows 16 {adapters} --nproc_per_node 1 --timeout 120"
    assert step.main(flags(model, tmp_path, words)) == 0
    config = LlamaConfig.from_pretrained(model)
    job = Job(config, LENGTH, World(0, 1, 0, 1, torch.device("cpu")), packed_rows=16)
    batch = stream_of(tmp_path / "out" / "s" / f"data-{LENGTH}", job).batch(0)
    assert batch.boundaries == (0, 16, 32, 48, 64) and batch.valid_tokens == 60
    net = job.whole_model()
    losses = [net(input_ids=ids, labels=ids).loss.item() for ids in batch.input_ids.split(16, dim=1)]
    points = read(tmp_path)
    assert [point["implementation"] for point in points] == implementations.split(",")
    for point in points:
        assert (point["skipped"], point["packed_rows"]) == (None, 16)
        assert point["first_loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)
    norms = [point["first_grad_norm"] for point in points]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-4)


@pytest.mark.slow
def test_weights_in_four_bits_are_the_same_in_every_implementation(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("trl")
    wide = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    wide.save_pretrained(tmp_path / "m")
    words = "--implementations lightseq,trl --packed_rows 16 --lora_rank 4 --nproc_per_node 1 --timeout 120"
    assert step.main(flags(tmp_path / "m", tmp_path / "dense", words.replace(",trl", ""))) == 0
    assert step.main(flags(tmp_path / "m", tmp_path / "bits", f"{words} --load_in_4bit")) == 0
    dense, ours, trl = (point["first_loss"] for name in ("dense", "bits") for point in read(tmp_path / name))
    assert ours == pytest.approx(trl, rel=1e-6) and abs(ours - dense) > 1e-4


# ---- what goes wrong ------------------------------------------------------------------------------------------------

WRITES = """
import json, sys
json.dump({"step_seconds": [9, 0.5, 0.25], "losses": [3, 2, float("nan")], "grad_norms": [1, 1, 1],
           "peak_memory_allocated_bytes": 5, "peak_memory_reserved_bytes": 6, "facts": {"kernel": "k"}, "sequences": 2},
          open(sys.argv[1], "w"))
"""
DIES = "raise RuntimeError('no luck') from ValueError('the root of it')"
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"


def test_one_that_dies_or_hangs_is_skipped_with_its_reason_and_the_rest_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = {"lightseq": DIES, "accelerate": HANGS, "plain": WRITES, "deepspeed": "pass"}
    monkeypatch.setattr(Trial, "command", property(lambda t: ["-c", scripts[t.implementation], str(t.result)]))
    monkeypatch.setattr(step_records, "provenance", lambda commit: ON_H200)
    begin = time.monotonic()
    assert step.main(flags(model, tmp_path, "--timeout 1 --implementations lightseq,accelerate,deepspeed,plain")) == 0
    assert time.monotonic() - begin < 20
    ours, hung, deepspeed, plain = read(tmp_path)
    assert ours["skipped"] == "the root of it" and ours["tokens_per_second"] is None
    assert hung["skipped"] == "no end within 1 s"
    assert deepspeed["skipped"] == "ended without results (FileNotFoundError)"
    assert plain["skipped"] is None
    assert (plain["tokens_per_second"], plain["tokens_per_second_lowest"], plain["tokens_per_second_highest"]) == (
        pytest.approx(2 * LENGTH / 0.375), 2 * LENGTH / 0.5, 2 * LENGTH / 0.25,  # two sequences a step
    )  # fmt: skip
    assert plain["mfu"] == pytest.approx(plain["model_tflops_per_gpu"] / 989)
    assert (plain["losses_finite"], plain["peak_memory_allocated_bytes"], plain["kernel"]) == (False, 5, "k")
    out = capsys.readouterr().out
    assert "started at" in out and "skipped: no end within 1 s" in out


def test_numbers_of_an_earlier_run_do_not_count(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_records, "provenance", lambda commit: ON_H200)
    for script, skipped in ((WRITES, None), ("pass", "ended without results (FileNotFoundError)")):
        monkeypatch.setattr(Trial, "command", property(lambda t, script=script: ["-c", script, str(t.result)]))
        assert step.main(flags(model, tmp_path, "--timeout 60 --implementations plain")) == 0
        assert read(tmp_path)[-1]["skipped"] == skipped
        (tmp_path / "out" / "s.jsonl").unlink()


def test_a_timeout_ends_the_processes_that_a_launcher_started(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="no end within"):
        run(["-c", HANGS], 1.0, tmp_path / "log.txt")
    children = psutil.Process(os.getpid()).children(recursive=True)
    assert not [p for p in children if "time.sleep(100)" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\n[rank0]: RuntimeError: NCCL\n", "out of memory"),
        ("error: --kernel fa9 is unknown\nRuntimeError: later\n", "--kernel fa9 is unknown"),
        ("[rank0]: ValueError: 5 heads do not divide\n", "5 heads do not divide"),
        ("[rank2]: torch.distributed.DistBackendError: NCCL error\n", "torch.distributed.DistBackendError: NCCL error"),
        ("  RuntimeError is within a line\n  traceback : Signal 9 (SIGKILL) received", "killed: Signal 9 (SIGKILL)"),
        (
            "error: rank 1 is gone\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
            "Signal 15 (SIGTERM)\nRoot Cause (first observed failure):\n  traceback : Signal 9 (SIGKILL) received",
            "killed: Signal 9 (SIGKILL)",
        ),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n", "ended with status 3"),
        ("", "ended with status 3"),
    ],
)
def test_a_log_says_why(log: str, said: str) -> None:
    assert reason(log, 3) == said


# ---- commands and flags ---------------------------------------------------------------------------------------------


def test_every_length_is_tried_by_lightseq_with_each_set_of_flags_and_by_the_peers(model: Path, tmp_path: Path) -> None:
    more = ["--lightseq_flags", "--remat none --schedule ulysses", "--lightseq_flags=--tf32"]
    rows = trials_of(model, tmp_path, "--lengths 2K,4K --implementations plain,lightseq", True, *more)
    labels = ["lightseq", "lightseq (remat none, schedule ulysses)", "lightseq (tf32)", "plain"]
    assert [(row.length, row.label) for row in rows] == [(n, label) for n in (2048, 4096) for label in labels]
    command = " ".join(rows[1].command)
    assert command.startswith("-m torch.distributed.run --standalone --nproc_per_node=2 ")
    assert "llama3/train.py" in command and command.endswith("--bf16 --remat none --schedule ulysses")
    assert "--bf16" in command and "--random_init" in command
    assert len({row.directory for row in rows}) == len(rows)
    alone = trials_of(model, tmp_path, "--implementations plain --lightseq_flags=--tf32", True)
    assert [row.label for row in alone] == ["lightseq (tf32)", "plain"]
    assert "benchmarks/step_peers/worker.py plain" in " ".join(rows[3].command)


def test_a_trainer_on_one_process_runs_without_a_launcher(model: Path, tmp_path: Path) -> None:
    words = f"--implementations trl,unsloth,plain --nproc_per_node 1 --unsloth_python {sys.executable}"
    trl, unsloth, plain = trials_of(model, tmp_path, words, False)
    assert trl.command[0].endswith("/worker.py") and unsloth.command[0].endswith("/worker.py")
    assert plain.command[:2] == ["-m", "torch.distributed.run"]
    assert (trl.python, unsloth.python, plain.python) == (None, sys.executable, None)
    assert "UNSLOTH_FSDP2" not in unsloth.environment
    [several] = trials_of(model, tmp_path, "--implementations unsloth", True)
    assert several.command[:2] == plain.command[:2] and several.environment["UNSLOTH_FSDP2"] == "1"


def test_packed_rows_and_adapters_are_asked_of_every_implementation(tmp_path: Path) -> None:
    words = "--implementations lightseq,trl --packed_rows 16 --lora_rank 4"
    ours, trl = trials_of(Path("tiny-llama2"), tmp_path, words, False)
    assert "llama2/train.py" in " ".join(ours.command) and "--bf16" not in ours.command
    assert " --packing best_fit --lora_rank 4" in " ".join(ours.command)
    assert " ".join(trl.command).endswith("--packed_rows 16 --lora_rank 4")


@pytest.mark.parametrize(
    ("words", "peer"),
    [("--packed_rows 4", "plain"), ("--lora_rank 4", "deepspeed"), ("--load_in_4bit", "lightseq-sft")],
)
def test_a_peer_that_cannot_pack_or_adapt_says_so(words: str, peer: str, tmp_path: Path) -> None:
    paths = f"--model {tmp_path} --data {tmp_path} --result {tmp_path / 'r'} --length 64 --steps 1 --timeout 9"
    with pytest.raises(ValueError, match=f"{peer} is not measured with {words.split()[0]}"):
        worker.main([peer, *paths.split(), *words.split()])


@pytest.mark.slow
def test_gemma_is_trained_by_lightseq_train_and_cut_with_its_windows(tmp_path: Path) -> None:
    setting = setting_of(parse(flags(Path("gemma3-4b"), tmp_path, "--layers 7")), on_gpu=True)
    window = sliding(1024)
    assert layer_reaches(setting.config) == (window,) * 5 + (None, window)
    assert " -m lightseq train --model_name_or_path " in " ".join(trials(setting)[0].command)
    _, config = model_of("gemma3-4b")
    found = inspect_architecture(config)
    assert (found.name, len(found.layers), found.attentions[0].heads.dim) == ("Gemma3ForCausalLM", 34, 256)
    assert found.total == 3_880_263_168  # google/gemma-3-4b-pt without its vision tower
    assert [layer for layer, mixer in enumerate(found.attentions) if mixer.window is None] == [5, 11, 17, 23, 29]


@pytest.mark.slow
def test_peers_share_a_row_and_run_cudnn_only_where_these_take_the_model(tmp_path: Path) -> None:
    world = World(0, 2, 0, 2, torch.device("cuda"))
    llama, gemma = LlamaConfig.from_pretrained(save_model(tmp_path / "l", tied=True)), model_of("gemma3-4b")[1]
    jobs = [Job(llama, LENGTH, world), Job(llama, LENGTH, world, packed_rows=16), Job(gemma, LENGTH, world)]
    assert [job.takes_cudnn for job in jobs] == [True, True, False]
    wrapped = [fully_sharded(job, checkpoints=True)["fsdp_config"]["transformer_layer_cls_to_wrap"] for job in jobs[1:]]
    assert wrapped == [["LlamaDecoderLayer"], ["Gemma3DecoderLayer"]]
    assert [own_row_reason(job) for job in jobs] == [
        None, "TRL refuses packing with context parallelism", "context parallelism has no sliding windows",
    ]  # fmt: skip


def test_packed_documents_count_the_pairs_that_a_window_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "command", property(lambda t: ["-c", WRITES, str(t.result)]))
    monkeypatch.setattr(step_records, "provenance", lambda commit: ON_H200)
    model = save_gemma(tmp_path / "gemma")
    assert step.main(flags(model, tmp_path, "--packed_rows 32 --implementations trl")) == 0
    [point] = read(tmp_path)
    each = model_flops(Gemma3TextConfig.from_pretrained(model), 32, 1)  # of a document, whose window is shorter
    assert point["model_tflops_per_gpu"] == pytest.approx(2 * (LENGTH // 32) * each / 0.375 / 2 / 1e12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--implementations nobody", "'nobody' is unknown; choose from lightseq, plain, rows, accelerate, "),
        ("--lengths 1X", "1X is not a number of tokens"),
        ("--steps 0", "'0' is not a positive whole number"),
        ("--lightseq_flags=--remat=some", "--lightseq_flags '--remat=some': --remat 'some' is unknown"),
        ("--unsloth_python /no/such/python", "--unsloth_python /no/such/python is not a program"),
        ("--lengths 64,100 --packed_rows 16", "--packed_rows 16 does not divide --lengths 100"),
        ("--model tiny-llama3 --lora_rank 300", "--lora_rank 300 exceeds the model's hidden size of 256"),
        ("--model tiny-lama3", "did you mean tiny-llama3 or tiny-llama2?"),
        ("--model gemma3-4b --layers 35", "--layers 35 exceeds the 34 layers of gemma3-4b; give fewer"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_records, "provenance", lambda commit: {"hardware": {"device": "cpu"}})
    assert said in refusal(step.main, *words.split(), "--output", tmp_path / "s.jsonl")


def test_an_output_file_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").touch()
    with pytest.raises(ValueError, match="exists; give another file"):
        parse(["--output", str(tmp_path / "s.jsonl")])
    with pytest.raises(ValueError, match=r"has no suffix; write steps.jsonl"):
        parse(["--output", "steps"])
