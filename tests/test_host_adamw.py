"""Weights and 8-bit states on the host, updated elsewhere in pieces, become what the optimizer makes of the whole."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import spawn

from lightseq.memory.host_adamw import compute_updates_on
from lightseq.training.optimization import clip

optim = pytest.importorskip("torchao.optim")
SHAPES = (16, 3, 32, 128), (9, 1024), (300, 7), (5,), (4097,)  # cut into pieces or not, with states of 8 bits or not


def trained(device: str | None, piece: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and states after three steps, computed on a device in pieces, or by the optimizer itself."""
    g = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]
    frozen = nn.Parameter(torch.ones(3))
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": [*weights[3:], frozen]}]
    optimizer = optim.AdamW8bit(groups, lr=1e-2)
    if device is not None:
        compute_updates_on(torch.device(device), optimizer, piece)
    for step in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=g) * 10**-step
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        clip(gradients, norm, 0.0 if step == 0 else 0.5 * norm.item(), optimizer)
        optimizer.step()
    assert frozen.tolist() == [1, 1, 1] and frozen not in optimizer.state
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [x.detach() for x in weights], [x.dequantize() if hasattr(x, "codes") else x for x in states]


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1024, 1 << 20])
def test_updates_in_pieces_equal_updates_of_the_whole(piece: int) -> None:
    with torch.compiler.set_stance("force_eager"):  # the same arithmetic, and compiling takes long
        expected, got = trained(None), trained("cpu", piece)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu(1)
def test_a_gpu_equals_the_cpu() -> None:
    """The compiler may fuse a sum with a product there, so an 8-bit code may differ by one."""
    with torch.compiler.set_stance("force_eager"):
        expected, expected_states = trained(None)
    got, states = trained("cuda", 1024)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=0.2, atol=1e-4)


def _made_where_the_weights_are(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weights = [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in ((65, 512), (6, 7))]
    expected = [optim.AdamW8bit(weights)._new_buffer(weight, True) for weight in weights]
    optimizer = optim.AdamW8bit(weights)
    compute_updates_on(torch.device("cpu"), optimizer, 1 << 15)  # a piece is filled up to its size
    DTensor.from_local = None  # type: ignore[assignment]  # it moves a tensor to its mesh, whose GPU has no room for it
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    for weight, like in zip(weights, expected, strict=True):
        state = optimizer.state[weight]["exp_avg"]
        assert (state.shape, state.stride(), state.dtype) == (like.shape, like.stride(), like.dtype)
        assert state.placements == like.placements and type(state.to_local()) is type(like.to_local())
        assert torch.allclose(
            state.to_local().dequantize() if like is expected[0] else state.to_local(), torch.tensor(0.1)
        )


def test_states_of_distributed_weights_are_made_where_these_are() -> None:
    spawn(2, _made_where_the_weights_are)
