"""Training flags of tools that need no data and no output directory."""

from collections.abc import Sequence
from typing import Final

from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig

NOWHERE: Final = "nowhere"  # stands for a path that is not given


def parse_with_optional_paths(argv: Sequence[str], program: str) -> TrainConfig:
    """Parses the flags of training. --data_path and --output_dir are NOWHERE if they are not given."""
    return parse(["--data_path", NOWHERE, "--output_dir", NOWHERE, *argv], program)
