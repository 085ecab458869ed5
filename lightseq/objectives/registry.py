"""The objectives by the names of --objective."""

from collections.abc import Callable, Mapping
from typing import Final

from lightseq.config.all_flags import Flags
from lightseq.objectives.next_token import NextToken
from lightseq.objectives.objective import Objective
from lightseq.objectives.preferences import Preferences

OBJECTIVES: Final[Mapping[str, Callable[[Flags], Objective]]] = {
    "next_token": lambda _: NextToken(),
    "dpo": lambda flags: Preferences(flags.beta, has_adapters=flags.lora_rank is not None),
}


def objective_of(flags: Flags) -> Objective:
    """Returns what a run with these flags learns."""
    return OBJECTIVES[flags.objective](flags)
