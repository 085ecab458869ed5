"""Interface of attention kernels, which compute one tile under a full or a causal mask.

Shape suffixes: B batch, S query tokens, T key tokens, H query heads, K key/value heads, D head dim, E head dim of
values.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class KernelSpec:
    """Hardware and inputs that a kernel has to support.

    `capability` is the CUDA compute capability, (0, 0) on CPU.
    """

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    deterministic: bool = False
    packed: bool = False  # most tiles hold several documents
    windows: bool = False  # some layers have a sliding window
    softcap: bool = False  # some layers cap their scores
    value_dim: int | None = None  # elements of a head's values (default: head_dim)

    @property
    def has_other_values(self) -> bool:
        """Returns whether values have another dimension than keys."""
        return self.value_dim not in (None, self.head_dim)

    @property
    def widest(self) -> int:
        """Returns the larger of the dimensions of keys and values."""
        return max(self.head_dim, self.value_dim or 0)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Returns the CUDA compute capability of a device, (0, 0) on CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


GradientMemory = tuple[Tensor | None, Tensor | None, Tensor | None]  # for dq, dk, dv


class Saved(NamedTuple):
    """Tensors saved for the backward pass of a tile. out and lse are the global ones of its queries."""

    q: Tensor  # (B, S, H, D)
    k: Tensor  # (B, T, K, D)
    v: Tensor  # (B, T, K, E)
    out: Tensor  # (B, S, H, E)
    lse: Tensor  # (B, H, S)


class Kernel(Protocol):
    """Interface of a kernel, which computes one tile.

    out (B, S, H, E) has q's dtype; lse is (B, H, S) in float32 (float64 for float64 inputs), natural logarithm, of the
    scaled scores. The backward takes the *global* out and lse of its queries, over the keys of all tiles.
    A kernel may write its result to `into`, a tensor of any strides, and then returns that tensor.

    `window` limits a causal mask, aligned bottom-right, to the last keys that a query sees, with its own. Only kernels
    that have windows (`has_windows`) get one.

    Optional interfaces: `VarlenKernel` (tile.py) for several segments in one call, and `SoftCapKernel`. A kernel that
    needs an optional library also has `why_unsupported(spec)`: the reason of `why_unavailable` if it were installed.
    """

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    @property
    def causal_alignment(self) -> Literal["bottom_right", "square"]:
        """Alignment of causal masks; square: only for as many keys as queries."""
        ...

    @property
    def has_windows(self) -> bool:
        """True if `forward` and `backward` take a window."""
        ...

    def why_unavailable(self, spec: KernelSpec) -> str | None:
        """Returns None if the kernel can run here, else the reason in a few words."""
        ...

    def forward(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns out and lse."""
        ...

    def backward(
        self, dout_BSHE: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns dq, dk and dv."""
        ...


@runtime_checkable
class SoftCapKernel(Protocol):
    """Interface of a kernel that can cap scaled scores s softly, cap * tanh(s / cap), before the mask (Gemma 2).

    Its log-sum-exp is taken over the capped scores.
    """

    def with_softcap(self, softcap: float) -> Self:
        """Returns the kernel that caps its scores."""
        ...


def gradient_memory(into: GradientMemory, saved: Saved) -> list[Tensor]:
    """Returns memory for dq, dk and dv: the given tensors, and new tensors instead of None."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if given is None else given
        for given, x in zip(into, saved[:3], strict=True)
    ]
