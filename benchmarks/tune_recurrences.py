"""Measures which variants of fla's kernels are fastest on this GPU, for the heads of popular hybrids.

Writes the file that lightseq/kernels/recurrent/tuned_choices.py reads. --no_choices measures from nothing; without it
the first pass takes the choices that are there, and its time says what they spare. Processes compile the variants side
by side, and one of them then measures.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from unittest import mock

import torch
from torch.nn import functional as F

from benchmarks.command_line import Parser, length, listed, one_of, positive
from lightseq.config.parser import run_command
from lightseq.kernels.recurrent import tuned_choices
from lightseq.kernels.recurrent.base import ScanInputs
from lightseq.kernels.recurrent.scan_kernel_choice import select_kernel

EXAMPLES = """examples:
  python3 benchmarks/tune_recurrences.py --no_choices --output lightseq/kernels/recurrent/hopper.json
  python3 benchmarks/tune_recurrences.py --kinds delta"""


@dataclass(frozen=True)
class Heads:
    """Heads of a popular recurrence."""

    kind: str
    key_heads: int
    value_heads: int
    keys: int
    values: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.key_heads} and {self.value_heads} heads of {self.keys} x {self.values}"

    def inputs(self, tokens: int) -> ScanInputs:
        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(1, tokens, *sizes, device="cuda", dtype=torch.bfloat16)

        q, k = (F.normalize(draw(self.key_heads, self.keys), dim=-1) for _ in range(2))
        channels = (self.keys,) if self.kind == "channels" else ()
        g = -0.1 * torch.rand(1, tokens, self.value_heads, *channels, device="cuda")
        beta = None if self.kind == "decay" else draw(self.value_heads).sigmoid()
        return ScanInputs(q, k, draw(self.value_heads, self.values), g, beta)


POPULAR = (
    Heads("delta", 16, 32, 128, 128),  # Qwen3.5-4B and 9B, Qwen3-Next
    Heads("delta", 16, 16, 128, 128),  # Qwen3.5-0.8B and 2B
    Heads("delta", 30, 30, 96, 192),  # OLMo Hybrid
    Heads("channels", 32, 32, 128, 128),  # Kimi Linear
    Heads("decay", 1, 48, 128, 64),  # Granite 4 H micro and tiny
    Heads("decay", 8, 64, 128, 64),  # Nemotron 3 Nano
    Heads("decay", 1, 24, 256, 64),  # Falcon-H1
    Heads("decay", 1, 64, 64, 64),  # Zamba 2
)
KINDS = ("delta", "channels", "decay")


def main(words: Sequence[str]) -> int:
    return run_command(lambda: tune(parse(words)))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    out = Parser("benchmarks/tune_recurrences.py", __doc__, EXAMPLES)
    add = out.add_argument
    add("--kinds", type=listed(one_of(*KINDS), KINDS), default="all", metavar="K,...", help=f"all, {', '.join(KINDS)}")
    add("--length", type=length, default="32K", metavar="N", help="tokens of a pass")
    add("--no_choices", action="store_true", help="measure from nothing")
    add("--jobs", type=positive, default=8, metavar="N", help="processes that compile")
    add("--output", type=Path, metavar="FILE", help="JSON file; entries of other kernels and sizes there are kept")
    return out.parse_args(words)


def tune(flags: argparse.Namespace) -> None:
    if flags.no_choices:
        mock.patch.dict(tuned_choices.FILES, clear=True).start()
    with ProcessPoolExecutor(flags.jobs, get_context("spawn")) as pool:
        for heads in [heads for heads in POPULAR if heads.kind in flags.kinds]:
            start = time.monotonic()
            if flags.no_choices:
                list(pool.map(compile_share, [(heads, job, flags.jobs) for job in range(flags.jobs)]))
            first, second = (timed_pass(heads, flags.length) for _ in range(2))
            print(
                f"{heads}: {time.monotonic() - start - first - second:.1f} s to compile variants, first pass "
                f"{first:.1f} s, second {second:.3f} s",
                flush=True,
            )
            if flags.output:
                write(flags.output)


def compile_share(work: tuple[Heads, int, int]) -> None:
    """Compiles every N-th variant of all kernels, into the cache on disk."""
    heads, job, jobs = work
    with mock.patch.dict(tuned_choices.FILES, clear=True):
        for _, tuner in tuned_choices.autotuners():
            if not hasattr(tuner, "every"):
                tuner.every = tuner.configs
            # A tuner with one variant would fail where that one needs too much memory of a multiprocessor.
            tuner.configs = [tuner.every[0], *tuner.every[1:][job::jobs]]
            tuner.cache.clear()
        timed_pass(heads, 4096)


def timed_pass(heads: Heads, tokens: int) -> float:
    """Returns seconds of scans of one and of four fragments, with and without states, forward and backward."""
    start = time.monotonic()
    for edges in ((0, tokens), (0, tokens // 4, tokens // 2, 3 * tokens // 4, tokens)):
        x = heads.inputs(tokens)
        kernel = select_kernel(x)
        shape = (1, len(edges) - 1, heads.value_heads, heads.keys, heads.values)
        states = torch.randn(shape, device="cuda", dtype=torch.float32)
        dout = torch.randn_like(x.v)
        for initial in (None, states):
            scan = kernel.forward(x, 1.0, edges)
            scan.summarize()
            scan.run(initial)
            backward = kernel.backward(x, 1.0, edges, initial, dout)
            if initial is not None:
                backward.initial_gradients()
            backward.run(initial)
        torch.cuda.synchronize()
    return time.monotonic() - start


def write(output: Path) -> None:
    """Adds the choices to a file, one line for each."""
    entries = json.loads(output.read_text()) if output.exists() else []
    found = {json.dumps([entry[part] for part in ("kernel", "key", "dtypes")]): entry for entry in entries}
    for entry in tuned_choices.measured():
        found.setdefault(json.dumps([entry[part] for part in ("kernel", "key", "dtypes")]), entry)
    lines = ",\n".join(json.dumps(found[key]) for key in sorted(found))
    output.write_text(f"[\n{lines}\n]\n")
    print(f"{len(found)} choices  {output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
