"""A checkpoint keeps what an operator inside it gave, and hands that out where the layer runs again."""

from collections.abc import Callable
from contextvars import ContextVar, Token

from torch import Tensor

Results = tuple[Tensor, ...]
# What is called in the place of an operator's computation, which it is given, within `instead`.
Around = Callable[[Callable[[], Results]], Results]

_AROUND: ContextVar[Around | None] = ContextVar("around", default=None)


class instead:
    """Within it, in this thread, an operator that asks `results_of` gets what `around` makes of its computation.

    A dispatch mode would do that at the price of some ten microseconds for every other operation.
    """

    def __init__(self, around: Around) -> None:
        self._around, self._tokens = around, list[Token[Around | None]]()

    def __enter__(self) -> None:
        self._tokens.append(_AROUND.set(self._around))

    def __exit__(self, *_: object) -> None:
        _AROUND.reset(self._tokens.pop())


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


def results_of(compute: Callable[[], Results]) -> Results:
    """What an operator computes, unless a checkpoint around it has kept that."""
    around = _AROUND.get()
    return compute() if around is None else around(compute)
