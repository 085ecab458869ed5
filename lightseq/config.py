"""What a training run is asked to do: the command line as one frozen dataclass whose comments are its help text."""

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from lightseq.masking import masked

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
    "report_to": ("none", "tensorboard", "wandb"),
    "optim": ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_torch_8bit", "sgd"),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup"),
    "schedule": ("auto", "ring", "striped", "zigzag", "balanced", "prefix", "ulysses", "usp"),
    "kernel": ("auto", "fa4", "fa3", "fa2", "cudnn", "aten", "cpu", "reference"),
    "transport": ("auto", "nccl", "gloo", "symmetric"),
    "fp8": ("tensorwise", "rowwise"),
    "remat": ("none", "attention", "full"),
    "scaling_strategy": ("all", "n_layers"),
    "offload": ("none", "activations", "optimizer", "both", "auto"),
    "packing": ("none", "best_fit"),
}

FSDP_MODES: Final = ("full_shard", "hybrid_shard")
FSDP_REFUSED: Final[Mapping[str, str]] = {
    "shard_grad_op": "parameters are gathered anew for the backward pass, so that memory stays small",
    "offload": "parameters stay on the device",
}

AT_LEAST_ONE: Final = (
    *("max_steps", "eval_steps", "save_steps", "save_total_limit", "logging_steps", "model_max_length"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("sequence_parallel_size", "ulysses_size", "layers_per_checkpoint", "lora_rank", "scaling_factor"),
    "max_train_samples",
)
POSITIVE: Final = (
    *("num_train_epochs", "lora_alpha", "rope_theta", "step_timeout", "host_memory_budget", "device_memory_budget"),
)
NOT_NEGATIVE: Final = ("max_grad_norm", "learning_rate", "weight_decay", "warmup_ratio", "warmup_steps", "seed")
OLDER_SPELLINGS: Final[Mapping[str, str]] = {"evaluation_strategy": "eval_strategy", "set_seed": "seed"}


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
    transport: str = "auto"  # how key/value blocks travel
    # full_shard: FSDP2 over all ranks; hybrid_shard: shards inside a host, replicates across hosts;
    fsdp: str = "full_shard"  # "": DDP. The word auto_wrap may follow
    fsdp_transformer_layer_cls_to_wrap: str | None = None  # the module that is sharded as one (default: the model's)
    # a DeepSpeed JSON: ZeRO-1, 2 or 3 in the place of fsdp; its "auto" takes the values of these flags, and what
    deepspeed: str | None = None  # contradicts them is refused
    step_timeout: float = 1800.0  # seconds without progress after which a run is given up
    # [memory]
    # what the backward pass recomputes. none: nothing; attention (the default): all but attention;
    remat: str | None = None  # full: attention too
    # neighbouring layers of which the forward pass keeps one input; each group is run forward once more, and what
    layers_per_checkpoint: int = 1  # remat says is then kept for its layers
    gradient_checkpointing: bool | None = None  # True: --remat attention; False: --remat none
    # what waits in host memory. activations: what layers keep for the backward pass; optimizer: float32 weights,
    # gradients and optimizer state, which a step then updates on the CPU; both; auto: what the plan chooses layer by
    offload: str = "none"  # layer, keeping, offloading or computing attention again, whatever fits and costs least
    # GiB of host memory that offloaded activations may take on a rank; past it they stay on the device
    host_memory_budget: float | None = None  # (default: 80% of what is free, shared among a host's ranks)
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

    def __post_init__(self) -> None:
        for check in (_check_names, _check_numbers, _check_precision, _check_learning_rate, _check_fsdp, _check_memory):
            check(self)
        _check_scaling(self)
        _check_fused_attention(self)
        _check_packing(self)
        _check_deepspeed(self)
        _check_lora(self)
        _check_files(self)

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
        return next((word for word in _words(self.fsdp) if word in FSDP_MODES), "ddp")

    @property
    def compute_dtype(self) -> str:
        """Name of the torch dtype that activations have."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    def to_json(self) -> dict[str, Any]:
        """Every flag as a plain JSON value, what looks like a secret masked."""
        plain: dict[str, Any] = masked(json.loads(json.dumps(dataclasses.asdict(self))))
        return plain


def warmup_steps(config: TrainConfig, total: int) -> int:
    """Steps of a run of `total` steps in which the learning rate rises; a ratio is rounded up."""
    return config.warmup_steps or math.ceil(config.warmup_ratio * total)


def parse(argv: Sequence[str], program: str) -> TrainConfig:
    """The config that the words after the program's name ask for; `ValueError` with one line if they cannot be met."""
    values, unknown = _parser(program).parse_known_args([underscored(word) for word in argv])
    if unknown:
        raise ValueError(_unknown_flag(unknown[0], program))
    return TrainConfig(**vars(values))


def help_text(program: str) -> str:
    """Every flag that can be given, by group, with what it means, its choices and its default."""
    lines = [f"usage: {program} --model_name_or_path NAME --data_path PATH --output_dir PATH [--flag value ...]"]
    for title, flags in _help_groups().items():
        lines += ["", title]
        lines += [_help_line(flag, comment) for flag, comment in flags.items()]
    return "\n".join(lines)


def _help_line(flag: str, comment: str) -> str:
    default, column = _defaults()[flag], 41
    notes = [f"choices: {', '.join(CHOICES[flag])}"] if flag in CHOICES else []
    notes += [f"default: {default}"] if default not in (None, "") else []
    text = comment + (f" [{'; '.join(notes)}]" if notes else "")
    return textwrap.fill(text, 120, initial_indent=f"  --{flag}".ljust(column), subsequent_indent=" " * column)


@functools.cache
def _help_groups() -> Mapping[str, Mapping[str, str]]:
    """Title -> flag -> help, read from the source of `TrainConfig` so that the two cannot drift apart."""
    groups: dict[str, dict[str, str]] = {}
    above: list[str] = []
    for line in inspect.getsource(TrainConfig).splitlines():
        if title := re.fullmatch(r"    # \[(.+)\]", line):
            groups[title[1]] = {}
        elif comment := re.fullmatch(r"    # (.+)", line):
            above.append(comment[1])
        elif field := re.fullmatch(r"    (\w+): .*?  # (.+)", line):
            groups[list(groups)[-1]][field[1]] = " ".join([*above, field[2]])
            above = []
    return groups


def underscored(word: str) -> str:
    """--learning-rate=1 names --learning_rate."""
    flag, *value = word.split("=", 1)
    return "=".join(["--" + flag[2:].replace("-", "_"), *value]) if flag.startswith("--") else word


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _parser(program: str) -> _Parser:
    parser = _Parser(prog=program, add_help=False, allow_abbrev=False)
    hints = typing.get_type_hints(TrainConfig)
    for flag, default in _defaults().items():
        kind = _kind(hints[flag])
        names = [f"--{flag}"] + [f"--{older}" for older, now in OLDER_SPELLINGS.items() if now == flag]
        convert = _checkpoint if flag == "resume_from_checkpoint" else CONVERTERS[kind]
        # A flag of yes or no may stand alone; `--bf16` then means True.
        bare: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
        parser.add_argument(*names, dest=flag, type=convert, default=default, **bare)
    return parser


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(TrainConfig)}


def _kind(hint: Any) -> type:
    """The type of a given value: `int | None` is int, `dict[str, Any] | None` is dict."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return words[text.lower()]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _json_object(text: str) -> dict[str, Any]:
    example = """give a JSON object, as '{"rope_type": "linear", "factor": 4.0}'"""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not JSON ({error}); {example}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; {example}")
    return value


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a span of steps; give first:last, as 10:12")
    return int(match[1]), int(match[2])


def _checkpoint(text: str) -> str | None:
    return {"true": "True", "auto": "auto", "false": None}.get(text.lower(), text)


CONVERTERS: Final[Mapping[type, Callable[[str], Any]]] = {
    str: str,
    bool: _boolean,
    int: _integer,
    float: _number,
    dict: _json_object,
    tuple: _span,
}


def _unknown_flag(word: str, program: str) -> str:
    if not word.startswith("--"):
        return f"unexpected {word!r}: every value follows its flag; {program} --help lists them"
    flag = word.split("=")[0]
    known = [f"--{name}" for name in (*_defaults(), *OLDER_SPELLINGS)]
    nearest = difflib.get_close_matches(flag, known, n=1)
    return f"unknown flag {flag}" + (f"; did you mean {nearest[0]}?" if nearest else f"; {program} --help lists them")


def _words(fsdp: str) -> list[str]:
    return fsdp.replace(",", " ").split()


def _check_names(config: TrainConfig) -> None:
    for flag in CHOICES:
        value = getattr(config, flag)
        if value is not None and value not in CHOICES[flag]:
            raise ValueError(f"--{flag} {value!r} is unknown; choose from {', '.join(CHOICES[flag])}")


def _check_numbers(config: TrainConfig) -> None:
    least: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
        (AT_LEAST_ONE, "give at least 1", lambda value: value >= 1),
        (POSITIVE, "give a number above 0", lambda value: 0 < value < math.inf),
        (NOT_NEGATIVE, "give 0 or more", lambda value: 0 <= value < math.inf),
    )
    for flags, remedy, holds in least:
        for flag in flags:
            value = getattr(config, flag)
            if value is not None and not holds(value):
                optional = ", or leave it out" if _defaults()[flag] is None else ""
                raise ValueError(f"--{flag} {value}: {remedy}{optional}")
    if config.profile_steps is not None and not 1 <= config.profile_steps[0] <= config.profile_steps[1]:
        first, last = config.profile_steps
        raise ValueError(f"--profile_steps {first}:{last}: give first:last with 1 <= first <= last, as 10:12")


def _check_packing(config: TrainConfig) -> None:
    for flag in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        count = getattr(config, flag)
        if config.packing != "none" and count != 1:
            remedy = "give a longer --model_max_length, or --gradient_accumulation_steps"
            raise ValueError(f"--packing {config.packing} fills one sequence, not the {count} of --{flag}; {remedy}")


def _check_scaling(config: TrainConfig) -> None:
    for flag in ("scaling_factor", "scaling_strategy"):
        if getattr(config, flag) != _defaults()[flag] and config.model_name_or_path != "scaled":
            given = f"--{flag} {getattr(config, flag)} sizes the model scaled"
            raise ValueError(f"{given}, not {config.model_name_or_path}; give --model_name_or_path scaled")


def _check_fused_attention(config: TrainConfig) -> None:
    fused, kernel = config.fused_attention, config.kernel
    if (fused is True and kernel == "reference") or (fused is False and kernel not in ("auto", "reference")):
        raise ValueError(f"--fused_attention {fused} contradicts --kernel {kernel}; leave one of them out")


def _check_precision(config: TrainConfig) -> None:
    if config.bf16 and config.fp16:
        raise ValueError("--bf16 and --fp16 exclude each other; give one, or neither for float32")
    if config.fp8 and not config.bf16:
        given = "--fp16" if config.fp16 else "float32"
        raise ValueError(f"--fp8 {config.fp8} works within bfloat16, not {given}; add --bf16")
    if config.fp8_emulate and not config.fp8:
        raise ValueError("--fp8_emulate has nothing to emulate; name a recipe with --fp8, or leave it out")


def _check_learning_rate(config: TrainConfig) -> None:
    if config.warmup_ratio > 1:
        raise ValueError(f"--warmup_ratio {config.warmup_ratio}: give a share of all steps between 0 and 1")
    if config.warmup_ratio and config.warmup_steps:
        given = f"--warmup_ratio {config.warmup_ratio} and --warmup_steps {config.warmup_steps}"
        raise ValueError(f"{given} both set the warm-up; give one")
    if config.lr_scheduler_type == "constant" and (config.warmup_ratio or config.warmup_steps):
        raise ValueError("--lr_scheduler_type constant has no warm-up; choose constant_with_warmup, or leave it out")


def _check_fsdp(config: TrainConfig) -> None:
    words = _words(config.fsdp)
    for word in words:
        if word in FSDP_REFUSED:
            raise ValueError(f"--fsdp {word} is refused: {FSDP_REFUSED[word]}; choose from {', '.join(FSDP_MODES)}")
        if word not in (*FSDP_MODES, "auto_wrap"):
            raise ValueError(f'--fsdp {word!r} is unknown; choose from {", ".join(FSDP_MODES)}, or "" for DDP')
    if words and sum(word in FSDP_MODES for word in words) != 1:
        raise ValueError(f"--fsdp {config.fsdp!r}: name one of {', '.join(FSDP_MODES)}")


def _check_deepspeed(config: TrainConfig) -> None:
    if config.deepspeed is None:
        return
    if config.fsdp != _defaults()["fsdp"]:
        raise ValueError(f"--deepspeed {config.deepspeed} and --fsdp {config.fsdp!r} both hold the weights; give one")
    if config.optim not in ("adamw_torch", "adamw_torch_fused", "sgd"):
        raise ValueError(f"--optim {config.optim} does not run under --deepspeed; use adamw_torch_fused")
    if config.fp8:
        raise ValueError(f"--fp8 {config.fp8} does not run under --deepspeed; leave one of them out")
    if config.offload in ("optimizer", "both", "auto"):
        raise ValueError(
            f"--offload {config.offload} moves what DeepSpeed holds; use offload_optimizer in {config.deepspeed}, "
            "and --offload activations for the rest"
        )
    if config.layers_per_checkpoint > 1:
        raise ValueError(
            f"--layers_per_checkpoint {config.layers_per_checkpoint} does not run under --deepspeed, which gathers "
            "weights layer by layer; leave one of them out"
        )


def _check_lora(config: TrainConfig) -> None:
    if config.lora_rank is None:
        for flag in ("lora_alpha", "lora_target_modules"):
            if getattr(config, flag) != _defaults()[flag]:
                raise ValueError(f"--{flag} {getattr(config, flag)} has no adapters to shape; add --lora_rank")
        return
    given = f"--lora_rank {config.lora_rank}"
    if config.deepspeed:
        raise ValueError(f"{given} does not run under --deepspeed; leave one of them out")
    if config.fp8:
        raise ValueError(f"{given} and --fp8 {config.fp8} both replace the layers' linears; leave one of them out")
    if config.random_init and config.save_strategy != "no":
        raise ValueError(f"{given} saves adapters alone, of weights that --random_init does not keep; leave one out")


def _check_memory(config: TrainConfig) -> None:
    implied = {None: config.remat, True: "attention", False: "none"}[config.gradient_checkpointing]
    if config.remat is not None and config.remat != implied:
        given = f"--gradient_checkpointing {config.gradient_checkpointing}"
        raise ValueError(f"{given} means --remat {implied}, but --remat {config.remat} was given too; give one")
    if config.layers_per_checkpoint > 1 and config.remat_policy == "none":
        given = f"--layers_per_checkpoint {config.layers_per_checkpoint} recomputes layers"
        raise ValueError(f"{given}, but --remat none was given too; give --remat attention or full")
    if config.host_memory_budget is not None and config.offload not in ("activations", "both", "auto"):
        given = f"--host_memory_budget {config.host_memory_budget:g} bounds offloaded activations"
        raise ValueError(f"{given}, but --offload is {config.offload}; add --offload activations")
    if config.device_memory_budget is not None and config.offload != "auto":
        given = f"--device_memory_budget {config.device_memory_budget:g} is what --offload auto plans for"
        raise ValueError(f"{given}, but --offload is {config.offload}; add --offload auto, or leave it out")
    if config.offload == "auto" and (config.remat_policy != "attention" or config.layers_per_checkpoint > 1):
        given = f"--remat {config.remat_policy} --layers_per_checkpoint {config.layers_per_checkpoint}"
        raise ValueError(f"--offload auto chooses what each layer recomputes, but {given} was given; leave these out")


def _check_files(config: TrainConfig) -> None:
    help_of = {flag: comment for flags in _help_groups().values() for flag, comment in flags.items()}
    for flag in ("model_name_or_path", "data_path", "output_dir"):
        if not getattr(config, flag):
            raise ValueError(f"--{flag} is missing: {help_of[flag].removesuffix(' (required)')}")
    if config.keep_best:
        _check_keep_best(config)
    if config.eval_strategy != "no" and not config.eval_data_path:
        raise ValueError(f"--eval_strategy {config.eval_strategy} has nothing to evaluate; give --eval_data_path too")


def _check_keep_best(config: TrainConfig) -> None:
    """Every checkpoint needs the evaluation loss of its own step."""
    both = f"--eval_strategy {config.eval_strategy} and --save_strategy {config.save_strategy}"
    if "no" in (config.eval_strategy, config.save_strategy) or config.eval_strategy != config.save_strategy:
        raise ValueError(f"--keep_best compares what is saved by its evaluation loss, but {both}; give both alike")
    if config.eval_strategy == "steps" and config.save_steps % config.eval_steps:
        steps = f"--save_steps {config.save_steps} is no multiple of --eval_steps {config.eval_steps}"
        raise ValueError(f"--keep_best compares what is saved by its evaluation loss, but {steps}; make it one")
