"""Weights in fewer bits under FSDP2: what ranks hold and gather of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightseq.distributed.parallel_dims import local_part, parallel_dims, whole_tensor
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import weights
from lightseq.models.decoder import decoder_layers
from lightseq.models.packed import PackedWeight, plain_tensors
from lightseq.parallelize import parallelize


def check_gathers(whole: Sequence[PackedWeight], fill: Callable[[int], Tensor] | None = None) -> None:
    """Gathers weights twice. With `fill`, they are first on the meta device, and get their values afterwards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    linears = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in whole))
    for linear, weight in zip(linears, whole, strict=True):
        linear.weight = nn.Parameter(weight.to("meta") if fill else weight.clone(), requires_grad=False)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(linears, mesh=mesh, mp_policy=precision)
    if fill:
        linears._apply(lambda x: torch.empty_like(x, device="cpu"))
        for place, linear in enumerate(linears):
            weights.fill(linear.weight, fill(place).__getitem__)
    for linear, weight in zip(linears, whole, strict=True):
        assert whole_tensor(linear.weight.detach()).equal(weight.dense())
    for _ in range(2):
        linears.unshard()
        for linear, weight in zip(linears, whole, strict=True):
            found = linear.weight
            assert all(a.equal(b) for a, b in zip(found.raw.tensors, weight.raw.tensors, strict=True))
            assert found.dtype == torch.bfloat16
            assert found.dense().equal(weight.like(weight.raw, dtype=torch.bfloat16).dense())
        linears.reshard()


def check_copies(whole: PackedWeight) -> None:
    """Gathers a weight that is in host memory, and whose shards FSDP2 would copy to a GPU."""
    sent = PackedWeight.fsdp_pre_all_gather

    def copied(self: PackedWeight, mesh: Any) -> Any:
        copy = self.clone()
        copy.from_host = True
        return sent(copy, mesh)

    PackedWeight.fsdp_pre_all_gather = copied  # type: ignore[method-assign]
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(whole.clone(), requires_grad=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(linear, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for _ in range(3):
        linear.unshard()
        found = linear.weight.raw
        assert all(a.equal(b) for a, b in zip(found.tensors, whole.raw.tensors, strict=True))
        linear.reshard()
        assert not found.codes.untyped_storage().nbytes()
    assert whole_tensor(linear.weight.detach()).equal(whole.dense())


def bytes_of_run(model: Any, config: Any) -> tuple[int, int]:
    """Returns the bytes of this rank's shards, and those that gathering the first layer adds."""
    world, device = dist.get_world_size(), torch.device("cpu")
    dims = parallel_dims(World(dist.get_rank(), world, dist.get_rank(), world, device))
    parallel = parallelize(model, config, dims, MemorySettings())
    weights.materialize(model, device, root=parallel.loss_model, dtype=torch.bfloat16)
    layer: Any = decoder_layers(model)[0]
    for module in (parallel.loss_model, layer):  # FSDP2 pads shards when it first gathers
        module.unshard()
        module.reshard()
    shards = storages(model)
    layer.unshard()
    return sum(shards.values()), sum(size for at, size in storages(layer).items() if at not in shards)


def storages(module: nn.Module) -> dict[int, int]:
    """Returns the sizes of storages by their addresses, but for scales of scales, which every rank holds."""
    parts = [part for p in module.parameters() for part in plain_tensors(local_part(p.detach()))]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}
