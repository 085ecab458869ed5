"""Flags of a training run: each field of these dataclasses is a flag, with its help in the metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


def flag(default: Any, help: str) -> Any:
    """Returns a dataclass field with a help text."""
    return field(default=default, metadata={"help": help})


def auto_flag(help: str) -> Any:
    """Returns a dataclass field that is None unless given; the run then decides, as its planner does on GPUs."""
    return field(default=None, metadata={"help": help, "default": "auto"})


@dataclass(frozen=True)
class ModelConfig:
    model_name_or_path: str = flag("", "Preset name, Hub id or local directory of the model.")
    random_init: bool = flag(False, "Use only the model's architecture and initialize its weights at random.")
    tokenizer: str | None = flag(
        None, "Hub id or directory of the tokenizer for text data, or byte. Default: the model's."
    )
    rope_theta: float | None = flag(None, "Base of the rotary frequencies. Default: the model's.")
    rope_scaling: dict[str, Any] | None = flag(
        None, """RoPE scaling as JSON, such as '{"rope_type": "yarn", "factor": 8}'. Default: the model's."""
    )
    scaling_factor: int = flag(
        1,
        "Size of the model that --model_name_or_path scaled builds. scaled-all-4 sets this and --scaling_strategy.",
    )
    scaling_strategy: str = flag(
        "all",
        "Dimensions that --scaling_factor scales. all: width, heads and depth; n_layers: depth, at a width of 4,096.",
    )


@dataclass(frozen=True)
class DataConfig:
    data_path: str = flag(
        "",
        "Training data: texts (.txt, .md or a folder of them, a document per file), a token directory, a .pkl, rows "
        "(.jsonl, .json, .parquet or a folder of them), a dataset written by save_to_disk, or hf:NAME, hf:NAME:SPLIT "
        "or hf:NAME:CONFIG:SPLIT on the Hub. Several, separated by commas, are mixed: a.jsonl=2,b.jsonl=0.5 passes "
        "over a.jsonl twice in an epoch and over half of b.jsonl.",
    )
    eval_data_path: str | None = flag(None, "Evaluation data, in any format of --data_path.")
    eval_fraction: float | None = flag(
        None,
        "Share of the rows (of texts and token directories: the documents) of --data_path to hold out for evaluation, "
        "such as 0.05. Drawn by --seed. Without --eval_strategy, the run evaluates every --eval_steps if given, else "
        "after each epoch, and at the end.",
    )
    model_max_length: int = flag(
        2048, "Tokens per sequence, summed over its ranks. Units are accepted, such as 128K or 1.5M."
    )
    text_column: str = flag(
        "text",
        "Column that holds the text. Rows with messages, or prompt and completion, train on the answers only, unless "
        "this names another column than text.",
    )
    columns: str | None = flag(
        None,
        "Columns of rows to read under other names, such as prompt=question,completion=answer for rows whose column "
        "question is the prompt.",
    )
    ignore_columns: str | None = flag(
        None,
        "Columns of rows to ignore, separated by commas. Without it, a column that is not known is refused, because "
        "it may change what should be trained.",
    )
    chat_template: str | None = flag(
        None,
        "Jinja template for chats, and for prompts with answers: a file, or the template itself. Default: the "
        "tokenizer's. Checkpoints save it with the tokenizer.",
    )
    max_train_samples: int | None = flag(None, "Number of rows to read, starting with the first. Default: all.")
    max_eval_samples: int | None = flag(
        None,
        "Number of rows of the evaluation data to read, or of documents if it holds tokens, starting with the first. "
        "Default: all.",
    )
    data_cache: str = flag("~/.cache/lightseq/tokens", "Directory for cached tokens of text rows.")
    packing: str = flag(
        "none",
        "none: one example per sequence. best_fit: packs whole documents into a sequence, without attention between "
        "them. Documents longer than a sequence are split without losing a target. Default with --objective dpo, which "
        "packs pairs: best_fit.",
    )
    share_prefixes: bool | None = auto_flag(
        "Compute a common beginning of packed documents once, such as the prompt of both answers with --objective dpo. "
        "Its targets are learned once for each document. True: also packs documents that begin alike into one "
        "sequence, which may hold more of them. auto: with --objective dpo, where it saves a fifth of a sequence's "
        "tokens and the model allows it; sequences hold the same pairs as with False."
    )
    lazy_preprocess: bool = flag(
        False, "Tokenize the texts of a file of rows on access instead of beforehand. No effect on other data."
    )


@dataclass(frozen=True)
class TrainingConfig:
    output_dir: str = flag("", "Directory for run.json, metrics.jsonl and checkpoints.")
    overwrite_output_dir: bool = flag(False, "Start over in a directory that holds an earlier run.")
    resume_from_checkpoint: str | None = flag(
        None,
        "Checkpoint directory to resume from. True: the newest complete one in --output_dir; auto: the same, but "
        "starts a new run if there is none.",
    )
    objective: str = flag(
        "next_token",
        "What the model learns. next_token: texts, answers of chats, or tokens. dpo: to prefer the chosen answer of a "
        "row to the rejected one (DPO with TRL's sigmoid loss), beside the model as it was before training. distill: "
        "the distributions of --teacher, in place of the tokens.",
    )
    beta: float = flag(
        0.1, "Strength with which --objective dpo holds the model to the reference: the factor of its log-ratios."
    )
    teacher: str | None = flag(
        None,
        "Local directory or Hub id of the model that --objective distill learns from. It may have another "
        "architecture, but needs the same tokenizer.",
    )
    distill_kind: str = flag(
        "forward",
        "Divergence of the model from the teacher, over the whole vocabulary. forward: KL(teacher, model). reverse: "
        "KL(model, teacher). jsd: generalized Jensen-Shannon divergence.",
    )
    distill_temperature: float = flag(1.0, "Divisor of both models' logits before the divergence.")
    distill_beta: float = flag(0.5, "Weight of the teacher in the mixture of --distill_kind jsd.")
    num_train_epochs: float = flag(3.0, "Passes over the data. Ignored if --max_steps is given.")
    max_steps: int | None = flag(None, "Optimizer steps. Default: as many as --num_train_epochs takes.")
    per_device_train_batch_size: int = flag(1, "Sequences per forward pass of a sequence-parallel group.")
    per_device_eval_batch_size: int = flag(
        1, "Sequences per forward pass of a sequence-parallel group during evaluation."
    )
    gradient_accumulation_steps: int = flag(1, "Forward passes per optimizer step.")
    optim: str = flag(
        "adamw_torch_fused",
        "Optimizer. adamw_8bit (or adamw_torch_8bit) is torchao's AdamW, whose two states take one byte per weight "
        "each.",
    )
    learning_rate: float = flag(5e-5, "Peak learning rate.")
    adam_beta1: float = flag(0.9, "Decay rate of AdamW's running mean of gradients.")
    adam_beta2: float = flag(0.999, "Decay rate of AdamW's running mean of squared gradients.")
    adam_epsilon: float = flag(1e-8, "Added to the denominator of AdamW's update.")
    weight_decay: float = flag(0.0, "Decoupled weight decay. Applies to weight matrices only.")
    router_aux_loss_coef: float | None = flag(
        None,
        "Coefficient of the load-balancing loss of experts, of which the mean over forward passes and data ranks is "
        "added to the training loss. metrics.jsonl has that mean as router_loss; its loss excludes the term. 0: off. "
        "Default: the config's router_aux_loss_coef if it sets output_router_logits to true, else 0.",
    )
    router_bias_update_rate: float = flag(
        0.0,
        "Step by which biases of experts (e_score_correction_bias) move after each optimizer step: up for experts "
        "below the mean load, down for those above. DeepSeek V3 used 0.001. 0: biases stay.",
    )
    max_grad_norm: float = flag(1.0, "Global norm that gradients are clipped to. 0: no clipping.")
    lr_scheduler_type: str = flag("linear", "Learning rate schedule of transformers, which includes the warm-up.")
    lr_scheduler_kwargs: dict[str, Any] | None = flag(
        None,
        """Settings of the schedule as JSON, such as '{"min_lr_rate": 0.1}' for cosine_with_min_lr. Default: """
        "transformers' own.",
    )
    warmup_ratio: float = flag(0.0, "Warm-up steps as a fraction of all steps, between 0 and 1.")
    warmup_steps: int = flag(0, "Warm-up steps.")
    bf16: bool = flag(False, "Compute in bfloat16. Master weights stay in float32.")
    fp16: bool = flag(False, "Compute in float16 with loss scaling. Master weights stay in float32.")
    tf32: bool = flag(False, "Run float32 matrix products in TF32.")
    fp8: str | None = flag(
        None, "Compute the linear projections of the layers in FP8, with a scale per tensor or per row. Needs --bf16."
    )
    fp8_emulate: bool = flag(False, "Round to FP8 but multiply in float32. Slow; for hardware without FP8.")
    torch_compile: bool | None = auto_flag("Compile the decoder layers. auto: on GPUs, except with --deepspeed.")
    seed: int = flag(42, "Seed for random weights and data order.")
    deterministic: bool = flag(False, "Make losses on GPUs bit-identical between runs, at some cost in speed.")


@dataclass(frozen=True)
class AdapterConfig:
    lora_rank: int | None = flag(None, "Train LoRA adapters of this rank (through peft) instead of the weights.")
    lora_alpha: float | None = flag(
        None, "Scale of the adapters: their output is multiplied by lora_alpha / lora_rank. Default: twice the rank."
    )
    use_rslora: bool = flag(False, "Multiply by lora_alpha / √lora_rank instead (rank-stabilized LoRA).")
    loraplus_lr_ratio: float | None = flag(
        None, "Learning rate of the adapters' B over that of A, such as 16 (LoRA+). Default: both have the same."
    )
    lora_adapter: str | None = flag(
        None,
        "Directory of an adapter to start from: of peft, or a checkpoint. Rank, scale and targets must be the same.",
    )
    lora_target_modules: str = flag(
        "all-linear",
        "Linear layers that get an adapter, such as q_proj,v_proj, or a regular expression for their whole names, such "
        r'as .*layers\.[0-3]\..*_proj. Experts get no adapter. "": no linear layer.',
    )
    lora_target_parameters: str | None = flag(
        None, "Weights of stacked experts that get an adapter, such as mlp.experts.gate_up_proj,mlp.experts.down_proj."
    )
    load_in_4bit: bool = flag(
        False,
        "Hold the frozen linear layers in four bits (QLoRA: NF4 with double quantization, as bitsandbytes has), or "
        "only gpt-oss's experts, in the MXFP4 of its files.",
    )


@dataclass(frozen=True)
class ParallelismConfig:
    sequence_parallel_size: int | None = flag(None, "Ranks that share a sequence. Default: all.")
    expert_parallel_size: int | None = flag(
        None,
        "Ranks of a host that hold different experts of a mixture, and exchange tokens instead of weights. 1: every "
        "rank gathers all experts of a layer. Default: the plan's choice on GPUs, 1 on CPUs.",
    )
    schedule: str = flag(
        "auto", "Attention schedule: which rank computes which tile when. auto: the one with the lowest predicted time."
    )
    recurrent_schedule: str = flag(
        "auto",
        "How recurrent layers span the ranks of a sequence. chain: ranks send states, in messages that do not grow "
        "with the length. heads: ranks exchange tokens for value heads, which must divide by the ranks. auto: chain.",
    )
    ulysses_size: int | None = flag(
        None,
        "Ranks that split the heads among them (a Ulysses group) and work on the same part of the sequence. "
        "Default: all for ulysses, half for usp, 1 otherwise.",
    )
    kernel: str = flag("auto", "Kernel for one tile of attention. auto: the fastest that supports the run.")
    fused_attention: bool | None = flag(
        None, "False: same as --kernel reference. True: any other kernel. Default: follow --kernel."
    )
    transport: str = flag(
        "auto",
        "Transport of key/value blocks between ranks. For measurements, -blocking disables overlap and -unrecorded "
        "disables CUDA graphs of short passes.",
    )
    fsdp: str = flag(
        "full_shard",
        'full_shard: FSDP2 over all ranks. hybrid_shard: shards within a host, replicates across hosts. "": DDP. '
        "A trailing auto_wrap is accepted and has no effect.",
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = flag(
        None, "Layer class that FSDP2 shards as a unit. Must be the model's decoder layer, which is the default."
    )
    deepspeed: str | None = flag(
        None,
        'DeepSpeed JSON file for ZeRO-1, 2 or 3 instead of --fsdp. "auto" takes the value of the matching flag; '
        "contradictions are an error.",
    )
    step_timeout: float = flag(1800.0, "Seconds without progress after which the run is aborted.")


@dataclass(frozen=True)
class MemoryConfig:
    remat: str | None = auto_flag(
        "How much of each layer the backward pass recomputes; the value names what is stored. none: recomputes "
        "nothing; attention+linears: stores attention and the outputs of all linear layers; attention+mlp: stores "
        "attention and the MLP's gate and up outputs; attention: stores attention only; full: recomputes everything. "
        "auto: the fastest that fits on GPUs, attention on CPUs."
    )
    layers_per_checkpoint: int | None = auto_flag(
        "Layers per checkpoint. Only the group's input is saved, at the cost of one extra forward pass. auto: more "
        "than 1 only if nothing faster fits."
    )
    tile_layers: bool | None = auto_flag(
        "Run attention in slices of heads and everything else in tiles of 8,192 tokens, which saves memory near a "
        "million tokens per GPU. auto: only if nothing faster fits."
    )
    gradient_checkpointing: bool | None = flag(
        None, "True: same as --remat attention. False: same as --remat none. Default: follow --remat."
    )
    offload: str = flag(
        "auto",
        "Tensors to move to host memory. none; activations: those stored for the backward pass; optimizer: float32 "
        "weights, gradients and optimizer state, updated on the CPU (with adamw_8bit on the GPU, in pieces); both; "
        "auto: only what does not fit otherwise; on CPUs none.",
    )
    host_memory_budget: float | None = flag(
        None,
        "GiB of host memory per rank for offloaded activations; the rest stays on the GPU. Default: an equal share of "
        "80% of the memory that the weights leave free.",
    )
    device_memory_budget: float | None = flag(
        None, "GiB of GPU memory that the planner may plan with. Default: all, less a margin of 8%."
    )


@dataclass(frozen=True)
class LoggingConfig:
    logging_steps: int = flag(1, "Steps between lines of metrics.jsonl. A save writes one, too.")
    eval_strategy: str = flag("no", "When to evaluate: never, every --eval_steps, or after each epoch.")
    eval_steps: int | None = flag(None, "Steps between evaluations with --eval_strategy steps. Default: 500.")
    save_strategy: str = flag(
        "steps",
        "When to save a checkpoint: never, every --save_steps and at the end, or after each epoch.",
    )
    save_steps: int = flag(500, "Steps between checkpoints with --save_strategy steps.")
    save_total_limit: int | None = flag(None, "Number of newest checkpoints to retain. Default: all.")
    async_save: bool = flag(
        True, "Write checkpoints from copies in host memory while training continues. False: training waits."
    )
    keep_best: bool = flag(False, "Also retain the checkpoint with the lowest evaluation loss.")
    early_stopping_patience: int | None = flag(
        None,
        "End the run when the evaluation loss has not improved on its lowest value this many times in a row. Also "
        "retains the best checkpoint, as --keep_best does. Default: run to the last step.",
    )
    early_stopping_threshold: float = flag(
        0.0, "Amount by which the evaluation loss must fall below its lowest value to count as an improvement."
    )
    sample_prompts: str | None = flag(
        None,
        "File with one prompt per line. After each evaluation and at the end, the model continues each one with its "
        "likeliest tokens; the texts are printed and written to samples.jsonl.",
    )
    sample_max_new_tokens: int = flag(64, "Most tokens to add to each of --sample_prompts.")
    report_to: str = flag(
        "none",
        "Experiment tracker to log to, in addition to metrics.jsonl. It needs accelerate and its own package, whose "
        "environment variables name the project (WANDB_PROJECT) and the key.",
    )
    push_to_hub: bool = flag(
        False, "Upload the newest checkpoint, with --keep_best the best one, to the Hugging Face hub when the run ends."
    )
    hub_model_id: str | None = flag(None, "Hub repository of --push_to_hub. Default: the name of --output_dir.")
    hub_private_repo: bool = flag(False, "Make a new repository of --push_to_hub private.")
    profile_steps: tuple[int, int] | None = flag(None, "Range of steps to profile, such as 10:12. Default: none.")
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
