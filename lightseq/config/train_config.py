"""What a training run is asked to do: one frozen dataclass, whose comments are the help text of the command line."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from lightseq.config.checks import FSDP_MODES, check, words_of
from lightseq.utils.masking import mask_secrets


@dataclass(frozen=True)
class TrainConfig:
    """One training run: a field is a flag, the comment after (or above) it its help, `# [title]` opens a group."""

    # [model]
    model_name_or_path: str = ""  # preset name, hub id or local directory (required)
    random_init: bool = False  # take the architecture only and draw fresh weights
    tokenizer: str | None = None  # hub id or directory of the tokenizer, for text data (default: the model's)
    rope_theta: float | None = None  # base of the rotary frequencies (default: the model's)
    rope_scaling: dict[str, Any] | None = None  # JSON, as '{"rope_type": "yarn", "factor": 8}' (default: the model's)
    scaling_factor: int = 1  # size of the model `scaled`, as its name may say too: scaled-all-4
    scaling_strategy: str = "all"  # what grows in it: width, heads and depth; or the layers of a model 4096 wide
    # [data]
    # token directory, .pkl, rows in .jsonl, .json or .parquet files or a folder of them, a data set that save_to_disk
    data_path: str = ""  # wrote, or hf:NAME or hf:NAME:SPLIT of the hub (required)
    eval_data_path: str | None = None  # the same, for evaluation
    model_max_length: int = 2048  # tokens of a sequence, all ranks together
    text_column: str = "text"  # of rows; else messages, or prompt and completion, are trained on their answers alone
    max_train_samples: int | None = None  # rows that are read, from the first on (default: all)
    data_cache: str = "~/.cache/lightseq/tokens"  # where the tokens of rows are kept
    # best_fit: documents share a sequence without attending to each other, longer ones are cut into pieces that lose
    packing: str = "none"  # no target; none: one example a sequence
    lazy_preprocess: bool = False  # tokenise text on access instead of beforehand; tokens need no preparation
    # [training]
    output_dir: str = ""  # where run.json, metrics.jsonl and checkpoints go (required)
    overwrite_output_dir: bool = False  # start anew in a directory that holds an earlier run
    # checkpoint directory; True: the newest in output_dir that is whole; auto: the same, or begin anew where nothing
    resume_from_checkpoint: str | None = None  # was saved
    num_train_epochs: float = 3.0  # passes over the data, where max_steps is absent
    max_steps: int | None = None  # optimizer steps; takes the place of num_train_epochs
    per_device_train_batch_size: int = 1  # sequences of a sequence-parallel group in one forward pass
    per_device_eval_batch_size: int = 1  # the same, for evaluation
    gradient_accumulation_steps: int = 1  # forward passes of an optimizer step
    # optimizer (AdamW: betas 0.9 and 0.999, epsilon 1e-8); adamw_8bit, or adamw_torch_8bit: torchao's, its states
    optim: str = "adamw_torch_fused"  # in a byte a weight each
    learning_rate: float = 5e-5  # highest learning rate of the run
    weight_decay: float = 0.0  # decoupled decay of the weight matrices
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm (0: never)
    lr_scheduler_type: str = "linear"  # course of the learning rate after the warm-up
    warmup_ratio: float = 0.0  # share of all steps spent warming up
    warmup_steps: int = 0  # the same in steps
    bf16: bool = False  # compute in bfloat16; master weights stay float32
    fp16: bool = False  # compute in float16 with loss scaling; master weights stay float32
    tf32: bool = False  # let float32 matrix products run in TF32
    fp8: str | None = None  # compute the layers' linears in FP8, with a scale a tensor or a scale a row; needs --bf16
    fp8_emulate: bool = False  # round as FP8 does but multiply in float32, slowly: for hardware without it
    torch_compile: bool = False  # compile the decoder layers
    seed: int = 42  # of weights and of data order
    deterministic: bool = False  # bit-identical losses on the GPU too, at some cost
    # [adapters]
    lora_rank: int | None = None  # train adapters of this rank (LoRA, through peft) in the place of the weights
    lora_alpha: float | None = None  # their output is scaled by this over the rank (default: twice the rank)
    lora_target_modules: str = "all-linear"  # the linears that get one, as q_proj,v_proj
    # [parallelism]
    sequence_parallel_size: int | None = None  # ranks that share a sequence (default: all)
    schedule: str = "auto"  # who computes which tile of attention when
    # ranks that share a place of the sequence and split its heads (default: all for ulysses, half for usp, else
    ulysses_size: int | None = None  # one)
    kernel: str = "auto"  # what computes one tile of attention
    fused_attention: bool | None = None  # False: plain attention, --kernel reference; True: any other kernel
    # how key/value blocks travel; with -blocking before what is computed, with -unrecorded without CUDA graphs of short
    transport: str = "auto"  # passes: what overlap and recordings are measured against
    # full_shard: FSDP2 over all ranks; hybrid_shard: shards inside a host, replicates across hosts;
    fsdp: str = "full_shard"  # "": DDP. The word auto_wrap may follow
    fsdp_transformer_layer_cls_to_wrap: str | None = None  # the module that is sharded as one (default: the model's)
    # a DeepSpeed JSON: ZeRO-1, 2 or 3 in the place of fsdp; its "auto" takes the values of these flags, and what
    deepspeed: str | None = None  # contradicts them is refused
    step_timeout: float = 1800.0  # seconds without progress after which a run is given up
    # [memory]
    # what the backward pass recomputes. none: nothing; attention+linears: norms, rotations and activations;
    # attention+mlp: these and attention's projections; attention (the default): these and the MLP, all but attention;
    remat: str | None = None  # full: attention too
    # neighbouring layers of which the forward pass keeps one input; each group is run forward once more, and what
    layers_per_checkpoint: int = 1  # remat says is then kept for its layers
    tile_layers: bool = False  # what a layer makes around attention exists for a tile of its tokens at a time
    gradient_checkpointing: bool | None = None  # True: --remat attention; False: --remat none
    # what waits in host memory. activations: what layers keep for the backward pass; optimizer: float32 weights,
    # gradients and optimizer state, updated on the CPU, or with adamw_8bit on the GPU in pieces; both; auto: what the
    offload: str = "none"  # plan has each layer keep, offload or compute again; weights too if nothing fits else
    # GiB of host memory that offloaded activations may take on a rank; past it they stay on the device
    host_memory_budget: float | None = None  # (default: its share of 80% of what weights leave free)
    device_memory_budget: float | None = None  # GiB of a GPU for tensors, by --offload auto's plan (default: all)
    # [logging and saving]
    logging_steps: int = 1  # steps between two lines of metrics.jsonl
    eval_strategy: str = "no"  # when to evaluate
    eval_steps: int = 500  # steps between evaluations, with eval_strategy steps
    save_strategy: str = "steps"  # when to save a checkpoint
    save_steps: int = 500  # steps between checkpoints, with save_strategy steps
    save_total_limit: int | None = None  # checkpoints to keep, newest first (default: all)
    async_save: bool = True  # write checkpoints from copies in host memory, beside the training, which else waits
    keep_best: bool = False  # keep the checkpoint of the lowest evaluation loss too, however old
    report_to: str = "none"  # who receives the metrics besides metrics.jsonl
    profile_steps: tuple[int, int] | None = None  # first:last step to profile, as 10:12
    profile_memory: bool = False  # of these steps every allocation of the GPU too, for pytorch.org/memory_viz

    def __post_init__(self) -> None:
        check(self)

    @property
    def remat_policy(self) -> str:
        """none, attention or full, from whichever of the two flags was given."""
        if self.remat is not None:
            return self.remat
        return "none" if self.gradient_checkpointing is False else "attention"

    @property
    def model_name(self) -> str:
        """A preset's name, a hub id or a directory. `scaled` carries what it was asked to be."""
        name = self.model_name_or_path
        return f"scaled-{self.scaling_strategy}-{self.scaling_factor}" if name == "scaled" else name

    @property
    def kernel_name(self) -> str:
        """The kernel, or auto, from whichever of the two flags was given."""
        return "reference" if self.fused_attention is False else self.kernel

    @property
    def fsdp_mode(self) -> str:
        """full_shard, hybrid_shard or ddp."""
        return next((word for word in words_of(self.fsdp) if word in FSDP_MODES), "ddp")

    @property
    def state_on_host(self) -> bool:
        """Whether weights, gradients and the optimizer's state are to wait in host memory; under auto the plan says."""
        return self.offload in ("optimizer", "both")

    @property
    def compute_dtype(self) -> str:
        """Name of the torch dtype that activations have."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def to_json(self) -> dict[str, Any]:
        """Every flag as a plain JSON value, what looks like a secret masked."""
        plain: dict[str, Any] = mask_secrets(json.loads(json.dumps(dataclasses.asdict(self))))
        return plain


def warmup_steps(config: TrainConfig, total: int) -> int:
    """Steps of a run of `total` steps in which the learning rate rises; a ratio is rounded up."""
    return config.warmup_steps or math.ceil(config.warmup_ratio * total)
