"""One rank of a peer. step.py starts it and records the command.

python3 -m torch.distributed.run --standalone --nproc_per_node=4 benchmarks/step_peers/worker.py plain --model DIR ...
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    if sys.argv[1:2] == ["unsloth"]:
        import unsloth  # noqa: F401  # patches packages imported after it

import argparse
import faulthandler
import json
import signal
from collections.abc import Callable, Sequence
from importlib import import_module

import torch.distributed as dist
from transformers import AutoConfig, LlamaConfig

from benchmarks.step_peers.peer import SEED, Job, Peer, TrainerPeer, measure
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream
from lightseq.data.examples import Examples
from lightseq.data.open_examples import open_examples
from lightseq.data.packing import open_packed
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import check_devices, use_host_cores
from lightseq.models.decoder import text_config
from lightseq.parts.adapters import lora_from_config

# Imported on demand, because each needs its own packages and patches others on import.
PEERS = {
    "plain": ("plain", "prepare"),
    "rows": ("rows", "prepare"),
    "accelerate": ("accelerate_context_parallel", "prepare"),
    "deepspeed": ("deepspeed_ulysses", "prepare"),
    "deepspeed-offload": ("deepspeed_ulysses", "prepare_offloaded"),
    "trl": ("sft", "prepare_trl"),
    "lightseq-sft": ("sft", "prepare_lightseq"),
    "unsloth": ("unsloth_sft", "prepare"),
}
# Peers that take packed rows and adapters.
TRAINERS = ("trl", "lightseq-sft", "unsloth")
# Peers that take other models than Llama.
ANY_MODEL = ("rows", "trl", "lightseq-sft", "accelerate", "unsloth")


def prepare_of(peer: str) -> Callable[[Job], Peer | TrainerPeer]:
    """Returns the function that sets up a peer on this rank."""
    module, function = PEERS[peer]
    found: Callable[[Job], Peer | TrainerPeer] = getattr(import_module(f"benchmarks.step_peers.{module}"), function)
    return found


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="benchmarks/step_peers/worker.py", allow_abbrev=False)
    out.add_argument("peer", choices=PEERS)
    for name in ("model", "data", "result"):
        out.add_argument(f"--{name}", type=Path, required=True)
    for name, kind in (("length", int), ("steps", int), ("timeout", float)):
        out.add_argument(f"--{name}", type=kind, required=True)
    for name in ("packed_rows", "lora_rank"):
        out.add_argument(f"--{name}", type=int)
    out.add_argument("--load_in_4bit", action="store_true")
    return out


def main(words: Sequence[str]) -> None:
    flags = parser().parse_args(words)
    faulthandler.register(signal.SIGTERM, chain=True)  # at its time limit, the log says what the rank was doing
    for name in ("packed_rows", "lora_rank"):
        if getattr(flags, name) and flags.peer not in TRAINERS:
            raise ValueError(f"{flags.peer} is not measured with --{name}")
    if flags.load_in_4bit and flags.peer != "trl":
        raise ValueError(f"{flags.peer} is not measured with --load_in_4bit")
    with init_distributed(flags.timeout) as world:
        check_devices(world)
        use_host_cores(world)  # as in lightseq: torch's launcher leaves a rank one thread
        config = AutoConfig.from_pretrained(flags.model)
        if flags.peer not in ANY_MODEL and not isinstance(config, LlamaConfig):
            raise ValueError(f"{flags.peer} is measured with Llama only, not with {config.model_type}")
        asked = TrainConfig(model_name_or_path="", data_path="", output_dir="", lora_rank=flags.lora_rank)
        lora = lora_from_config(asked, config)
        job = Job(
            config, flags.length, world, packed_rows=flags.packed_rows, lora=lora, load_in_4bit=flags.load_in_4bit
        )
        stream = stream_of(flags.data, job)
        peer = prepare_of(flags.peer)(job)
        if isinstance(peer, TrainerPeer):
            outcome = peer.train([stream.batch(step) for step in range(flags.steps)])
        else:
            step = peer.step
            measured = measure(lambda index: step(stream.batch(index)), range(flags.steps), world.device)
            outcome = {**measured, "sequences": peer.sequences}
        if world.is_main:
            flags.result.write_text(json.dumps({**outcome, "facts": dict(peer.facts)}, indent=2) + "\n")
        dist.barrier()  # an early exit would close connections that other ranks still read from


def stream_of(data: Path, job: Job) -> BatchStream:
    """Returns lightseq's batches, in its order."""
    packed = job.packed_rows is not None
    examples: Examples = (open_packed if packed else open_examples)(
        data, job.length, text_config(job.config).vocab_size
    )
    return BatchStream(examples, job.length, 1, seed=SEED, packed=packed)


if __name__ == "__main__":
    main(sys.argv[1:])
