"""Offloading of activations to host memory, with copies that overlap the computation.

In the forward pass, a side stream copies a layer's tensors to the host while the next layers compute, up to the next
offloaded one; then they are freed. In the backward pass, they are copied back while the same layers compute. At most
two offloaded layers' tensors are on the device.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightseq.distributed.parallel_dims import local_part
from lightseq.memory.pinned import PinnedMemory, empty_pageable
from lightseq.models.packed import plain_tensors

MIN_BYTES = 1 << 20  # smaller tensors stay on the device; copying them is not worth it
IN_FLIGHT = 2  # offloaded layers with tensors on the device: one that computes, one that is copied


def layers_in_flight(tile_layers: bool) -> int:
    """Returns the number of offloaded layers with tensors on the device at a time.

    Tiled layers compute for seconds, so copies need no overlap, and one layer saves memory.
    """
    return 1 if tile_layers else IN_FLIGHT


def device_lifetimes(offloaded: Sequence[bool], in_flight: int = IN_FLIGHT) -> list[int]:
    """Returns the lifetime on the device of each offloaded layer's tensors; 0 if they stay there.

    A lifetime counts layers, starting with the layer itself. With two layers in flight it lasts until the next
    offloaded layer has run. The last offloaded layer uses the distance of the one before it; a single one uses two
    layers, or one near the end of the model.
    """
    places = [i for i, leaves in enumerate(offloaded) if leaves]
    distances = [later - earlier for earlier, later in pairwise(places)]
    if len(places) == 1:
        distances = [2 if places[0] + 3 < len(offloaded) else 1]
    elif places:
        distances.append(distances[-1])
    lifetimes = [0] * len(offloaded)
    for place, distance in zip(places, distances, strict=True):
        lifetimes[place] = 1 + (distance if in_flight > 1 else 0)
    return lifetimes


class HostBufferPool:
    """Pool of host buffers of at most `limit_bytes` in total. Shorter batches reuse the buffers of longer ones."""

    def __init__(self, limit_bytes: float, pinned: bool) -> None:
        self.limit_bytes, self.allocated_bytes = limit_bytes, 0
        self._make = PinnedMemory().empty if pinned else empty_pageable
        self._free: dict[torch.dtype, list[Tensor]] = defaultdict(list)  # sorted by size
        self._whole: dict[int, Tensor] = {}  # buffers in use, by address

    def acquire(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a flat buffer, or None if that would exceed the limit."""
        free = self._free[dtype]
        place = bisect_left(free, elements, key=len)  # the smallest sufficient buffer
        buffer = free.pop(place) if place < len(free) else self._new(elements, dtype)
        if buffer is None:
            return None
        self._whole[buffer.data_ptr()] = buffer
        return buffer[:elements]

    def _new(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        size = elements * dtype.itemsize
        if self.allocated_bytes + size > self.limit_bytes:
            return None
        self.allocated_bytes += size
        return self._make((elements,), dtype)

    def release(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool."""
        insort(self._free[buffer.dtype], self._whole[buffer.data_ptr()], key=len)


class OffloadedTensor:
    """A tensor in host memory. `original` is its device copy until that is freed, `restored` the copy back."""

    def __init__(self, layer: "_Layer", tensor: Tensor, host: Tensor) -> None:
        self.layer, self.host = layer, host
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.original: Tensor | None = tensor
        self.restored: Tensor | None = None


class OnDeviceTensor:
    """A saved tensor that stays on the device. Reading it starts fetching tensors that earlier layers will need."""

    def __init__(self, layer: "_Layer", tensor: Tensor) -> None:
        self.layer, self.tensor = layer, tensor


class _Layer:
    """Saved tensors of one layer in one forward pass, and their lifetime on the device (`device_lifetimes`)."""

    def __init__(self, index: int, shared: set[int], weights: set[torch.Size], lifetime: int) -> None:
        self.index, self.lifetime = index, lifetime
        self.shared = shared  # storages of parameters and of arguments that layers share, which stay on the device
        self.weights = weights  # shapes of weights that the layer copies, which stay there too
        self.stored: dict[tuple, OffloadedTensor] = {}
        self.copy_done: torch.cuda.Event | None = None
        self.fetch_done: torch.cuda.Event | None = None
        self.fetching = self.fetched = self.released = False


class Offload:
    """Saved-tensor hooks that store activations in host memory; tensors that do not fit stay on the device.

    Each forward pass must be followed by its backward pass. With `in_flight` 1, copies do not overlap the computation.
    On CPU, copies are synchronous.
    """

    def __init__(self, device: torch.device, memory: HostBufferPool, in_flight: int = IN_FLIGHT) -> None:
        self._in_flight = in_flight
        self.offloaded_bytes = self.on_device_bytes = 0  # in the last or current forward pass
        self.memory, self._device = memory, device
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layers: list[_Layer] = []  # in the last or current forward pass
        self._running: _Layer | None = None
        self._owned_input: int | None = None  # storage of an input that only the layers read (`free_input_after_copy`)

    def wrap(self, layers: Sequence[nn.Module], after: nn.Module, staying: Sequence[nn.Module] = ()) -> None:
        """Wraps the forward of `layers`, in model order, to offload saved tensors, except in `staying` layers.

        The module `after` them stores its tensors on the device, because the backward pass reaches it first.
        Parameters, and tensor arguments after the first, are shared between layers and stay on the device.
        """
        lifetimes = device_lifetimes([*(layer not in staying for layer in layers), False], self._in_flight)
        for index, (layer, lifetime) in enumerate(zip(layers, lifetimes[:-1], strict=True)):
            forward = partial(self._forward, index, layer, lifetime, layer.forward)
            layer.forward = forward  # type: ignore[method-assign]
        after.forward = partial(self._after, after.forward)  # type: ignore[method-assign]

    def store(self, tensor: Tensor) -> OffloadedTensor | OnDeviceTensor | Tensor:
        """Starts copying a tensor to the host, or leaves it on the device. For use inside a layer's forward."""
        layer = self._running
        if layer is None or not self._is_offloadable(tensor, layer):
            return tensor
        if not layer.lifetime:
            return OnDeviceTensor(layer, tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in layer.stored:
            host = self.memory.acquire(tensor.numel(), tensor.dtype)
            if host is None:
                self.on_device_bytes += tensor.nbytes
                return OnDeviceTensor(layer, tensor)
            self.offloaded_bytes += tensor.nbytes
            tensor = tensor.detach()
            layer.stored[key] = OffloadedTensor(layer, tensor, host)
            with self._on_side_stream():
                layer.stored[key].host.copy_(_flat(tensor), non_blocking=True)
            layer.copy_done = self._event()
        return layer.stored[key]

    @contextmanager
    def free_input_after_copy(self, tensor: Tensor) -> Iterator[None]:
        """Frees the memory of the first layer's input as soon as its device copy is dropped, whoever holds the tensor.

        Nobody but the layers may read it any more.
        """
        self._owned_input = _storage(tensor)
        try:
            yield
        finally:
            self._owned_input = None

    def fetch(self, stored: OffloadedTensor | OnDeviceTensor | Tensor) -> Tensor:
        """Returns the tensor on the device, and starts fetching tensors that earlier layers will need.

        Raises RuntimeError if the tensor was freed, as in a second backward pass.
        """
        if isinstance(stored, Tensor):
            return stored
        layer = stored.layer
        if not layer.fetched and not layer.released:
            self._begin_backward(layer)
        if isinstance(stored, OnDeviceTensor):
            return stored.tensor
        if layer.released:
            raise RuntimeError("offloaded tensors are freed by the backward pass; use --offload none for a second one")
        assert stored.restored is not None
        return stored.restored

    def _begin_backward(self, layer: _Layer) -> None:
        for later in self._layers[layer.index + 1 :]:
            self._release(later)
        self._start_fetch(layer)
        _wait_for(layer.fetch_done)
        layer.fetched = True
        for earlier in reversed(self._layers[: layer.index]):
            if earlier.index + earlier.lifetime > layer.index:
                self._start_fetch(earlier)

    def _forward(
        self, index: int, layer: nn.Module, lifetime: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index == 0:
            for old in self._layers:
                self._release(old)
            self._layers, self.offloaded_bytes, self.on_device_bytes = [], 0, 0
        others = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
        weights = (part for x in layer.parameters() for part in plain_tensors(local_part(x)))
        shared = {_storage(x) for x in (*others, *weights)}
        self._running = _Layer(index, shared, _copied_weights(layer), lifetime)
        self._layers.append(self._running)
        self._drop_originals(index)
        try:
            with saved_tensors_hooks(self.store, self.fetch):
                return forward(*args, **kwargs)
        finally:
            self._running = None

    def _after(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._drop_originals(len(self._layers))
        return forward(*args, **kwargs)

    def _drop_originals(self, index: int) -> None:
        """Drops the device copies of the layer whose lifetime ends when layer `index` begins."""
        for layer in self._layers:
            if not layer.lifetime or layer.index + layer.lifetime != index:
                continue
            _wait_for(layer.copy_done)  # the device waits before the memory is reused
            for stored in layer.stored.values():
                if stored.original is not None and _storage(stored.original) == self._owned_input:
                    stored.original.untyped_storage().resize_(0)
                stored.original = None

    def _start_fetch(self, layer: _Layer) -> None:
        """Starts copying a layer's tensors back to the device."""
        if layer.fetching:
            return
        layer.fetching = True
        for stored in layer.stored.values():
            stored.restored, stored.original = stored.original, None
            if stored.restored is not None:  # never freed
                continue
            stored.restored = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device=stored.device)
            with self._on_side_stream():
                _flat(stored.restored).copy_(stored.host, non_blocking=True)
        layer.fetch_done = self._event()

    def _release(self, layer: _Layer) -> None:
        if layer.released:
            return
        layer.released = True
        if not layer.fetched:  # a backward pass that ended early leaves copies that still write to the device
            _wait_for(layer.fetch_done)
        for stored in layer.stored.values():
            self.memory.release(stored.host)  # copies on the side stream run in order, so reuse is safe
            stored.original = stored.restored = None

    def _is_offloadable(self, tensor: Tensor, layer: _Layer) -> bool:
        here = type(tensor) is Tensor and tensor.device == self._device and tensor.nbytes >= MIN_BYTES
        if not (here and _is_dense(tensor)):
            return False
        return not (tensor.shape in layer.weights or _storage(tensor) in layer.shared)

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Runs the block on the side stream, after everything queued on the current one."""
        if self._side_stream is None:
            yield
            return
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            yield

    def _event(self) -> torch.cuda.Event | None:
        return self._side_stream.record_event() if self._side_stream is not None else None


def _copied_weights(layer: nn.Module) -> set[torch.Size]:
    """Returns the shapes of weights that a layer casts or gathers outside FSDP2: a rank's experts."""
    experts = [p for p in layer.parameters() if isinstance(p, DTensor) and p.ndim == 3]
    return {torch.Size((len(p) // p.device_mesh.size(0), *p.shape[1:])) for p in experts}


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    """Returns all elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
