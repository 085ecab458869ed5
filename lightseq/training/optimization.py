"""The optimizer step: which parameters decay, the rate of a step, true global clipping, float16 loss scaling."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from lightseq.config.checks import EIGHT_BIT
from lightseq.config.train_config import TrainConfig, warmup_steps
from lightseq.distributed.mesh import local_part
from lightseq.models.weights import global_shape

NORM_ROW = 1 << 14  # values whose squares are added to one number


def check_optimizer(name: str, device: torch.device) -> None:
    """Raises ValueError where what the optimizer is made of is missing on the device that computes the update."""
    if name not in EIGHT_BIT:
        return
    if find_spec("torchao") is None:
        raise ValueError(f"--optim {name} is torchao's, which is not installed; pip install torchao")
    if missing := _missing_compiler(device):
        raise ValueError(
            f"--optim {name} compiles its update and found no {missing}; install it, or use --optim adamw_torch_fused"
        )


def _missing_compiler(device: torch.device) -> str | None:
    """Returns what torch.compile needs on this device and does not find."""
    from torch._inductor import cpp_builder, exc  # takes a second to import
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        return None if has_triton() else "Triton"
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "C++ compiler"
    return None


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Makes AdamW (arXiv 1711.05101), its states in 8 bits (arXiv 2110.02861) or not, or SGD.

    Weight decay on matrices alone, not on norms and biases.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if len(global_shape(p)) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if len(global_shape(p)) < 2], "weight_decay": 0.0},
    ]
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    if config.optim in EIGHT_BIT:
        from torchao.optim import AdamW8bit

        # It compiles for a rank's parts, and torch's cache on disk does not tell those of one whole apart.
        if dist.is_initialized():
            torch.compiler.config.cache_key_tag = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        return AdamW8bit(groups, lr=config.learning_rate, betas=(0.9, 0.999), eps=1e-8)
    fused = True if config.optim == "adamw_torch_fused" else None
    return LocalAdamW(groups, lr=config.learning_rate, betas=(0.9, 0.999), eps=1e-8, fused=fused)


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's parts as the plain tensors they are; its state stays sharded as they are.

    An update of distributed tensors goes through their dispatcher, which looks at each of them on the host and keeps
    what it saw of every step.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:  # type: ignore[override]
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return is_complex


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Sets the learning rate of a parameter group; compiled optimizers keep theirs in a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def make_state(optimizer: torch.optim.Optimizer, only: torch.device | None = None) -> None:
    """Creates the optimizer's state by a step of zero gradients at rate 0, which changes no weight.

    `only` limits it to the parameters on one device. Raises OSError where the host cannot lock as much memory; one
    rank may raise alone.
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
    """The learning rate as a function of the step, so that resuming needs no state."""

    def __init__(self, config: TrainConfig, total_steps: int) -> None:
        probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
        schedule = get_scheduler(
            config.lr_scheduler_type,
            probe,
            num_warmup_steps=warmup_steps(config, total_steps),
            num_training_steps=total_steps,
        )
        assert isinstance(schedule, LambdaLR)
        self._peak, self._share = config.learning_rate, schedule.lr_lambdas[0]

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Sets the rate of optimizer step `step` (from 0) and returns it."""
        rate = self._peak * self._share(step)
        for group in optimizer.param_groups:
            set_rate(group, rate)
        return rate


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns this rank's part of every gradient, as plain tensors that share its memory."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def gradient_norms(grads: list[Tensor], shards: dist.ProcessGroup) -> Tensor:
    """Returns the L2 norm of every parameter's gradient over all ranks; the norm of these is the global one.

    On the device, or on the host if some gradients wait there.
    """
    here = [grad for grad in grads if grad.device.type != "cpu"]
    norms = torch.stack(torch._foreach_norm(here)) if here else torch.empty(0)
    if len(here) < len(grads):
        waiting = [_norm_on_host(grad) for grad in grads if grad.device.type == "cpu"]
        both = {False: iter(waiting), True: iter(norms.cpu())}
        norms = torch.stack([next(both[grad.device.type != "cpu"]) for grad in grads])
    squared = norms.square()
    dist.all_reduce(squared, group=shards)
    return squared.sqrt()


def _norm_on_host(x: Tensor) -> Tensor:
    """Returns the L2 norm, added row by row.

    For a whole tensor torch adds the squares with one thread, into a float32 that is off by half a per cent at 60
    million values.
    """
    flat = x.reshape(-1)
    whole = len(flat) - len(flat) % NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)]).norm()


def first_nonfinite(norms: Tensor) -> Tensor:
    """Returns the index of the first norm that is not finite, -1 if all are; on the device."""
    nonfinite = ~torch.isfinite(norms)
    return torch.where(nonfinite.any(), nonfinite.int().argmax(), -1)


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Takes the step unless the norm is not finite. Fused AdamW finds out on the device; for others the host looks."""
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(torch.isfinite(norm)):
        optimizer.step()


def clip(grads: list[Tensor], norm: Tensor, max_norm: float, optimizer: Any = None) -> None:
    """Scales gradients down to a global norm, without looking at it on the host. A max_norm of 0 leaves them alone.

    An optimizer with a `gradient_scale` (host_state.py) scales them where it updates.
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
    """Dynamic loss scaling for float16 (arXiv 1710.03740): halved at an overflow, doubled after 2000 clean steps."""

    scale: float = 2.0**16
    clean_steps: int = 0
    growth_interval: int = 2000

    def unscale(self, grads: list[Tensor], norm: Tensor) -> tuple[Tensor, bool]:
        """Returns the true norm, and whether the step may be taken. Waits for the device."""
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
