"""DeepSpeed JSON files: supported keys, values for "auto", and conflicts with flags."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightseq.config.train_config import TrainConfig
from lightseq.utils.files import CONFIG_BYTES, read_json

# Supported sections and keys. DeepSpeed ignores unknown ones silently; here they are an error.
SUPPORTED: Final = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "bf16", "fp16", "data_types", "communication_data_type", "optimizer"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "comms_logger", "flops_profiler"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level"),
)
REMEDIES: Final[Mapping[str, str]] = {  # what to do instead of setting an unsupported key
    "scheduler": "use --lr_scheduler_type, --lr_scheduler_kwargs, --warmup_steps and --warmup_ratio",
    "activation_checkpointing": "use --remat",
    "sequence_parallel_size": "use --sequence_parallel_size",
    "data_parallel_size": "use --sequence_parallel_size",
    "gradient_predivide_factor": "gradients are summed, never averaged",
    "prescale_gradients": "gradients are summed, never averaged",
    "gradient_allreduce_op": "gradients are summed, never averaged",
}
ADAMW: Final = ("adamw_torch", "adamw_torch_fused")
ADAMW_PARAMS: Final = ("lr", "weight_decay", "betas", "eps", "torch_adam", "adam_w_mode")
# Keys that make DeepSpeed print.
VERBOSE: Final = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger")


@dataclass(frozen=True)
class DeepSpeedSettings:
    """DeepSpeed's settings with every value filled in."""

    source: str  # path of the file
    stage: int  # ZeRO stage: 1, 2 or 3
    settings: dict[str, Any]  # what `deepspeed.initialize` takes

    @property
    def name(self) -> str:
        return f"DeepSpeed ZeRO-{self.stage}"

    def on_cpu(self, part: str) -> bool:
        """Returns whether offload_optimizer or offload_param (`part`) moves its tensors to the host."""
        return self.device_of(part) == "cpu"

    def device_of(self, part: str) -> str:
        """Returns the device of offload_optimizer or offload_param (`part`); `none` without offloading."""
        return _device(self.settings["zero_optimization"], part)


def deepspeed_settings(config: TrainConfig, data_ranks: int, hidden_size: int) -> DeepSpeedSettings | None:
    """Reads the file given by --deepspeed and replaces "auto" with the values of the flags; None without --deepspeed.

    Raises ValueError for unsupported keys and for values that contradict a flag.
    """
    if config.deepspeed is None:
        return None
    source = f"--deepspeed {config.deepspeed}"
    settings = _read(Path(config.deepspeed), source)
    stage = _check_sections(settings, source)
    _check_optimizer(settings, config, source)
    _check_batch(settings, config, data_ranks, source)
    for key, flag in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
        ("bf16.enabled", "bf16"),
        ("fp16.enabled", "fp16"),
    ):
        _check_equal(settings, key, getattr(config, flag), f"--{flag}", source)
    if stage == 3 and config.compiles:
        raise ValueError(
            f"{source}: --torch_compile does not run with ZeRO-3; use stage 1 or 2, or leave --torch_compile out"
        )
    _fill(settings, hidden_size)
    if left := next(_autos(settings), None):
        raise ValueError(f'{source}: {left} is "auto", but no flag sets it; give a value, or remove it')
    return DeepSpeedSettings(config.deepspeed, stage, settings)


def _read(path: Path, source: str) -> dict[str, Any]:
    try:
        settings = read_json(path, CONFIG_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{source} cannot be read ({reason}); give a DeepSpeed JSON file") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{source} is not a JSON object; give a DeepSpeed JSON file")
    return settings


def _check_sections(settings: Mapping[str, Any], source: str) -> int:
    """Returns the ZeRO stage. Raises ValueError for unsupported keys, values of the wrong type, and devices."""
    for key in settings:
        if key not in SUPPORTED:
            raise ValueError(
                f"{source}: {key} is not supported ({REMEDIES.get(key, 'it would have no effect')}); remove it"
            )
    for key in ("zero_optimization", "bf16", "fp16", "optimizer", "data_types"):
        if not isinstance(settings.get(key, {}), dict):
            raise ValueError(f"{source}: {key} is {json.dumps(settings[key])}; give an object")
    zero = settings.get("zero_optimization", {})
    inside = {"optimizer.params": settings.get("optimizer", {}).get("params")}
    inside |= {f"zero_optimization.{part}": zero.get(part) for part in ("offload_optimizer", "offload_param")}
    for key, section in inside.items():
        if not isinstance(section, dict | None):
            raise ValueError(f"{source}: {key} is {json.dumps(section)}; give an object")
    if zero.get("stage") not in (1, 2, 3):
        found = f"stage {zero['stage']!r}" if "stage" in zero else "no stage"
        raise ValueError(f'{source}: zero_optimization has {found}; give 1, 2 or 3, or use --fsdp "" for DDP')
    _check_devices(zero, source)
    if settings.get("zero_force_ds_cpu_optimizer"):
        raise ValueError(f"{source}: zero_force_ds_cpu_optimizer is true, but torch's AdamW is used; give false")
    return int(zero["stage"])


def _check_devices(zero: Mapping[str, Any], source: str) -> None:
    for part in ("offload_optimizer", "offload_param"):
        device = _device(zero, part)
        if device == "nvme":
            raise ValueError(f"{source}: {part} to 'nvme' is not supported; give cpu, or use --offload")
        if device not in ("cpu", "none"):
            raise ValueError(f"{source}: {part} has the device {device!r}; give cpu or none")
    if _device(zero, "offload_param") == "cpu" and zero["stage"] != 3:
        raise ValueError(f"{source}: offload_param needs stage 3, not {zero['stage']}; give 3, or remove it")


def _device(zero: Mapping[str, Any], part: str) -> str:
    return str((zero.get(part) or {}).get("device", "none"))


def _check_optimizer(settings: dict[str, Any], config: TrainConfig, source: str) -> None:
    """Removes the optimizer section. Raises ValueError if it contradicts the flags, which choose the optimizer."""
    section = settings.pop("optimizer", None)
    if section is None:
        return
    kind, params = section.get("type"), section.get("params") or {}
    if kind not in ("auto", "Adam", "AdamW") or params.get("adam_w_mode") is False:
        raise ValueError(f"{source}: optimizer is {json.dumps(section)}; give AdamW, or remove it and use --optim")
    if config.optim not in ADAMW:
        raise ValueError(f"{source}: optimizer is {kind}, but --optim is {config.optim}; remove one of them")
    if unknown := [key for key in params if key not in ADAMW_PARAMS]:
        raise ValueError(f"{source}: optimizer.params.{unknown[0]} is not supported; remove it")
    for key, value, flag in (
        ("lr", config.learning_rate, "--learning_rate"),
        ("weight_decay", config.weight_decay, "--weight_decay"),
        ("betas", [config.adam_beta1, config.adam_beta2], "[--adam_beta1, --adam_beta2]"),
        ("eps", config.adam_epsilon, "--adam_epsilon"),
    ):
        _check_equal(params, key, value, flag, f"{source}: optimizer.params")


def _check_batch(settings: dict[str, Any], config: TrainConfig, data_ranks: int, source: str) -> None:
    """Removes train_batch_size. Raises ValueError if it contradicts the flags.

    A sequence-parallel group counts as one data rank.
    """
    total = settings.pop("train_batch_size", "auto")
    micro, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if total not in ("auto", micro * steps * data_ranks):
        raise ValueError(
            f"{source}: train_batch_size is {total}, but --per_device_train_batch_size {micro} x "
            f"--gradient_accumulation_steps {steps} x {data_ranks} data ranks is {micro * steps * data_ranks}; "
            'make them equal, or write "auto"'
        )


def _check_equal(settings: dict[str, Any], key: str, value: Any, flag: str, source: str) -> None:
    """Sets `key` to the flag's value. Raises ValueError if the file has another one."""
    *sections, last = key.split(".")
    place = settings
    for section in sections:
        place = place.setdefault(section, {})
    found = place.get(last, "auto")
    if found != "auto" and found != value:
        raise ValueError(
            f"{source}: {key} is {json.dumps(found)}, but {flag} is {json.dumps(value)}; "
            'make them equal, or write "auto"'
        )
    place[last] = value


def _fill(settings: dict[str, Any], hidden_size: int) -> None:
    """Sets bucket sizes as Hugging Face derives them, float32 gradient sums, and torch's optimizer."""
    zero = settings["zero_optimization"]
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for key, size in sizes.items():
        if zero.get(key) == "auto":
            zero[key] = size
    types = settings.setdefault("data_types", {})
    if types.get("grad_accum_dtype", "auto") == "auto":
        types["grad_accum_dtype"] = "fp32"
    if settings.get("communication_data_type", "auto") == "auto":
        settings["communication_data_type"] = "fp32"
    settings["zero_allow_untested_optimizer"] = True
    settings["zero_force_ds_cpu_optimizer"] = False
    settings.setdefault("log_level", "info" if any(settings.get(key) for key in VERBOSE) else "error")


def _autos(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields the keys, with their sections, whose value is still "auto"."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{path}{key}.")
        elif value == "auto" and key != "keep_in_fp32_modules":  # there "auto" is a valid value
            yield path + key
