"""The flags of the attention benchmark: what they are called, what they mean, and what is wrong with a value."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks.layers import Choice
from benchmarks.packed import PACKED_PEERS, lengths
from benchmarks.peers import PEERS
from lightseq.config.checks import CHOICES
from lightseq.config.lengths import tokens
from lightseq.kernels import KERNELS
from lightseq.schedule.algorithms import SCHEDULES

TRANSPORTS = (*CHOICES["transport"], "none")
CEILING = "single-gpu"
EVERY_PEER = (CEILING, *PEERS, *PACKED_PEERS)
DTYPES = ("bfloat16", "float16", "float32", "float64")

EXAMPLES = """examples:
  python3 -m torch.distributed.run --nproc_per_node=4 benchmarks/attention.py --peers all --exposed
  ... --schedules prefix,prefix@head_groups=2,usp@ulysses_size=2 --lengths 512K --kernels fa4,cudnn
  ... --documents lognormal:0 --lengths 128K --schedules prefix,ulysses --peers single-gpu
  ... --check --lengths 2K --schedules all --peers none
  python3 -m analysis attention outputs/attention.jsonl"""


class Flag(NamedTuple):
    name: str
    metavar: str
    default: Any
    text: str
    convert: Callable[[str], Any] = str


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see --help")


def length(text: str) -> int:
    """`128K` in tokens."""
    try:
        return tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


TWICE = "gather_twice"


def choice(text: str) -> tuple[str, Choice]:
    """`usp@ulysses_size=2@head_groups=4`, and what it asks for."""
    schedule, *settings = text.split("@")
    if schedule not in ("auto", *SCHEDULES):
        raise argparse.ArgumentTypeError(
            f"{schedule!r} is unknown; choose from auto, all, none, {', '.join(SCHEDULES)}"
        )
    sizes: dict[str, int | None] = dict.fromkeys(("head_groups", "ulysses_size"))
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting == TWICE:
            continue
        if key not in sizes or not value.isdecimal() or int(value) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: after @ comes head_groups=N, ulysses_size=N or {TWICE}")
        sizes[key] = int(value)
    if TWICE in settings and schedule not in ("auto", "ulysses"):
        raise argparse.ArgumentTypeError(f"{text!r}: {schedule} gathers twice anyway; leave {TWICE} to ulysses")
    return text, Choice(
        schedule,
        ulysses_size=sizes["ulysses_size"],
        head_groups=sizes["head_groups"],
        keep_gathered=TWICE not in settings,
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def listed(convert: Callable[[str], Any], every: Iterable[str] = ()) -> Callable[[str], list[Any]]:
    """Reads `a,b,c`. Where there is a list of `every` name, `all` stands for it and `none` for nothing."""
    every = list(every)

    def read(text: str) -> list[Any]:
        if every and text == "none":
            return []
        words = [word for item in text.split(",") for word in (every if every and item == "all" else [item.strip()])]
        if not all(words):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty item")
        return [convert(word) for word in dict.fromkeys(words)]

    return read


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    names = list(names)

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; choose from {', '.join(names)}")
        return text

    return read


WHAT = (
    Flag("lengths", "N,...", "16K,32K,64K,128K", "tokens of whole sequences; K is 2^10, M is 2^20", listed(length)),
    Flag(
        "schedules", "S,...", "auto",
        f"auto, all, none, {', '.join(SCHEDULES)}; @head_groups=N and @ulysses_size=N set those that have them, "
        f"@{TWICE} has ulysses gather q, k and v again for the backward pass",
        listed(choice, SCHEDULES),
    ),
    Flag("kernels", "K,...", "auto", f"auto, {', '.join(KERNELS)}", listed(one_of(("auto", *KERNELS)))),
    Flag("transports", "T,...", "auto", ", ".join(TRANSPORTS), listed(one_of(TRANSPORTS))),
    Flag(
        "peers", "P,...", CEILING,
        f"all, none, {', '.join(EVERY_PEER[1:])}, or {CEILING}: the kernel on one GPU with the whole sequence, so the "
        "ceiling",
        listed(one_of(EVERY_PEER), EVERY_PEER),
    ),
    Flag(
        "documents", "D", None,
        "lognormal:SEED packs documents of 1K to 64K tokens into each sequence, lognormal:SEED:LEAST:MOST others",
        lengths,
    ),
    Flag("heads", "N", 32, "query heads", positive),
    Flag("kv_heads", "N", 8, "key/value heads", positive),
    Flag("head_dim", "N", 128, "head dimension", positive),
    Flag("batch", "N", 1, "sequences", positive),
    Flag("dtype", "D", None, f"{', '.join(DTYPES)} (bfloat16 on GPUs, float32 on CPU)", one_of(DTYPES)),
)  # fmt: skip
HOW = (
    Flag("warmup", "N", 2, "runs before the clock starts", positive),
    Flag("repeats", "N", 20, "timed runs at most", positive),
    Flag("least_repeats", "N", 3, "timed runs at least", positive),
    Flag("seconds", "S", 10.0, "what the timed runs of a point may take, within those bounds", seconds),
    Flag("seed", "N", 0, "of the random inputs", int),
    Flag("output", "FILE", Path("outputs/attention.jsonl"), "where the records go", Path),
    Flag(
        "trace",
        "DIR",
        None,
        "trace lightseq's layers too, a directory each, for python3 -m analysis profile; the "
        "records then say how much of the exchange kernels hide",
        Path,
    ),
    Flag("commit", "HASH", None, "what the header names where there is no git to ask"),
)
SWITCHES = {
    "exposed": "time lightseq's tiles with transport none too: what that saves is exposed communication",
    "check": "errors against float64 instead of times; quadratic memory, so keep to 2K or so",
    "append": "add to the output file where it exists",
}


def add_groups(parser: Parser, what: Sequence[Flag], how: Sequence[Flag]) -> argparse._ArgumentGroup:
    """Adds both groups of flags, and returns the second."""
    for title, flags in (("what", what), ("how", how)):
        group = parser.add_argument_group(title)
        for flag in flags:
            text = flag.text if flag.default is None else f"{flag.text} (%(default)s)"
            group.add_argument(
                f"--{flag.name}", metavar=flag.metavar, default=flag.default, type=flag.convert, help=text
            )
    return group


def parser() -> Parser:
    out = Parser(
        prog="benchmarks/attention.py",
        description="Times forward and backward of one causal attention layer over all ranks: lightseq and its peers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = add_groups(out, WHAT, HOW)
    for name, text in SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=text)
    return out


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The flags, checked. Raises ValueError with one line for what is wrong."""
    flags = parser().parse_args(words)
    if flags.heads % flags.kv_heads:
        raise ValueError(f"--heads {flags.heads} does not divide among --kv_heads {flags.kv_heads}")
    if flags.documents and flags.batch != 1:
        raise ValueError(f"--documents {flags.documents.text} packs one sequence; leave --batch {flags.batch} out")
    if flags.least_repeats > flags.repeats:
        raise ValueError(f"--least_repeats {flags.least_repeats} is more than --repeats {flags.repeats}")
    if not flags.schedules and not flags.peers:
        raise ValueError("--schedules none and --peers none leave nothing to measure")
    if flags.output.exists() and not flags.append:
        raise ValueError(f"--output {flags.output} exists; name another file, or give --append")
    return flags
