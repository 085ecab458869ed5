"""Choice of the kernel: the fastest that can run here, and why faster ones cannot."""

from dataclasses import dataclass
from typing import cast

from lightseq.kernels.attention.base import Kernel, KernelSpec, SoftCapKernel
from lightseq.kernels.attention.registry import KERNELS


@dataclass(frozen=True)
class Selection:
    """Chosen kernel, and (name, reason) of every faster one that cannot run."""

    kernel: Kernel
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        before = "; ".join(f"{name}: {reason}" for name, reason in self.skipped)
        return self.kernel.name + (f" ({before})" if before else "")


def select(name: str, spec: KernelSpec) -> Selection:
    """Returns the named kernel, or for `auto` the first that can run.

    Raises ValueError for a kernel that cannot run here, and if only the reference kernel could cap scores on a GPU.
    """
    if name != "auto":
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} is unknown; choose auto or one of {', '.join(KERNELS)}")
        kernel = KERNELS[name].make(spec)
        if reason := kernel.why_unavailable(spec):
            raise ValueError(f"kernel {name} cannot run here: {reason}; choose another, or auto")
        return Selection(kernel)
    skipped: list[tuple[str, str]] = []
    for candidate in _order(spec):
        kernel = KERNELS[candidate].make(spec)
        reason = kernel.why_unavailable(spec)
        if candidate == "reference" and spec.softcap and spec.device_type == "cuda":
            others = "; ".join(f"{name}: {why}" for name, why in skipped)
            raise ValueError(
                "the model caps its attention scores softly, which no fast kernel here supports; install flash-attn-4 "
                f"and train in bfloat16, or choose kernel reference, whose memory is quadratic ({others})"
            )
        if reason is None:
            return Selection(kernel, tuple(skipped))
        skipped.append((candidate, reason))
    raise AssertionError("the reference kernel runs everywhere")


def with_softcap(kernel: Kernel, softcap: float | None) -> Kernel:
    """Returns the kernel that caps its scores at `softcap` (None: not at all). Raises ValueError if it cannot."""
    if softcap is None:
        return kernel
    if not isinstance(kernel, SoftCapKernel):
        raise ValueError(
            f"the model caps its attention scores softly (softcap {softcap}), but kernel {kernel.name} cannot; pass "
            "softcap=True to hf.enable, or choose kernel reference"
        )
    return cast(Kernel, kernel.with_softcap(softcap))


def why_unsupported(name: str, spec: KernelSpec) -> str | None:
    """Returns why this hardware cannot run the named kernel, or None if it can. Ignores what is installed."""
    kernel = KERNELS[name].make(spec)
    check = getattr(kernel, "why_unsupported", kernel.why_unavailable)  # the latter needs no optional library
    reason: str | None = check(spec)
    return reason


def _order(spec: KernelSpec) -> tuple[str, ...]:
    """Returns the kernels to try on this hardware, the fastest first. The last runs anywhere."""
    if spec.device_type == "cpu":
        return ("cpu", "reference")
    if spec.packed:  # varlen kernels first: others need a call per document, and set up each new length
        later = ("fa3", "cudnn", "reference")
        return ("fa4", "fa2", "aten", *later) if spec.capability >= (9, 0) else ("fa2", "aten", *later[1:])
    if spec.capability >= (9, 0):
        return ("fa4", "fa3", "cudnn", "fa2", "aten", "reference")
    return ("fa2", "cudnn", "aten", "reference")
