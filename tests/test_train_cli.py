"""A training run from its command line to its files: both programs, resuming, checkpoints, evaluation, metrics."""

import dataclasses
import errno
import gzip
import json
import math
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import slow_except
from programs import FAMILIES, Ended, program, programs
from rich.console import Console
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from worlds import spawn

from data_gen.__main__ import main as data_gen
from lightseq.checkpoint.checkpoints import read_trainer_state
from lightseq.config.command_line import parse
from lightseq.data.sequences import read_pickle
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.preemption import STOP_MESSAGE, StopRequest
from lightseq.distributed.world import World
from lightseq.models import hub, weights
from lightseq.plan.breakdown import Breakdown
from lightseq.training import journal, trainer
from lightseq.training import train as training
from lightseq.training.engine import Update
from lightseq.training.find_model import FoundModel, tokenizer_directory
from lightseq.training.fsdp_engine import FsdpEngine
from lightseq.training.metrics import MetricsFile, read_records
from lightseq.training.output_directory import continues_after_restart, lock_directory, mark_begun
from lightseq.training.profiler import StepProfile
from lightseq.training.setup_checks import check_profiled
from lightseq.training.step_stats import StepResult
from lightseq.training.terminal import Terminal
from lightseq.utils.source import commit

ROOT = Path(__file__).resolve().parent.parent
LENGTH, DOCUMENT, VOCABULARY = 48, 41, 64
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {  # the families differ where these do
    "llama2": LlamaConfig(**TINY, num_key_value_heads=4, tie_word_embeddings=False),
    "llama3": LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=True),
}
# As the experiments before this program called it; the model, data and output follow.
ORIGINAL = """--fp16 --num_train_epochs 3 --per_device_train_batch_size 1 --per_device_eval_batch_size 1
    --gradient_accumulation_steps 1 --evaluation_strategy no --save_strategy steps --save_steps 1000
    --save_total_limit 1 --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type "cosine"
    --logging_steps 1 --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer'
    --tf32 False --model_max_length 2048 --gradient_checkpointing True --lazy_preprocess True"""


def train(world: int, family: str, *runs: str) -> list[Ended]:
    """Training programs one after the other on one world; what rank 0 said."""
    ends = spawn(world, programs, family, list(runs))
    for rank, rank_ends in enumerate(ends):
        for words, end in zip(runs, rank_ends, strict=True):
            assert end.status == 0, f"{words}: {end.err}"
            assert rank == 0 or end.out == "", "only rank 0 speaks"
    return ends[0]


class Files(NamedTuple):
    """The inputs of a run, and the folder for its outputs."""

    root: Path

    def words(self, family: str, output: str, *more: str) -> str:
        """A short run's command line; later words win."""
        return " ".join([
            f"--model_name_or_path {self.root / family} --random_init --data_path {self.root / 'data.pkl'}",
            f"--output_dir {self.root / output} --model_max_length {LENGTH} --learning_rate 1e-2",
            *more,
        ])  # fmt: skip

    def records(self, output: str) -> list[dict[str, Any]]:
        return read_records(self.root / output / "metrics.jsonl")

    def losses(self, output: str) -> dict[int, float]:
        """Loss by step; a step that is recorded twice fails."""
        found = [(r["step"], r["loss"]) for r in self.records(output) if "loss" in r]
        assert len(dict(found)) == len(found), found
        return dict(found)

    def checkpoints(self, output: str) -> list[str]:
        return sorted(path.name for path in (self.root / output).glob("checkpoint*"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("train")
    for name, documents in (("data", 8), ("eval", 3)):
        words = f"synthetic --kind needle --documents {documents} --length {DOCUMENT} --vocab_size {VOCABULARY}"
        assert data_gen([*words.split(), "--seed", str(documents), "--output", str(root / f"{name}.pkl")]) == 0
    for family, config in CONFIGS.items():
        config.save_pretrained(root / family)
    return Files(root)


@pytest.mark.parametrize("family", slow_except(["llama2"], FAMILIES))
def test_the_original_command_lines_run(files: Files, family: str) -> None:
    output = f"original-{family}"
    end = train(2, family, files.words(family, output, ORIGINAL, "--max_steps 2 --model_max_length 48"))[0]
    assert "float16 compute" in end.out and "step 2/2" in end.out
    assert list(files.losses(output)) == [1, 2]
    assert files.checkpoints(output) == ["checkpoint-2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--fp16",
        "--gradient_accumulation_steps 2 --optim sgd",
        "--gradient_accumulation_steps 2 --sequence_parallel_size 1",
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(files: Files, tmp_path: Path, flags: str) -> None:
    flags += " --lr_scheduler_type constant --weight_decay 0.1"
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    train(
        2,
        "llama3",
        files.words("llama3", whole, flags, "--max_steps 8"),
        files.words("llama3", parts, flags, "--max_steps 5"),  # float16 has overflowed by then, and halved its scale
        files.words("llama3", parts, flags, "--max_steps 8 --resume_from_checkpoint True"),
    )
    assert list(files.losses(parts)) == list(range(1, 9))
    assert files.losses(parts) == files.losses(whole)  # to the bit
    scalers = [read_trainer_state(Path(output) / "checkpoint-8")["scaler"] for output in (parts, whole)]
    assert scalers[0] == scalers[1] and (scalers[0] is not None) is ("--fp16" in flags)


def before_steps(rank: int, family: str, words: str, do: Callable[[int, int], None]) -> Ended:
    """A program that calls a function with the rank and the number of completed steps before each step."""
    step = trainer.Trainer.step

    def after(self: trainer.Trainer, index: int) -> Any:
        do(rank, index)
        return step(self, index)

    trainer.Trainer.step = after  # type: ignore[method-assign]
    return program(rank, family, words)


def end_after_five_steps(_rank: int, steps: int) -> None:
    """Ends as if the processes had been killed."""
    if steps == 5:
        raise SystemExit(9)


def test_a_killed_run_resumes_from_its_checkpoint(files: Files) -> None:
    flags = "--max_steps 6 --save_steps 3 --warmup_steps 2 --lr_scheduler_type cosine"
    words = files.words("llama2", "killed", flags)
    assert [end.status for end in spawn(2, before_steps, "llama2", words, end_after_five_steps)] == [9, 9]
    assert list(files.losses("killed")) == [1, 2, 3, 4] and files.checkpoints("killed") == ["checkpoint-3"]
    with (files.root / "killed" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 6, "lo')  # the line that it was writing
    (files.root / "killed" / "checkpoint-6.partial").mkdir()
    again = words + " --resume_from_checkpoint True"
    _, _, said = train(2, "llama2", again, files.words("llama2", "unbroken", flags), again)
    assert list(files.losses("killed")) == [1, 2, 3, 4, 5, 6]
    assert files.losses("killed") == files.losses("unbroken")
    assert files.checkpoints("killed") == ["checkpoint-3", "checkpoint-6"]
    assert "nothing left to train: " in said.out and "checkpoint-6 was saved after step 6 of 6; give a" in said.out


def uneven_hosts(rank: int) -> str:
    with pytest.raises(ValueError) as refusal:
        parallel_dims(
            World(rank, 3, rank % 2, 1 if rank == 2 else 2, torch.device("cpu")), 1, "hybrid_shard"
        ).make_meshes()
    return str(refusal.value)


def test_hosts_of_unequal_numbers_of_ranks_are_refused_on_every_rank() -> None:
    assert all(
        "needs equally many ranks on every host, but they have 1 to 2" in line for line in spawn(3, uneven_hosts)
    )


def test_two_runs_never_write_into_one_directory(files: Files) -> None:
    held = lock_directory(files.root / "shared", World(0, 1, 0, 1, torch.device("cpu")))
    end = spawn(2, program, "llama2", files.words("llama2", "shared", "--max_steps 2"))[0]
    assert end.status == 2 and f"shared is being written to by process {os.getpid()} on " in end.err
    assert sorted(path.name for path in (files.root / "shared").iterdir()) == ["lock"]
    held.close()
    train(1, "llama2", files.words("llama2", "shared", "--max_steps 1"))


def with_nonfinite_gradients(rank: int, family: str, words: str, steps: tuple[int, ...]) -> Ended:
    """A program in which one rank's gradient of one parameter is NaN at some steps."""
    update, updates = FsdpEngine.update, count(1)

    def planted(self: FsdpEngine) -> Update:
        if next(updates) in steps and rank == 1:
            gradient = dict(self.model.named_parameters())["model.layers.1.mlp.up_proj.weight"].grad
            gradient.to_local().flatten()[:1] = float("nan")
        return update(self)

    FsdpEngine.update = planted  # type: ignore[method-assign]
    journal.MAX_SKIPPED_STEPS = 3
    return program(rank, family, words)


def test_a_nonfinite_gradient_skips_its_step_and_is_named(files: Files) -> None:
    words = files.words("llama2", "nonfinite", "--max_steps 4 --lr_scheduler_type constant")
    ends = spawn(2, with_nonfinite_gradients, "llama2", words, (2,))
    assert [end.status for end in ends] == [0, 0]
    assert (
        "step 2: the gradient of model.layers.1.mlp.up_proj.weight is not finite; the step was skipped" in ends[0].out
    )
    records = files.records("nonfinite")
    assert [r["skipped_steps"] for r in records] == [0, 1, 0, 0] and records[1]["grad_norm"] is None
    losses = list(files.losses("nonfinite").values())
    assert all(isinstance(x, float) and x < 10 for x in losses)


def with_nan_losses(rank: int, family: str, words: str, steps: tuple[int, ...]) -> Ended:
    """A program in which the loss on one rank is NaN at some steps, though no gradient is."""
    step = trainer.Trainer.step

    def planted(self: trainer.Trainer, index: int) -> StepResult:
        result = step(self, index)
        return dataclasses.replace(result, loss=result.loss * math.nan) if index + 1 in steps and rank else result

    trainer.Trainer.step = planted  # type: ignore[method-assign]
    journal.MAX_NONFINITE_LOSSES = 3
    return program(rank, family, words)


@pytest.mark.slow
def test_too_many_losses_in_a_row_that_are_not_finite_end_the_run_on_every_rank(files: Files) -> None:
    assert journal.MAX_NONFINITE_LOSSES == 10
    words = files.words("llama2", "nan-losses", "--max_steps 9 --save_steps 1 --logging_steps 3")
    ends = spawn(2, with_nan_losses, "llama2", words, (1, 2, 4, 5, 6, 7))
    assert [end.status for end in ends] == [1, 1]
    said = "error: steps 4 to 6 have a loss that is not finite; resume from "
    assert ends[0].err.count("error: ") == 1 and said in ends[0].err and "error: " not in ends[1].err
    # That of step 3 holds the weights with which the loss of step 4 is not finite.
    assert "nan-losses/checkpoint-2 with other data or a lower --learning_rate" in ends[0].err


def sums_over_ranks(rank: int, family: str, words: str) -> int:
    """Counts the gradient-sized tensors that a program sums over its ranks."""
    found, all_reduce = [], torch.distributed.all_reduce

    def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(x.numel() > 1000)
        return all_reduce(x, *args, **kwargs)

    torch.distributed.all_reduce = noted
    assert program(rank, family, words).status == 0
    return sum(found)


@pytest.mark.slow
def test_copies_sum_their_gradients_once_an_update(files: Files) -> None:
    flags = '--max_steps 2 --save_strategy no --fsdp "" --gradient_accumulation_steps'
    once, often = (
        spawn(2, sums_over_ranks, "llama2", files.words("llama2", f"summed-{n}", f"{flags} {n}")) for n in (1, 3)
    )
    assert once == often and all(n > 0 for n in once)


@pytest.mark.slow
def test_skipped_steps_are_counted_one_by_one_at_any_logging_interval(files: Files) -> None:
    """Windows of four: two in a row across a border end no run, three do and leave its checkpoint."""
    words = files.words("llama2", "seldom", "--max_steps 12 --save_steps 4 --logging_steps 4")
    ends = spawn(2, with_nonfinite_gradients, "llama2", words, (2, 4, 5, 8, 9, 10, 11))
    assert [end.status for end in ends] == [1, 1]
    assert [r["skipped_steps"] for r in files.records("seldom")] == [2, 2, 3]
    noted = [step for step in range(1, 13) if f"step {step}: the gradient of model.layers.1" in ends[0].out]
    assert noted == [2, 4, 5, 8, 9, 10]
    assert "error: steps 8 to 10 were skipped, the last because the gradient of model.layers.1" in ends[0].err
    assert "/seldom/checkpoint-8, whose weights are still good, with" in ends[0].err and ends[1].err == ""
    assert files.checkpoints("seldom") == ["checkpoint-4", "checkpoint-8"]


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ValueError, match=r"cannot be locked \(No locks available\), so two runs could"):
        lock_directory(tmp_path / "run", World(0, 1, 0, 1, torch.device("cpu")))


def with_a_full_disk(rank: int, family: str, words: str) -> Ended:
    """A program whose third line of metrics finds no room."""
    write, lines = MetricsFile.write, count(1)

    def full(self: MetricsFile, record: Any) -> None:
        if next(lines) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, record)

    MetricsFile.write = full  # type: ignore[method-assign]
    return program(rank, family, words)


def test_metrics_on_a_full_disk_end_the_run_in_one_line(files: Files) -> None:
    (end,) = spawn(1, with_a_full_disk, "llama2", files.words("llama2", "full", "--max_steps 5 --save_steps 2"))
    said = f"error: rank 0: {files.root}/full/metrics.jsonl cannot be written: No space left on device; free some"
    assert end.status == 1 and said in end.err and "Traceback" not in end.err
    assert list(files.losses("full")) == [1, 2] and files.checkpoints("full") == ["checkpoint-2"]


def signal_second_rank(number: int, rank: int, steps: int) -> None:
    if (rank, steps) == (1, 2):
        signal.raise_signal(number)


def asked(rank: int) -> list[tuple[str | None, bool]]:
    """Returns the ranks' agreement in two steps; the first rank is late, the second gets a signal once it has asked."""
    answers = []
    with StopRequest() as stop:
        for step in range(2):
            time.sleep(0.2 * (rank == 0))
            stop.begin_poll(failed=step == 1 and rank == 0)
            if (rank, step) == (1, 0):
                signal.raise_signal(signal.SIGUSR1)
            dist.all_reduce(torch.ones(1))  # as an update does
            answers.append(stop.poll_result())
    return answers


def test_ranks_agree_on_the_signals_known_at_the_poll() -> None:
    assert spawn(2, asked) == [[(None, False), ("SIGUSR1", True)]] * 2


@pytest.mark.parametrize(("name", "every"), [pytest.param("SIGTERM", 1, marks=pytest.mark.slow), ("SIGINT", 2)])
def test_a_signal_ends_all_ranks_after_the_step_with_a_checkpoint(files: Files, name: str, every: int) -> None:
    flags = f"--max_steps 5 --save_steps 100 --warmup_steps 2 --lr_scheduler_type cosine --logging_steps {every}"
    output = f"preempted-{name}"
    words = files.words("llama2", output, flags)
    ends = spawn(2, before_steps, "llama2", words, partial(signal_second_rank, getattr(signal, name)))
    assert [end.status for end in ends] == [0, 0] and f"stopped by {name}; resume with" in ends[0].out
    assert files.checkpoints(output) == ["checkpoint-3"]
    assert list(files.losses(output)) == [1, 2, 3][every - 1 :], "what came after the last record is written, too"
    if name == "SIGTERM":
        train(2, "llama2", words + " --resume_from_checkpoint True", files.words("llama2", "unstopped", flags))
        assert files.losses(output) == files.losses("unstopped")


def test_a_checkpoint_has_the_tokenizer_and_the_settings_for_generation(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    model.generation_config.update(do_sample=True, temperature=0.6, eos_token_id=[1, 2])
    model.save_pretrained(tmp_path / "model")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="a", eos_token="b").save_pretrained(tmp_path / "own")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a b b a " * 16}) + "\n")
    flags = f"--data_path {tmp_path}/rows.jsonl --tokenizer {tmp_path}/own --data_cache {tmp_path}/cache"
    words = f"--model_name_or_path {tmp_path}/model --output_dir {tmp_path}/run {flags}"
    words += " --max_steps 1 --model_max_length 32"
    end = spawn(1, program, "llama2", words)[0]
    assert end.status == 0, end.err
    own, saved = (folder / "tokenizer.json" for folder in (tmp_path / "own", tmp_path / "run" / "checkpoint-1"))
    assert saved.read_text() == own.read_text()
    settings = GenerationConfig.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert (settings.temperature, settings.eos_token_id) == (0.6, [1, 2])


def test_the_tokenizer_comes_from_the_flag_or_else_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(weights: Path | str | None, tokenizer: str | None) -> Path | None:
        return tokenizer_directory(FoundModel(LlamaConfig(), weights, tokenizer, 1, ()), Path("fetched"))

    monkeypatch.setattr(hub, "download_tokenizer", lambda hub_id: Path("hub") / hub_id)
    assert of("some/model", "some/model") == Path("fetched") and of("some/model", str(tmp_path)) == tmp_path
    assert of("some/model", "other/model") == Path("hub/other/model")
    assert of(tmp_path, "byte") is None and of(None, None) is None


def test_a_run_killed_while_it_resumes_keeps_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MetricsFile(tmp_path, 0).write({"step": 1, "loss": 2.0})
    before = (tmp_path / "metrics.jsonl").read_text()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: exit("killed"))
        with pytest.raises(SystemExit):
            MetricsFile(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    MetricsFile(tmp_path, 1).write({"step": 2, "loss": float("nan")})
    assert [r["loss"] for r in read_records(tmp_path / "metrics.jsonl")] == [2.0, None]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def with_another_rate(rank: int, words: str) -> Ended:
    return program(rank, "llama2", f"{words} --learning_rate {rank + 1}e-3 --data_cache {rank}")


def test_ranks_with_other_flags_end_in_one_line(files: Files) -> None:
    ends = spawn(2, with_another_rate, files.words("llama2", "other-flags", "--max_steps 1"))
    assert [end.status for end in ends] == [2, 2]
    line = "--learning_rate is 0.002 on rank 1 and 0.001 on rank 0; start every host with the same command"
    assert ends[0].err.endswith(f"{line}\n") and ends[0].err.count("\n") == 1
    assert not ends[1].err and not (files.root / "other-flags").exists()


def with_data_here_alone(rank: int, words: str) -> Ended:
    if rank == 1:
        exists = os.path.exists
        os.path.exists = lambda path: not str(path).endswith("data.pkl") and exists(path)
    return program(rank, "llama2", words)


def test_data_that_one_host_lacks_is_not_called_another_flag(files: Files) -> None:
    ends = spawn(2, with_data_here_alone, files.words("llama2", "lacking", "--max_steps 1 --save_strategy no"))
    assert not any("start every host with the same command" in end.err for end in ends)


def test_a_launch_that_dies_while_it_removes_an_old_run_starts_over(tmp_path: Path) -> None:
    launch = World(0, 1, 0, 1, torch.device("cpu"), 0, "new")
    again = dataclasses.replace(launch, restarts=1)
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}")
    lock_directory(tmp_path, launch).close()
    assert not continues_after_restart(tmp_path, again), "nothing of this launch is there yet"
    with lock_directory(tmp_path, launch) as held:
        mark_begun(held, tmp_path, launch)
    for _ in range(2):
        assert continues_after_restart(tmp_path, again)
        with lock_directory(tmp_path, again) as held:
            mark_begun(held, tmp_path, again)
    assert (tmp_path / "lock").read_text().count("\n") == 2


TOLD_TWICE = """
import signal, sys
from lightseq.distributed import preemption
first, last = (getattr(signal, name) for name in sys.argv[1:])
with preemption.StopRequest() as stop:
    for number in (first, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.raise_signal(number)
    preemption.CTRL_C_SECONDS = 0.0
    signal.raise_signal(signal.SIGUSR1)
    print("goes on", flush=True)
    signal.raise_signal(last)
    print("still", flush=True)
"""


@pytest.mark.parametrize(
    ("first", "last", "ends"), [("SIGTERM", "SIGINT", True), ("SIGINT", "SIGTERM", True), ("SIGTERM", "SIGTERM", False)]
)
def test_a_signal_is_acknowledged_and_a_later_ctrl_c_ends_the_process(
    first: str, last: str, ends: bool, tmp_path: Path
) -> None:
    """A launcher makes a SIGTERM of the second; a scheduler may send several."""
    (tmp_path / "told.py").write_text(TOLD_TWICE)
    done = forked.run(f"{tmp_path}/told.py {first} {last}", tmp_path)
    assert done.returncode == (-getattr(signal, last) if ends else 0), done.stderr
    answer = STOP_MESSAGE.format("another" if first == "SIGINT" else "a")
    assert done.stdout == "goes on\n" + "still\n" * (not ends) and done.stderr == f"\n{first}: {answer}\n"


def test_a_restart_takes_no_directory_that_its_launch_did_not_begin(files: Files) -> None:
    """A directory that was refused at first must not be overwritten or resumed at the second try."""
    words = files.words("llama2", "others", "--max_steps 2 --save_steps 1")
    train(1, "llama2", words)
    before = files.records("others")
    (end,) = spawn(1, program, "llama2", words, 1, "two")
    assert end.status == 2 and "already holds a run" in end.err
    assert files.records("others") == before and files.checkpoints("others") == ["checkpoint-1", "checkpoint-2"]


LAUNCHED = """
import sys
from lightseq.distributed.start import init_distributed
with init_distributed(60) as world, open(sys.argv[1], "a") as file:
    file.write(f"{world.launch}\\n")
sys.exit(world.restarts < int(sys.argv[2]))
"""


def test_a_launch_keeps_its_name_after_a_restart_and_another_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "launched.py").write_text(LAUNCHED)
    words, store = f"{tmp_path}/launched.py {tmp_path}/launches 0", None
    for restarts in ("0", "1"):
        world = forked.World(1, words, tmp_path, {"TORCHELASTIC_RESTART_COUNT": restarts}, store)
        store = world.store
        assert [end.returncode for end in world.end()] == [0]
    forked.World(1, words, tmp_path).end()
    first, again, other = (tmp_path / "launches").read_text().split()
    assert first == again != other


KILLED = """
import os, signal, sys
import llama2
from lightseq.training import trainer
from lightseq.training import command
step = trainer.Trainer.step
def dying(self, index):
    if index == 3 and self.world.rank == 1 and not self.world.restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, index)
trainer.Trainer.step = dying
command.main(llama2.FAMILY, sys.argv[1:])
"""


@pytest.mark.slow
def test_the_launcher_restarts_a_killed_rank_and_nothing_is_lost(files: Files) -> None:
    words = files.words("llama2", "restarted", "--max_steps 5 --save_steps 2")
    (files.root / "killed.py").write_text(KILLED)
    launch = "-m torch.distributed.run --standalone --nproc_per_node=2 --max_restarts=1"
    command = [sys.executable, *launch.split(), str(files.root / "killed.py"), *words.split()]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True, timeout=120)
    train(2, "llama2", files.words("llama2", "unkilled", "--max_steps 5 --save_steps 2"))
    assert files.losses("restarted") == files.losses("unkilled")


def preparing(rank: int, family: str, words: str) -> Ended:
    """A program whose second rank fetches for longer than a step may take."""
    prepare, continues = training.prepare, training.continues_after_restart

    def under_watch(*arguments: Any) -> Any:
        assert "watchdog" in {thread.name for thread in threading.enumerate()}
        return continues(*arguments)

    def longer(*arguments: Any) -> Any:
        time.sleep(7.0 * rank)
        return prepare(*arguments)

    training.continues_after_restart, training.prepare = under_watch, longer
    return program(rank, family, words)


@pytest.mark.slow
def test_a_run_is_watched_from_its_start_and_may_take_its_time_until_its_first_step(files: Files) -> None:
    words = files.words("llama2", "prepared", "--max_steps 1 --save_strategy no --step_timeout 6")
    assert [end.status for end in spawn(2, preparing, "llama2", words)] == [0, 0]


@pytest.mark.slow
def test_a_run_resumes_into_another_directory(files: Files) -> None:
    flags = "--max_steps 4 --save_steps 2"
    train(2, "llama2", files.words("llama2", "first", flags))
    checkpoint = files.root / "first" / "checkpoint-2"
    train(2, "llama2", files.words("llama2", "second", flags, f"--resume_from_checkpoint {checkpoint}"))
    first = files.losses("first")
    assert files.losses("second") == {3: first[3], 4: first[4]}
    begun = [json.loads((files.root / name / "run.json").read_text())["first_step"] for name in ("first", "second")]
    assert begun == [1, 3]


def test_the_same_seed_gives_the_same_bits(files: Files) -> None:
    flags = "--max_steps 3 --max_grad_norm 0.1"
    train(2, "llama3", files.words("llama3", "once", flags))
    otherwise = files.words("llama3", "otherwise", flags, "--seed 43 --max_steps 1 --save_strategy no")
    train(2, "llama3", files.words("llama3", "twice", flags), otherwise)
    kept = ("loss", "grad_norm", "learning_rate", "valid_tokens")
    once, twice = ([[r[key] for key in kept] for r in files.records(name)] for name in ("once", "twice"))
    assert once == twice and files.losses("otherwise")[1] != files.losses("once")[1]
    weight_files = [files.root / name / "checkpoint-3" / "model.safetensors" for name in ("once", "twice")]
    assert weight_files[0].read_bytes() == weight_files[1].read_bytes()


def in_shards(rank: int, family: str, runs: list[str]) -> list[Ended]:
    weights.SHARD_BYTES = 10_000
    return programs(rank, family, runs)


def master_weights(checkpoint: Path, config: LlamaConfig) -> LlamaForCausalLM:
    """The model whose weights are those a resumed run would go on with."""
    model = LlamaForCausalLM(config)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    dcp.load(tensors, checkpoint_id=checkpoint / "state", no_dist=True)
    return model


def plain_loss(model: LlamaForCausalLM, data: Path) -> float:
    """Mean over all targets, one sequence after the other, by nothing but transformers."""
    total, targets = 0.0, 0
    with torch.no_grad():
        for ids, _ in read_pickle(data):
            batch = torch.from_numpy(ids.astype("int64"))[None]
            total += model(input_ids=batch, labels=batch).loss.item() * (len(ids) - 1)
            targets += len(ids) - 1
    return total / targets


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the state is read by one process
@pytest.mark.parametrize(
    ("family", "run", "flags"),
    [
        pytest.param("llama2", programs, "--sequence_parallel_size 1", marks=pytest.mark.slow),
        pytest.param("llama2", programs, "--fsdp ''", marks=pytest.mark.slow),
        pytest.param("llama3", programs, "--gradient_accumulation_steps 2", marks=pytest.mark.slow),
        ("llama3", in_shards, "--sequence_parallel_size 1"),
    ],
)
def test_a_checkpoint_is_the_trained_model(files: Files, tmp_path: Path, family: str, run: Any, flags: str) -> None:
    """It opens with transformers, holds the weights to the bit, and training starts from it where it left off."""
    trained, tuned = str(tmp_path / "trained"), str(tmp_path / "tuned")
    evaluated = f"--eval_data_path {files.root / 'eval.pkl'} --eval_strategy steps --per_device_eval_batch_size 2"
    checkpoint = Path(trained) / "checkpoint-2"
    start = f"--model_name_or_path {checkpoint} --random_init False --learning_rate 0"
    runs = [
        files.words(family, trained, evaluated, flags, "--max_steps 2 --eval_steps 2"),
        files.words(family, tuned, evaluated, flags, start, "--max_steps 1 --eval_steps 1"),
    ]
    assert [end.status for end in spawn(2, run, family, runs)[0]] == [0, 0]
    assert len(list(checkpoint.glob("*.safetensors"))) == 1 or run is in_shards
    assert not list(checkpoint.glob("model.safetensors")) or run is programs

    opened = AutoModelForCausalLM.from_pretrained(checkpoint)
    master = master_weights(checkpoint, CONFIGS[family])
    assert opened.dtype == torch.float32 and opened.config.use_cache
    ids = torch.arange(40)[None]
    assert torch.equal(opened(ids).logits, master(ids).logits)
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) is CONFIGS[family].tie_word_embeddings

    (left_off,) = (r["eval_loss"] for r in files.records(trained) if "eval_loss" in r)
    (start_loss,) = (r["eval_loss"] for r in files.records(tuned) if "eval_loss" in r)
    assert start_loss == left_off
    assert left_off == pytest.approx(plain_loss(opened, files.root / "eval.pkl"), rel=1e-6)


@pytest.mark.slow
def test_evaluation_during_training_is_limited_to_the_first_documents(files: Files, tmp_path: Path) -> None:
    content = pickle.loads((files.root / "eval.pkl").read_bytes())
    (tmp_path / "cut.pkl").write_bytes(pickle.dumps({key: column[:2] for key, column in content.items()}))
    words = "--max_steps 1 --eval_strategy steps --eval_steps 1 --save_strategy no --eval_data_path"
    whole = f"{words} {files.root}/eval.pkl"
    runs = {"whole": whole, "limited": f"{whole} --max_eval_samples 2", "cut": f"{words} {tmp_path}/cut.pkl"}
    train(2, "llama3", *(files.words("llama3", f"{tmp_path}/{name}", flags) for name, flags in runs.items()))
    losses = {name: [r["eval_loss"] for r in files.records(f"{tmp_path}/{name}") if "eval_loss" in r] for name in runs}
    assert losses["limited"] == losses["cut"] != losses["whole"]


def test_checkpoints_are_saved_and_retained_as_the_flags_say(files: Files) -> None:
    epochs = "--per_device_train_batch_size 4 --num_train_epochs 2"  # of 8 examples: 4 steps
    train(
        1,
        "llama3",
        files.words("llama3", "newest", "--max_steps 4 --save_steps 1 --save_total_limit 2"),
        files.words("llama3", "epochs", epochs, "--save_strategy epoch"),
    )
    assert files.checkpoints("newest") == ["checkpoint-3", "checkpoint-4"]
    assert files.checkpoints("epochs") == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
def test_the_checkpoint_of_the_lowest_evaluation_loss_is_kept_besides_the_newest(files: Files) -> None:
    flags = f"--eval_data_path {files.root / 'eval.pkl'} --eval_strategy steps --eval_steps 1 --save_steps 2"
    flags += " --save_total_limit 1 --keep_best True --lr_scheduler_type constant"
    words = files.words("llama2", "best", flags)
    diverges = f"{words} --max_steps 7 --learning_rate 30 --resume_from_checkpoint True"
    ends = train(2, "llama2", f"{words} --max_steps 4", diverges)
    losses = {r["step"]: r["eval_loss"] for r in files.records("best") if "eval_loss" in r}
    saved = {step: losses[step] for step in (2, 4, 6, 7)}  # the last step is saved too, and evaluated therefore
    first, last = min(saved, key=lambda step: saved[step]), 7
    assert first < last, "or this test tells nothing"
    assert files.checkpoints("best") == [f"checkpoint-{first}", f"checkpoint-{last}"]
    assert f"best        {files.root / 'best' / f'checkpoint-{first}'} (lowest evaluation loss)" in ends[1].out
    assert read_trainer_state(files.root / "best" / f"checkpoint-{first}")["eval_loss"] == saved[first]


@pytest.mark.slow
def test_a_model_is_evaluated_after_every_epoch(files: Files) -> None:
    flags = "--per_device_train_batch_size 4 --num_train_epochs 2 --save_strategy no"
    evaluated = f"--eval_data_path {files.root / 'eval.pkl'} --eval_strategy epoch"
    train(
        2,
        "llama2",
        files.words("llama2", "evaluated", flags, evaluated),
        files.words("llama2", "unevaluated", flags),
    )
    evaluations = [r for r in files.records("evaluated") if "eval_loss" in r]
    keys = {"step", "eval_loss", "eval_perplexity", "eval_accuracy"}
    assert [set(r) for r in evaluations] == [keys] * 2 and [r["step"] for r in evaluations] == [2, 4]
    for record in evaluations:
        assert record["eval_perplexity"] == pytest.approx(math.exp(record["eval_loss"]))
        assert 0 <= record["eval_accuracy"] <= 1
    assert list(files.losses("evaluated")) == [1, 2, 3, 4]
    assert files.losses("evaluated") == files.losses("unevaluated")


@pytest.fixture(scope="module")
def unsaved(files: Files) -> list[Ended]:
    """Two runs without checkpoints, that log each step and every third."""
    flags = "--max_steps 7 --save_strategy no"
    third = files.words("llama3", "third", flags, "--logging_steps 3")
    return train(2, "llama3", files.words("llama3", "each", flags), third)


def test_a_run_without_checkpoints_says_so(files: Files, unsaved: list[Ended]) -> None:
    assert files.checkpoints("each") == [] and "none saved" in unsaved[0].out


def test_a_logged_loss_is_the_mean_since_the_last_one(files: Files, unsaved: list[Ended]) -> None:
    each, third = files.losses("each"), files.losses("third")
    assert list(third) == [3, 6, 7]
    means = {last: sum(each[step] for step in range(last - 2, last + 1)) / 3 for last in (3, 6)}
    assert third == pytest.approx({**means, 7: each[7]})


def test_allocations_are_recorded_while_steps_are_profiled_and_written_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[object] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    words = "--model_name_or_path m --data_path d --output_dir o --profile_steps 2:3 --profile_memory"
    profile = StepProfile(parse(words.split(), ""), tmp_path, World(1, 2, 1, 2, torch.device("cpu")))
    for step in (1, 2, 3, 4):
        profile.before(step)
        assert calls[:1] == (["all"] if step > 1 else [])
        profile.after(step)
    assert calls == ["all", f"{tmp_path}/profile/memory-rank1.pickle", None]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Any, path: str) -> None:
        Path(path).write_text("cut")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    words = "--model_name_or_path m --data_path d --output_dir o --profile_steps 1:1"
    profile = StepProfile(parse(words.split(), ""), tmp_path, World(0, 1, 0, 1, torch.device("cpu")))
    profile.before(1)
    profile.after(1)
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert not list((tmp_path / "profile").iterdir())


def test_a_profile_summary_lists_gpu_memory_by_purpose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 400)
    words = "--model_name_or_path m --data_path d --output_dir o --profile_steps 2:3"
    parts = Breakdown(1, 2, 3, 4, 5, 6, 7)
    profile = StepProfile(parse(words.split(), ""), tmp_path, World(1, 2, 1, 2, torch.device("cuda")), lambda: parts)
    found = profile._memory()
    assert found.pop("parts") == asdict(parts)
    assert found == {"peak": 28, "own": 406, "all": 700, "device": 1000}, "attention's buffers are not the allocator's"


@pytest.mark.gpu(1)
def test_allocations_of_a_gpu_are_a_snapshot_that_can_be_opened(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    words = "--model_name_or_path m --data_path d --output_dir o --profile_steps 1:1 --profile_memory"
    profile = StepProfile(parse(words.split(), ""), tmp_path, World(0, 1, 0, 1, device))
    profile.before(1)
    kept = torch.empty(12345, dtype=torch.uint8, device=device)
    profile.after(1)
    snapshot = pickle.loads((tmp_path / "profile" / "memory-rank0.pickle").read_bytes())
    sizes = {event["size"] for events in snapshot["device_traces"] for event in events}
    assert any(size >= kept.nbytes for size in sizes)


@pytest.mark.slow
def test_steps_to_profile_that_a_resumed_run_finds_past_are_left_out(files: Files) -> None:
    resumed = "--max_steps 4 --profile_steps 2:3 --resume_from_checkpoint True"
    words = [files.words("llama3", "reprofiled", "--save_steps 2", more) for more in ("--max_steps 2", resumed)]
    train(2, "llama3", *words)
    profiles = files.root / "reprofiled" / "profile"
    for rank in (0, 1):
        events = json.loads(gzip.decompress((profiles / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert {"step 3", "lightseq::attention"} <= names and not {"step 2", "step 4"} & names
    summary = json.loads((profiles / "summary-rank0.json").read_text())
    phases = {each["phase"]: each["ms"] for each in summary["spent"]}
    assert phases.keys() == {"forward", "backward", "update"} and summary["steps"] == 1
    assert min(phases.values()) > 0 and sum(phases.values()) <= summary["step_ms"]
    config = parse(words[1].split(), "")
    past = "warning: --profile_steps 2:3: the run resumes after step 4; nothing is profiled"
    assert check_profiled(config, torch.device("cpu"), 4, 5) == (past,)
    assert check_profiled(config, torch.device("cpu"), 2, 4) == ()


def test_tensorboard_gets_what_metrics_jsonl_gets(files: Files) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(1, "llama3", files.words("llama3", "board", "--max_steps 2 --save_strategy no --report_to tensorboard"))
    events = accumulator.EventAccumulator(str(files.root / "board" / "runs"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert shown == pytest.approx(files.losses("board"))


def with_secrets(rank: int, family: str, words: str) -> Ended:
    os.environ.update(HF_TOKEN="secret-1", WANDB_API_KEY="secret-2", AWS_SECRET_ACCESS_KEY="secret-3")
    os.environ.update(MY_SECRET="secret-4", OPENAI_KEY="secret-5", DB_PASS="secret-6")
    return program(rank, family, words)


@pytest.mark.compat
def test_run_json_describes_the_run_without_secrets(files: Files) -> None:
    words = files.words(
        "llama3", "told", "--max_steps 2 --seed 7 --schedule balanced --data_cache secret-4:secret-5:secret-6"
    )
    assert [end.status for end in spawn(2, with_secrets, "llama3", words)] == [0, 0]
    output = files.root / "told"
    run = json.loads((output / "run.json").read_text())
    assert run["command"] == f"llama3/train.py {re.sub('secret-.', '***', words)}" and run["config"]["seed"] == 7
    assert (run["schedule"], run["kernel"], run["transport"]) == ("balanced", "cpu", "gloo")
    assert run["versions"]["torch"] == version("torch") and run["versions"]["python"] == platform.python_version()
    assert run["commit"] == commit()
    assert run["hardware"]["device"] == "cpu" and run["world_size"] == run["sequence_ranks"] == 2
    assert not [f for f in output.rglob("*") if f.is_file() and b"secret-" in f.read_bytes()]
    assert not [line for line in (output / "run.json").read_text().splitlines() if "API_KEY" in line]


def test_a_record_counts_tokens_and_bytes_of_its_step(files: Files, unsaved: list[Ended]) -> None:
    first, second, *_ = files.records("each")
    assert first.keys() == second.keys()
    for record in (first, second):
        assert (record["tokens"], record["valid_tokens"]) == (LENGTH, DOCUMENT - 1)
        assert record["training_tokens_percent"] == pytest.approx(100 * (DOCUMENT - 1) / LENGTH)
        assert record["tokens_per_second"] == pytest.approx(2 * record["tokens_per_second_per_gpu"])
        assert record["comm_bytes"] > 0 and record["host_rss_bytes"] > 1e6 and record["mfu"] is None


def test_both_forms_of_a_program_start_in_any_directory(tmp_path: Path) -> None:
    script, module = [str(ROOT / "llama2" / "train.py")], ["-m", "llama3.train"]
    started = [
        subprocess.Popen([sys.executable, *form, "--help"], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for form, cwd in ((script, tmp_path), (module, ROOT))
    ]
    for process, family in zip(started, ("llama2", "llama3"), strict=True):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and err == b""
        assert out.decode().count(f"usage: {family}/train.py") == 1


STEP = {"loss": 2.5, "learning_rate": 4.567e-5, "grad_norm": 0.98765, "tokens_per_second": 1234.5, "step_seconds": 2.0}


def test_lines_of_steps_show_the_learning_rate_the_gradient_norm_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time left counts evaluations and saves, which `step_seconds` does not, but no compilation before step 1."""
    terminal, shown = Terminal(100, 0), "loss 2.5000  lr 4.57e-05  grad norm 0.988  1,234 tokens/s  2.00 s a step"
    for step, now in ((1, 500.0), (2, 503.0), (11, 540.0), (100, 900.0)):
        monkeypatch.setattr("lightseq.training.terminal.time.monotonic", lambda now=now: now)
        terminal.show({**STEP, "step": step, "padding_percent": 0.0})
    assert capsys.readouterr().out.splitlines() == [
        f"step   1/100  {shown}", f"step  11/100  {shown}  0:05:56 left", f"step 100/100  {shown}",
    ]  # fmt: skip


@pytest.mark.parametrize(("width", "has_bar"), [(80, False), (130, True)])
def test_a_terminal_shows_numbers_of_a_step_and_the_time_left_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, has_bar: bool
) -> None:
    monkeypatch.setattr(
        "lightseq.training.terminal.Console", partial(Console, force_terminal=True, color_system=None, width=width)
    )
    terminal = Terminal(100, 0)
    terminal.header({"model": "m"}, [])
    terminal.show({**STEP, "step": 7, "padding_percent": 9.0})
    terminal.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out).strip().splitlines()[-1]
    assert len(last) <= width and ("━" in last) is has_bar
    assert re.search(r"7/100 loss 2.5000  lr 4.57e-05  grad norm 0.988  1,234 tokens/s.* left$", last.strip())


def test_the_summary_compares_means_of_the_first_and_the_last_losses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []
    noisy = [5.0 + 0.5 * (-1) ** step for step in range(20)]
    for losses in ([5.0], [5.0, 5.0], [5.0, 4.5], [*noisy, *(loss - 1 for loss in noisy)], [4.0, 9.0, 5.0]):
        Terminal(2, 0).summary(None, Path("m"), losses, None)
        said.append(capsys.readouterr().out.splitlines()[0])
    assert said == [
        "loss 5.0000 (one logged step)",
        "loss stayed at 5.0000 (the first and the last of 2 logged steps)",
        "loss fell by 0.5000, from 5.0000 to 4.5000 (the first and the last of 2 logged steps)",
        "loss fell by 1.0000, from 5.0000 to 4.0000 (means of the first and last 10 of 40 logged steps)",
        "loss rose by 1.0000, from 4.0000 to 5.0000 (the first and the last of 3 logged steps)",
    ]
    rising = [*noisy, *(loss + 0.1 for loss in noisy)]
    Terminal(2, 0).summary(None, Path("m"), rising, None, eval_losses=[5.0, 4.8, 4.5])
    assert capsys.readouterr().out.splitlines()[:2] == [
        "training loss stayed within its noise, 5.0000 and 5.1000 (means of the first and last 10 of 40 logged steps)",
        "evaluation loss fell by 0.5000, from 5.0000 to 4.5000 (the first and the last of 3 evaluations)",
    ]
