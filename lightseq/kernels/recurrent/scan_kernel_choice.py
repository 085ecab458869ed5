"""Choice of a kernel for a recurrence."""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from lightseq.kernels.recurrent.base import ScanInputs, ScanKernel

MODULES: Final = {
    "torch": ("torch_scan", "TorchScan"),
    "fla_delta": ("fla_delta_scan", "FlaDeltaScan"),
    "fla_kimi": ("fla_kimi_scan", "FlaKimiScan"),
    "fla_decay": ("fla_decay_scan", "FlaDecayScan"),
}
# Kernels of flash-linear-attention, by whether they are delta rules and whether each channel has its own decay.
FLA_KERNELS: Final = {(True, False): "fla_delta", (True, True): "fla_kimi", (False, False): "fla_decay"}
FLA: Final = "0.6"  # the version whose kernels are called one by one
INSTALL: Final = f"pip install 'flash-linear-attention=={FLA}.*' tilelang"
MAX_KEYS: Final = 256  # most elements of a key in fla's kernels


def select_kernel(x: ScanInputs) -> ScanKernel:
    """Returns the fastest kernel for these inputs. Says once on a GPU why the fast one cannot run."""
    if x.v.device.type != "cuda":
        return _kernel("torch")
    name = FLA_KERNELS.get((x.beta is not None, x.g.ndim == 4), "")
    reason = _why_not_fla(name, x.k.dtype, x.k.shape[-1], x.v.shape[-1])
    if reason is None:
        return _kernel(name)
    _warn(reason)
    return _kernel("torch")


def why_slow(dtype: torch.dtype) -> str | None:
    """Returns why recurrences in this dtype run on matrix products of torch on a GPU here; None if nothing is known.

    It does not import the library, which takes long.
    """
    return _why_not_dtype(dtype) or _why_not_installed()


@cache
def _kernel(name: str) -> ScanKernel:
    module, kind = MODULES[name]
    made: ScanKernel = getattr(import_module(f"lightseq.kernels.recurrent.{module}"), kind)()
    return made


@cache
def _warn(reason: str) -> None:
    warnings.warn(f"recurrent layers run slowly, on matrix products of torch: {reason}", stacklevel=2)


@cache
def _why_not_fla(name: str, dtype: torch.dtype, keys: int, values: int) -> str | None:
    if not name:
        return "no fast kernel has a decay for each channel without a delta rule"
    if reason := _why_not_dtype(dtype):
        return reason
    if keys > MAX_KEYS or keys % 2 or values % 2:
        return f"the fast kernel takes even sizes, and keys of up to {MAX_KEYS}, not {keys} and values of {values}"
    return _why_unusable(name)


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    if dtype in (torch.float16, torch.bfloat16):
        return None
    return f"the fast kernel takes bfloat16, not {dtype}; train in bfloat16"


def _why_not_installed() -> str | None:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"flash-linear-attention is not installed; {INSTALL}"
    if not found.startswith(f"{FLA}."):
        return f"fla-core {found} is not the version that is supported; {INSTALL}"
    return None


@cache
def _why_unusable(name: str) -> str | None:
    if reason := _why_not_installed():
        return reason
    try:
        _kernel(name)
    except Exception as error:  # the package may raise anything when it is imported
        return f"fla-core {version('fla-core')} does not load ({type(error).__name__}: {error})"
    return None
