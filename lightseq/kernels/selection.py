"""Choice of the kernel: the fastest that can run here, and why faster ones cannot."""

from dataclasses import dataclass

from lightseq.kernels.base import Kernel, KernelSpec
from lightseq.kernels.registry import KERNELS


@dataclass(frozen=True)
class Selection:
    """Chosen kernel, and (name, reason) of every faster one that cannot run."""

    kernel: Kernel
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        before = "; ".join(f"{name}: {reason}" for name, reason in self.skipped)
        return self.kernel.name + (f" ({before})" if before else "")


def select(name: str, spec: KernelSpec) -> Selection:
    """Returns the named kernel, or for `auto` the first that can run. Raises ValueError if it cannot run here."""
    if name != "auto":
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} is unknown; choose auto or one of {', '.join(KERNELS)}")
        kernel = KERNELS[name].make(spec)
        if reason := kernel.why_not(spec):
            raise ValueError(f"kernel {name} cannot run here: {reason}; choose another, or auto")
        return Selection(kernel)
    skipped: list[tuple[str, str]] = []
    for candidate in _order(spec):
        kernel = KERNELS[candidate].make(spec)
        reason = kernel.why_not(spec)
        if reason is None:
            return Selection(kernel, tuple(skipped))
        skipped.append((candidate, reason))
    raise AssertionError("the reference kernel runs everywhere")


def why_unsupported(name: str, spec: KernelSpec) -> str | None:
    """Returns why this hardware cannot run the named kernel, whatever is installed; None if it can."""
    kernel = KERNELS[name].make(spec)
    check = getattr(kernel, "why_unsupported", kernel.why_not)  # other kernels come with torch
    reason: str | None = check(spec)
    return reason


def _order(spec: KernelSpec) -> tuple[str, ...]:
    if spec.device_type == "cpu":
        return ("cpu", "reference")
    if spec.packed:  # varlen kernels first: others need a call per document, and set up each new length
        later = ("fa3", "cudnn", "reference")
        return ("fa4", "fa2", "aten", *later) if spec.capability >= (9, 0) else ("fa2", "aten", *later[1:])
    if spec.capability >= (9, 0):
        return ("fa4", "fa3", "cudnn", "fa2", "aten", "reference")
    return ("fa2", "cudnn", "aten", "reference")
