"""Replacement of a language model's head by a function of its input, such as a loss in chunks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightseq.parts.changes import Changes


class ReplacedHead:
    """Head whose `forward` computes `compute(hidden, weight, bias)` in place of the logits, until it is restored.

    The result is stored, because models scale, cap or cast what their head returns. They get it too, so that FSDP's
    hooks around the head see it. Only `forward` is replaced, so that these hooks still run.
    """

    def __init__(self, head: Any, compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        self._head = head
        self._compute = compute
        self._result: tuple[Tensor, int] | None = None
        self._changes = Changes()
        self._changes.restore_later(head, "forward")
        head.forward = self._run

    def _run(self, hidden: Tensor) -> Tensor:
        result = self._compute(hidden, self._head.weight, self._head.bias)
        self._result = result, tensor_version(result)
        return result

    def result(self) -> Tensor:
        """Returns what the head computed last. Raises ValueError if it did not run, or if the result was changed."""
        if self._result is None:
            raise ValueError("the model did not call its LM head with the layers' output alone; use another model")
        result, version = self._result
        if tensor_version(result) != version:
            raise ValueError(
                "the model changes the output of its LM head in place, which losses in chunks do not support; use "
                "another model"
            )
        return result

    def restore(self) -> None:
        """Gives the head its own `forward` again."""
        self._changes.undo()


def tensor_version(x: Tensor) -> int:
    """Returns the number of in-place changes of a tensor; 0 in inference mode, which does not count them."""
    return 0 if x.is_inference() else x._version
