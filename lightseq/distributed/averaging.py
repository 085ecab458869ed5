"""Wrappers that average gradients over ranks, where shares of one sequence's gradient have to be summed."""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

# Communication hooks of torch that average, as DDP does without a hook.
AVERAGING_HOOKS = {
    default_hooks.allreduce_hook,
    default_hooks.bf16_compress_hook,
    default_hooks.fp16_compress_hook,
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
}
UNWRAPPED = "leave it out, and sum gradients over ranks after the backward pass"


@dataclass(frozen=True)
class Averaging:
    """A wrapper that averages gradients over some ranks."""

    wrapper: str
    ranks: tuple[int, ...]
    groups: tuple[dist.ProcessGroup, ...]  # averages over these groups in turn


def find_averaging(model: nn.Module) -> Averaging | None:
    """Returns the wrapper that averages gradients of the model whose forward pass runs; None without one.

    Raises ValueError for a wrapper that may average or sum.
    """
    ddp = DistributedDataParallel._get_active_ddp_module()
    for name, module in model.named_modules():
        wrapper = "DDP" if isinstance(module, DistributedDataParallel) else "replicate"
        if wrapper == "DDP" or "replicate" in (_get_registry(module) or ()):
            whose = f"the part {name}" if name else "the model"
            raise ValueError(
                f"{wrapper} around {whose} averages gradients, which lightseq cannot scale; wrap the whole model in DDP"
            )
    if ddp is not None:
        for hook, _ in ddp._comm_hooks:
            if hook not in AVERAGING_HOOKS:
                raise ValueError(
                    f"DDP has the communication hook {getattr(hook, '__name__', hook)}, which may average or sum "
                    f"gradients; {UNWRAPPED}, or use a hook of torch"
                )
        inside = set(model.parameters())
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and parameter not in inside:
                raise ValueError(
                    f"DDP averages the gradient of {name}, which is outside of the {type(model).__name__} that "
                    f"lightseq splits, so it cannot scale it; {UNWRAPPED}"
                )
        return Averaging("DDP", tuple(dist.get_process_group_ranks(ddp.process_group)), (ddp.process_group,))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        if getattr(model, "_is_fsdp_managed_module", False):
            raise ValueError(f"FSDP1 averages gradients; {UNWRAPPED}, or use FSDP2 (fully_shard)")
        return None
    groups = [group for unit in units for group in _parameter_groups(unit)]
    meshes = [group.mesh_info.mesh for group in groups if group.gradient_divide_factor is None]
    found = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    if not found:
        factors = {group.gradient_divide_factor for group in groups} - {1.0}
        if factors:
            warnings.warn(
                f"FSDP2 divides gradients by {', '.join(f'{factor:g}' for factor in factors)}, which "
                "set_gradient_divide_factor asked for; ranks that share a sequence need sums, so give 1.0 unless you "
                "multiply them yourself",
                stacklevel=2,
            )
        return None
    if len(found) > 1 or any(group.gradient_divide_factor is not None for group in groups):
        raise ValueError(
            "some FSDP2 modules average gradients over other ranks than others; call set_gradient_divide_factor(1.0) "
            "on each, as examples/with_fsdp2.py does"
        )
    return Averaging("FSDP2", found.pop(), tuple(meshes[0].get_group(dim) for dim in range(meshes[0].ndim)))


def trainer_scales_loss() -> bool:
    """Returns whether transformers' Trainer computes the loss now, and multiplies it by the number of ranks.

    Only its own `compute_loss` does, not one of a subclass, so the calls that led here tell.
    """
    trainer = sys.modules.get("transformers.trainer")
    frame = sys._getframe()
    while trainer is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is trainer.Trainer.compute_loss.__code__:
            own = frame.f_locals
            return own["num_items_in_batch"] is not None and bool(own["self"].args.average_tokens_across_devices)
    return False


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    """Returns FSDP2's groups of parameters of a module; older versions of torch have at most one."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
