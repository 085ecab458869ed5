"""One rank of a peer. step.py starts it and records the command.

python3 -m torch.distributed.run --standalone --nproc_per_node=4 benchmarks/step_peers/worker.py plain --model DIR ...
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent.parent
    )  # instead of this folder, whose modules would hide packages

import argparse
import importlib
import json
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.step_peers.peer import SEED, Job, Peer, StepOutcome, TrainerPeer, measure
from lightseq.data.batches import BatchStream, open_examples
from lightseq.distributed.mesh import check_devices, init_distributed

# Imported on demand, because each needs its own packages and patches others on import.
PEERS = {
    "plain": "benchmarks.step_peers.plain",
    "accelerate": "benchmarks.step_peers.accelerate_context_parallel",
    "deepspeed": "benchmarks.step_peers.deepspeed_ulysses",
    "autosp": "benchmarks.step_peers.deepspeed_autosp",
    "trl": "benchmarks.step_peers.trl_sft",
    "unsloth": "benchmarks.step_peers.unsloth_sft",
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="benchmarks/step_peers/worker.py", allow_abbrev=False)
    out.add_argument("peer", choices=PEERS)
    for name in ("model", "data", "result"):
        out.add_argument(f"--{name}", type=Path, required=True)
    for name, kind in (("length", int), ("steps", int), ("timeout", float)):
        out.add_argument(f"--{name}", type=kind, required=True)
    return out


def main(words: Sequence[str]) -> None:
    flags = parser().parse_args(words)
    with init_distributed(flags.timeout) as world:
        check_devices(world)
        config = LlamaConfig.from_pretrained(flags.model)
        job = Job(config, flags.length, world)
        stream = BatchStream(open_examples(flags.data, flags.length, config.vocab_size), flags.length, 1, seed=SEED)
        peer: Peer | TrainerPeer = importlib.import_module(PEERS[flags.peer]).prepare(job)
        if isinstance(peer, TrainerPeer):
            outcome = peer.train([stream.batch(step) for step in range(flags.steps)])
        else:
            outcome = measure(partial(take_step, peer, stream), range(flags.steps), world.device)
        if world.is_main:
            flags.result.write_text(json.dumps({**outcome, "facts": dict(peer.facts)}, indent=2) + "\n")
        dist.barrier()  # an early exit would close connections that other ranks still read from


def take_step(peer: Peer, stream: BatchStream, index: int) -> StepOutcome:
    return peer.step(stream.batch(index))


if __name__ == "__main__":
    main(sys.argv[1:])
