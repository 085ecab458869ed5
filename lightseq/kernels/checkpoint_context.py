"""Context of a checkpoint, which lets custom operators reuse their stored outputs during recomputation."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import NamedTuple

from torch import Tensor

Results = tuple[Tensor, ...]
# Called with an operator's computation, in place of it.
OperatorWrapper = Callable[[Callable[[], Results]], Results]


class _Pass(NamedTuple):
    wrapper: OperatorWrapper | None
    recomputing: bool


_NO_CHECKPOINT = _Pass(None, recomputing=False)
_PASS: ContextVar[_Pass] = ContextVar("pass", default=_NO_CHECKPOINT)


class checkpoint_pass:
    """Context manager around one of the two passes of a checkpoint, for operators in this thread.

    `stored_or_computed` then calls `wrapper` (None: the computation itself); `is_recomputing` returns `recomputing`.
    A dispatch mode would do the same at about ten microseconds for every other operation.
    """

    def __init__(self, wrapper: OperatorWrapper | None, recomputing: bool) -> None:
        self._pass, self._tokens = _Pass(wrapper, recomputing), list[Token[_Pass]]()

    def __enter__(self) -> None:
        self._tokens.append(_PASS.set(self._pass))

    def __exit__(self, *_: object) -> None:
        _PASS.reset(self._tokens.pop())


def take_memory(gradient: Tensor) -> Tensor:
    """Takes the memory of a gradient that a backward pass was passed, and frees it with the returned tensor.

    Autograd would hold the gradient until the pass ends; it is left with a tensor without memory. Nobody else may read
    that tensor. Tensors that share its memory keep it.
    """
    taken = gradient.detach()
    free_memory(gradient)
    return taken


def free_memory(x: Tensor) -> None:
    """Frees the memory of a tensor, whoever holds it."""
    x.set_()  # type: ignore[call-overload]


def operator_wrapper() -> OperatorWrapper | None:
    """Returns the wrapper that a checkpoint puts around an operator's computation; None without a checkpoint."""
    return _PASS.get().wrapper


def stored_or_computed(compute: Callable[[], Results]) -> Results:
    """Returns the results of an operator: stored by a checkpoint around it, else computed."""
    wrapper = operator_wrapper()
    return compute() if wrapper is None else wrapper(compute)


def is_recomputing() -> bool:
    """Returns whether a layer is being recomputed for its backward pass, which does not read the layer's output."""
    return _PASS.get().recomputing
