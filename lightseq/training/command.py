"""Entry point of training. Imports torch and transformers only for a run, so that --help is instant."""

import sys
from collections.abc import Sequence

from lightseq.config.command_line import help_text, print_help_if_asked
from lightseq.config.parser import print_error
from lightseq.distributed.environment import is_main_process, set_up_process
from lightseq.distributed.job_launchers import adopt_launcher
from lightseq.distributed.rank_launcher import INTERRUPTED
from lightseq.models.presets import ModelFamily
from lightseq.utils.process import without_collection
from lightseq.utils.versions import check_transformers


def main(family: ModelFamily, argv: Sequence[str] | None = None) -> int:
    """Runs `lightseq train`, llama2/train.py and llama3/train.py.

    Returns 130 after Ctrl-C, but 0 if a launcher started this process: it would report a failure. Exits with status 2
    and one line on invalid input.
    """
    set_up_process()
    is_rank = adopt_launcher()
    argv = list(sys.argv[1:] if argv is None else argv)
    program = family.command
    if print_help_if_asked(argv, lambda: help_text(program, starts_ranks=bool(family.program))):
        return 0
    try:
        check_transformers()
    except ImportError as error:
        sys.exit(print_error(error) if is_main_process() else 2)
    with without_collection():
        from lightseq.training.train import train  # takes seconds to import

    stopped_by = train(family, argv, program)
    return INTERRUPTED if stopped_by == "SIGINT" and not is_rank else 0
