"""Wrappers that run kernels for equal dimensions on keys and values of different dimensions."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import pad

from lightseq.kernels.attention.base import GradientMemory, Kernel, Saved
from lightseq.kernels.attention.segment_calls import Lengths
from lightseq.kernels.attention.tile import VarlenKernel


def with_padding(kernel: Kernel, dim: int, value_dim: int) -> Any:
    """Returns a kernel for keys of `dim` and values of `value_dim`, which runs `kernel` on heads of the larger.

    It computes several segments in one call if `kernel` does.
    """
    return (_PaddedVarlen if isinstance(kernel, VarlenKernel) else _Padded)(kernel, dim, value_dim)


@dataclass(frozen=True)
class _Padded:
    """Kernel that pads the narrower of keys and values with zeros, which change neither scores nor results."""

    kernel: Any
    dim: int
    value_dim: int

    @property
    def name(self) -> str:
        return f"{self.kernel.name} with padded {'values' if self.value_dim < self.dim else 'keys'}"

    @property
    def causal_alignment(self) -> Literal["bottom_right", "square"]:
        alignment: Literal["bottom_right", "square"] = self.kernel.causal_alignment
        return alignment

    @property
    def has_windows(self) -> bool:
        return bool(self.kernel.has_windows)

    def why_unavailable(self, spec: Any) -> str | None:
        return "is made of another kernel, by name"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, into: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = self.kernel.forward(*self._wide(q, k, v), causal, scale, None, window)
        return out[..., : self.value_dim], lse

    def backward(
        self, dout: Tensor, saved: Saved, causal: bool, scale: float, into: GradientMemory = (None, None, None),
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        made = self.kernel.backward(*self._wide_saved(dout, saved), causal, scale, window=window)
        return self._narrow(*made)

    def _wide(self, *tensors: Tensor) -> list[Tensor]:
        width = max(self.dim, self.value_dim)
        return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors]

    def _wide_saved(self, dout: Tensor, saved: Saved) -> tuple[Tensor, Saved]:
        wide_dout, q, k, v, out = self._wide(dout, *saved[:4])
        return wide_dout, Saved(q=q, k=k, v=v, out=out, lse=saved.lse)

    def _narrow(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq[..., : self.dim], dk[..., : self.dim], dv[..., : self.value_dim]


class _PaddedVarlen(_Padded):
    """Pads values for varlen kernels."""

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, causal: bool, scale: float,
        into: Tensor | None = None, window: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = self.kernel.forward_varlen(*self._wide(q, k, v), lengths, causal, scale, None, window)
        return out[..., : self.value_dim], lse

    def backward_varlen(
        self, dout: Tensor, saved: Saved, lengths: Lengths | None, causal: bool, scale: float,
        into: GradientMemory = (None, None, None), window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        made = self.kernel.backward_varlen(*self._wide_saved(dout, saved), lengths, causal, scale, window=window)
        return self._narrow(*made)
