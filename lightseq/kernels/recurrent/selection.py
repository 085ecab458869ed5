"""Choice of a kernel for a recurrence."""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from lightseq.kernels.recurrent.base import ScanInputs, ScanKernel

MODULES: Final = {"torch": ("torch_scan", "TorchScan"), "fla": ("fla_scan", "FlaScan")}
FLA: Final = "0.6"  # the version whose kernels are called one by one
INSTALL: Final = f"pip install 'flash-linear-attention=={FLA}.*' tilelang"
MAX_KEYS: Final = 256  # of fla's kernels


def select_kernel(x: ScanInputs) -> ScanKernel:
    """Returns the fastest kernel for these inputs. Says once on a GPU why the fast one cannot run."""
    if x.v.device.type != "cuda":
        return _kernel("torch")
    reason = _why_not_fla(x.k.dtype, x.k.shape[-1], x.g.ndim == 4, x.beta is not None)
    if reason is None:
        return _kernel("fla")
    _warn(reason)
    return _kernel("torch")


@cache
def _kernel(name: str) -> ScanKernel:
    module, kind = MODULES[name]
    made: ScanKernel = getattr(import_module(f"lightseq.kernels.recurrent.{module}"), kind)()
    return made


@cache
def _warn(reason: str) -> None:
    warnings.warn(f"recurrent layers run slowly, on matrix products of torch: {reason}", stacklevel=2)


@cache
def _why_not_fla(dtype: torch.dtype, keys: int, per_channel: bool, is_delta_rule: bool) -> str | None:
    if not is_delta_rule:
        return "no fast kernel of Mamba 2 is used yet"
    if per_channel:
        return "no fast kernel of Kimi Delta Attention is used yet"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the fast kernel takes bfloat16, not {dtype}; train in bfloat16"
    if keys > MAX_KEYS:
        return f"the fast kernel takes keys of up to {MAX_KEYS} elements, not {keys}"
    return _why_unusable()


@cache
def _why_unusable() -> str | None:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"flash-linear-attention is not installed; {INSTALL}"
    if not found.startswith(f"{FLA}."):
        return f"fla-core {found} is not the version that is supported; {INSTALL}"
    try:
        _kernel("fla")
    except Exception as error:  # the package may raise anything when it is imported
        return f"fla-core {found} does not load ({type(error).__name__}: {error})"
    return None
