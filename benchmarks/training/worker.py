"""One rank of a peer in a benchmark of whole steps; benchmarks/step.py starts it and prints the command it used.

python3 -m torch.distributed.run --standalone --nproc_per_node=4 benchmarks/training/worker.py plain --model DIR ...
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)  # and hides no package behind this folder

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.measure import CLOCKS
from benchmarks.training.outcome import Outcome
from benchmarks.training.peer import Job, Peer, StepOutcome
from lightseq.data.batches import BatchStream, open_examples
from lightseq.distributed.mesh import World, check_devices, init_distributed

# Imported only when asked for: each needs packages of its own, and changes others on import.
PEERS = {
    "plain": "benchmarks.training.plain",
    "accelerate": "benchmarks.training.context_parallel",
    "deepspeed": "benchmarks.training.ulysses_alst",
}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="benchmarks/training/worker.py", allow_abbrev=False)
    out.add_argument("peer", choices=PEERS)
    for name in ("model", "data", "result"):
        out.add_argument(f"--{name}", type=Path, required=True)
    for name, kind in (("length", int), ("steps", int), ("seed", int), ("learning_rate", float), ("timeout", float)):
        out.add_argument(f"--{name}", type=kind, required=True)
    out.add_argument("--no_compile", action="store_true")
    return out


def main(words: Sequence[str]) -> None:
    flags = parser().parse_args(words)
    with init_distributed(flags.timeout) as world:
        check_devices(world)
        config = LlamaConfig.from_pretrained(flags.model)
        job = Job(config, flags.length, world, flags.learning_rate, flags.seed, not flags.no_compile)
        examples = open_examples(flags.data, flags.length, config.vocab_size)
        stream = BatchStream(examples, flags.length, 1, seed=flags.seed)
        peer: Peer = importlib.import_module(PEERS[flags.peer]).prepare(job)
        outcome = measure(peer, stream, flags.steps, world)
        if world.is_main:
            flags.result.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
        dist.barrier()  # who leaves first closes connections that the others may still be reading from


def measure(peer: Peer, stream: BatchStream, steps: int, world: World) -> Outcome:
    """Takes steps as a trainer would: the host runs at most one ahead of the device, and reads nothing on the way.

    Setting up does not count as memory: some build the whole model on every rank before they split it.
    """
    device = world.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    clock = CLOCKS[device.type]()
    marks, results = [clock.mark()], list[StepOutcome]()
    for i in range(steps):
        if i >= 2:
            clock.wait(marks[i - 1])
        results.append(peer.step(stream.batch(i)))
        marks.append(clock.mark())
    seconds = torch.tensor([clock.seconds(a, b) for a, b in pairwise(marks)], device=device)
    losses = torch.stack([result.loss.float().to(device) for result in results])
    peaks = torch.tensor(peak_memory(device), device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    norms = [result.grad_norm.item() for result in results]
    allocated, reserved = (int(x) or None for x in peaks.tolist())
    return Outcome(seconds.tolist(), losses.tolist(), norms, allocated, reserved, dict(peer.facts))


def peak_memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


if __name__ == "__main__":
    main(sys.argv[1:])
