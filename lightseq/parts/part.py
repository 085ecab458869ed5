"""Interface of the parts of a model: what training replaces in them, and what their operators store and hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from lightseq.attention.context import SequenceContext
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP
from lightseq.parts.changes import Changes
from lightseq.schedule.reach import Reach


@dataclass(frozen=True)
class Choices:
    """Choices of how parts compute. Each changes what a layer saves or computes, and none depends on ranks."""

    reaches: tuple[Reach | None, ...] = ()  # keys visible to each layer, by its model's mask
    groups_experts: bool = False  # experts run as grouped products
    tiles_mlp: bool = False  # gated MLPs run over tiles of tokens
    ends_with_mlp: bool = False  # no backward pass needs the output of an MLP (`Layer.mlp_is_last`)
    stores_products: bool = False  # checkpoints may store gate and up of MLPs, and the first products of experts
    stores_projections: bool = False  # checkpoints may store the outputs of attention's projections


def choices_of_policy(policy: str, ends_with_mlp: bool, tiles_mlp: bool = True) -> Choices:
    """Returns the choices of a remat policy. With `tiles_mlp` MLPs run over tiles if layers are checkpointed."""
    stores = policy in STORES_MLP
    return Choices(
        groups_experts=True,
        tiles_mlp=stores or (tiles_mlp and policy != "none"),  # the tiled operator also stores gate and up
        ends_with_mlp=ends_with_mlp,
        stores_products=stores,
        stores_projections=policy == STORE_LINEARS,
    )


class ExpertRanks(Protocol):
    """Ranks that hold different experts of the same layers."""

    def weight(self, parameter: Tensor) -> Tensor:
        """Returns the experts that this rank computes, in the compute dtype."""
        ...

    def product(self, x_RI: Tensor, parameter: Tensor, ends_E: Tensor, transposed: bool, stored: bool) -> Tensor:
        """Returns the product (R, O) of each expert's rows with its weights."""
        ...

    def forward(self, module: Any, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the weighted sum of each token's experts (T, H), computed by all ranks."""
        ...


@dataclass(frozen=True)
class Ranks:
    """Ranks that parts span. None: the modules' ranks do not change."""

    sequence: SequenceContext | None = None  # context of attention and recurrences
    experts: ExpertRanks | None = None


@dataclass(frozen=True)
class Part:
    """A kind of computation in the layers of a model.

    `fit` replaces the computation of such modules inside the given ones, records it, and looks at no device, mesh or
    process group. So the plan and the runs on the meta device fit modules as training does.
    """

    name: str  # also of the point in a backward pass where `backward` runs
    fit: Callable[[Sequence[nn.Module], Choices, Ranks, Changes], None]
    stored: tuple[Any, ...] = ()  # operators whose results a checkpoint stores, unless it recomputes everything
    backward: Any = None  # operator of the backward pass whose memory the plan counts by itself
