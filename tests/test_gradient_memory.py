"""Sharded gradients lie where activations lay, and nothing else does while another stream uses them."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from worlds import spawn

from lightseq.memory.gradient_memory import ReduceScatterIntoSharedPool

BYTES = 64 << 20


def _allocate() -> Tensor:
    return torch.empty(BYTES, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu(1)
def test_gradients_take_freed_activations_and_are_not_overwritten_in_use() -> None:
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
def test_what_torch_fills_new_tensors_with_comes_before_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_training_is_bitwise_the_same() -> None:
    expected = spawn(2, _trained_weights, False, device="cuda")
    found = spawn(2, _trained_weights, True, device="cuda")
    for ours, theirs in zip(found, expected, strict=True):
        assert all(np.isfinite(weight).all() for weight in ours)
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))
