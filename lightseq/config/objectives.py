"""Objectives of training by the names of --objective, and the flags that exclude them."""

from typing import Final

from lightseq.config.all_flags import Flags

OBJECTIVES: Final = ("next_token", "dpo")  # objectives/registry.py says what each is
# KL(teacher, student), KL(student, teacher), and a generalized Jensen-Shannon divergence (parts/divergence.py).
DIVERGENCES: Final = ("forward", "reverse", "jsd")


def check_objective(config: Flags) -> None:
    """Raises ValueError for flags that do not work with the objective."""
    given = f"--objective {config.objective}"
    if config.objective != "dpo":
        if config.beta != type(config).beta:
            raise ValueError(f"--beta {config.beta} applies to --objective dpo, not {config.objective}; leave it out")
        return
    if config.packing == "none":
        raise ValueError(f"{given} packs both answers of a pair into one row, but --packing is none; give best_fit")
    for flag in ("deepspeed", "lazy_preprocess"):
        if value := getattr(config, flag):
            raise ValueError(f"--{flag} {value} does not work with {given}; leave it out")
    if config.lora_adapter is not None:
        raise ValueError(
            f"{given} compares with the base model without adapters, not with --lora_adapter {config.lora_adapter}; "
            "merge it with `lightseq merge`, and start from the merged model"
        )
