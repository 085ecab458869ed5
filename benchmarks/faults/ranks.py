"""The ranks of a training run as processes that can be killed, frozen, cut off or given a fault to run into.

They are forked from a server that has imported torch already, so that a run of some steps takes a second.
"""

import ctypes
import json
import multiprocessing as mp
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig

from lightseq.checkpoint.checkpoints import list_checkpoints
from lightseq.checkpoint.manifest import describe
from lightseq.data.token_directory import write_token_directory
from lightseq.training.metrics import read_records

assert sys.platform == "linux", "faults are made with Linux' own means"

RANKS, LENGTH, VOCABULARY = 2, 48, 64
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip
STEP_TIMEOUT = 12.0  # seconds; a rank may be silent for half of it
DEADLINE = 120.0  # of anything: what lasts longer hangs

Plant = tuple[Callable[..., None], tuple[Any, ...]]  # called in every rank with its number before it trains
processes = mp.get_context("forkserver")


def write_inputs(folder: Path) -> None:
    """Writes a model's config and 40 documents with a pattern to learn."""
    CONFIG.save_pretrained(folder / "model")
    starts = np.random.default_rng(0).integers(0, VOCABULARY, 40)
    documents = [(start + 5 * np.arange(LENGTH)) % VOCABULARY for start in starts]
    write_token_directory(folder / "data", documents, VOCABULARY, dict, force=True)


def words(folder: Path, output: Path, steps: int, more: str = "") -> list[str]:
    line = (
        f"--model_name_or_path {folder}/model --random_init --data_path {folder}/data --output_dir {output} "
        f"--model_max_length {LENGTH} --max_steps {steps} --learning_rate 1e-3 --lr_scheduler_type cosine "
        f"--step_timeout {STEP_TIMEOUT} {more}"
    )
    return line.split()


@dataclass
class Run:
    """Ranks that were started, and what they printed."""

    processes: list[Any]
    logs: list[Path]
    output: Path

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(self, ranks: range = range(RANKS)) -> list[int | None]:
        """Returns exit statuses, None of a rank that still runs at the deadline."""
        end = time.monotonic() + DEADLINE
        for rank in ranks:
            self.processes[rank].join(max(0.0, end - time.monotonic()))
        return [self.processes[rank].exitcode for rank in ranks]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def printed(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs if log.is_file())

    @property
    def errors(self) -> list[str]:
        """Returns the lines that say what was wrong."""
        return [line for line in self.printed.splitlines() if line.startswith("error: ")]

    @property
    def step(self) -> int:
        """Returns the last step that was logged."""
        records = [r for r in read_records(self.output / "metrics.jsonl") if "loss" in r]
        return records[-1]["step"] if records else 0

    @property
    def is_saving(self) -> bool:
        return any(self.output.glob("checkpoint-*.partial"))


def start(
    output: Path, command: list[str], plants: tuple[Plant, ...] = (), address: str = "127.0.0.1",
    spaces: tuple[str | None, ...] = (None,) * RANKS, name: str = "",
) -> Run:  # fmt: skip
    """Starts the ranks of a run; `spaces` are network namespaces, one a rank, `name` tells its logs from another's."""
    processes.set_forkserver_preload(["benchmarks.faults.child"])
    output.parent.mkdir(parents=True, exist_ok=True)
    run, port = Run([], [], output), free_port()
    for rank in range(RANKS):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
        environment |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        run.logs.append(output.parent / f"{output.name}{name}.rank{rank}.log")
        arguments = (rank, environment, command, str(run.logs[rank]), plants, spaces[rank])
        run.processes.append(processes.Process(target=enter, args=arguments, daemon=True))
        run.processes[rank].start()
    return run


def enter(
    rank: int, environment: dict[str, str], command: list[str], log: str, plants: tuple[Plant, ...], space: str | None
) -> None:
    from benchmarks.faults.child import train

    if space is not None:
        with open(f"/var/run/netns/{space}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")
        environment = environment | {"GLOO_SOCKET_IFNAME": space}
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    for plant, arguments in plants:
        plant(rank, *arguments)
    train(command)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def outcome(output: Path, steps: int) -> tuple[str, list[float]]:
    """Returns what a finished run has come to: the hash of its weights, and its losses."""
    records = [r for r in read_records(output / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in records] == list(range(1, steps + 1)), "a step is missing, or there twice"
    return describe(output / f"checkpoint-{steps}" / "model.safetensors").sha256, [r["loss"] for r in records]


def newest(output: Path) -> int:
    found = list_checkpoints(output)
    return json.loads((found[-1] / "trainer_state.json").read_text())["step"] if found else 0


def until(holds: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    """Waits for something to hold, and returns whether it came in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.002)
    return False
