"""Storage of a router's choices, so that a recomputed layer uses the same experts as in the forward pass."""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

TOP_K: Final = (torch.topk, Tensor.topk)
CHOICE_OPS: Final = (torch.ops.aten.topk.default,)  # for checkpointing policies of compiled layers


def choice_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns a context that stores the choices of `torch.topk` in the forward pass, and one that replays them."""
    indices: deque[Tensor] = deque()
    return _Choices(indices, recomputing=False), _Choices(indices, recomputing=True)


class _Choices(TorchFunctionMode):
    """Mode that replaces `torch.topk` by gathering at indices, which are computed or stored.

    Both passes then save the same tensors, which torch's checkpoint requires.
    """

    def __init__(self, indices: deque[Tensor], recomputing: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._indices, self._recomputing = indices, recomputing

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self._top_k(*args, **kwargs) if function in TOP_K else function(*args, **kwargs)

    def _top_k(self, scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if self._recomputing:
            chosen = self._indices.popleft()
        else:
            chosen = torch.topk(scores.detach(), k, dim, largest, sorted).indices
            self._indices.append(chosen)
        return torch.return_types.topk((scores.gather(dim, chosen), chosen))
