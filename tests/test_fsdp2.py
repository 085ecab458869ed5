"""Prefetched weights arrive before their unit runs; sharded gradients reuse the memory of activations."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from worlds import spawn

from lightseq.distributed.parallel_dims import local_part
from lightseq.memory.fsdp2 import ReduceScatterIntoSharedPool, WeightPrefetch

LAYERS = 6
BYTES = 64 << 20


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


def test_weights_arrive_while_the_unit_before_them_computes() -> None:
    for size in (1, 2):
        units = LAYERS // size
        forward = [{i, i + 1} & set(range(units)) for i in range(units) for _ in range(size)]
        backward = [{i, i - 1} & set(range(units)) for i in reversed(range(units)) for _ in range(size)]
        (found,) = spawn(1, watched, size)
        assert found == [*forward, *backward] * 2


def watched(_rank: int, size: int) -> list[set[int]]:
    """Returns the units whose weights are on the device at each layer's forward and backward pass."""
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


def test_prefetched_weights_give_the_same_losses_and_gradients() -> None:
    assert spawn(1, agrees, "cpu", 64, 16) == [True]


@pytest.mark.gpu(1)
def test_no_weight_is_read_before_it_arrived_on_a_gpu() -> None:
    """With few rows copies are behind, with many they could overtake whoever still reads what they write to."""
    for rows in (64, 65536):
        assert spawn(1, agrees, "cuda", rows, 4096, device="cuda") == [True]


def agrees(_rank: int, kind: str, rows: int, width: int) -> bool:
    runs = [trained(kind, rows, width, ahead) for ahead in (False, True)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def trained(kind: str, rows: int, width: int, ahead: bool) -> list[Tensor]:
    """Returns the losses of three steps of SGD and of a pass without gradients, and the final weights."""
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


def _allocate() -> Tensor:
    return torch.empty(BYTES, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu(1)
def test_gradients_reuse_freed_activations_and_are_not_overwritten_in_use() -> None:
    reducing = torch.cuda.Stream()
    activations = [_allocate(), _allocate()]
    addresses = {activation.data_ptr() for activation in activations}
    del activations
    reducing.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reducing):
        allocate = ReduceScatterIntoSharedPool().allocate
        gradient = allocate((BYTES,), dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        taken = gradient.data_ptr()
        assert taken in addresses
        torch.cuda._sleep(1 << 30)  # the stream still uses the gradient when it is freed
    del gradient
    meanwhile = _allocate()
    assert not reducing.query() and meanwhile.data_ptr() in addresses - {taken}
    reducing.synchronize()
    assert _allocate().data_ptr() == taken


@pytest.mark.gpu(1)
def test_deterministic_fill_of_new_tensors_comes_before_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        torch.cuda._sleep(1 << 30)
        with torch.cuda.stream(torch.cuda.Stream()):
            device = torch.device("cuda", torch.cuda.current_device())
            gradient = ReduceScatterIntoSharedPool().allocate((BYTES // 4,), dtype=torch.float32, device=device)
            gradient.zero_()
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not gradient.any()


def _trained_weights(rank: int, shared_pool: bool) -> list[np.ndarray]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8))).cuda()
    mesh = init_device_mesh("cuda", (2,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [*model, model]:
        unit = fully_shard(layer, mesh=mesh, mp_policy=precision)
        if shared_pool:
            unit.set_custom_reduce_scatter(ReduceScatterIntoSharedPool())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(rank)
    for _ in range(4):
        for _ in range(3):  # gradients are accumulated
            model(torch.randn(4096, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.to_local().detach().cpu().numpy() for weight in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.gpu(2)
def test_a_shared_pool_trains_to_the_same_bits() -> None:
    expected = spawn(2, _trained_weights, False, device="cuda")
    found = spawn(2, _trained_weights, True, device="cuda")
    for ours, theirs in zip(found, expected, strict=True):
        assert all(np.isfinite(weight).all() for weight in ours)
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))
