"""Expert parallelism: each rank of a group holds some experts, and computes them for the tokens of all its ranks.

The ranks exchange hidden states, not weights. Hidden states, choices and scores are gathered, every rank computes its
own experts for all of them, and the partial sums travel back. That moves fewer bytes than sending each copy to its
expert as long as the group has no more ranks than a token has experts, and every message has a fixed size, so the host
never waits for the router.

Shape suffixes: T tokens, K experts of a token, H hidden, R rows, E experts; G ranks of the group.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lightseq.kernels.grouped_products import grouped_product, grouped_weight_gradient
from lightseq.parts.experts import experts_modules, run_experts

ops: Any = torch.ops._c10d_functional

EXPERT, EXPERT_DATA = "expert", "expert_data"  # dimensions of the mesh of experts


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that share one copy of the experts."""

    ranks: int  # with different experts
    rank: int  # this one's place among them
    name: str  # name of their process group
    shards: int  # ranks that hold parts of the same experts
    shards_name: str
    dtype: torch.dtype  # that experts compute in
    gathers_again: bool  # for the backward pass, instead of keeping gathered weights until then

    def weight(self, parameter: Tensor) -> Tensor:
        """Returns the experts that this rank computes, gathered from ranks that shard them, in the compute dtype."""
        local, dim = _local_part(parameter)
        if self.shards == 1:
            return local.to(self.dtype)
        return _GatherWeight.apply(local, self.dtype, dim, self.shards, self.shards_name)  # type: ignore[no-any-return]

    def product(self, x_RI: Tensor, parameter: Tensor, ends_E: Tensor, transposed: bool, stored: bool) -> Tensor:
        """Returns the product (R, O) of each expert's rows, in the compute dtype, with its weights."""
        if self.shards == 1 or not self.gathers_again:
            return grouped_product(x_RI, self.weight(parameter), ends_E, transposed, stored)
        local, dim = _local_part(parameter)
        return _product_of_shards(x_RI, local, ends_E, transposed, dim, self.shards, self.shards_name)  # type: ignore[no-any-return]

    def forward(self, module: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts (T, H), computed by all ranks of the group."""
        count = module.num_experts // self.ranks
        chosen = _all_gather(experts_TK, self.ranks, self.name) - self.rank * count
        chosen = torch.where((chosen >= 0) & (chosen < count), chosen, count)  # others have their rows at the end
        hidden, weights = (_Gather.apply(x, self.ranks, self.name) for x in (hidden_TH, weights_TK))
        return _Scatter.apply(run_experts(module, hidden, chosen, weights, count), self.ranks, self.name)  # type: ignore[no-any-return]


def expert_group(mesh: DeviceMesh, dtype: torch.dtype, gathers_again: bool) -> ExpertGroup:
    """Returns the ranks of the mesh (expert, expert_data); the other arguments as in `ExpertGroup`."""
    return ExpertGroup(
        ranks=mesh.size(0),
        rank=mesh.get_local_rank(EXPERT),
        name=mesh.get_group(EXPERT).group_name,
        shards=mesh.size(1),
        shards_name=mesh.get_group(EXPERT_DATA).group_name,
        dtype=dtype,
        gathers_again=gathers_again,
    )


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives each rank of the mesh (expert, expert_data) its part of the experts of a model on the meta device.

    Raises ValueError if a rank's experts do not split evenly.
    """
    for _, experts in experts_modules(model):
        placements = split_of(experts, mesh.size(0), mesh.size(1))
        for name, parameter in [*experts.named_parameters(recurse=False)]:
            part: Any = DTensor.from_local(_part(parameter, mesh, placements), mesh, placements, run_check=False)
            setattr(experts, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def split_of(experts: Any, ranks: int, shards: int) -> tuple[Placement, Placement]:
    """Returns the split of experts: over ranks by expert, over `shards` by expert or by their second dimension.

    Raises ValueError if neither splits evenly.
    """
    if (dimension := _split_dimension(experts, ranks, shards)) is not None:
        return Shard(0), Shard(dimension)
    every = ranks * shards
    sizes = [size for size in range(2, every + 1) if every % size == 0 and experts.num_experts % size == 0]
    others = [size for size in sizes if _split_dimension(experts, size, every // size) is not None]
    raise ValueError(
        f"--expert_parallel_size {ranks}: a rank's {experts.num_experts // ranks} experts and their weights do not "
        f"split over {shards} ranks; use {' or '.join(map(str, [1, *others]))}"
    )


def _split_dimension(experts: Any, ranks: int, shards: int) -> int | None:
    """Returns the dimension of a rank's experts that splits over shards; None if none does."""
    if experts.num_experts // ranks % shards == 0:
        return 0
    return None if any(parameter.shape[1] % shards for parameter in experts.parameters(recurse=False)) else 1


def _part(parameter: Tensor, mesh: DeviceMesh, placements: tuple[Placement, Placement]) -> Tensor:
    shape = list(parameter.shape)
    for placement, ranks in zip(placements, mesh.shape, strict=True):
        assert isinstance(placement, Shard)
        shape[placement.dim] //= ranks
    return parameter.new_empty(shape)


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks. Gradients travel back to their rows' rank, which adds them in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:  # type: ignore[override]
        ctx.ranks, ctx.group = ranks, group
        return _all_gather(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _sum_parts(dy, ctx.ranks, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """Adds the partial rows of all ranks in float32, each rank its own. Gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:  # type: ignore[override]
        ctx.ranks, ctx.group = ranks, group
        return _sum_parts(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _all_gather(dy, ctx.ranks, ctx.group), None, None


def _local_part(parameter: Tensor) -> tuple[Tensor, int]:
    """Returns this rank's part of a parameter, and the dimension in which ranks with the same experts split it."""
    assert isinstance(parameter, DTensor)
    _, split = parameter.placements
    assert isinstance(split, Shard)
    return parameter.to_local(), split.dim


class _GatherWeight(torch.autograd.Function):
    """Gathers a weight in the compute dtype. Its gradient is summed over the ranks in float32."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dtype: torch.dtype, dim: int, ranks: int, group: str) -> Tensor:  # type: ignore[override]
        ctx.dim, ctx.ranks, ctx.group, ctx.dtype = dim, ranks, group, shard.dtype
        return _gather_weight(shard, dtype, dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        return _reduce_weight(gradient, ctx.dtype, ctx.dim, ctx.ranks, ctx.group), None, None, None, None


def _gather_weight(shard: Tensor, dtype: torch.dtype, dim: int, ranks: int, group: str) -> Tensor:
    gathered = _all_gather(shard.to(dtype), ranks, group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(ranks), dim)


def _reduce_weight(gradient: Tensor, dtype: torch.dtype, dim: int, ranks: int, group: str) -> Tensor:
    """Returns this rank's part of the sum of all ranks' gradients, added in float32."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    parts = wide if dim == 0 else torch.cat(wide.chunk(ranks, dim))
    return ops.wait_tensor(ops.reduce_scatter_tensor(parts.contiguous(), "sum", ranks, group)).to(dtype)  # type: ignore[no-any-return]


# A custom operator, so that compilers do not merge two passes' gathers and keep the weights in between.
@torch.library.custom_op("lightseq::product_of_shards", mutates_args=())
def _product_of_shards(
    x_RI: Tensor, shard: Tensor, ends_E: Tensor, transposed: bool, dim: int, ranks: int, group: str
) -> Tensor:
    return grouped_product(x_RI, _gather_weight(shard, x_RI.dtype, dim, ranks, group), ends_E, transposed)


@_product_of_shards.register_fake
def _(x_RI: Tensor, shard: Tensor, ends_E: Tensor, transposed: bool, dim: int, ranks: int, group: str) -> Tensor:
    outputs = shard.shape[2] if transposed else shard.shape[1] * (ranks if dim == 1 else 1)
    return x_RI.new_empty(len(x_RI), outputs)


def _save_shards(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_RI, shard, ends_E, *ctx.settings = inputs
    ctx.save_for_backward(x_RI, shard, ends_E)


def _backward_of_shards(ctx, dy_RO: Tensor):  # type: ignore[no-untyped-def]
    x_RI, shard, ends_E = ctx.saved_tensors
    transposed, dim, ranks, group = ctx.settings
    needs_x, trains, *_ = ctx.needs_input_grad
    dx = dshard = None
    dy_RO = dy_RO.contiguous()
    if needs_x:
        dx = _product_of_shards(dy_RO, shard, ends_E, not transposed, dim, ranks, group)
    if trains:
        gradient = grouped_weight_gradient(x_RI, dy_RO, ends_E, transposed)
        dshard = _reduce_weight(gradient, shard.dtype, dim, ranks, group)
    return dx, dshard, None, None, None, None, None


_product_of_shards.register_autograd(_backward_of_shards, setup_context=_save_shards)


def _all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, group))  # type: ignore[no-any-return]


def _sum_parts(x: Tensor, ranks: int, group: str) -> Tensor:
    """Sums this rank's rows over all ranks' parts (G x T, ...). Each part is rounded once."""
    sizes = [len(x) // ranks] * ranks
    parts = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), sizes, sizes, group))
    wide = torch.promote_types(x.dtype, torch.float32)
    return parts.view(ranks, -1, *x.shape[1:]).sum(0, dtype=wide).to(x.dtype)  # type: ignore[no-any-return]
