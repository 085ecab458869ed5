"""Checks of flags, alone and in combination. An error is one line with the value and the remedy."""

import math
from collections.abc import Callable
from typing import Any, Final

from lightseq.config.all_flags import FSDP_MODES, Flags, fsdp_words
from lightseq.config.choices import (
    ADAM_FLAGS,
    AT_LEAST_ONE,
    AT_MOST,
    CHOICES,
    DECAY_RATES,
    FOLLOW_A_METRIC,
    LR_SCHEDULES,
    NOT_NEGATIVE,
    POSITIVE,
)
from lightseq.config.objectives import OBJECTIVES
from lightseq.config.remat_policies import STORES_MLP

FSDP_REFUSED: Final = {
    "shard_grad_op": "the planner keeps gathered parameters for the backward pass where they fit",
    "offload": "use --offload optimizer",
}
ADAPTER_FLAGS: Final = (
    *("lora_alpha", "use_rslora", "loraplus_lr_ratio", "lora_adapter", "lora_target_modules"),
    *("lora_target_parameters", "load_in_4bit"),
)
Condition = Callable[[Flags], Any]


def _trains_by(objective: str) -> Condition:
    return lambda c: c.objective == objective


def _trains_not_by(objective: str) -> Condition:
    return lambda c: c.objective != objective


# Flags that may not be given while a condition holds, and the rest of the error; `c` is the config.
NOT_WITH: Final[tuple[tuple[tuple[str, ...], Condition, str], ...]] = (
    (("profile_memory",), lambda c: c.profile_steps is None, "records the steps of --profile_steps; give both"),
    (("fp8_emulate",), lambda c: not c.fp8, "needs --fp8; add it, or leave --fp8_emulate out"),
    (ADAM_FLAGS, lambda c: c.optim == "sgd", "applies to AdamW, not to --optim sgd; leave one of them out"),
    (
        ("host_memory_budget",),
        lambda c: c.offload not in ("activations", "both", "auto"),
        "limits offloaded activations, but --offload is {c.offload}; add --offload activations",
    ),
    (
        ("device_memory_budget",),
        lambda c: c.offload != "auto",
        "applies to --offload auto, but --offload is {c.offload}; add --offload auto, or leave it out",
    ),
    (
        ("host_memory_budget", "device_memory_budget"),
        lambda c: c.deepspeed and c.offload == "auto",
        "limits a memory plan, which --deepspeed does not have; leave it out, or give --host_memory_budget with "
        "--offload activations",
    ),
    (
        ("scaling_factor", "scaling_strategy"),
        lambda c: c.model_name_or_path != "scaled",
        "applies to --model_name_or_path scaled, not to {c.model_name_or_path}; leave one of them out",
    ),
    (
        ("fp8", "lora_rank", "tile_layers"),
        lambda c: c.deepspeed,
        "does not run under --deepspeed; leave one of them out",
    ),
    (ADAPTER_FLAGS, lambda c: c.lora_rank is None, "needs adapters; add --lora_rank"),
    (("fp8",), lambda c: c.lora_rank, "and --lora_rank {c.lora_rank} both replace the linear layers; leave one out"),
    *(
        (objective.own, _trains_not_by(name), f"applies to --objective {name}, not {{c.objective}}; leave it out")
        for name, objective in OBJECTIVES.items()
    ),
    (
        ("distill_beta",),
        lambda c: c.distill_kind != "jsd",
        "applies to --distill_kind jsd, not {c.distill_kind}; leave it out",
    ),
    (
        ("deepspeed", "share_prefixes"),
        _trains_by("distill"),
        "does not work with --objective distill; leave it out",
    ),
    (("deepspeed", "lazy_preprocess"), _trains_by("dpo"), "does not work with --objective dpo; leave it out"),
    (("share_prefixes",), lambda c: c.deepspeed, "does not work with --deepspeed {c.deepspeed}; leave one of them out"),
    (
        ("share_prefixes",),
        lambda c: c.packing == "none",
        "applies to packed documents, but --packing is none; give best_fit",
    ),
    (
        ("lora_adapter",),
        _trains_by("dpo"),
        "does not work with --objective dpo, which compares with the base model without adapters; merge it with "
        "`lightseq merge`, and start from the merged model",
    ),
    (
        ("per_device_train_batch_size", "per_device_eval_batch_size"),
        lambda c: c.packing != "none",
        "does not work with --packing {c.packing}, which needs batches of one sequence; give 1, and raise "
        "--model_max_length or --gradient_accumulation_steps instead",
    ),
    (
        ("max_eval_samples",),
        lambda c: c.eval_fraction is not None,
        "limits --eval_data_path, not --eval_fraction {c.eval_fraction}; lower the fraction instead",
    ),
    (
        ("early_stopping_threshold",),
        lambda c: c.early_stopping_patience is None,
        "needs --early_stopping_patience; add it",
    ),
    (("sample_max_new_tokens",), lambda c: c.sample_prompts is None, "needs prompts; add --sample_prompts"),
)

# Other combinations that are refused, and the error.
REFUSED: Final[tuple[tuple[Condition, str], ...]] = (
    (
        lambda c: (
            (c.fused_attention is True and c.kernel == "reference")
            or (c.fused_attention is False and c.kernel not in ("auto", "reference"))
        ),
        "--fused_attention {c.fused_attention} contradicts --kernel {c.kernel}; leave one of them out",
    ),
    (lambda c: c.bf16 and c.fp16, "--bf16 and --fp16 exclude each other; give one, or neither for float32"),
    (lambda c: c.fp8 and c.fp16, "--fp8 {c.fp8} needs bfloat16, not --fp16; add --bf16"),
    (lambda c: c.fp8 and not c.bf16, "--fp8 {c.fp8} needs bfloat16, not float32; add --bf16"),
    (lambda c: c.warmup_ratio > 1, "--warmup_ratio {c.warmup_ratio}: give a share of all steps between 0 and 1"),
    (
        lambda c: c.warmup_ratio and c.warmup_steps,
        "--warmup_ratio {c.warmup_ratio} and --warmup_steps {c.warmup_steps} both set the warm-up; give one",
    ),
    (
        lambda c: c.lr_scheduler_type == "constant" and (c.warmup_ratio or c.warmup_steps),
        "--lr_scheduler_type constant has no warm-up; choose constant_with_warmup, or leave it out",
    ),
    (
        lambda c: c.gradient_checkpointing is not None and c.remat not in (None, _implied_policy(c)),
        "--gradient_checkpointing {c.gradient_checkpointing} and --remat {c.remat} contradict each other; give one",
    ),
    (
        lambda c: c.remat_policy == "none" and c.tiles_layers,
        "--tile_layers recomputes layers, but --remat none was given too; give --remat attention or full",
    ),
    (
        lambda c: c.remat_policy == "none" and c.group_size > 1,
        "--layers_per_checkpoint {c.group_size} recomputes layers, but --remat none was given too; give --remat "
        "attention or full",
    ),
    (
        lambda c: c.remat in STORES_MLP and c.tiles_layers,
        "--remat {c.remat} stores activations of the MLP, which --tile_layers does not support; give --remat attention",
    ),
    (
        lambda c: c.remat in STORES_MLP and c.fp8,
        "--remat {c.remat} stores activations of the MLP, which --fp8 {c.fp8} does not support; give --remat attention",
    ),
    (
        lambda c: c.deepspeed and c.fsdp != type(c).fsdp,
        "--deepspeed {c.deepspeed} and --fsdp {c.fsdp!r} both shard the weights; give one",
    ),
    (
        lambda c: c.deepspeed and c.optim not in ("adamw_torch", "adamw_torch_fused", "sgd"),
        "--optim {c.optim} does not run under --deepspeed; use adamw_torch_fused",
    ),
    (
        lambda c: c.deepspeed and c.group_size > 1,
        "--layers_per_checkpoint {c.group_size} does not run under --deepspeed; leave one of them out",
    ),
    (
        lambda c: c.deepspeed and c.state_on_host,
        "--offload {c.offload} does not run under --deepspeed; set offload_optimizer in {c.deepspeed}, and use "
        "--offload activations for activations",
    ),
    (
        lambda c: c.expert_ranks > 1 and c.load_in_4bit,
        "--expert_parallel_size {c.expert_ranks} does not run with --load_in_4bit True; give 1, or leave one of them "
        "out",
    ),
    (
        lambda c: c.expert_ranks > 1 and c.deepspeed,
        "--expert_parallel_size {c.expert_ranks} does not run under --deepspeed; leave one of them out",
    ),
    (
        lambda c: c.expert_ranks > 1 and c.fsdp_mode != "full_shard",
        "--expert_parallel_size {c.expert_ranks} needs --fsdp full_shard, not {c.fsdp!r}",
    ),
    (
        lambda c: c.expert_ranks > 1 and c.state_on_host,
        "--expert_parallel_size {c.expert_ranks} keeps experts on the GPU, but --offload is {c.offload}; use "
        "activations or none",
    ),
    (
        lambda c: c.objective == "distill" and not c.teacher,
        "--objective distill needs a teacher; add --teacher with its directory or Hub id",
    ),
    (
        lambda c: not 0 < c.distill_beta < 1,
        "--distill_beta {c.distill_beta}: give a number above 0 and below 1, or --distill_kind forward or reverse",
    ),
    (
        lambda c: c.objective == "dpo" and c.packing == "none",
        "--objective dpo packs both answers of a pair into one row, but --packing is none; give best_fit",
    ),
    (
        lambda c: c.eval_fraction is not None and not 0 < c.eval_fraction < 1,
        "--eval_fraction {c.eval_fraction}: give a share above 0 and below 1, or leave it out",
    ),
    (
        lambda c: c.eval_fraction is not None and c.eval_data_path,
        "--eval_fraction {c.eval_fraction} and --eval_data_path {c.eval_data_path} both give evaluation data; give one",
    ),
    (
        lambda c: c.eval_strategy != "no" and not c.eval_data_path and c.eval_fraction is None,
        "--eval_strategy {c.eval_strategy} needs data; add --eval_fraction, or --eval_data_path",
    ),
    (
        lambda c: c.eval_steps is not None and c.eval_schedule == "no" and not c.eval_data_path,
        "--eval_steps {c.eval_steps} needs data; add --eval_fraction, or --eval_data_path",
    ),
    (
        lambda c: c.eval_data_path and c.eval_strategy == "no",
        "--eval_data_path {c.eval_data_path} is not used because --eval_strategy is no; add --eval_strategy steps, or "
        "leave it out",
    ),
    (
        lambda c: c.early_stopping_patience is not None and c.eval_schedule == "no",
        "--early_stopping_patience {c.early_stopping_patience} needs evaluations; add --eval_fraction, or "
        "--eval_data_path and --eval_strategy",
    ),
)


def _implied_policy(config: Flags) -> str:
    return "attention" if config.gradient_checkpointing else "none"


def check(config: Flags) -> None:
    """Raises ValueError for the first check that fails."""
    _check_choices(config)
    _check_numbers(config)
    _check_fsdp(config)
    for condition, text in REFUSED:
        if condition(config):
            raise ValueError(text.format(c=config))
    for flags, condition, text in NOT_WITH:
        for flag in flags:
            value = getattr(config, flag)
            if value != _default(config, flag) and value is not False and condition(config):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ValueError(f"--{flag} {shown} {text.format(c=config)}")
    if config.retains_best:
        _check_retains_best(config)


def _default(config: Flags, flag: str) -> Any:
    """Returns the default of a flag, which dataclasses store on the class."""
    return getattr(type(config), flag)


def _check_choices(config: Flags) -> None:
    if config.lr_scheduler_type in FOLLOW_A_METRIC:
        given = f"--lr_scheduler_type {config.lr_scheduler_type} follows the loss instead of the step"
        raise ValueError(f"{given} and is not supported; choose from {', '.join(LR_SCHEDULES)}")
    for flag in CHOICES:
        value = getattr(config, flag)
        if value is not None and value not in CHOICES[flag]:
            planned = config.__dataclass_fields__[flag].metadata.get("default") == "auto"
            choices = ", ".join([*CHOICES[flag], *(["auto"] if planned and "auto" not in CHOICES[flag] else [])])
            raise ValueError(f"--{flag} {value!r} is unknown; choose from {choices}")


def _check_numbers(config: Flags) -> None:
    bounds: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
        (AT_LEAST_ONE, "give at least 1", lambda value: value >= 1),
        (POSITIVE, "give a number above 0", lambda value: 0 < value < math.inf),
        (NOT_NEGATIVE, "give a finite number of at least 0", lambda value: 0 <= value < math.inf),
        (DECAY_RATES, "give a number from 0 to below 1", lambda value: 0 <= value < 1),
    )
    for flags, remedy, is_within in bounds:
        for flag in flags:
            value = getattr(config, flag)
            if value is not None and not is_within(value):
                optional = ", or leave it out" if _default(config, flag) is None else ""
                raise ValueError(f"--{flag} {value}: {remedy}{optional}")
    for flag, most in AT_MOST.items():
        if (value := getattr(config, flag)) is not None and value > most:
            raise ValueError(f"--{flag} {value}: give at most {most:,}")
    if config.profile_steps is not None and not 1 <= config.profile_steps[0] <= config.profile_steps[1]:
        first, last = config.profile_steps
        raise ValueError(f"--profile_steps {first}:{last}: give first:last with 1 <= first <= last, such as 10:12")


def _check_fsdp(config: Flags) -> None:
    words = fsdp_words(config.fsdp)
    for word in words:
        if word in FSDP_REFUSED:
            raise ValueError(f"--fsdp {word} is refused: {FSDP_REFUSED[word]}; choose from {', '.join(FSDP_MODES)}")
        if word not in (*FSDP_MODES, "auto_wrap"):
            raise ValueError(f'--fsdp {word!r} is unknown; choose from {", ".join(FSDP_MODES)}, or "" for DDP')
    if words and sum(word in FSDP_MODES for word in words) != 1:
        raise ValueError(f"--fsdp {config.fsdp!r} is unknown; choose from {', '.join(FSDP_MODES)}")


def _check_retains_best(config: Flags) -> None:
    """Raises ValueError unless every checkpoint has the evaluation loss of its own step."""
    given = "--keep_best" if config.keep_best else f"--early_stopping_patience {config.early_stopping_patience}"
    reason, schedule = f"{given} needs an evaluation at every checkpoint", config.eval_schedule
    if "no" in (schedule, config.save_strategy) or schedule != config.save_strategy:
        both = f"--eval_strategy is {schedule} and --save_strategy is {config.save_strategy}"
        raise ValueError(f"{reason}, but {both}; set both to steps, or both to epoch")
    if schedule == "steps" and config.save_steps % config.steps_per_evaluation:
        steps = f"--save_steps {config.save_steps} is not a multiple of --eval_steps {config.steps_per_evaluation}"
        raise ValueError(f"{reason}, but {steps}; make it one")
