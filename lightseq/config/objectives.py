"""Objectives of training by the names of --objective, and their flags."""

from typing import Final

OBJECTIVES: Final = ("next_token", "dpo", "distill")  # objectives/registry.py says what each is
# KL(teacher, student), KL(student, teacher), and a generalized Jensen-Shannon divergence (parts/divergence.py).
DIVERGENCES: Final = ("forward", "reverse", "jsd")
FLAGS_OF: Final = {"dpo": ("beta",), "distill": ("teacher", "distill_kind", "distill_temperature", "distill_beta")}
