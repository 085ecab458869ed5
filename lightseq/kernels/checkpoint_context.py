"""What an operator knows of the checkpoint around it: what that has kept of its results, and whether it runs again."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import NamedTuple

from torch import Tensor

Results = tuple[Tensor, ...]
# What is called in the place of an operator's computation, which it is given.
OperatorWrapper = Callable[[Callable[[], Results]], Results]


class _Pass(NamedTuple):
    wrapper: OperatorWrapper | None
    recomputing: bool


_NO_CHECKPOINT = _Pass(None, recomputing=False)
_PASS: ContextVar[_Pass] = ContextVar("pass", default=_NO_CHECKPOINT)


class checkpoint_pass:
    """One of the two passes of a checkpoint: within it, in this thread, operators that ask are told.

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
    """The memory of a gradient that a backward pass was given, so that it goes as soon as the result does.

    Autograd holds what it gave until the pass is over, and is left with a tensor of no memory. To be used where nobody
    else reads that tensor; others that share its memory keep it.
    """
    taken = gradient.detach()
    free_memory(gradient)
    return taken


def free_memory(x: Tensor) -> None:
    """Leaves a tensor without memory, whoever holds it."""
    x.set_()  # type: ignore[call-overload]


def operator_wrapper() -> OperatorWrapper | None:
    """Returns what a checkpoint puts in the place of an operator's computation; None without a checkpoint."""
    return _PASS.get().wrapper


def stored_or_computed(compute: Callable[[], Results]) -> Results:
    """Returns what an operator computes, or what a checkpoint around it has stored."""
    wrapper = operator_wrapper()
    return compute() if wrapper is None else wrapper(compute)


def is_recomputing() -> bool:
    """Whether a layer runs once more, for what its backward pass needs: nobody reads what comes out at its end."""
    return _PASS.get().recomputing
