"""Flags of benchmarks/attention.py, which load without torch."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.attention_peers import PACKED_PEERS, PEERS
from benchmarks.command_line import Parser, check_output, length, listed, one_of, positive, seconds
from lightseq.config.choices import CHOICES
from lightseq.kernels.attention.registry import KERNELS
from lightseq.schedule.algorithms import SCHEDULES

ABOUT = "Times forward and backward of one causal attention layer over all ranks, for lightseq and its peers."
CEILING = "single-gpu"  # the kernel on one GPU with the whole sequence, an upper bound
EXAMPLES = """examples:
  python3 -m torch.distributed.run --nproc_per_node=4 benchmarks/attention.py --peers all
  ... --schedules prefix,prefix@head_groups=2,usp@ulysses_size=2 --lengths 512K --kernels fa4,cudnn
  ... --documents lognormal:0 --lengths 128K --schedules prefix,ulysses --peers single-gpu
  python3 -m analysis attention outputs/attention.jsonl"""


@dataclass(frozen=True)
class Choice:
    """Settings of lightseq's attention; None means automatic."""

    schedule: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_size: int | None = None
    head_groups: int | None = None


def parser() -> Parser:
    out = Parser("benchmarks/attention.py", ABOUT, EXAMPLES)
    kernels, transports = ("auto", *KERNELS), (*CHOICES["transport"], "none")
    peers, dtypes = (CEILING, *PEERS, *PACKED_PEERS), ("bfloat16", "float16", "float32", "float64")
    schedules = f"auto, all, none, {', '.join(SCHEDULES)}; options: @head_groups=N, @ulysses_size=N"
    what = out.add_argument_group("layer").add_argument
    what("--lengths", type=listed(length), default="16K,32K,64K,128K", metavar="N,...", help="tokens of a sequence")
    what("--schedules", type=listed(choice, SCHEDULES), default="auto", metavar="S,...", help=schedules)
    what("--kernels", type=listed(one_of(*kernels)), default="auto", metavar="K,...", help=", ".join(kernels))
    what("--transports", type=listed(one_of(*transports)), default="auto", metavar="T,...", help=", ".join(transports))
    what(
        "--peers",
        type=listed(one_of(*peers), peers),
        default=CEILING,
        metavar="P,...",
        help=f"all, none, {', '.join(peers)}; {CEILING} is the kernel on one GPU with the whole sequence, as a bound",
    )
    what(
        "--documents",
        type=documents,
        metavar="D",
        help="pack documents of 1K to 64K tokens (lognormal:SEED) or other lengths (lognormal:SEED:MIN:MAX)",
    )
    what("--window", type=length, metavar="N", help="sliding window: keys that a query sees (default: all before it)")
    what("--heads", type=positive, default=32, metavar="N", help="query heads")
    what("--kv_heads", type=positive, default=8, metavar="N", help="key/value heads")
    what("--head_dim", type=positive, default=128, metavar="N", help="head dimension")
    what("--value_dim", type=positive, metavar="N", help="head dimension of values (default: --head_dim)")
    dtype = f"{', '.join(dtypes)}; if not given, bfloat16 on GPUs and float32 on CPU"
    what("--dtype", type=one_of(*dtypes), metavar="D", help=dtype)
    how = out.add_argument_group("measurement").add_argument
    how("--warmup", type=positive, default=2, metavar="N", help="untimed runs before the measurement")
    how("--repeats", type=positive, default=20, metavar="N", help="maximum number of timed runs")
    limit = "time limit for the timed runs of a point; at least 3 are made"
    how("--seconds", type=seconds, default=10.0, metavar="S", help=limit)
    out.add_output("outputs/attention.jsonl")
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    flags = parser().parse_args(words)
    if flags.heads % flags.kv_heads:
        raise ValueError(f"--heads {flags.heads} is not a multiple of --kv_heads {flags.kv_heads}")
    if not flags.schedules and not flags.peers:
        raise ValueError("--schedules none and --peers none leave nothing to measure; give one of them")
    if flags.window and flags.documents:
        raise ValueError("--window and --documents are measured one at a time; leave one out")
    check_output(flags)
    return flags


def choice(text: str) -> tuple[str, Choice]:
    """Parses a schedule with settings, such as `usp@ulysses_size=2@head_groups=4`."""
    schedule, *settings = text.split("@")
    if schedule not in ("auto", *SCHEDULES):
        raise argparse.ArgumentTypeError(
            f"{schedule!r} is unknown; choose from auto, all, none, {', '.join(SCHEDULES)}"
        )
    found = Choice(schedule)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in ("head_groups", "ulysses_size") or not value.isdecimal() or int(value) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: write head_groups=N or ulysses_size=N after @")
        found = replace(found, **{key: int(value)})  # type: ignore[arg-type]
    return text, found


def documents(text: str) -> str:
    if not re.fullmatch(r"lognormal:\d+(:\d+:\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a distribution; write lognormal:SEED or lognormal:SEED:128:8192"
        )
    _, least, most = bounds(text)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths must start at 1 token or more and increase")
    return text


def bounds(text: str) -> tuple[int, int, int]:
    """Returns the seed, and the minimum and maximum tokens of a document."""
    seed, least, most = [*map(int, text.split(":")[1:]), 2**10, 2**16][:3]
    return seed, least, most
