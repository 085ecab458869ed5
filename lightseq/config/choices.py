"""Values and bounds of flags."""

from collections import ChainMap
from collections.abc import Collection, Mapping
from typing import Any, Final

from lightseq.config.lengths import MAX_TOKENS
from lightseq.config.objectives import DIVERGENCES, OBJECTIVES
from lightseq.config.optimizers import OPTIMIZERS
from lightseq.config.recurrent_schedules import RECURRENT_SCHEDULES
from lightseq.config.remat_policies import POLICIES
from lightseq.kernels.attention.registry import KERNELS
from lightseq.schedule.algorithms import SCHEDULES

AUTO: Final[dict[str, Any]] = {"auto": None}  # extends the names of a registry, which may grow at run time
LR_SCHEDULES: Final = (  # names in transformers, which takes seconds to import
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
    "objective": tuple(OBJECTIVES),
    "distill_kind": DIVERGENCES,
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
