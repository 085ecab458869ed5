"""Predicts the time of one attention layer, forward and backward, on clusters of different sizes.

lightseq plan --attention --gpus 1,8,64 --gpus_per_host 8 --length 1M
"""

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightseq.config.lengths import parse_tokens
from lightseq.config.parser import Parser, count_flag, run_command
from lightseq.plan.rates import CHIPS, MEASURED_ON, attention_rates, chip_named
from lightseq.schedule.algorithms import SCHEDULES, ulysses_group_size
from lightseq.schedule.auto import (
    ChoiceEstimate,
    ScheduleChoice,
    choose_best,
    estimate_choice,
    possible_choices,
    why_impossible,
)
from lightseq.schedule.cost import BACKWARD_FLOPS, AttentionShape
from lightseq.schedule.timing import RATES, Rates, kernel_seconds
from lightseq.utils.files import open_output, record_lines
from lightseq.utils.formatting import aligned

PROGRAM = "lightseq plan"
MAX_SEQUENCE_RANKS = 2048  # a schedule for this many ranks takes half a minute and 4 GB
HEADINGS = ("GPUs", "schedule", "head groups", "ulysses size", "ms", "TFLOP/s per GPU", "efficiency", "exposed ms")


def parser() -> Parser:
    out = Parser(prog=PROGRAM, description="Predicts one attention layer on clusters of different sizes.")
    out.add_argument("--attention", action="store_true", required=True, help="plan one attention layer, not a run")
    out.add_argument("--gpus", default="1,2,4,8,16,32,64", help="numbers of GPUs (default: %(default)s)")
    out.add_argument("--gpus_per_host", type=count_flag, default=8, help="GPUs per host (default: 8)")
    out.add_argument("--chip", default="h200", help=f"one of {', '.join(CHIPS)} (default: %(default)s)")
    out.add_argument("--length", default="128K", help="tokens per sequence, such as 131072, 128K or 1M (default: 128K)")
    out.add_argument("--heads", type=count_flag, default=32, help="query heads (default: 32)")
    out.add_argument("--kv_heads", type=count_flag, default=8, help="key/value heads (default: 8)")
    out.add_argument("--head_dim", type=count_flag, default=128, help="head dimension (default: 128)")
    out.add_argument("--schedules", default="all", help=f"all, or a list of {', '.join(SCHEDULES)}")
    out.add_argument("--output", type=Path, metavar="FILE", help="write the predictions to this JSONL file too")
    return out


def main(words: Sequence[str]) -> int:
    return run_command(lambda: _predict(parser().parse_args(words), f"{PROGRAM} {shlex.join(words)}"))


def _predict(args: argparse.Namespace, command: str) -> None:
    shape = AttentionShape(parse_tokens(args.length, "--length"), args.heads, args.kv_heads, args.head_dim)
    _check_shape(shape)
    gpus, schedules = _gpu_counts(args.gpus), _schedule_names(args.schedules)
    if args.gpus_per_host < 1:
        raise ValueError(f"--gpus_per_host {args.gpus_per_host}: give at least 1")
    chip = chip_named(args.chip)
    rates = {name: attention_rates(chip, name) for name in RATES} if chip is not MEASURED_ON else RATES
    header = {
        "plan": "attention",
        "command": command,
        **asdict(shape),
        "gpus_per_host": args.gpus_per_host,
        "rates_from": f"measured on {MEASURED_ON.device}, scaled by datasheets to {chip.device}",
        "rates": {name: asdict(value) for name, value in rates.items()},
    }
    records = list(predictions(shape, args.gpus_per_host, gpus, schedules, rates))
    if args.output is not None:
        _write(args.output, [header, *records])
    print("\n".join(_table(records)))
    print("*: the fastest for that number of GPUs")
    for record in filter(itemgetter("skipped"), records):
        print(f"left out for {record['gpus']} GPUs: {record['skipped']}")
    if args.output is not None:
        print(f"records  {args.output}")


def predictions(
    shape: AttentionShape,
    gpus_per_host: int,
    gpus: Sequence[int],
    schedules: Sequence[str],
    rates_by_transport: Mapping[str, Rates] = RATES,
) -> Iterator[dict[str, Any]]:
    """Yields a record for every number of GPUs and schedule, with its best sizes or the reason it is impossible.

    `fastest` marks the choice of training. Another one may be up to 0.2% faster, since head groups that save memory
    are preferred.
    """
    for count in gpus:
        transport = "symmetric" if count <= gpus_per_host else "nccl"
        rates = rates_by_transport[transport]
        options = {
            name: [
                ChoiceEstimate(choice, estimate_choice(choice, count, shape, rates, gpus_per_host))
                for choice in possible_choices(count, shape, ScheduleChoice(name))
            ]
            for name in schedules
        }
        possible = [option for of_schedule in options.values() for option in of_schedule]
        fastest = choose_best(possible, shape.kv_heads).choice if possible else None
        for name, of_schedule in options.items():
            found = choose_best(of_schedule, shape.kv_heads) if of_schedule else None
            record = {"gpus": count, "schedule": name, "transport": transport}
            record |= _figures(found, count, shape, rates)
            skipped = None if found else why_impossible(ScheduleChoice(name), count, shape)
            yield record | {"fastest": found is not None and found.choice == fastest, "skipped": skipped}


def _figures(found: ChoiceEstimate | None, gpus: int, shape: AttentionShape, rates: Rates) -> dict[str, Any]:
    """Returns sizes and times, all None if the schedule is impossible."""
    choice, estimate = found or (None, None)
    flops = (1 + BACKWARD_FLOPS) * 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim  # causal: half
    return {
        "head_groups": choice and (choice.head_groups or 1),
        "ulysses_size": choice and ulysses_group_size(choice.schedule, gpus, choice.ulysses_size),
        "seconds": estimate and estimate.seconds,
        "compute_seconds": estimate and estimate.compute_seconds,
        "exposed_communication_seconds": estimate and estimate.exposed_seconds,
        "memory_seconds": estimate and estimate.memory_seconds,
        "tflops_per_gpu": estimate and flops / gpus / estimate.seconds / 1e12,
        "efficiency": estimate and kernel_seconds(shape, rates) / gpus / estimate.seconds,
        "gathered_bytes": estimate and estimate.gathered_bytes,
    }


def _table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of possible schedules. A star marks the fastest for each number of GPUs."""
    rows = [_cells(r) for r in records if not r["skipped"]]
    return aligned([["", *HEADINGS], *rows], left=(0, 2))


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


def _write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replaces an earlier plan. Raises ValueError for any other file."""
    if path.is_file() and path.stat().st_size and not record_lines(path)[0].startswith('{"plan": '):
        raise ValueError(f"--output {path} exists and is not an attention plan; give another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_output(path) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def _schedule_names(text: str) -> list[str]:
    names = list(SCHEDULES) if text == "all" else text.split(",")
    for name in names:
        if name not in SCHEDULES:
            raise ValueError(f"--schedules {name!r} is unknown; give all, or choose from {', '.join(SCHEDULES)}")
    return list(dict.fromkeys(names))


def _gpu_counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,16}", word) and int(word) > 0 for word in words):
        raise ValueError(f"--gpus {text:.200} is not a list of positive numbers; write it like 1,2,4,8")
    counts = sorted({int(word) for word in words})
    if counts[-1] > MAX_SEQUENCE_RANKS:
        raise ValueError(f"--gpus {counts[-1]} are too many for one sequence; give at most {MAX_SEQUENCE_RANKS}")
    return counts


def _check_shape(shape: AttentionShape) -> None:
    if min(shape.heads, shape.kv_heads, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
        raise ValueError(
            f"--kv_heads {shape.kv_heads} does not divide --heads {shape.heads} (with --head_dim {shape.head_dim}); "
            "give positive numbers that divide"
        )
