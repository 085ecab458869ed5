"""Trains through Ray Train: each of its workers, one per GPU, starts one rank of lightseq train.

python3 launch/ray_train.py --num_workers 16 --config qwen3-8b-lora-128k --data_path chats.jsonl --output_dir outputs/a

Start it from a folder that all hosts share, with this repository on them, too.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The script runs uninstalled, and no module of this folder hides a package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from lightseq.config.command_line import parse
from lightseq.config.parser import Parser, run_command

PROGRAM = "launch/ray_train.py"
RESUME = "--resume_from_checkpoint"


def parser() -> Parser:
    out = Parser(prog=PROGRAM, description="Takes the flags of lightseq train, and these:", allow_abbrev=False)
    out.add_argument("--num_workers", type=int, required=True, help="ranks of the run, one per GPU")
    out.add_argument("--cpu", action="store_true", help="start ranks without GPUs, to try a command")
    failures = f"times to start all ranks again after a failure, with {RESUME} auto (default: 0)"
    out.add_argument("--max_failures", type=int, default=0, help=failures)
    out.add_argument("--storage_path", help="folder for Ray's own records, which all hosts share (default: Ray's)")
    return out


def main(words: Sequence[str]) -> int:
    return run_command(lambda: train(*parser().parse_known_args(words)))


def train(own: argparse.Namespace, flags: list[str]) -> None:
    """Runs training with these flags. Raises ValueError for flags that training refuses, and without Ray."""
    config = parse(flags, PROGRAM)
    if own.max_failures and not config.resume_from_checkpoint:
        flags += [RESUME, "auto"]
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ValueError(f"Ray Train is not installed ({error}); pip install 'ray[train]'") from None
    failures = FailureConfig(max_failures=own.max_failures)
    TorchTrainer(
        train_rank,
        train_loop_config={"flags": flags, "folder": os.getcwd(), "root": str(Path(__file__).resolve().parent.parent)},
        scaling_config=ScalingConfig(num_workers=own.num_workers, use_gpu=not own.cpu),
        torch_config=TorchConfig(backend="gloo"),  # Ray's group is only for the ranks to meet; nccl would take memory
        run_config=RunConfig(storage_path=own.storage_path, failure_config=failures),
    ).fit()


def train_rank(config: dict[str, Any]) -> None:
    """Runs a worker's rank, in a process of its own: Ray calls this in a thread, where no signal can be handled.

    Ray sets the variables of torch's launcher for each worker. The worker of rank 0 hosts the store at MASTER_PORT, in
    which the ranks meet, as an agent of that launcher does.
    """
    sys.path.insert(0, config["root"])  # Ray's workers do not have the driver's path
    from lightseq.distributed.rank_launcher import prepare_rank

    path = os.pathsep.join(filter(None, [config["root"], os.environ.get("PYTHONPATH")]))
    status = subprocess.run(
        [sys.executable, "-m", "lightseq", "train", *config["flags"]],
        env={**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": path},
        cwd=config["folder"],
        preexec_fn=prepare_rank,
    ).returncode
    if status:
        raise RuntimeError(f"rank {os.environ['RANK']} ended with status {status}; its output says why")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
