"""What an operator knows of the checkpoint around it: what that has kept of its results, and whether it runs again."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import NamedTuple

from torch import Tensor

Results = tuple[Tensor, ...]
# What is called in the place of an operator's computation, which it is given.
Around = Callable[[Callable[[], Results]], Results]


class _Pass(NamedTuple):
    around: Around | None
    again: bool


_NO_CHECKPOINT = _Pass(None, again=False)
_PASS: ContextVar[_Pass] = ContextVar("pass", default=_NO_CHECKPOINT)


class checkpointed:
    """One of the two passes of a checkpoint: within it, in this thread, operators that ask are told.

    `results_of` gives what `around` makes of a computation (None: what it gives), and `runs_again` is `again`. A
    dispatch mode would do that at the price of some ten microseconds for every other operation.
    """

    def __init__(self, around: Around | None, again: bool) -> None:
        self._pass, self._tokens = _Pass(around, again), list[Token[_Pass]]()

    def __enter__(self) -> None:
        self._tokens.append(_PASS.set(self._pass))

    def __exit__(self, *_: object) -> None:
        _PASS.reset(self._tokens.pop())


def take(gradient: Tensor) -> Tensor:
    """The memory of a gradient that a backward pass was given, so that it goes as soon as the result does.

    Autograd holds what it gave until the pass is over, and is left with a tensor of no memory. To be used where nobody
    else reads that tensor; others that share its memory keep it.
    """
    taken = gradient.detach()
    let_go(gradient)
    return taken


def let_go(x: Tensor) -> None:
    """Leaves a tensor without memory, whoever holds it."""
    x.set_()  # type: ignore[call-overload]


def around_operator() -> Around | None:
    """Returns what a checkpoint puts in the place of an operator's computation; None without a checkpoint."""
    return _PASS.get().around


def results_of(compute: Callable[[], Results]) -> Results:
    """Returns what an operator computes, or what a checkpoint around it has stored."""
    around = around_operator()
    return compute() if around is None else around(compute)


def runs_again() -> bool:
    """Whether a layer runs once more, for what its backward pass needs: nobody reads what comes out at its end."""
    return _PASS.get().again
