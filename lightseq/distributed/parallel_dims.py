"""Split of a run's ranks into groups for sequences, parameter shards and replicas."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lightseq.distributed.world import World
from lightseq.utils.formatting import divisors, plural
from lightseq.utils.tensors import scalar


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of a run's dimensions, and this rank's place in them.

    Ranks form a (data x sequence) grid for batches: neighbouring ranks share a sequence, so that its blocks stay inside
    a host if possible. For parameters they form a (replicate x shard) grid.
    """

    world: World
    sequence: int  # ranks that share a sequence
    shard: int  # ranks that share a copy of the parameters
    fsdp_mode: str = "full_shard"  # or hybrid_shard, or ddp
    expert: int = 1  # ranks with different experts of a mixture

    @property
    def data_ranks(self) -> int:
        """Returns the number of groups of ranks that share a sequence."""
        return self.world.size // self.sequence

    @property
    def replicate(self) -> int:
        """Returns the number of copies of the parameters."""
        return self.world.size // self.shard

    @property
    def data_rank(self) -> int:
        """Returns the number of this rank's group."""
        return self.world.rank // self.sequence

    @property
    def counts_batch(self) -> bool:
        """Returns whether this rank counts its group's batch in sums over all ranks. One rank per group does."""
        return self.world.rank % self.sequence == 0

    def sum_over_batches(self, count: int) -> Tensor:
        """Returns the sum of a group's count over all groups, on the device and without waiting for it."""
        if self.data_ranks == 1:
            return scalar(count, torch.int64, self.world.device)
        total = scalar(count if self.counts_batch else 0, torch.int64, self.world.device)
        dist.all_reduce(total)
        return total

    def make_meshes(self) -> None:
        """Makes the meshes, on all ranks together. Raises ValueError on all ranks if hosts differ."""
        sizes = [self.world.local_size] * self.world.size
        if self.fsdp_mode == "hybrid_shard" and self.world.size > 1:
            dist.all_gather_object(sizes, self.world.local_size)
        if len(set(sizes)) > 1:
            raise ValueError(
                f"--fsdp hybrid_shard needs equally many ranks on every host, but they have {min(sizes)} to "
                f"{max(sizes)}; start as many on each, or use --fsdp full_shard"
            )
        _ = self.sequence_mesh, self.parameter_mesh, self.expert_mesh

    @cached_property
    def sequence_mesh(self) -> DeviceMesh:
        """Returns the ranks that share a sequence with this one."""
        sizes, names = (self.data_ranks, self.sequence), ("data", "sequence")
        return init_device_mesh(self.world.device.type, sizes, mesh_dim_names=names)["sequence"]

    @cached_property
    def parameter_mesh(self) -> DeviceMesh:
        """Returns the mesh over which FSDP2 shards; of two dimensions if there are copies (hybrid sharding)."""
        kind = self.world.device.type
        if self.fsdp_mode == "full_shard":
            return init_device_mesh(kind, (self.shard,), mesh_dim_names=("shard",))
        return init_device_mesh(kind, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """Returns the mesh (expert, expert_data) over which experts are split; None if FSDP2 shards them like others.

        Neighbouring ranks hold different experts, so that tokens stay inside a host.
        """
        if self.expert == 1:
            return None
        ranks = torch.arange(self.world.size).view(-1, self.expert).T
        return DeviceMesh(self.world.device.type, ranks, mesh_dim_names=("expert", "expert_data"))

    def with_whole_experts(self) -> "ParallelDims":
        """Returns the split of a model whose experts FSDP2 shards like other weights, over the same meshes."""
        other = replace(self, expert=1)
        vars(other).update({name: vars(self)[name] for name in ("sequence_mesh", "parameter_mesh")})
        return other

    @property
    def replica(self) -> int:
        """Returns the number of this rank's copy of the parameters."""
        return self.world.rank // self.shard


def parallel_dims(
    world: World, sequence_size: int | None = None, fsdp_mode: str = "full_shard", expert_size: int = 1
) -> ParallelDims:
    """Returns the split of a run's ranks. All ranks share a sequence unless `sequence_size` says otherwise.

    full_shard splits parameters over all ranks; hybrid_shard over the ranks of a host, with copies across hosts; ddp
    keeps a copy on every rank. `expert_size` ranks of a host hold different experts. Raises ValueError if the
    sequence's ranks do not divide the world, or the experts' ranks do not divide a host.
    """
    size = sequence_size or world.size
    if world.size % size:
        raise ValueError(
            f"--sequence_parallel_size {size} does not divide {plural(world.size, 'rank')}; use {divisors(world.size)}"
        )
    check_expert_size(expert_size, world.local_size)
    shard = {"full_shard": world.size, "hybrid_shard": world.local_size, "ddp": 1}[fsdp_mode]
    return ParallelDims(world, sequence=size, shard=shard, fsdp_mode=fsdp_mode, expert=expert_size)


def check_expert_size(expert_size: int, host_ranks: int) -> None:
    """Raises ValueError unless the ranks with different experts divide the ranks of a host."""
    if host_ranks % expert_size:
        raise ValueError(
            f"--expert_parallel_size {expert_size} does not divide the {plural(host_ranks, 'rank')} of a host; use "
            f"{divisors(host_ranks)}"
        )


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gathers a tensor from all ranks that hold a part of it; a plain tensor is returned unchanged.

    Every rank of the mesh must call it. Gathers over one axis of the mesh after the other, the last one first, because
    DTensor.full_tensor raises KeyError in torch before 2.13 where the ranks along flattened axes do not ascend.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups of ranks that hold the parts of a tensor, one per sharded mesh dimension.

    A plain tensor has none, and neither has a replicated one.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard())
