"""Head of a language model: the function that makes logits, and its replacement by a loss in chunks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lightseq.models.decoder import with_head
from lightseq.parts.changes import Changes
from lightseq.parts.identity import hook_of, is_known_code, linear_change
from lightseq.parts.probes import find_logit_transform
from lightseq.utils.logit_transform import LogitTransform


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
        """Returns the head's last result. Raises ValueError if it did not run, or if the result was changed."""
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
        """Restores the head's `forward`."""
        self._changes.undo()


def tensor_version(x: Tensor) -> int:
    """Returns the number of in-place changes of a tensor; 0 in inference mode, which does not count them."""
    return 0 if x.is_inference() else x._version


def known_logit_transform(model: PreTrainedModel) -> LogitTransform | None:
    """Returns the function that makes logits of the head's result, or None if the model is not known well enough.

    It reads the model as it is now, whose attributes and config may have changed since it was built.
    """
    if head_change(model) is not None:
        return None
    try:
        return find_logit_transform(model)
    except Exception:  # the model's code may raise anything
        return None


def required_logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Returns `known_logit_transform`. Raises ValueError if it is None."""
    name = type(model).__name__
    change = head_change(model) or ((hook := hook_of(model)) and f"{name} {hook}")
    if change:
        raise ValueError(f"{change}, which the chunked loss would leave out; use your own loop around hf.enable")
    found = known_logit_transform(model)
    if found is None:
        raise ValueError(f"{name} makes its logits in an unknown way; use your own loop around hf.enable")
    return found


def head_change(model: PreTrainedModel) -> str | None:
    """Returns why logits may be more than the head's product and a function of it; None if they are not.

    The function that the model's own code applies is another question (`known_logit_transform`). The answer reads as
    "LlamaForCausalLM's LM head has a forward hook".
    """
    if (change := linear_change(model.get_output_embeddings())) is not None:
        return f"{type(model).__name__}'s LM head {change}"
    for part in (model, with_head(model)):
        if (change := hook_of(part, ("forward_hooks",))) is not None:
            return f"{type(part).__name__} {change}"
        if not is_known_code(part.forward):
            return f"{type(part).__name__} has a forward of its own"
    return None
