"""Copies from host to device that do not make the host wait, and the label of tokens without a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # schedules and data import this module, and load without torch
    import torch
    from torch import Tensor

IGNORE_INDEX: Final = -100  # as in torch.nn.functional.cross_entropy


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the CPU to a device, from pinned memory, without waiting for the device's earlier work."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def scalar(x: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Creates a scalar on the device with a kernel. A copy from the host would wait for all queued work."""
    import torch

    return torch.full((), x, dtype=dtype, device=device)
