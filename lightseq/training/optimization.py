"""Optimizer step: parameter groups, learning rate, global gradient clipping, float16 loss scaling."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightseq.config.optimizers import EIGHT_BIT
from lightseq.config.train_config import TrainConfig, warmup_steps
from lightseq.distributed.parallel_dims import local_part
from lightseq.models.weights import LORA_INFIX
from lightseq.training.weight_decay import without_decay
from lightseq.utils.formatting import first_line
from lightseq.utils.source import source_digest

NORM_ROW = 1 << 14  # values per partial sum of squares
NOT_SETTINGS = {
    "optimizer",
    "num_warmup_steps",
    "num_training_steps",
    "last_epoch",
}  # arguments of schedules that flags set
CHECKED_STEPS = 1000  # steps at which a schedule is tried, evenly spaced
LORA_B = f"{LORA_INFIX}B."  # in the names of adapters' second factors
RATE_RATIO = "rate_ratio"  # key of a parameter group: its learning rate over that of the run
UNKNOWN_PARAMETER = 2**31  # stands for a parameter's index if some gradient is not finite, but not known which


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Returns AdamW (arXiv 1711.05101), AdamW with 8-bit states (arXiv 2110.02861), or SGD.

    Weight decay applies to weights of products and tables, as in transformers (`without_decay`). With
    `--loraplus_lr_ratio`, the adapters' B have a learning rate of their own (LoRA+, arXiv 2402.12354).
    """
    exempt = without_decay(model)
    kinds: dict[tuple[bool, float], list[nn.Parameter]] = {(decays, 1.0): [] for decays in (True, False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ratio = (config.loraplus_lr_ratio or 1.0) if LORA_B in name else 1.0
            kinds.setdefault((parameter not in exempt, ratio), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0, RATE_RATIO: ratio}
        for (decays, ratio), parameters in kinds.items()
    ]
    if config.optim == "sgd":
        return LocalSGD(groups, lr=config.learning_rate)
    betas = config.adam_beta1, config.adam_beta2
    if config.optim in EIGHT_BIT:
        from torchao.optim import AdamW8bit

        # The update is compiled for a rank's shards, and the key of torch's disk cache ignores which rank's they are.
        if dist.is_initialized():
            rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            torch.compiler.config.cache_key_tag = f"lightseq {source_digest()}, {rank}"
        return AdamW8bit(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon)
    fused = True if config.optim == "adamw_torch_fused" else None
    return LocalAdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=fused)


class _LocalUpdates(torch.optim.Optimizer):
    """Wrapper of a torch optimizer that updates the local tensors of DTensors. Its state remains DTensors.

    An update of DTensors goes through their dispatcher, which costs host time per tensor and caches an entry per step.
    It also refuses lists in which some tensors are not DTensors, as float32 parameters that every rank has whole.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        result: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return result


class LocalAdamW(_LocalUpdates, torch.optim.AdamW):
    """AdamW on local tensors."""


class LocalSGD(_LocalUpdates, torch.optim.SGD):
    """SGD without momentum on local tensors."""


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Sets the learning rate of a parameter group, in place if it is a tensor, as in compiled optimizers."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def make_state(optimizer: torch.optim.Optimizer, only: torch.device | None = None) -> None:
    """Creates the optimizer state with a step of zero gradients at learning rate 0, which changes no weight.

    `only` limits it to the parameters on one device. Raises OSError, possibly on a single rank, if the host cannot
    page-lock enough memory.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
        for parameter in group["params"]:
            if only is None or parameter.device == only:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)


class LearningRate:
    """Learning rate schedule as a function of the step, so that resuming needs no state."""

    def __init__(self, config: TrainConfig, total_steps: int) -> None:
        from transformers import get_scheduler  # imports peft if it is installed, which plans need not wait for

        kwargs = config.lr_scheduler_kwargs or {}
        probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
        schedule = get_scheduler(
            config.lr_scheduler_type,
            probe,
            num_warmup_steps=warmup_steps(config, total_steps),
            # transformers derives one from the other, and warns if both are given.
            num_training_steps=None if "num_stable_steps" in kwargs else total_steps,
            scheduler_specific_kwargs=kwargs,
        )
        assert isinstance(schedule, LambdaLR)
        self._peak, self.factor = config.learning_rate, schedule.lr_lambdas[0]  # factor by step

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Sets and returns the learning rate of optimizer step `step`, counted from 0."""
        rate = self._peak * self.factor(step)
        for group in optimizer.param_groups:
            set_rate(group, rate * group.get(RATE_RATIO, 1.0))
        return rate


def check_lr_schedule(config: TrainConfig, total_steps: int) -> None:
    """Raises ValueError if transformers cannot make a schedule of the flags, or its rates leave 0 to the peak."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    name, kwargs = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    given = f"--lr_scheduler_type {name} with --lr_scheduler_kwargs {json.dumps(kwargs)}"
    known = signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters.keys() - NOT_SETTINGS
    if unknown := kwargs.keys() - known:
        remedy = f"choose from {', '.join(sorted(known))}" if known else "leave it out"
        raise ValueError(f"{given}: {min(unknown)} is unknown; {remedy}")
    try:
        factor = LearningRate(config, total_steps).factor
        factors = [factor(step) for step in range(0, total_steps, max(1, total_steps // CHECKED_STEPS))]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{given}: {first_line(error)}") from error
    if outside := [x for x in factors if not 0 <= x <= 1]:
        raise ValueError(
            f"{given} has a rate of {config.learning_rate * outside[0]:g}, outside of 0 to --learning_rate "
            f"{config.learning_rate:g}; give other settings"
        )


def gradient_norms(grads: Sequence[Tensor], shards: Sequence[tuple[dist.ProcessGroup, ...]]) -> Tensor:
    """Returns the L2 norm of each parameter's gradient over all ranks. The norm of these norms is the global norm.

    `grads` are this rank's parts, and `shards` the groups of ranks that hold the others (`shard_groups`). The result is
    on the device, or on the host if any gradient is there.
    """
    on_device = [grad for grad in grads if grad.device.type != "cpu"]
    norms = torch.stack(torch._foreach_norm(on_device)) if on_device else torch.empty(0)
    if len(on_device) < len(grads):
        on_host = [_norm_on_host(grad) for grad in grads if grad.device.type == "cpu"]
        both = {False: iter(on_host), True: iter(norms.cpu())}
        norms = torch.stack([next(both[grad.device.type != "cpu"]) for grad in grads])
    return _sum_over_shards(norms.square(), shards).sqrt()


def _sum_over_shards(values: Tensor, shards: Sequence[tuple[dist.ProcessGroup, ...]]) -> Tensor:
    """Sums each value over its own groups of ranks, with one reduction per group for all values that share it."""
    kinds = dict.fromkeys(shards)
    if len(kinds) == 1:
        return _sum_over(shards[0], values)
    each = list(values.unbind())  # not indexed by a list, which would wait for the device
    for groups in kinds:
        places = [place for place, other in enumerate(shards) if other == groups]
        summed = _sum_over(groups, torch.stack([each[place] for place in places]))
        for place, value in zip(places, summed.unbind(), strict=True):
            each[place] = value
    return torch.stack(each)


def _sum_over(groups: Iterable[dist.ProcessGroup], values: Tensor) -> Tensor:
    for group in groups:
        dist.all_reduce(values, group=group)
    return values


def _norm_on_host(x: Tensor) -> Tensor:
    """Returns the L2 norm, summed row by row.

    torch sums the squares of a whole tensor on one thread in float32, with an error of 0.5% at 60 million values.
    """
    flat = x.reshape(-1)
    whole = len(flat) - len(flat) % NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)]).norm()


def first_nonfinite(norms: Tensor) -> Tensor:
    """Returns the index of the first non-finite norm, or -1, as a tensor on the device."""
    nonfinite = ~torch.isfinite(norms)
    return torch.where(nonfinite.any(), nonfinite.int().argmax(), -1)


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Updates the weights if the norm is finite. Fused AdamW checks on the device, else the host waits for the norm."""
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(torch.isfinite(norm)):
        optimizer.step()


def clip(grads: list[Tensor], norm: Tensor, max_norm: float, optimizer: Any = None) -> None:
    """Clips gradients to a global norm without a host wait. A `max_norm` of 0 disables clipping.

    An optimizer with a `gradient_scale` (host_adamw.py) scales them in its update instead.
    """
    if not max_norm:
        return
    scale = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    if hasattr(optimizer, "gradient_scale"):
        optimizer.gradient_scale = scale
        return
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], scale.to(device))


@dataclass
class LossScaler:
    """Dynamic loss scaling for float16 (arXiv 1710.03740): halves at an overflow, doubles after 2000 clean steps."""

    scale: float = 2.0**16
    clean_steps: int = 0
    growth_interval: int = 2000

    def unscale(self, grads: list[Tensor], norm: Tensor) -> tuple[Tensor, bool]:
        """Unscales the gradients. Returns their norm, and whether it is finite. Waits for the device."""
        norm = norm / self.scale
        finite = bool(torch.isfinite(norm))
        if finite:
            torch._foreach_mul_(grads, 1.0 / self.scale)
            self.clean_steps += 1
        else:
            self.scale, self.clean_steps = max(self.scale / 2, 1.0), 0
        if self.clean_steps == self.growth_interval:
            self.scale, self.clean_steps = self.scale * 2, 0
        return norm, finite
