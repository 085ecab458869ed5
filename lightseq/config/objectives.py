"""Objectives of training by their names in --objective, with their flags and their effects on other flags."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class ObjectiveFlags:
    """Facts about an objective that flags and the reading of data depend on."""

    own: tuple[str, ...] = ()  # flags that apply to it alone
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of other flags
    reads_pairs: bool = False  # rows hold a chosen and a rejected answer, and not a text, a chat or tokens
    shares_prefixes: bool = False  # its rows begin alike, so --share_prefixes defaults to trees


OBJECTIVES: Final[Mapping[str, ObjectiveFlags]] = {  # objectives/registry.py says what each is
    "next_token": ObjectiveFlags(),
    "dpo": ObjectiveFlags(("beta",), {"packing": "best_fit"}, reads_pairs=True, shares_prefixes=True),
    "distill": ObjectiveFlags(("teacher", "distill_kind", "distill_temperature", "distill_beta")),
}
# KL(teacher, student), KL(student, teacher), and a generalized Jensen-Shannon divergence (parts/divergence.py).
DIVERGENCES: Final = ("forward", "reverse", "jsd")
