"""Context of a checkpoint, which lets custom operators reuse their stored outputs during recomputation."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import NamedTuple

from torch import Tensor

Results = tuple[Tensor, ...]
# Called in place of an operator's computation, which it gets as its argument.
OperatorWrapper = Callable[[Callable[[], Results]], Results]


class _Pass(NamedTuple):
    wrapper: OperatorWrapper | None
    recomputing: bool


_NO_CHECKPOINT = _Pass(None, recomputing=False)
_PASS: ContextVar[_Pass] = ContextVar("pass", default=_NO_CHECKPOINT)


class checkpoint_pass:
    """Context manager around one of the two passes of a checkpoint, for operators in this thread.

    Inside it `reuse_or_compute` calls `wrapper` (None: the computation itself), and `is_recomputing` returns
    `recomputing`. A dispatch mode could do the same, but would add about ten microseconds to every other operation.
    """

    def __init__(self, wrapper: OperatorWrapper | None, recomputing: bool) -> None:
        self._pass, self._tokens = _Pass(wrapper, recomputing), list[Token[_Pass]]()

    def __enter__(self) -> None:
        self._tokens.append(_PASS.set(self._pass))

    def __exit__(self, *_: object) -> None:
        _PASS.reset(self._tokens.pop())


def take_memory(gradient: Tensor) -> Tensor:
    """Moves the memory of a gradient into the returned tensor, so that it is freed with that tensor.

    Autograd would hold the gradient until the end of the backward pass. It keeps an empty tensor instead, which nobody
    may read. Tensors that share the memory keep it.
    """
    taken = gradient.detach()
    free_memory(gradient)
    return taken


def free_memory(x: Tensor) -> None:
    """Frees the memory of a tensor, even if others still hold the tensor."""
    x.set_()  # type: ignore[call-overload]


def operator_wrapper() -> OperatorWrapper | None:
    """Returns the wrapper that a checkpoint puts around an operator's computation; None without a checkpoint."""
    return _PASS.get().wrapper


def reuse_or_compute(compute: Callable[[], Results]) -> Results:
    """Returns an operator's results: stored by the checkpoint around it, or computed."""
    wrapper = operator_wrapper()
    return compute() if wrapper is None else wrapper(compute)


def is_recomputing() -> bool:
    """Returns whether a checkpoint is recomputing a layer; its backward pass does not read the layer's output."""
    return _PASS.get().recomputing
