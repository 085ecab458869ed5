"""Choice of the kernel: the fastest that can run here, and why faster ones cannot."""

from dataclasses import dataclass, field, replace
from typing import cast

from lightseq.kernels.attention.base import Kernel, KernelSpec, SoftCapKernel
from lightseq.kernels.attention.padded_values import with_padding
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.attention.torch_native import NEEDS_EQUAL_DIMS


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
        kernel, reason = _make(name, spec)
        if reason is not None:
            raise ValueError(f"kernel {name} cannot run here: {reason}; choose another, or auto")
        return Selection(kernel)
    skipped: list[tuple[str, str]] = []
    for candidate in _order(spec):
        kernel, reason = _make(candidate, spec)
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


def _make(name: str, spec: KernelSpec) -> tuple[Kernel, str | None]:
    """Makes a kernel, padded if it needs equal dimensions of keys and values. Returns why it cannot run, if so."""
    kernel = KERNELS[name].make(spec)
    reason = kernel.why_unavailable(spec)
    if reason != NEEDS_EQUAL_DIMS:
        return kernel, reason
    assert spec.value_dim is not None, "values differ from keys"
    padded = replace(spec, head_dim=spec.widest, value_dim=spec.widest)
    return with_padding(kernel, spec.head_dim, spec.value_dim), kernel.why_unavailable(padded)


@dataclass(frozen=True)
class Kernels:
    """The kernel for each kind of heads of a model, chosen when it is first asked for."""

    name: str  # `auto`, or a kernel
    spec: KernelSpec  # apart from the dimensions
    chosen: dict[tuple[int, int], Selection] = field(default_factory=dict, compare=False)

    def of(self, dim: int, value_dim: int) -> Selection:
        """Returns the selection for keys of `dim` and values of `value_dim`. Raises ValueError as `select`."""
        if (dim, value_dim) not in self.chosen:
            self.chosen[dim, value_dim] = select(self.name, replace(self.spec, head_dim=dim, value_dim=value_dim))
        return self.chosen[dim, value_dim]

    def __str__(self) -> str:
        if len({str(selection) for selection in self.chosen.values()}) == 1:
            return str(next(iter(self.chosen.values())))
        named = ((f"{dim}" if dim == values else f"{dim}/{values}", x) for (dim, values), x in self.chosen.items())
        return ", ".join(f"{selection} for heads of {dims}" for dims, selection in named)


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
    check = getattr(kernel, "why_unsupported", kernel.why_unavailable)  # a hardware check imports nothing
    reason: str | None = check(spec)
    return reason if reason != NEEDS_EQUAL_DIMS else check(replace(spec, head_dim=spec.widest, value_dim=spec.widest))


def _order(spec: KernelSpec) -> tuple[str, ...]:
    """Returns the kernels to try on this hardware, the fastest first. The last runs anywhere."""
    if spec.device_type == "cpu":
        return ("cpu", "reference")
    if spec.packed:  # varlen kernels first: others need a call per document, and set up each new length
        later = ("fa3", "cudnn", "cublas", "reference")
        return ("fa4", "fa2", "aten", *later) if spec.capability >= (9, 0) else ("fa2", "aten", *later[1:])
    if spec.capability >= (9, 0):
        return ("fa4", "fa3", "cudnn", "fa2", "aten", "cublas", "reference")
    return ("fa2", "cudnn", "aten", "cublas", "reference")
