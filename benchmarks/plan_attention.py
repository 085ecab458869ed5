"""Predicts the time of one attention layer, forward and backward, on clusters of different sizes.

python3 benchmarks/plan_attention.py --gpus 1,8,64 --gpus_per_host 8 --length 1M
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The script runs uninstalled, and no module of this folder hides a package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import Parser, count_flag, run_command
from lightseq.plan.rates import CHIPS, attention_rates, chip_named
from lightseq.schedule.algorithms import SCHEDULES, ulysses_group_size
from lightseq.schedule.auto import (
    MAX_SEQUENCE_RANKS,
    ChoiceEstimate,
    ScheduleChoice,
    choose_best,
    estimate_choice,
    possible_choices,
    why_impossible,
)
from lightseq.schedule.cost import BACKWARD_FLOPS, AttentionShape
from lightseq.schedule.timing import RATES, Rates, kernel_seconds
from lightseq.utils.formatting import aligned

HEADINGS = ("GPUs", "schedule", "head groups", "ulysses size", "ms", "TFLOP/s per GPU", "efficiency", "exposed ms")


def parser() -> Parser:
    out = Parser(description="Predicts one attention layer on clusters of different sizes.")
    out.add_argument("--gpus", default="1,2,4,8,16,32,64", help="numbers of GPUs (default: %(default)s)")
    out.add_argument("--gpus_per_host", type=count_flag, default=8, help="GPUs per host (default: 8)")
    out.add_argument("--chip", default="h200", help=f"one of {', '.join(CHIPS)} (default: %(default)s)")
    out.add_argument("--length", default="128K", help="tokens per sequence, such as 131072, 128K or 1M (default: 128K)")
    out.add_argument("--heads", type=count_flag, default=32, help="query heads (default: 32)")
    out.add_argument("--kv_heads", type=count_flag, default=8, help="key/value heads (default: 8)")
    out.add_argument("--head_dim", type=count_flag, default=128, help="head dimension (default: 128)")
    return out


def main(words: Sequence[str]) -> int:
    return run_command(lambda: _predict(parser().parse_args(words)))


def _predict(args: argparse.Namespace) -> None:
    shape = AttentionShape(parse_tokens(args.length, "--length"), args.heads, args.kv_heads, args.head_dim)
    gpus, chip = sorted({count_flag(word) for word in args.gpus.split(",")}), chip_named(args.chip)
    if min(*gpus, args.gpus_per_host, shape.kv_heads, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
        raise ValueError("--gpus, --gpus_per_host, --kv_heads and --head_dim are at least 1, and kv_heads divide heads")
    if gpus[-1] > MAX_SEQUENCE_RANKS:
        raise ValueError(f"--gpus {gpus[-1]} are too many for one sequence; give at most {MAX_SEQUENCE_RANKS}")
    rates = {name: attention_rates(chip, name) for name in RATES}
    records = list(predictions(shape, args.gpus_per_host, gpus, rates))
    print("\n".join(aligned([["", *HEADINGS], *(_cells(r) for r in records if not r["skipped"])], left=(0, 2))))
    print("*: the fastest for that number of GPUs")
    for record in records:
        if record["skipped"]:
            print(f"left out for {record['gpus']} GPUs: {record['skipped']}")


def predictions(
    shape: AttentionShape, gpus_per_host: int, gpus: Sequence[int], rates_by_transport: Mapping[str, Rates] = RATES
) -> Iterator[dict[str, Any]]:
    """Yields a record for every number of GPUs and schedule, with its best sizes or the reason it is impossible.

    `fastest` marks the choice of training. Another one may be up to 0.2% faster, since head groups that save memory
    are preferred.
    """
    for count in gpus:
        rates = rates_by_transport["symmetric" if count <= gpus_per_host else "nccl"]
        options = {
            name: [
                ChoiceEstimate(choice, estimate_choice(choice, count, shape, rates, gpus_per_host))
                for choice in possible_choices(count, shape, ScheduleChoice(name))
            ]
            for name in SCHEDULES
        }
        fastest = choose_best([option for found in options.values() for option in found], shape.kv_heads).choice
        for name, of_schedule in options.items():
            record: dict[str, Any] = {"gpus": count, "schedule": name, "fastest": False, "skipped": None}
            if not of_schedule:
                yield record | {"skipped": why_impossible(ScheduleChoice(name), count, shape)}
                continue
            found = choose_best(of_schedule, shape.kv_heads)
            yield record | {"fastest": found.choice == fastest} | _figures(found, count, shape, rates)


def _figures(found: ChoiceEstimate, gpus: int, shape: AttentionShape, rates: Rates) -> dict[str, Any]:
    choice, estimate = found
    flops = (1 + BACKWARD_FLOPS) * 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim  # causal: half
    return {
        "head_groups": choice.head_groups or 1,
        "ulysses_size": ulysses_group_size(choice.schedule, gpus, choice.ulysses_size),
        "seconds": estimate.seconds,
        "exposed_communication_seconds": estimate.exposed_seconds,
        "tflops_per_gpu": flops / gpus / estimate.seconds / 1e12,
        "efficiency": kernel_seconds(shape, rates) / gpus / estimate.seconds,
    }


def _cells(r: Mapping[str, Any]) -> list[str]:
    return [
        "*" if r["fastest"] else "",
        str(r["gpus"]),
        r["schedule"],
        str(r["head_groups"]),
        str(r["ulysses_size"]),
        f"{1e3 * r['seconds']:,.2f}",
        f"{r['tflops_per_gpu']:.0f}",
        f"{r['efficiency']:.1%}",
        f"{1e3 * r['exposed_communication_seconds']:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
