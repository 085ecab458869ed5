"""Every part of a model, in the order in which training fits them."""

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from lightseq.parts import attention, experts, mlp, recurrences
from lightseq.parts.changes import Changes
from lightseq.parts.part import Choices, Part, Ranks

PARTS: Final[tuple[Part, ...]] = (attention.PART, recurrences.PART, mlp.PART, experts.PART)
STORED_OPS: Final[tuple[Any, ...]] = tuple(op for part in PARTS for op in part.stored)


def fit(modules: Sequence[nn.Module], choices: Choices, ranks: Ranks, changes: Changes) -> None:
    """Replaces the computation of modules, such as decoder layers, by the choices, spanning the ranks.

    Serves training, `hf.enable`, the plan and the run on the meta device, so that all of them see the same modules.
    Raises ValueError for modules that do not support a choice.
    """
    for part in PARTS:
        part.fit(modules, choices, ranks, changes)
