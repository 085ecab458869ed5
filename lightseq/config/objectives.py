"""Objectives of training by the names of --objective, and the flags that exclude them."""

from typing import Final

from lightseq.config.all_flags import Flags

OBJECTIVES: Final = ("next_token", "dpo", "distill")  # objectives/registry.py says what each is
# KL(teacher, student), KL(student, teacher), and a generalized Jensen-Shannon divergence (parts/divergence.py).
DIVERGENCES: Final = ("forward", "reverse", "jsd")
FLAGS_OF: Final = {"dpo": ("beta",), "distill": ("teacher", "distill_kind", "distill_temperature", "distill_beta")}


def check_objective(config: Flags) -> None:
    """Raises ValueError for flags that do not work with the objective."""
    for objective, flags in FLAGS_OF.items():
        for flag in flags if config.objective != objective else ():
            if (value := getattr(config, flag)) != getattr(type(config), flag):
                given = f"--{flag} {value} applies to --objective {objective}, not {config.objective}"
                raise ValueError(f"{given}; leave it out")
    if config.share_prefixes:
        _check_share_prefixes(config)
    if config.objective == "dpo":
        _check_dpo(config)
    if config.objective == "distill":
        _check_distill(config)


def _check_distill(config: Flags) -> None:
    given = f"--objective {config.objective}"
    if not config.teacher:
        raise ValueError(f"{given} needs a teacher; add --teacher with its directory or Hub id")
    if config.deepspeed:
        raise ValueError(f"--deepspeed {config.deepspeed} does not work with {given}; leave it out")
    beta = config.distill_beta
    if beta != type(config).distill_beta and config.distill_kind != "jsd":
        raise ValueError(
            f"--distill_beta {beta} applies to --distill_kind jsd, not {config.distill_kind}; leave it out"
        )
    if not 0 < beta < 1:
        raise ValueError(
            f"--distill_beta {beta}: give a number above 0 and below 1, or --distill_kind forward or reverse"
        )


def _check_dpo(config: Flags) -> None:
    given = f"--objective {config.objective}"
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


def _check_share_prefixes(config: Flags) -> None:
    given = f"--share_prefixes {config.share_prefixes}"
    if config.packing == "none":
        raise ValueError(f"{given} applies to packed documents, but --packing is none; give best_fit")
    if config.deepspeed:
        raise ValueError(f"{given} does not work with --deepspeed {config.deepspeed}; leave one of them out")
    if config.objective == "distill":
        raise ValueError(f"{given} does not work with --objective distill; leave it out")
