"""Validates a schedule and draws its table: lightseq schedule --schedule balanced --ranks 8

With rows that share prefixes it draws their tokens: lightseq schedule --schedule prefix --ranks 2 --rows abcde,abcdf
"""

from collections.abc import Sequence
from typing import Final

from lightseq.config.parser import Parser, count_flag, run_command, whole_number
from lightseq.models.presets import ModelFamily
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.render import render

MOST_RANKS: Final = 512  # validating takes time quadratic in the ranks, and minutes beyond this


def ranks(text: str) -> int:
    """Parses a number of ranks for argparse."""
    return whole_number(text, MOST_RANKS)


def parser() -> Parser:
    out = Parser(prog="lightseq schedule", description="Validates a schedule and draws its table.")
    out.add_argument("--schedule", required=True, help=", ".join(SCHEDULES))
    out.add_argument("--ranks", type=ranks, required=True, help=f"ranks that share a sequence, at most {MOST_RANKS}")
    out.add_argument(
        "--head_groups",
        type=count_flag,
        default=1,
        help="groups of heads that are computed one after the other (default: 1)",
    )
    out.add_argument(
        "--ulysses_size",
        type=count_flag,
        help="ranks that split the heads among them (a Ulysses group) and work on the same chunks",
    )
    out.add_argument(
        "--rows",
        metavar="ABC,ABD,...",
        help="rows that share prefixes, a letter for each token: draws which rank computes which pair of them",
    )
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return run_command(lambda: _draw(words))


def _draw(words: Sequence[str]) -> None:
    args = parser().parse_args(words)
    from lightseq.schedule.proof import validate  # imports torch, which takes seconds

    schedule = make_schedule(args.schedule, args.ranks, args.head_groups, args.ulysses_size)
    if args.rows is None:
        validate(schedule)
        print(render(schedule))
        return
    from lightseq.tools.token_drawing import draw_rows

    print(draw_rows(schedule, args.rows.split(",")))
