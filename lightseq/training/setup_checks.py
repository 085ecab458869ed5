"""Checks of a run's flags against its model, data, device and disk; `setup.prepare` makes them.

A check raises ValueError with one line, or returns notes to print at the start.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from lightseq.architecture.inspection import OWN_LOOP, Architecture, inspect_architecture
from lightseq.architecture.recurrent_schedule import check_recurrent_schedule
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import kernel_spec as attention_kernel_spec
from lightseq.checkpoint.checkpoints import check_disk, list_checkpoints, saved_bytes, saves_left
from lightseq.config.optimizers import EIGHT_BIT
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream
from lightseq.data.columns import RENDERED
from lightseq.data.examples import Examples, WindowExamples
from lightseq.data.held_out import SelectedExamples
from lightseq.data.mixture import parts_of
from lightseq.data.packing import PackedExamples
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.world import World
from lightseq.kernels.attention.base import KernelSpec, compute_capability
from lightseq.kernels.attention.tile_kernel_choice import select
from lightseq.parts.attention import LENGTH_DEPENDENT_ROPE, caps_scores, rope_types
from lightseq.parts.facts import Layer, distinct, names_of_kinds
from lightseq.parts.tiled import check_layer_class
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.auto import ScheduleChoice, choose_windowed
from lightseq.utils.formatting import differences
from lightseq.utils.versions import OLDEST_FOR_EXPERTS, check_version

Notes = tuple[str, ...]
# Hosts may keep copies of these in different places.
INPUT_FLAGS = (
    *("model_name_or_path", "lora_adapter", "teacher", "tokenizer", "chat_template"),
    *("data_path", "eval_data_path", "deepspeed"),
)


def check_same_flags(config: TrainConfig, world: World) -> None:
    """Ends all ranks with one line unless all were given the same flags. All ranks must call it.

    Paths of inputs may differ if they exist where they were given, and so may the directory of the cache.
    """
    flags = config.to_json() | {"data_cache": None}
    existing = {name for name in INPUT_FLAGS if flags[name] and os.path.exists(flags[name])}
    everyone: list[tuple[dict[str, Any], set[str]]] = [(flags, existing)] * world.size
    dist.all_gather_object(everyone, (flags, existing))
    paths = set[str].intersection(*(theirs for _, theirs in everyone))
    compared = [{name: value for name, value in theirs.items() if name not in paths} for theirs, _ in everyone]

    def compare() -> None:
        if found := differences(compared):
            raise ValueError(f"--{'; --'.join(found)}; start every host with the same command")

    on_all_ranks(world, compare)


def check_packages(config: TrainConfig) -> None:
    """Raises ValueError if a flag needs a package that is not installed."""
    tracker = "mlflow-skinny" if config.report_to == "mlflow" else config.report_to  # part of mlflow, too
    needed = {
        f"--report_to {config.report_to}": (tracker, "accelerate") if config.report_to != "none" else (),
        f"--optim {config.optim}": ("torchao",) if config.optim in EIGHT_BIT else (),
        f"--deepspeed {config.deepspeed}": ("deepspeed",) if config.deepspeed is not None else (),
    }
    for flag, packages in needed.items():
        for package in packages:
            try:
                version(package)
            except PackageNotFoundError:
                raise ValueError(f"{flag} needs {package}, which is not installed; pip install {package}") from None


# ---- model and device ------------------------------------------------------------------------------------------------


def check_layers(config: TrainConfig, architecture: Architecture) -> None:
    """Raises ValueError if the flags need something that the model's layers do not support."""
    kinds = names_of_kinds(architecture.layers)
    unmarked = any(".experts." in name for name in architecture.outside_linears)  # by older versions
    if unmarked or any(layer.experts for layer in architecture.kinds):
        check_version("transformers", OLDEST_FOR_EXPERTS, f"the experts of {architecture.name}")
    if architecture.outside_linears:
        raise ValueError(
            f"{architecture.name} has weights outside linear layers and known experts, as Conv1D has "
            f"({architecture.outside_linears[0]}); {OWN_LOOP}"
        )
    if (positions := architecture.positions) is not None and config.model_max_length > positions:
        raise ValueError(
            f"--model_max_length {config.model_max_length} exceeds the {positions} positions that {architecture.name} "
            f"has a table for; give {positions} or less"
        )
    if config.tiles_layers:
        for kind in kinds:
            check_layer_class(kind)
    if config.group_size > 1 and (architecture.layers_share_keys or not architecture.layers_share_inputs):
        raise ValueError(
            f"--layers_per_checkpoint {config.group_size} needs layers that get the same arguments, such as RoPE, and "
            f"keys of their own, but {architecture.name}'s do not; leave it out"
        )
    if config.deepspeed is not None and config.compute_dtype != "float32" and architecture.in_float32:
        raise ValueError(
            f"--deepspeed {config.deepspeed} computes all weights in {config.compute_dtype}, but {architecture.name} "
            f"keeps some in float32 ({architecture.in_float32[0]}); leave --deepspeed out"
        )
    if config.deepspeed is not None and 0 in architecture.sizes:
        raise ValueError(
            f"--deepspeed {config.deepspeed} takes no parameters without elements, as {architecture.name} has; leave "
            "--deepspeed out"
        )
    if config.expert_ranks > 1:
        counts = {layer.experts.count for layer in architecture.kinds if layer.experts}
        given = f"--expert_parallel_size {config.expert_ranks}"
        if not counts:
            raise ValueError(f"{given}: {architecture.name} has no experts; leave it out")
        if uneven := [count for count in counts if count % config.expert_ranks]:
            raise ValueError(f"{given} does not divide the {uneven[0]} experts of {architecture.name}; give a divisor")
    if config.group_size > 1 and any(layer.experts for layer in architecture.kinds):
        raise ValueError(
            f"--layers_per_checkpoint {config.group_size} does not work with experts, which the group's second forward "
            "pass could choose otherwise; leave it out"
        )
    for layer in distinct(architecture.layers):
        _check_layer(config.remat_policy, architecture.name, layer)
    asked = config.fsdp_transformer_layer_cls_to_wrap
    if asked is not None and [asked] != kinds:
        raise ValueError(
            f"--fsdp_transformer_layer_cls_to_wrap {asked}: the layers of {config.model_name_or_path} are of the class "
            f"{' and '.join(kinds)}; give that, or leave it out"
        )


def _check_layer(policy: str, name: str, layer: Layer) -> None:
    """Raises ValueError for a layer of a model with this name that cannot span ranks, or store what a policy says."""
    if layer.mixes_tokens and not layer.mixers:  # nothing here knows whether and how its tokens read others
        raise ValueError(f"{name} has a layer ({layer.kind}) without attention or a registered mixer; {OWN_LOOP}")
    if (calls := len(layer.attentions)) > 1:
        raise ValueError(f"{name} has a layer ({layer.kind}) with {calls} calls of attention, not one; {OWN_LOOP}")
    if policy in STORES_MLP and not layer.can_store_mlp:
        raise ValueError(
            f"--remat {policy} needs a gated MLP of plain linear layers, which {layer.kind} does not have; give "
            "--remat attention"
        )
    if policy == STORE_LINEARS and not layer.plain_projections:
        raise ValueError(
            f"--remat {STORE_LINEARS} needs four attention projections without bias, which {layer.kind} does not "
            "have; give --remat attention+mlp"
        )


def check_mixers(config: TrainConfig, architecture: Architecture, ranks: int) -> None:
    """Raises ValueError if windows or recurrent layers cannot span this many ranks in the way that the flags ask."""
    if AttentionConfig.from_flags(config, torch.device("cpu")).with_windows(architecture.windows, ranks).windows:
        choose_windowed(ScheduleChoice(config.schedule))
    mixers = [mixer for layer in distinct(architecture.layers) for mixer in layer.linear_mixers]
    check_recurrent_schedule(config.recurrent_schedule, architecture.name, mixers, ranks)


def check_packing(packing: str, model_config: PreTrainedConfig) -> None:
    """Raises ValueError if the model cannot train on packed documents."""
    for rope in sorted(rope_types(model_config) & LENGTH_DEPENDENT_ROPE):
        raise ValueError(
            f"--packing {packing} does not work with RoPE {rope}, which depends on a document's length; "
            "give another --rope_scaling"
        )
    architecture = inspect_architecture(model_config)
    if not architecture.passes_documents:
        raise ValueError(
            f"--packing {packing} does not work with {architecture.name}, whose layers do not pass document boundaries "
            "to attention; leave it out"
        )


def check_kernel(config: TrainConfig, model_config: PreTrainedConfig, device: torch.device, ranks: int) -> None:
    """Raises ValueError if the attention kernel cannot run the model on this device."""
    for spec in kernel_specs(config, model_config, device.type, compute_capability(device), ranks):
        select(config.kernel_name, spec)


def kernel_specs(
    config: TrainConfig, model_config: PreTrainedConfig, device_type: str, capability: tuple[int, int], ranks: int
) -> list[KernelSpec]:
    """Returns the requirements of a run's attention kernels, one per kind of heads.

    The device has this type and CUDA compute capability; this many ranks share a sequence.
    """
    architecture = inspect_architecture(model_config)
    options = AttentionConfig.from_flags(config, torch.device(device_type))
    options = replace(options.with_windows(architecture.windows, ranks), softcap=caps_scores(model_config))
    return [
        attention_kernel_spec(options, dim, capability, value_dim)
        for dim, value_dim in dict.fromkeys((x.heads.dim, x.heads.value_dim) for x in architecture.attentions)
    ]


def bfloat16_warning(config: TrainConfig, device_name: str, capability: tuple[int, int]) -> list[str]:
    """Returns a warning about --bf16 on a CPU, or on a GPU whose tensor cores have no bfloat16."""
    if not config.bf16 or capability >= (8, 0):
        return []
    if capability == (0, 0):
        return ["--bf16 may be many times slower than float32 on a CPU; give --bf16 False to try things out"]
    return [f"--bf16 is slow on {device_name}, whose tensor cores have no bfloat16; give --fp16 in its place"]


def flag_warnings(config: TrainConfig, sequence_size: int) -> list[str]:
    """Returns warnings about flags that together cost speed."""
    found = []
    if config.fp8 is not None and config.torch_compile is False:
        found.append(
            "without --torch_compile, casts to FP8 run as separate kernels and may cost more than FP8 saves; add it"
        )
    algorithm = SCHEDULES.get(config.schedule)
    splits_packed_rows = config.packing != "none" and sequence_size > 1
    if splits_packed_rows and algorithm is not None and algorithm.packed_work == "uneven":
        even = " or ".join(name for name, row in SCHEDULES.items() if row.packed_work == "even")
        found.append(
            f"--schedule {config.schedule} does not balance packed documents: some ranks may compute several times as "
            f"much attention as others (attention_balance in metrics.jsonl); leave --schedule out, or use {even}"
        )
    return found


# ---- data ------------------------------------------------------------------------------------------------------------


def require_chats(config: TrainConfig, opened: Sequence[Examples]) -> None:
    """Raises ValueError if --chat_template is given, but renders no row of the data."""
    if config.chat_template is None:
        return
    windows = [examples.windows if isinstance(examples, PackedExamples) else examples for examples in opened]
    windows = [part for examples in windows for part in parts_of(examples)]
    windows = [examples.source if isinstance(examples, SelectedExamples) else examples for examples in windows]
    kinds = {x.source.meta.get("kind") for x in windows if isinstance(x, WindowExamples)}
    if not kinds & {*RENDERED}:
        raise ValueError(
            "--chat_template applies to chats and to prompts with answers, which the data does not hold; leave it out"
        )


# ---- steps and disk --------------------------------------------------------------------------------------------------


def warn_unreached(config: TrainConfig, stream: BatchStream, total_steps: int) -> Notes:
    """Returns warnings about evaluations and warm-up that would come only after the last step."""
    found, first = [], stream.first_step
    if total_steps == first:
        return ()  # nothing to train, which `prepare` notes
    every = config.steps_per_evaluation
    passed = {
        "steps": total_steps // every - first // every,
        "epoch": int(stream.epochs_after(total_steps)) - int(stream.epochs_after(first)),
    }
    schedule, at_end = config.eval_schedule, config.evaluates_at_end or config.retains_best
    if schedule != "no" and not passed[schedule] and not at_end:
        when = f"every {every} steps" if schedule == "steps" else "at the end of an epoch"
        found.append(f"warning: evaluation runs {when}, but this run ends at step {total_steps} without one")
    if config.warmup_steps > total_steps:
        found.append(
            f"warning: --warmup_steps {config.warmup_steps} is past the last step, {total_steps}, so the learning rate "
            "never reaches its peak"
        )
    return tuple(found)


def check_profiled(config: TrainConfig, device: torch.device, first_step: int, total_steps: int) -> Notes:
    """Returns a warning if the steps to profile are already done. Not an error, because a restart keeps the flags.

    Raises ValueError if they come after the last step, or --profile_memory has no GPU.
    """
    if config.profile_steps is None:
        return ()
    if config.profile_memory and device.type != "cuda":
        raise ValueError("--profile_memory needs a GPU, and there is none; leave it out")
    first, last = config.profile_steps
    if first > total_steps:
        raise ValueError(
            f"--profile_steps {first}:{last} begins after the last step, {total_steps}; give earlier steps"
        )
    warning = f"warning: --profile_steps {first}:{last}: the run resumes after step {first_step}; nothing is profiled"
    return (warning,) if last <= first_step else ()


def check_disk_space(
    config: TrainConfig, trained_parameters: int, base_bytes: int, stream: BatchStream, total_steps: int
) -> Notes:
    """Returns a note on the disk space of checkpoints. Raises ValueError if not even one fits.

    `base_bytes`: of the files that hold the weights, which checkpoints store in the same dtypes; 0 if unknown.
    """
    epochs_left = stream.epochs_after(total_steps) - stream.epochs_after(stream.first_step)
    saves = saves_left(config, stream.first_step, total_steps, epochs_left)
    directory = Path(config.output_dir)
    existing = len(list_checkpoints(directory))
    note = check_disk(directory, saved_bytes(trained_parameters, config, base_bytes), saves, existing, config)
    return (note,) if note else ()
