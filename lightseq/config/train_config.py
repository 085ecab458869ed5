"""A training run as one frozen dataclass: a field is a flag, its help stands in the field's metadata."""

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final

from lightseq.config.checks import FSDP_MODES, check, fsdp_words
from lightseq.utils.masking import mask_secrets


def flag(default: Any, help: str) -> Any:
    """Returns a dataclass field with a help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    model_name_or_path: str = flag("", "Preset name, Hub id or local directory of the model.")
    random_init: bool = flag(False, "Take only the architecture and draw random weights.")
    tokenizer: str | None = flag(None, "Hub id or directory of the tokenizer for text data. Default: the model's.")
    rope_theta: float | None = flag(None, "Base of the rotary frequencies. Default: the model's.")
    rope_scaling: dict[str, Any] | None = flag(
        None, """RoPE scaling as JSON, such as '{"rope_type": "yarn", "factor": 8}'. Default: the model's."""
    )
    scaling_factor: int = flag(1, "Size of the model named scaled. The name scaled-all-4 says the same.")
    scaling_strategy: str = flag(
        "all", "What --scaling_factor grows. all: width, heads and depth; n_layers: the depth of a model 4,096 wide."
    )


@dataclass(frozen=True)
class DataConfig:
    data_path: str = flag(
        "",
        "Training data: a token directory, a .pkl, rows (.jsonl, .json, .parquet or a folder of them), a data set "
        "written by save_to_disk, or hf:NAME or hf:NAME:SPLIT on the Hub.",
    )
    eval_data_path: str | None = flag(None, "Evaluation data, in any form that --data_path takes.")
    model_max_length: int = flag(2048, "Tokens per sequence, over all ranks together. 128K and 1.5M work too.")
    text_column: str = flag(
        "text",
        "Column of a row's text. Rows of messages, or of prompt and completion, are trained on their answers only.",
    )
    max_train_samples: int | None = flag(None, "Rows to read, from the first on. Default: all.")
    data_cache: str = flag("~/.cache/lightseq/tokens", "Directory that caches the tokens of rows.")
    packing: str = flag(
        "none",
        "none: one example per sequence. best_fit: whole documents share a sequence without attending to each other; "
        "longer ones are cut without losing a target.",
    )
    lazy_preprocess: bool = flag(False, "Tokenize text on access instead of beforehand. Has no effect on token data.")


@dataclass(frozen=True)
class TrainingConfig:
    output_dir: str = flag("", "Directory for run.json, metrics.jsonl and checkpoints.")
    overwrite_output_dir: bool = flag(False, "Start over in a directory that holds an earlier run.")
    resume_from_checkpoint: str | None = flag(
        None,
        "Checkpoint directory to resume from. True: the newest complete one in --output_dir; auto: the same, or a new "
        "run if there is none.",
    )
    num_train_epochs: float = flag(3.0, "Passes over the data. Ignored if --max_steps is given.")
    max_steps: int | None = flag(None, "Optimizer steps. Default: those of --num_train_epochs.")
    per_device_train_batch_size: int = flag(1, "Sequences per forward pass of a sequence-parallel group.")
    per_device_eval_batch_size: int = flag(1, "Sequences per forward pass of such a group in evaluation.")
    gradient_accumulation_steps: int = flag(1, "Forward passes per optimizer step.")
    optim: str = flag(
        "adamw_torch_fused",
        "Optimizer. AdamW has betas 0.9 and 0.999 and epsilon 1e-8; adamw_8bit (or adamw_torch_8bit) is torchao's, "
        "with one byte per weight for each of its two states.",
    )
    learning_rate: float = flag(5e-5, "Peak learning rate.")
    weight_decay: float = flag(0.0, "Decoupled weight decay. Applies to weight matrices only.")
    max_grad_norm: float = flag(1.0, "Global norm that gradients are clipped to. 0: no clipping.")
    lr_scheduler_type: str = flag("linear", "Course of the learning rate after the warm-up.")
    warmup_ratio: float = flag(0.0, "Warm-up as a share of all steps, between 0 and 1.")
    warmup_steps: int = flag(0, "Warm-up in steps.")
    bf16: bool = flag(False, "Compute in bfloat16. Master weights stay in float32.")
    fp16: bool = flag(False, "Compute in float16 with loss scaling. Master weights stay in float32.")
    tf32: bool = flag(False, "Run float32 matrix products in TF32.")
    fp8: str | None = flag(
        None, "Compute the layers' linear projections in FP8, with one scale per tensor or per row. Needs --bf16."
    )
    fp8_emulate: bool = flag(False, "Round as FP8 does but multiply in float32. Slow; for hardware without FP8.")
    torch_compile: bool = flag(False, "Compile the decoder layers.")
    seed: int = flag(42, "Seed of the random weights and of the data order.")
    deterministic: bool = flag(False, "Make losses bit-identical on the GPU too. Costs some speed.")


@dataclass(frozen=True)
class AdapterConfig:
    lora_rank: int | None = flag(None, "Train LoRA adapters of this rank (through peft) instead of the weights.")
    lora_alpha: float | None = flag(
        None, "Scale of the adapters: their output is multiplied by lora_alpha / lora_rank. Default: twice the rank."
    )
    lora_target_modules: str = flag("all-linear", "Linear layers that get an adapter, such as q_proj,v_proj.")


@dataclass(frozen=True)
class ParallelismConfig:
    sequence_parallel_size: int | None = flag(None, "Ranks that share a sequence. Default: all.")
    schedule: str = flag(
        "auto", "Attention schedule: which rank computes which tile when. auto: the fastest by the time model."
    )
    ulysses_size: int | None = flag(
        None,
        "Ranks of a Ulysses group, which attend for the same part of the sequence, each with its own heads. "
        "Default: all for ulysses, half for usp, 1 otherwise.",
    )
    kernel: str = flag("auto", "Kernel that computes one tile of attention. auto: the fastest that can run.")
    fused_attention: bool | None = flag(
        None, "False: plain attention, as --kernel reference. True: any other kernel. Default: as --kernel says."
    )
    transport: str = flag(
        "auto",
        "How key/value blocks travel. For measurements, -blocking disables overlap and -unrecorded disables CUDA "
        "graphs of short passes.",
    )
    fsdp: str = flag(
        "full_shard",
        'full_shard: FSDP2 over all ranks. hybrid_shard: shards inside a host, copies across hosts. "": DDP. The word '
        "auto_wrap may follow; it changes nothing.",
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = flag(
        None, "Class of the modules that are sharded as one. Default: the model's decoder layer."
    )
    deepspeed: str | None = flag(
        None,
        'DeepSpeed JSON file for ZeRO-1, 2 or 3 instead of --fsdp. Its "auto" takes the values of these flags; what '
        "contradicts them is refused.",
    )
    step_timeout: float = flag(1800.0, "Seconds without progress before the run is ended.")


@dataclass(frozen=True)
class MemoryConfig:
    remat: str | None = flag(
        None,
        "What the backward pass recomputes. none: nothing; attention+linears: norms, rotary embeddings and activation "
        "functions; attention+mlp: these and attention's projections; attention (the default): these and the MLP; "
        "full: attention as well.",
    )
    layers_per_checkpoint: int = flag(
        1, "Layers per checkpoint. Only the group's input is saved, at the cost of one extra forward pass."
    )
    tile_layers: bool = flag(
        False, "Runs everything except attention in tiles of 8,192 tokens. Use it near a million tokens per GPU."
    )
    gradient_checkpointing: bool | None = flag(
        None, "True: --remat attention. False: --remat none. Default: as --remat says."
    )
    offload: str = flag(
        "none",
        "What waits in host memory. activations: what layers store for the backward pass; optimizer: float32 weights, "
        "gradients and optimizer state, updated on the CPU (with adamw_8bit on the GPU, in pieces); both; auto: the "
        "planner decides per layer whether to keep, offload or recompute; weights are offloaded only if nothing else "
        "fits.",
    )
    host_memory_budget: float | None = flag(
        None,
        "GiB of host memory per rank for offloaded activations; the rest stays on the GPU. Default: the rank's share "
        "of 80% of what weights leave free.",
    )
    device_memory_budget: float | None = flag(
        None, "GiB of GPU memory for tensors that --offload auto plans with. Default: all."
    )


@dataclass(frozen=True)
class LoggingConfig:
    logging_steps: int = flag(1, "Steps between lines of metrics.jsonl.")
    eval_strategy: str = flag("no", "When to evaluate.")
    eval_steps: int = flag(500, "Steps between evaluations with --eval_strategy steps.")
    save_strategy: str = flag("steps", "When to save a checkpoint.")
    save_steps: int = flag(500, "Steps between checkpoints with --save_strategy steps.")
    save_total_limit: int | None = flag(None, "Newest checkpoints to retain. Default: all.")
    async_save: bool = flag(
        True, "Write checkpoints from copies in host memory while training continues. False: training waits."
    )
    keep_best: bool = flag(False, "Also retain the checkpoint with the lowest evaluation loss, however old.")
    report_to: str = flag("none", "Tracker that gets the metrics as well as metrics.jsonl.")
    profile_steps: tuple[int, int] | None = flag(None, "Steps to profile, as first:last, such as 10:12. Default: none.")
    profile_memory: bool = flag(
        False, "Also record every GPU allocation of --profile_steps, for pytorch.org/memory_viz."
    )


GROUPS: Final[Mapping[str, type]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "adapters": AdapterConfig,
    "parallelism": ParallelismConfig,
    "memory": MemoryConfig,
    "logging": LoggingConfig,
}


# A dataclass has the fields of its last base first.
@dataclass(frozen=True)
class TrainConfig(
    LoggingConfig, MemoryConfig, ParallelismConfig, AdapterConfig, TrainingConfig, DataConfig, ModelConfig
):
    """All flags of a training run in one flat object, checked when it is made."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def remat_policy(self) -> str:
        """The value of --remat, or what --gradient_checkpointing says in its place."""
        if self.remat is not None:
            return self.remat
        return "none" if self.gradient_checkpointing is False else "attention"

    @property
    def model_name(self) -> str:
        """A preset's name, a Hub id or a directory; for the model `scaled` a name that carries its size."""
        name = self.model_name_or_path
        return f"scaled-{self.scaling_strategy}-{self.scaling_factor}" if name == "scaled" else name

    @property
    def kernel_name(self) -> str:
        """The value of --kernel, or what --fused_attention says in its place."""
        return "reference" if self.fused_attention is False else self.kernel

    @property
    def fsdp_mode(self) -> str:
        """One of full_shard, hybrid_shard and ddp."""
        return next((word for word in fsdp_words(self.fsdp) if word in FSDP_MODES), "ddp")

    @property
    def state_on_host(self) -> bool:
        """True if the flags put weights, gradients and optimizer state in host memory; under auto the plan decides."""
        return self.offload in ("optimizer", "both")

    @property
    def compute_dtype(self) -> str:
        """Name of the torch dtype of activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def to_json(self) -> dict[str, Any]:
        """Returns every flag as a plain JSON value, with secrets masked."""
        plain: dict[str, Any] = mask_secrets(json.loads(json.dumps(asdict(self))))
        return plain


@cache
def flag_types() -> Mapping[str, type]:
    """Returns the type of each flag's value; that of `int | None` is int, that of `dict[str, Any] | None` is dict."""
    return {name: _value_type(hint) for name, hint in typing.get_type_hints(TrainConfig).items()}


def _value_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def warmup_steps(config: TrainConfig, total: int) -> int:
    """Returns the steps of a run of `total` steps in which the learning rate rises; a ratio is rounded up."""
    return config.warmup_steps or math.ceil(config.warmup_ratio * total)
