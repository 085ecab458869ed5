"""Sequence parallelism in a loop with accelerate: one call instead of `accelerator.prepare`.

model, optimizer, loader = prepare(accelerator, model, optimizer, loader, sequence_parallel_size=2)
for batch in loader:
    loss = model(**batch).loss      # the whole batch's loss, as on one process
    accelerator.backward(loss)
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import seed_worker

from lightseq import hf
from lightseq.distributed.environment import ranks_per_host
from lightseq.hf.adapters import check_adapters
from lightseq.hf.quantized import check_before_sharding, skip_in_ddp
from lightseq.integrations.split_model import SPLIT_MODEL, SplitModel, split_model_of
from lightseq.integrations.whole_batches import WholeBatches
from lightseq.integrations.whole_scores import WholeScores, score_of
from lightseq.models.decoder import headless, transformers_model
from lightseq.parts.attention import layer_reaches
from lightseq.parts.changes import Changes
from lightseq.utils.formatting import check_names, divisors

ATTENTION_OPTIONS = (*hf.ENABLE_OPTIONS, "config")
DATA, SEQUENCE = "dp_shard", "cp"  # accelerate's names: ranks along "cp" get the same batches


def prepare(
    accelerator: Accelerator, model: nn.Module, *others: Any, sequence_parallel_size: int | None = None, **options: Any
) -> Any:
    """Prepares a model, optimizers and loaders as `accelerator.prepare` does, and splits sequences over ranks.

    Ranks that share sequences, `sequence_parallel_size` neighbours (default: all), get the same batches. The model
    takes whole batches and returns the whole loss; `backward`, clipping, accumulation and `gather_for_metrics` work as
    they do without sequence parallelism. `options` are passed to `hf.enable`. Raises ValueError for settings
    that do not work with it.
    """
    check_names("prepare", options, [*ATTENTION_OPTIONS, "sequence_parallel_size"])
    mesh = share_batches(accelerator, sequence_parallel_size)
    if mesh is not None:
        enable(model, mesh, accelerator, **options)
    return accelerator.prepare(model, *others)


def share_batches(accelerator: Accelerator, sequence_parallel_size: int | None) -> DeviceMesh | None:
    """Gives neighbouring ranks the same batches. Returns the mesh (data x sequence), None on one rank.

    Afterwards `gather_for_metrics` takes values of one rank per group, because all ranks of a group have the same.
    """
    ranks = accelerator.num_processes
    size = ranks if sequence_parallel_size is None else sequence_parallel_size
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"sequence_parallel_size={size!r} is not a number of ranks; give 1 or more")
    if size > ranks:
        here = "is 1" if ranks == 1 else f"are {ranks}"
        launch = f"python -m torch.distributed.run --nproc_per_node={size}"
        raise ValueError(
            f"sequence_parallel_size={size} needs {size} processes, but there {here}; start the script with "
            f"`{launch}`, or give sequence_parallel_size={ranks}"
        )
    if ranks % size:
        raise ValueError(f"sequence_parallel_size={size} does not divide {ranks} ranks; use {divisors(ranks)}")
    if size == 1:
        return None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("sequence_parallel_size > 1 does not work with DeepSpeed in a trainer; use FSDP2 or DDP")
    config = accelerator.parallelism_config
    if config is not None and config.non_data_parallel_size > 1:
        raise ValueError(
            "sequence_parallel_size > 1 does not work with accelerate's tp_size, cp_size and sp_size; leave them at 1"
        )
    if config is not None and config.dp_replicate_enabled and accelerator.is_fsdp2:
        raise ValueError(
            "dp_replicate_size > 1 with FSDP2 does not work with sequence_parallel_size > 1; use dp_shard_size"
        )
    if accelerator.dataloader_config.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True sends every rank other rows; leave it out with sequence_parallel_size > 1"
        )
    accelerator.dataloader_config.dispatch_batches = False  # also for iterable datasets, where True is the default
    if size == ranks:  # then accelerate leaves shuffling to each rank's own generator
        accelerator.rng_types = [*accelerator.rng_types, "torch"]
    mesh = init_device_mesh(accelerator.device.type, (ranks // size, size), mesh_dim_names=(DATA, SEQUENCE))
    # Not in `accelerator.state`, which all accelerators of a process share. Only loaders read this.
    accelerator._prepare_device_mesh = lambda: mesh  # type: ignore[method-assign]
    _reduce_in_float32(accelerator)
    accelerator.prepare_data_loader = partial(_prepare_data_loader, accelerator, mesh)  # type: ignore[method-assign]
    accelerator.prepare_model = partial(_prepare_model, accelerator)  # type: ignore[method-assign]
    accelerator.prepare_scheduler = partial(_prepare_scheduler, accelerator, size)  # type: ignore[method-assign]
    accelerator.gather_for_metrics = partial(_gather_for_metrics, accelerator, size)  # type: ignore[method-assign]
    return mesh


def enable(
    model: nn.Module, mesh: DeviceMesh, accelerator: Accelerator, base_only: bool = False, **options: Any
) -> SplitModel:
    """Splits a model's sequences over the mesh's sequence axis; the model still takes whole batches.

    With `base_only` the model's base model is enabled, and takes what `split_inputs` returns. A second call for the
    same model returns the first result.
    """
    unwrapped = accelerator.unwrap_model(model)
    check_adapters(unwrapped)
    inner = transformers_model(unwrapped)
    has_head = inner.get_output_embeddings() is not None
    if not has_head and score_of(inner) is None:
        raise ValueError(
            f"{type(inner).__name__} has neither an LM head nor a layer that scores tokens, which "
            "sequence_parallel_size > 1 needs; use a causal LM or a sequence classifier"
        )
    if (found := split_model_of(inner)) is not None:
        return found
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}  # dtypes of autocast; attention under fp8 runs in bf16
    mixed = accelerator.mixed_precision
    dtype = dtypes.get(mixed, torch.bfloat16 if mixed == "fp8" else inner.dtype)
    # Rows may be longer than a trainer's max_length: padding_free joins the rows of a batch.
    windows = any(reach is not None for reach in layer_reaches(inner.config))
    here = {"device": accelerator.device, "dtype": dtype, "gpus_per_host": _ranks_per_host(mesh), "windows": windows}
    enabled = headless(inner) if base_only or not has_head else inner
    context = hf.enable(enabled, mesh[SEQUENCE], **{**here, **options})
    if base_only:
        whole = SplitModel(enabled, context)
    else:
        whole = WholeBatches(unwrapped, context) if has_head else WholeScores(unwrapped, context)
    whole.record.changes.set_attribute(inner, SPLIT_MODEL, whole)
    _run_hooks_inside(unwrapped, inner, whole.record.changes)
    skip_in_ddp(unwrapped, whole.record.changes)
    whole.record.disabled_by = f"{__name__}.disable"
    return whole


def disable(model: nn.Module) -> None:
    """Undoes `enable`, so that the model generates. Does nothing for a model whose sequences are not split."""
    if (split := split_model_of(model)) is not None:
        split.record.changes.undo()


def _run_hooks_inside(model: nn.Module, inner: nn.Module, changes: Changes) -> None:
    """Makes peft call the inner model with its hooks; peft before 0.21 calls only its forward."""
    for module in model.modules():
        if type(module).__module__.startswith("peft.tuners.") and getattr(module, "model", None) is inner:
            changes.replace_forward(module, _call_inside)


def _call_inside(tuner: Any, _forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tuner.model(*args, **kwargs)


def _reduce_in_float32(accelerator: Accelerator) -> None:
    """Makes FSDP2 sum gradients in float32 and not cast losses; accelerate would round both to bfloat16."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)


def _ranks_per_host(mesh: DeviceMesh) -> int | None:
    """Returns the ranks of a group that share a host; None if all do."""
    per_host = ranks_per_host()
    return per_host if per_host is not None and per_host < mesh[SEQUENCE].size() else None


def _gather_for_metrics(accelerator: Accelerator, size: int, input_data: Any, use_gather_object: bool = False) -> Any:
    """Gathers metrics like accelerate, but from one rank of every group of `size`."""
    if use_gather_object or not _all_tensors(input_data):
        return _gather_objects(accelerator, size, input_data)
    ranks = accelerator.num_processes

    def one_per_group(data: Any) -> Any:
        if size == ranks:  # a single group: all ranks have the same data
            return recursively_apply(lambda x: torch.atleast_1d(x.detach()).clone(), data)
        return recursively_apply(partial(rows_of_every, size, ranks), type(accelerator).gather(accelerator, data))

    accelerator.gather = one_per_group  # type: ignore[method-assign]
    try:
        return type(accelerator).gather_for_metrics(accelerator, input_data)
    finally:
        del accelerator.gather


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _gather_objects(accelerator: Accelerator, size: int, rows: Any) -> list[Any]:
    """Gathers objects of every `size`-th rank in one list, and drops the padding of the last batch."""
    gathered = objects_of_every(size, rows)
    state = accelerator.gradient_state
    return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered


def _prepare_data_loader(
    accelerator: Accelerator, mesh: DeviceMesh, loader: DataLoader, *args: Any, **kwargs: Any
) -> DataLoader:
    """Prepares a loader like accelerate. Its workers draw the same numbers on ranks that share a sequence."""
    seed, group = loader.worker_init_fn, mesh.get_local_rank(DATA)
    if isinstance(seed, partial) and seed.func is seed_worker:  # Trainer's, with seeds of each rank
        loader.worker_init_fn = partial(seed, rank=group)
    elif seed is None and loader.num_workers and group:  # the first group draws the same numbers as one process
        loader.worker_init_fn = partial(seed_worker, num_workers=loader.num_workers, rank=group)
    prepared: Any = type(accelerator).prepare_data_loader(accelerator, loader, *args, **kwargs)
    if prepared is not loader:
        prepared.begin = partial(_begin_alike, prepared.begin, mesh.get_group(SEQUENCE))
    return prepared  # type: ignore[no-any-return]


def _begin_alike(begin: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Begins an epoch with the same random state on a group, from which torch seeds the loader's workers, too."""
    states = [random_states()]
    dist.broadcast_object_list(states, group=group, group_src=0)
    set_random_states(states[0])
    begin()


def _prepare_model(accelerator: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Prepares a model like accelerate. Adds logits to outputs of a wrapper such as DDP."""
    if accelerator.is_fsdp2:
        check_before_sharding(model)
    prepared: nn.Module = type(accelerator).prepare_model(accelerator, model, *args, **kwargs)
    holds_transformer = any(isinstance(module, PreTrainedModel) for module in model.modules())
    whole = split_model_of(model) if holds_transformer else None
    if prepared is not model and whole is not None:
        whole.watch(prepared)
    return prepared


def _prepare_scheduler(accelerator: Accelerator, size: int, scheduler: Any) -> AcceleratedScheduler:
    """Prepares a scheduler that steps once per group of ranks; accelerate's steps once per rank."""
    prepared = type(accelerator).prepare_scheduler(accelerator, scheduler)
    if prepared.step_with_optimizer and not prepared.split_batches:
        prepared.split_batches = True  # so that one call is one step
        prepared.step = partial(_step_times, prepared, accelerator.num_processes // size)
    return prepared


def _step_times(scheduler: AcceleratedScheduler, times: int, *args: Any, **kwargs: Any) -> None:
    inner = scheduler.scheduler
    for _ in range(times if scheduler.gradient_state.sync_gradients else 1):
        if inner._step_count <= getattr(inner, "total_steps", inner._step_count):  # OneCycleLR raises after its end
            AcceleratedScheduler.step(scheduler, *args, **kwargs)


def random_states() -> tuple[Any, ...]:
    """Returns the states of the generators of Python, NumPy and torch on the host."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Sets the states that `random_states` returned, here or on another rank."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def objects_of_every(size: int, rows: Iterable[Any]) -> list[Any]:
    """Returns the objects of every `size`-th rank in one list."""
    return [row for rank in gather_object([list(rows)])[::size] for row in rank]


def rows_of_every(size: int, ranks: int, gathered: Tensor) -> Tensor:
    """Returns the rows of every `size`-th rank from the rows of all ranks."""
    return gathered.unflatten(0, (ranks, -1))[::size].flatten(0, 1)
