"""The training program's entry: help comes at once, and torch and transformers are imported for a run alone."""

import sys
from collections.abc import Sequence

from lightseq.config.command_line import help_text, shows_help
from lightseq.distributed.environment import set_up_process
from lightseq.models.presets import ModelFamily


def main(family: ModelFamily, argv: Sequence[str] | None = None) -> int:
    """Runs `python3 -m lightseq train`, llama2/train.py and llama3/train.py.

    Exits 2, with one line, on input that it refuses.
    """
    set_up_process()
    words = list(sys.argv[1:] if argv is None else argv)
    program = family.program or f"{family.name}/train.py"
    if shows_help(words, lambda: help_text(program)):
        return 0
    from lightseq.training.train import train  # takes seconds

    train(family, words, program)
    return 0
