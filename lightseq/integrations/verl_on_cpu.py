"""Platform with which verl runs on processes without a GPU, for trials and tests.

export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=lightseq.integrations.verl_on_cpu
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


MODULE = SimpleNamespace(  # functions of torch.cuda that verl calls
    current_device=_zero,
    device_count=lambda: 1,
    empty_cache=_nothing,
    get_device_name=lambda *_: "CPU",
    get_rng_state=torch.get_rng_state,
    ipc_collect=_nothing,
    is_available=lambda: True,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    mem_get_info=lambda *_: (0, 0),
    memory_allocated=_zero,
    memory_reserved=_zero,
    reset_peak_memory_stats=_nothing,
    set_device=_nothing,
    set_rng_state=torch.set_rng_state,
    synchronize=_nothing,
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """verl's view of a machine without accelerators."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: Any = MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors to it

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
