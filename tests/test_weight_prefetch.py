"""Weights that wait on the host are there before their layer begins, those of two units at a time, and the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from worlds import spawn

from lightseq.distributed.parallel_dims import local_part
from lightseq.memory.weight_prefetch import WeightPrefetch

LAYERS = 6


class Layer(nn.Module):
    def __init__(self, width: int, seen: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(width, width), seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen()
        inner = self.linear(x)
        if inner.requires_grad:
            inner.register_hook(lambda _: self.seen())  # once the layer's backward pass has begun
        return x + inner.sin()


def test_weights_come_while_the_unit_before_them_computes() -> None:
    for size in (1, 2):
        units = LAYERS // size
        forward = [{i, i + 1} & set(range(units)) for i in range(units) for _ in range(size)]
        backward = [{i, i - 1} & set(range(units)) for i in reversed(range(units)) for _ in range(size)]
        (found,) = spawn(1, watched, size)
        assert found == [*forward, *backward] * 2


def watched(_rank: int, size: int) -> list[set[int]]:
    """At every layer's forward, and at its backward: the units whose weights are there."""
    found: list[set[int]] = []
    root, layers = built("cpu", size, 8, True, lambda: found.append(here()))

    def here() -> set[int]:
        return {i // size for i, layer in enumerate(layers) if not isinstance(layer.linear.weight, DTensor)}

    for _ in range(2):
        root(torch.ones(3, 8, requires_grad=True)).sum().backward()
    assert here() == set()  # nothing of a step outlives it
    return found


def built(kind: str, size: int, width: int, ahead: bool, seen: Callable[[], None]) -> tuple[nn.Module, list[Layer]]:
    torch.manual_seed(3)
    layers = [Layer(width, seen) for _ in range(LAYERS)]  # on the host, and stay there
    mesh, place = init_device_mesh(kind, (1,)), CPUOffloadPolicy(pin_memory=kind == "cuda")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "cuda" else MixedPrecisionPolicy()
    groups = [layers[start : start + size] for start in range(0, LAYERS, size)]
    root = nn.Sequential(*layers)
    for unit in (*groups, root):
        fully_shard(unit, mesh=mesh, offload_policy=place, mp_policy=precision)
    if ahead:
        WeightPrefetch(groups, kind)
    return root, layers


def test_losses_and_gradients_are_those_of_weights_that_come_late() -> None:
    assert spawn(1, agrees, "cpu", 64, 16) == [True]


@pytest.mark.gpu(1)
def test_on_a_gpu_no_weight_is_read_before_it_came() -> None:
    """With few rows copies are behind, with many they could overtake whoever still reads what they write to."""
    for rows in (64, 65536):
        assert spawn(1, agrees, "cuda", rows, 4096, device="cuda") == [True]


def agrees(_rank: int, kind: str, rows: int, width: int) -> bool:
    runs = [trained(kind, rows, width, ahead) for ahead in (False, True)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def trained(kind: str, rows: int, width: int, ahead: bool) -> list[Tensor]:
    """Losses of three steps of SGD, one of a pass without gradients, and the weights that they end with."""
    root, layers = built(kind, 2, width, ahead, lambda: None)
    x = torch.linspace(-1, 1, rows * width, device=kind).view(rows, width)
    losses = []
    for _ in range(3):
        loss = root(x.requires_grad_()).float().square().mean()
        loss.backward()
        losses.append(loss.detach().cpu())
        if kind == "cuda":
            torch.cuda.synchronize()
        with torch.no_grad():
            for parameter in root.parameters():
                assert parameter.grad is not None
                local_part(parameter).add_(local_part(parameter.grad), alpha=-0.1)
                parameter.grad = None
    with torch.no_grad():
        losses.append(root(x).float().square().mean().cpu())
    return losses + [local_part(parameter).clone() for layer in layers for parameter in layer.parameters()]
