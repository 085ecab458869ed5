"""Dispatch modes that watch the operators that torch runs."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestResult(TorchDispatchMode):
    """The most elements that one result of an operator had, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **kwargs or {})
        if not op.is_view:
            sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.elements = max([self.elements, *sizes])
        return result


class Operators(TorchDispatchMode):
    """The names of the operators that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ran.append(str(op))
        return op(*args, **kwargs or {})
