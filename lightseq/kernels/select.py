"""Which kernel runs here: the fastest first for the chip, and why those before it could not."""

from collections.abc import Callable
from dataclasses import dataclass

from lightseq.kernels.base import Kernel, KernelSpec
from lightseq.kernels.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from lightseq.kernels.reference import ReferenceKernel
from lightseq.kernels.torch_native import AtenKernel, CpuKernel, CudnnKernel

KERNELS: dict[str, Callable[[KernelSpec], Kernel]] = {
    "fa4": lambda spec: FlashAttention4(spec.deterministic),
    "fa3": lambda spec: FlashAttention3(spec.deterministic),
    "fa2": lambda spec: FlashAttention2(spec.deterministic),
    "cudnn": lambda spec: CudnnKernel(),
    "aten": lambda spec: AtenKernel(spec.deterministic),
    "cpu": lambda spec: CpuKernel(),
    "reference": lambda spec: ReferenceKernel(),
}


@dataclass(frozen=True)
class Selection:
    """A kernel, and (name, reason) of every faster one that cannot run."""

    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        before = "; ".join(f"{name}: {reason}" for name, reason in self.passed_over)
        return self.kernel.name + (f" ({before})" if before else "")


def select(name: str, spec: KernelSpec) -> Selection:
    """The named kernel, or for `auto` the first that can run. Raises ValueError with the reason if it cannot."""
    if name != "auto":
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} is unknown; choose auto or one of {', '.join(KERNELS)}")
        kernel = KERNELS[name](spec)
        if reason := kernel.why_not(spec):
            raise ValueError(f"kernel {name} cannot run here: {reason}; choose another, or auto")
        return Selection(kernel)
    passed_over: list[tuple[str, str]] = []
    for candidate in _order(spec):
        kernel = KERNELS[candidate](spec)
        reason = kernel.why_not(spec)
        if reason is None:
            return Selection(kernel, tuple(passed_over))
        passed_over.append((candidate, reason))
    raise AssertionError("the reference kernel runs everywhere")


def unfit(name: str, spec: KernelSpec) -> str | None:
    """Why the named kernel could not run on a GPU that need not be here, whatever is installed; None if it could."""
    kernel = KERNELS[name](spec)
    reason: str | None = getattr(kernel, "unfit", kernel.why_not)(spec)  # of the others nothing has to be installed
    return reason


def _order(spec: KernelSpec) -> tuple[str, ...]:
    if spec.device_type == "cpu":
        return ("cpu", "reference")
    if spec.packed:  # first those that take documents in one call: the others pay for every document, and every length
        later = ("fa3", "cudnn", "reference")
        return ("fa4", "fa2", "aten", *later) if spec.capability >= (9, 0) else ("fa2", "aten", *later[1:])
    if spec.capability >= (9, 0):
        return ("fa4", "fa3", "cudnn", "fa2", "aten", "reference")
    return ("fa2", "cudnn", "aten", "reference")
