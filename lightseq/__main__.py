"""Tools around training: python3 -m lightseq schedule --schedule balanced --ranks 8"""

import argparse
import sys
from collections.abc import Sequence

from lightseq.schedule import SCHEDULES, make_schedule
from lightseq.schedule_proof import validate
from lightseq.schedule_render import render


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lightseq", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("schedule", help="prove a schedule and draw its table")
    draw.add_argument("--schedule", required=True, help=", ".join(SCHEDULES))
    draw.add_argument("--ranks", type=int, required=True, help="ranks that share a sequence")
    draw.add_argument(
        "--head_groups", type=int, default=1, help="groups of heads that are fetched and computed one by one"
    )
    draw.add_argument("--ulysses_size", type=int, help="ranks that share a place of the sequence and split its heads")
    words = parser.parse_args(argv)
    try:
        schedule = make_schedule(words.schedule, words.ranks, words.head_groups, words.ulysses_size)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    validate(schedule)
    print(render(schedule))
    return 0


if __name__ == "__main__":
    sys.exit(main())
