"""The objectives by the names of --objective."""

from collections.abc import Callable, Mapping
from typing import Final

from lightseq.config.all_flags import Flags
from lightseq.objectives.distillation import Distillation
from lightseq.objectives.next_token import NextToken
from lightseq.objectives.objective import Objective
from lightseq.objectives.preferences import Preferences
from lightseq.parts.divergence import Divergence

OBJECTIVES: Final[Mapping[str, Callable[[Flags], Objective]]] = {
    "next_token": lambda _: NextToken(),
    "dpo": lambda flags: Preferences(flags.beta, has_adapters=flags.lora_rank is not None),
    "distill": lambda flags: Distillation(
        str(flags.teacher), Divergence(flags.distill_kind, flags.distill_beta, flags.distill_temperature)
    ),
}


def objective_of(flags: Flags) -> Objective:
    """Returns the objective of a run with these flags."""
    return OBJECTIVES[flags.objective](flags)
