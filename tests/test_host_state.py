"""Weights and states on the host, updated elsewhere in pieces, become what the optimizer itself makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightseq.training.host_state import update_on

SHAPES = (16, 3, 32, 128), (9, 1024), (300, 7), (5,), (4097,)  # cut into pieces or not, with states of 8 bits or not


def narrow(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    optim = pytest.importorskip("torchao.optim")
    made: torch.optim.Optimizer = optim.AdamW8bit(groups, lr=lr)
    return made


def wide(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def trained(
    make: Callable[..., torch.optim.Optimizer], device: torch.device | None, piece: int
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Weights after three steps, computed on a device in pieces, or by the optimizer itself."""
    g = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]
    frozen = nn.Parameter(torch.ones(3))
    optimizer = make([{"params": weights[:3], "weight_decay": 0.1}, {"params": [*weights[3:], frozen]}], lr=1e-2)
    if device is not None:
        update_on(device, optimizer, piece)
    for step in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=g) * 10**-step
        optimizer.step()
    assert frozen.tolist() == [1, 1, 1] and frozen not in optimizer.state
    return [weight.detach() for weight in weights], optimizer


def flat(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [x.dequantize() if hasattr(x, "dequantize") and hasattr(x, "codes") else x for x in states]


@pytest.mark.parametrize("piece", [1024, 1 << 20])
@pytest.mark.parametrize("make", [narrow, wide])
def test_pieces_become_what_the_optimizer_makes_of_the_whole(make: Callable[..., Any], piece: int) -> None:
    with torch.compiler.set_stance("force_eager"):  # the same arithmetic, and compiling takes long
        expected, theirs = trained(make, None, piece)
        got, ours = trained(make, torch.device("cpu"), piece)
    for weight, other in zip(got, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
    for state, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(state, other, rtol=1e-6, atol=1e-9)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("make", [narrow, wide])
def test_on_a_gpu_too(make: Callable[..., Any]) -> None:
    """Compiled for the GPU a sum may be fused with a product, and a code of 8 bits be its neighbour."""
    with torch.compiler.set_stance("force_eager"):
        expected, theirs = trained(make, None, 0)
    got, ours = trained(make, torch.device("cuda", 0), 1024)
    for weight, other in zip(got, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-4)
    for state, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(state, other, rtol=0.2 if make is narrow else 1e-5, atol=1e-4)
    assert all(weight.device.type == "cpu" for weight in got)
