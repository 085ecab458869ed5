"""What layers keep for the backward pass waits in host memory, copied out and back beside the computing.

Forward: a layer's tensors leave on a side stream while the next layer computes; once that is done they are gone.
Backward: the tensors of the layer below come back while a layer computes. The tensors of two layers are there at most.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightseq.memory.pinned import PinnedMemory, plain

LEAST_BYTES = 1 << 20  # smaller tensors stay: a copy of them costs more than their memory is worth
IN_FLIGHT = 2  # layers whose tensors are there at a time: one computes, another's are leaving or coming back


def layers_in_flight(tile_layers: bool) -> int:
    """Layers over tiles compute for seconds: one in flight takes least memory, and little is lost."""
    return 1 if tile_layers else IN_FLIGHT


class HostMemory:
    """Buffers on the host, made once and used again, `limit_bytes` of them in all; short batches use long ones'."""

    def __init__(self, limit_bytes: float, pinned: bool) -> None:
        self.limit_bytes, self.allocated_bytes = limit_bytes, 0
        self._make = PinnedMemory().empty if pinned else plain
        self._free: dict[torch.dtype, list[Tensor]] = defaultdict(list)  # rising in size
        self._whole: dict[int, Tensor] = {}  # buffers in use, by address

    def take(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """A flat buffer, or None where that would pass the limit."""
        free = self._free[dtype]
        place = bisect_left(free, elements, key=len)  # the smallest that will do, so that larger tensors find room too
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
        return self.make(elements, dtype)

    def make(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns a new buffer."""
        return self._make((elements,), dtype)

    def give_back(self, buffer: Tensor) -> None:
        insort(self._free[buffer.dtype], self._whole[buffer.data_ptr()], key=len)


class Kept:
    """A tensor on the host. `leaving` is the original, for as long as it may still be read; `back` the copy of it."""

    def __init__(self, layer: "_Layer", tensor: Tensor, host: Tensor) -> None:
        self.layer, self.host = layer, host
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.leaving: Tensor | None = tensor
        self.back: Tensor | None = None


class Stayed:
    """A tensor that did not leave: when it is read, the layer below comes back."""

    def __init__(self, layer: "_Layer", tensor: Tensor) -> None:
        self.layer, self.tensor = layer, tensor


class _Layer:
    """What one layer kept in one forward pass."""

    def __init__(self, index: int, shared: set[int], stays: bool) -> None:
        self.index, self.shared, self.stays = index, shared, stays  # shared: the storages that are not its own
        self.kept: dict[tuple, Kept] = {}
        self.left: torch.cuda.Event | None = None
        self.returned: torch.cuda.Event | None = None
        self.coming = self.awaited = self.over = False


class Offload:
    """Holds what layers save in host memory; what finds no room there stays on the device.

    One forward pass is followed by its backward pass. On CPU the same happens with plain copies. With one layer
    `in_flight` nothing is copied beside the computing, which takes least memory and loses little where layers compute
    for seconds.
    """

    def __init__(self, device: torch.device, memory: HostMemory, in_flight: int = IN_FLIGHT) -> None:
        self._in_flight = in_flight
        self.kept_bytes = self.stayed_bytes = 0  # of the forward pass that ran last, or runs
        self.memory, self._device = memory, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layers: list[_Layer] = []  # of the forward pass that ran last, or runs
        self._running: _Layer | None = None

    def wrap(self, layers: Sequence[nn.Module], after: nn.Module, staying: Sequence[nn.Module] = ()) -> None:
        """The forward of each of these layers, in the model's order, hands over what it saves, but of those `staying`.

        The layer `after` them keeps its own, for the backward pass begins with it or comes from there. Parameters, and
        tensors among the arguments after the first, serve several layers and stay.
        """
        for index, layer in enumerate(layers):
            forward = partial(self._forward, index, layer, layer in staying, layer.forward)
            layer.forward = forward  # type: ignore[method-assign]
        after.forward = partial(self._after, after.forward)  # type: ignore[method-assign]

    def keep(self, tensor: Tensor) -> Kept | Stayed | Tensor:
        """Starts the tensor's way to the host, or has it stay. For use inside the forward of a layer."""
        layer = self._running
        if layer is None or not self._may_leave(tensor, layer):
            return tensor
        if layer.stays:
            return Stayed(layer, tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in layer.kept:
            host = self.memory.take(tensor.numel(), tensor.dtype)
            if host is None:
                self.stayed_bytes += tensor.nbytes
                return Stayed(layer, tensor)
            self.kept_bytes += tensor.nbytes
            tensor = tensor.detach()
            layer.kept[key] = Kept(layer, tensor, host)
            with self._beside():
                layer.kept[key].host.copy_(_flat(tensor), non_blocking=True)
            layer.left = self._event()
        return layer.kept[key]

    def fetch(self, kept: Kept | Stayed | Tensor) -> Tensor:
        """The tensor, on the device; what the layer before it kept begins to come back. Raises RuntimeError if gone."""
        if isinstance(kept, Tensor):
            return kept
        layer = kept.layer
        if not layer.awaited and not layer.over:
            self._begin_backward(layer)
        if isinstance(kept, Stayed):
            return kept.tensor
        if layer.over:
            raise RuntimeError("what a layer kept is gone after its backward pass; for a second one use --offload none")
        assert kept.back is not None
        return kept.back

    def _begin_backward(self, layer: _Layer) -> None:
        for later in self._layers[layer.index + 1 :]:
            self._release(later)
        self._bring(layer)
        _wait_for(layer.returned)
        layer.awaited = True
        if layer.index and self._in_flight > 1:
            self._bring(self._layers[layer.index - 1])

    def _forward(
        self, index: int, layer: nn.Module, stays: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index == 0:
            for old in self._layers:
                self._release(old)
            self._layers, self.kept_bytes, self.stayed_bytes = [], 0, 0
        others = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
        self._running = _Layer(index, {_storage(x) for x in (*others, *layer.parameters())}, stays)
        self._layers.append(self._running)
        self._let_go(index - self._in_flight)
        try:
            with saved_tensors_hooks(self.keep, self.fetch):
                return forward(*args, **kwargs)
        finally:
            self._running = None

    def _after(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._let_go(len(self._layers) - self._in_flight)
        return forward(*args, **kwargs)

    def _let_go(self, index: int) -> None:
        """Of what a layer kept."""
        if index < 0:
            return
        _wait_for(self._layers[index].left)  # on the device; only then may its memory be somebody else's
        for kept in self._layers[index].kept.values():
            kept.leaving = None

    def _bring(self, layer: _Layer) -> None:
        """Starts the way back of all that a layer kept."""
        if layer.coming:
            return
        layer.coming = True
        for kept in layer.kept.values():
            kept.back, kept.leaving = kept.leaving, None
            if kept.back is not None:  # never freed
                continue
            kept.back = torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=kept.device)
            with self._beside():
                _flat(kept.back).copy_(kept.host, non_blocking=True)
        layer.returned = self._event()

    def _release(self, layer: _Layer) -> None:
        if layer.over:
            return
        layer.over = True
        for kept in layer.kept.values():
            self.memory.give_back(kept.host)  # the side stream is done with it before more
            kept.leaving = kept.back = None

    def _may_leave(self, tensor: Tensor, layer: _Layer) -> bool:
        here = type(tensor) is Tensor and tensor.device == self._device and tensor.nbytes >= LEAST_BYTES
        return here and _is_dense(tensor) and _storage(tensor) not in layer.shared

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the side stream, after all that the current one has begun."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _event(self) -> torch.cuda.Event | None:
        return self._side.record_event() if self._side is not None else None


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,))
