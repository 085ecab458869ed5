"""Runs that lose a rank at any moment, malformed files, host memory over many steps, and slow ranks."""

import pickle
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import World
from programs import Ended, program
from small import CONFIG, LENGTH, VOCABULARY, losses, words, write_inputs
from transformers import LlamaForCausalLM
from worlds import spawn

import llama2
from lightseq.architecture.family import resolve
from lightseq.checkpoint.checkpoints import STATE, TRAINER_STATE, list_checkpoints, read_trainer_state
from lightseq.checkpoint.manifest import describe, find_damage
from lightseq.checkpoint.state_files import restore_rng
from lightseq.checkpoint.tensor_index import read_index
from lightseq.data.open_examples import open_examples
from lightseq.data.token_directory import write_token_directory
from lightseq.models import weights
from lightseq.parts import loss_model
from lightseq.training.metrics import read_records

STEPS, SAVE_STEPS = 12, 3


def last_step(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return max((r["step"] for r in read_records(metrics)), default=0) if metrics.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_a_run_that_loses_a_rank_resumes_to_the_result_of_one_that_does_not(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    write_inputs(tmp_path)
    flags = f"--max_steps {STEPS} --save_steps {SAVE_STEPS} --step_timeout 20"

    def start(output: str, more: str = "") -> World:
        return World(2, f"llama2/train.py {words(tmp_path, output, f'{flags} {more}')}", tmp_path)

    assert [end.returncode for end in start("whole").end()] == [0, 0]
    output = tmp_path / "killed"
    for least in (4, 8):
        world = start("killed", "--resume_from_checkpoint auto")
        deadline = time.monotonic() + 60.0
        while last_step(output) < least and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(dice.uniform(0.0, 0.1))
        world.ranks[dice.randrange(2)].send_signal(signal.SIGKILL)
        ends = world.end()
        assert all(end.returncode is not None for end in ends), f"a rank hangs: {ends}"
        assert all(find_damage(checkpoint) is None for checkpoint in list_checkpoints(output))
    assert [end.returncode for end in start("killed", "--resume_from_checkpoint auto").end()] == [0, 0]
    assert losses(tmp_path, "killed") == losses(tmp_path, "whole")
    killed, whole = (tmp_path / name / f"checkpoint-{STEPS}" / "model.safetensors" for name in ("killed", "whole"))
    assert describe(killed).sha256 == describe(whole).sha256


# ---- malformed files ------------------------------------------------------------------------------------------------


def read_data(path: Path) -> None:
    examples = open_examples(path, LENGTH, VOCABULARY + 300, "byte", lazy=False, progress=False)
    for index in range(len(examples)):
        examples[index]


def read_manifest(path: Path) -> None:
    if (damage := find_damage(path)) is not None:
        raise ValueError(damage)


# Each well-formed file, and the function that reads its input: the first part of the path.
READERS: dict[str, Callable[[Path], object]] = {
    "data/tokens.bin": read_data,
    "data/documents.bin": read_data,
    "data/meta.json": read_data,
    "data.pkl": read_data,
    "text.jsonl": read_data,
    "weights/config.json": lambda path: resolve(llama2.FAMILY, str(path), True),
    "weights/model.safetensors.index.json": lambda path: weights.load_or_refuse(LlamaForCausalLM(CONFIG), path, "--x"),
    f"checkpoint/{TRAINER_STATE}": read_trainer_state,
    "checkpoint/manifest.json": read_manifest,
    f"checkpoint/{STATE}/.metadata": lambda path: read_index(path / STATE),
    f"checkpoint/{STATE}/random-0.json": lambda path: restore_rng(path / STATE / "random-0.json", torch.device("cpu")),
}


@pytest.fixture(scope="module")
def well_formed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("well-formed"))
    run = words(folder, "run", "--max_steps 1 --save_steps 1")
    assert [end.status for end in spawn(2, program, "llama2", run)] == [0, 0]
    (folder / "run" / "checkpoint-1").rename(folder / "checkpoint")
    write_token_directory(folder / "data", [np.arange(20), np.arange(1, 30)], VOCABULARY, dict)
    (folder / "text.jsonl").write_text('{"text": "some words"}\n{"text": "and others"}\n')
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "weights", max_shard_size="100KB")
    return folder


def test_evaluation_data_that_is_damaged_ends_the_run_in_one_line(well_formed: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(well_formed / "data", tmp_path / "damaged")
    tokens = np.memmap(next(damaged.glob("tokens.bin")), dtype=np.uint16, mode="r+")
    tokens[-1] = VOCABULARY
    tokens.flush()
    run = words(write_inputs(tmp_path), "run", f"--max_steps 1 --eval_data_path {damaged}")
    (end,) = spawn(1, program, "llama2", f"{run} --evaluation_strategy steps --eval_steps 1")
    assert end.status == 1 and end.err.count("\n") == 1
    assert end.err.startswith(f"error: rank 0: {damaged} document 1 has token id {VOCABULARY}, outside the model's")


class Hostile:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def malformed(content: bytes, way: str, dice: random.Random) -> bytes:
    made = bytearray(content)
    at = dice.randrange(len(made))
    match way:
        case "cut":
            return bytes(made[:at])
        case "nested":
            return dice.choice([b"[", b'{"a":', b"(", b"\x80\x04("]) * 20_000
        case "flipped":
            for _ in range(dice.choice([1, 8, 64])):
                made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)
        case "repeated":
            made[at:at] = made[:at]
        case "another number":
            digits = [i for i, byte in enumerate(made) if byte in b"0123456789"]
            place = dice.choice(digits or [at])
            made[place : place + 1] = dice.choice([b"-1", b"1e400", b"NaN", b"9" * 20, b"null", b"[]", b'"x"', b"2.5"])
    return bytes(made)


@pytest.mark.parametrize("way", ["cut", "nested", "flipped", "repeated", "another number", "hostile"])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_a_malformed_file_is_read_or_refused_in_words_and_never_run(
    name: str, way: str, well_formed: Path, tmp_path: Path
) -> None:
    source, canary = name.split("/")[0], tmp_path / "ran"
    if (well_formed / source).is_dir():
        shutil.copytree(well_formed / source, tmp_path / source)
    good = (well_formed / name).read_bytes()
    for seed in range(8 if way in ("flipped", "repeated", "another number") else 2):
        bad = pickle.dumps({"input_ids": Hostile(canary)}) if way == "hostile" else b""
        (tmp_path / name).write_bytes(bad or malformed(good, way, random.Random(seed)))
        try:
            READERS[name](tmp_path / source)
        except (ValueError, OSError) as refusal:  # these become one line
            assert str(refusal)
        assert not canary.exists()


# ---- long runs and slow ranks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_host_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    """Steps, records, checkpoints and evaluations leave nothing behind. `dev/LOG.md` shows 2,000 steps."""
    write_inputs(tmp_path)
    evaluated = f"--eval_data_path {tmp_path}/data.pkl --eval_strategy steps --eval_steps 50"
    flags = f"--max_steps 400 --save_steps 20 --save_total_limit 2 {evaluated}"
    assert spawn(2, program, "llama3", words(tmp_path, "long", flags))[0].status == 0
    resident = [r["host_rss_bytes"] for r in read_records(tmp_path / "long" / "metrics.jsonl") if "loss" in r]
    assert statistics.median(resident[-50:]) - statistics.median(resident[150:200]) < 4e6


def slowed(rank: int, line: str) -> Ended:
    head_loss = loss_model.cross_entropy_sum

    def slower(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1 * rank)
        return head_loss(*args, **kwargs)

    loss_model.cross_entropy_sum = slower  # type: ignore[assignment]
    return program(rank, "llama3", line)


def test_the_slowest_rank_is_in_the_metrics(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    assert spawn(2, slowed, words(tmp_path, "slow", "--max_steps 3 --save_strategy no"))[0].status == 0
    records = read_records(tmp_path / "slow" / "metrics.jsonl")
    assert [r["slowest_rank"] for r in records] == [1, 1, 1]
    assert all(0.3 < r["slowest_rank_share"] <= 0.5 for r in records), [r["slowest_rank_share"] for r in records]
