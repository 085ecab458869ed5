"""Checks of flags, alone and in combination. An error is one line with the value and the remedy."""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from lightseq.config.all_flags import FSDP_MODES, Flags, fsdp_words
from lightseq.config.lengths import MAX_TOKENS
from lightseq.config.objectives import DIVERGENCES, OBJECTIVES, check_objective
from lightseq.config.optimizers import OPTIMIZERS
from lightseq.config.recurrent_schedules import RECURRENT_SCHEDULES
from lightseq.config.remat_policies import POLICIES, STORES_MLP
from lightseq.kernels.attention.registry import KERNELS
from lightseq.schedule.algorithms import SCHEDULES

AUTO: Final[dict[str, Any]] = {"auto": None}  # extends the names of a registry, which may grow at run time
LR_SCHEDULES: Final = (  # of transformers, which takes seconds to import
    *("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
)
FOLLOW_A_METRIC: Final = ("reduce_lr_on_plateau", "greedy")  # schedules of transformers without a rate per step

CHOICES: Final[Mapping[str, Collection[str]]] = {
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
    "report_to": ("none", "tensorboard", "wandb", "mlflow", "trackio", "comet_ml"),
    "optim": OPTIMIZERS,
    "lr_scheduler_type": LR_SCHEDULES,
    "schedule": ChainMap(SCHEDULES, AUTO),
    "recurrent_schedule": RECURRENT_SCHEDULES,
    "kernel": ChainMap(KERNELS, AUTO),
    "transport": (
        *("auto", "nccl", "gloo", "symmetric"),
        *("auto-blocking", "nccl-blocking", "gloo-blocking", "symmetric-blocking"),
        *("auto-unrecorded", "symmetric-unrecorded"),
    ),
    "fp8": ("tensorwise", "rowwise"),
    "remat": POLICIES,
    "scaling_strategy": ("all", "n_layers"),
    "offload": ("none", "activations", "optimizer", "both", "auto"),
    "packing": ("none", "best_fit"),
    "objective": OBJECTIVES,
    "distill_kind": DIVERGENCES,
}

FSDP_REFUSED: Final[Mapping[str, str]] = {
    "shard_grad_op": "the planner keeps gathered parameters for the backward pass where they fit",
    "offload": "use --offload optimizer",
}

AT_LEAST_ONE: Final = (
    *("max_steps", "eval_steps", "save_steps", "save_total_limit", "logging_steps", "model_max_length"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("sequence_parallel_size", "expert_parallel_size", "ulysses_size", "layers_per_checkpoint", "lora_rank"),
    *("scaling_factor", "max_train_samples", "max_eval_samples", "early_stopping_patience", "sample_max_new_tokens"),
)
POSITIVE: Final = (
    *("num_train_epochs", "lora_alpha", "loraplus_lr_ratio", "rope_theta", "step_timeout"),
    *("host_memory_budget", "device_memory_budget", "adam_epsilon", "beta", "distill_temperature"),
)
AT_MOST: Final[Mapping[str, float]] = {
    **dict.fromkeys(
        ("max_steps", "warmup_steps", "eval_steps", "save_steps", "save_total_limit", "logging_steps"), 10**9
    ),
    **dict.fromkeys(("num_train_epochs", "step_timeout", "scaling_factor", "layers_per_checkpoint"), 10**6),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 10**6),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "sequence_parallel_size", "expert_parallel_size", "ulysses_size", "lora_rank"),
        10**6,
    ),
    "early_stopping_patience": 10**6,
    "model_max_length": MAX_TOKENS,
}
NOT_NEGATIVE: Final = (
    "max_grad_norm",
    "router_aux_loss_coef",
    "router_bias_update_rate",
    "learning_rate",
    "weight_decay",
    "warmup_ratio",
    "warmup_steps",
    "seed",
    "early_stopping_threshold",
)
DECAY_RATES: Final = ("adam_beta1", "adam_beta2")
ADAM_FLAGS: Final = (*DECAY_RATES, "adam_epsilon")


def check(config: Flags) -> None:
    """Raises ValueError for the first check that fails."""
    for check_flags in CHECKS:
        check_flags(config)


def _default(config: Flags, flag: str) -> Any:
    """Returns the default of a flag, which dataclasses store on the class."""
    return getattr(type(config), flag)


def _check_choices(config: Flags) -> None:
    for flag in CHOICES:
        value = getattr(config, flag)
        if value is not None and value not in CHOICES[flag]:
            planned = config.__dataclass_fields__[flag].metadata.get("default") == "auto"
            choices = ", ".join([*CHOICES[flag], *(["auto"] if planned and "auto" not in CHOICES[flag] else [])])
            raise ValueError(f"--{flag} {value!r} is unknown; choose from {choices}")


def _check_lr_scheduler_type(config: Flags) -> None:
    if config.lr_scheduler_type in FOLLOW_A_METRIC:
        given = f"--lr_scheduler_type {config.lr_scheduler_type} follows the loss instead of the step"
        raise ValueError(f"{given} and is not supported; choose from {', '.join(LR_SCHEDULES)}")


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
    if config.profile_memory and config.profile_steps is None:
        raise ValueError("--profile_memory records the steps of --profile_steps; give both")


def _check_packing(config: Flags) -> None:
    for flag in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        count = getattr(config, flag)
        if config.packing != "none" and count != 1:
            remedy = "give 1, and raise --model_max_length or --gradient_accumulation_steps instead"
            raise ValueError(
                f"--packing {config.packing} needs batches of one sequence, not --{flag} {count}; {remedy}"
            )


def _check_scaling(config: Flags) -> None:
    for flag in ("scaling_factor", "scaling_strategy"):
        if getattr(config, flag) != _default(config, flag) and config.model_name_or_path != "scaled":
            given = f"--{flag} {getattr(config, flag)} applies to --model_name_or_path scaled"
            raise ValueError(f"{given}, not to {config.model_name_or_path}; leave one of them out")


def _check_fused_attention(config: Flags) -> None:
    fused, kernel = config.fused_attention, config.kernel
    if (fused is True and kernel == "reference") or (fused is False and kernel not in ("auto", "reference")):
        raise ValueError(f"--fused_attention {fused} contradicts --kernel {kernel}; leave one of them out")


def _check_precision(config: Flags) -> None:
    if config.bf16 and config.fp16:
        raise ValueError("--bf16 and --fp16 exclude each other; give one, or neither for float32")
    if config.fp8 and not config.bf16:
        given = "--fp16" if config.fp16 else "float32"
        raise ValueError(f"--fp8 {config.fp8} needs bfloat16, not {given}; add --bf16")
    if config.fp8_emulate and not config.fp8:
        raise ValueError("--fp8_emulate needs --fp8; add it, or leave --fp8_emulate out")


def _check_optimizer(config: Flags) -> None:
    for flag in ADAM_FLAGS:
        value = getattr(config, flag)
        if config.optim == "sgd" and value != _default(config, flag):
            raise ValueError(f"--{flag} {value} applies to AdamW, not to --optim sgd; leave one of them out")


def _check_learning_rate(config: Flags) -> None:
    if config.warmup_ratio > 1:
        raise ValueError(f"--warmup_ratio {config.warmup_ratio}: give a share of all steps between 0 and 1")
    if config.warmup_ratio and config.warmup_steps:
        given = f"--warmup_ratio {config.warmup_ratio} and --warmup_steps {config.warmup_steps}"
        raise ValueError(f"{given} both set the warm-up; give one")
    if config.lr_scheduler_type == "constant" and (config.warmup_ratio or config.warmup_steps):
        raise ValueError("--lr_scheduler_type constant has no warm-up; choose constant_with_warmup, or leave it out")


def _check_fsdp(config: Flags) -> None:
    words = fsdp_words(config.fsdp)
    for word in words:
        if word in FSDP_REFUSED:
            raise ValueError(f"--fsdp {word} is refused: {FSDP_REFUSED[word]}; choose from {', '.join(FSDP_MODES)}")
        if word not in (*FSDP_MODES, "auto_wrap"):
            raise ValueError(f'--fsdp {word!r} is unknown; choose from {", ".join(FSDP_MODES)}, or "" for DDP')
    if words and sum(word in FSDP_MODES for word in words) != 1:
        raise ValueError(f"--fsdp {config.fsdp!r} is unknown; choose from {', '.join(FSDP_MODES)}")


def _check_deepspeed(config: Flags) -> None:
    if config.deepspeed is None:
        return
    if config.fsdp != _default(config, "fsdp"):
        raise ValueError(f"--deepspeed {config.deepspeed} and --fsdp {config.fsdp!r} both shard the weights; give one")
    if config.optim not in ("adamw_torch", "adamw_torch_fused", "sgd"):
        raise ValueError(f"--optim {config.optim} does not run under --deepspeed; use adamw_torch_fused")
    grouped = config.layers_per_checkpoint if config.group_size > 1 else None
    for flag, value in {
        "fp8": config.fp8, "lora_rank": config.lora_rank, "tile_layers": config.tile_layers,
        "layers_per_checkpoint": grouped,
    }.items():  # fmt: skip
        if value:
            raise ValueError(f"--{flag} {value} does not run under --deepspeed; leave one of them out")
    if config.offload in ("optimizer", "both"):
        raise ValueError(
            f"--offload {config.offload} does not run under --deepspeed; set offload_optimizer in {config.deepspeed}, "
            "and use --offload activations for activations"
        )


def _check_expert_parallelism(config: Flags) -> None:
    if config.expert_ranks == 1:
        return
    given = f"--expert_parallel_size {config.expert_parallel_size}"
    if config.load_in_4bit:
        raise ValueError(f"{given} does not run with --load_in_4bit True; give 1, or leave one of them out")
    if config.deepspeed is not None:
        raise ValueError(f"{given} does not run under --deepspeed; leave one of them out")
    if config.fsdp_mode != "full_shard":
        raise ValueError(f"{given} needs --fsdp full_shard, not {config.fsdp!r}")
    if config.offload in ("optimizer", "both"):
        raise ValueError(
            f"{given} keeps experts on the GPU, but --offload is {config.offload}; use activations or none"
        )


OF_ADAPTERS: Final = (
    *("lora_alpha", "use_rslora", "loraplus_lr_ratio", "lora_adapter", "lora_target_modules"),
    *("lora_target_parameters", "load_in_4bit"),
)


def _check_lora(config: Flags) -> None:
    if config.lora_rank is None:
        for flag in OF_ADAPTERS:
            if getattr(config, flag) != _default(config, flag):
                raise ValueError(f"--{flag} {getattr(config, flag)} needs adapters; add --lora_rank")
        return
    if config.fp8:
        given = f"--lora_rank {config.lora_rank} and --fp8 {config.fp8}"
        raise ValueError(f"{given} both replace the linear layers; leave one of them out")


def _check_remat(config: Flags) -> None:
    implied = {None: config.remat, True: "attention", False: "none"}[config.gradient_checkpointing]
    if config.remat is not None and config.remat != implied:
        given = f"--gradient_checkpointing {config.gradient_checkpointing}"
        raise ValueError(f"{given} means --remat {implied}, but --remat {config.remat} was given too; give one")
    if config.remat_policy == "none" and (config.group_size > 1 or config.tiles_layers):
        given = "--tile_layers" if config.tiles_layers else f"--layers_per_checkpoint {config.group_size}"
        raise ValueError(f"{given} recomputes layers, but --remat none was given too; give --remat attention or full")
    if config.remat in STORES_MLP and (config.tiles_layers or config.fp8):
        given = "--tile_layers" if config.tiles_layers else f"--fp8 {config.fp8}"
        raise ValueError(
            f"--remat {config.remat} stores activations of the MLP, which {given} does not support; "
            "give --remat attention"
        )


def _check_offload(config: Flags) -> None:
    if config.host_memory_budget is not None and config.offload not in ("activations", "both", "auto"):
        given = f"--host_memory_budget {config.host_memory_budget:g} limits offloaded activations"
        raise ValueError(f"{given}, but --offload is {config.offload}; add --offload activations")
    if config.device_memory_budget is not None and config.offload != "auto":
        given = f"--device_memory_budget {config.device_memory_budget:g} applies to --offload auto"
        raise ValueError(f"{given}, but --offload is {config.offload}; add --offload auto, or leave it out")
    for flag in ("host_memory_budget", "device_memory_budget"):
        value = getattr(config, flag)
        if config.deepspeed and config.offload == "auto" and value is not None:
            raise ValueError(
                f"--{flag} {value:g} limits a memory plan, which --deepspeed does not have; leave it out, or give "
                "--host_memory_budget with --offload activations"
            )


def _check_evaluation(config: Flags) -> None:
    if config.eval_fraction is not None:
        _check_eval_fraction(config)
    if config.keep_best:
        _check_retains_best(config, "--keep_best")
    if config.eval_strategy != "no" and not config.eval_data_path and config.eval_fraction is None:
        raise ValueError(f"--eval_strategy {config.eval_strategy} needs data; add --eval_fraction, or --eval_data_path")
    if config.eval_steps is not None and config.eval_schedule == "no" and not config.eval_data_path:
        raise ValueError(f"--eval_steps {config.eval_steps} needs data; add --eval_fraction, or --eval_data_path")
    if config.eval_data_path and config.eval_strategy == "no":
        given = f"--eval_data_path {config.eval_data_path} is not used because --eval_strategy is no"
        raise ValueError(f"{given}; add --eval_strategy steps, or leave it out")
    _check_early_stopping(config)
    if config.sample_prompts is None and config.sample_max_new_tokens != _default(config, "sample_max_new_tokens"):
        raise ValueError(f"--sample_max_new_tokens {config.sample_max_new_tokens} needs prompts; add --sample_prompts")


def _check_eval_fraction(config: Flags) -> None:
    given = f"--eval_fraction {config.eval_fraction}"
    if config.eval_fraction is not None and not 0 < config.eval_fraction < 1:
        raise ValueError(f"{given}: give a share above 0 and below 1, or leave it out")
    if config.eval_data_path:
        raise ValueError(f"{given} and --eval_data_path {config.eval_data_path} both give evaluation data; give one")
    if config.max_eval_samples is not None:
        limit = f"--max_eval_samples {config.max_eval_samples}"
        raise ValueError(f"{limit} limits --eval_data_path, not {given}; lower the fraction instead")


def _check_early_stopping(config: Flags) -> None:
    if config.early_stopping_patience is None:
        if config.early_stopping_threshold != _default(config, "early_stopping_threshold"):
            given = f"--early_stopping_threshold {config.early_stopping_threshold}"
            raise ValueError(f"{given} needs --early_stopping_patience; add it")
        return
    given = f"--early_stopping_patience {config.early_stopping_patience}"
    if config.eval_schedule == "no":
        raise ValueError(f"{given} needs evaluations; add --eval_fraction, or --eval_data_path and --eval_strategy")
    if config.save_strategy != "no":
        _check_retains_best(config, given)


def _check_retains_best(config: Flags, given: str) -> None:
    """Raises ValueError unless every checkpoint has the evaluation loss of its own step."""
    reason, schedule = f"{given} needs an evaluation at every checkpoint", config.eval_schedule
    if "no" in (schedule, config.save_strategy) or schedule != config.save_strategy:
        both = f"--eval_strategy is {schedule} and --save_strategy is {config.save_strategy}"
        raise ValueError(f"{reason}, but {both}; set both to steps, or both to epoch")
    if schedule == "steps" and config.save_steps % config.steps_per_evaluation:
        steps = f"--save_steps {config.save_steps} is not a multiple of --eval_steps {config.steps_per_evaluation}"
        raise ValueError(f"{reason}, but {steps}; make it one")


CHECKS: Final = (
    _check_lr_scheduler_type,
    _check_choices,
    _check_numbers,
    _check_precision,
    _check_optimizer,
    _check_learning_rate,
    _check_fsdp,
    _check_remat,
    _check_offload,
    _check_scaling,
    _check_fused_attention,
    _check_packing,
    _check_deepspeed,
    _check_expert_parallelism,
    _check_lora,
    check_objective,
    _check_evaluation,
)
