"""Training flags of tools that need no data, or no output directory."""

from collections.abc import Sequence
from typing import Any

from lightseq.config.command_line import REQUIRED_BY_TOOLS, parse
from lightseq.config.train_config import TrainConfig


def parse_with_optional_paths(argv: Sequence[str], program: str) -> TrainConfig:
    """Parses the flags of training. --data_path and --output_dir are empty if they are not given."""
    return parse(argv, program, REQUIRED_BY_TOOLS)


def recorded_flags(config: TrainConfig) -> dict[str, Any]:
    """Returns every flag for a record, with None for a path that was not given."""
    missing = {name: None for name in ("data_path", "output_dir") if not getattr(config, name)}
    return {**config.to_json(), **missing}
