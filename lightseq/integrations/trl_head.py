"""Heads that TRL gives a model, recognized by the function that replaces the model's forward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from lightseq.parts.identity import hook_of, product_change

TRL_FUNCTION: Final = ("trl.trainer.utils", "_fused_forward")  # the forward that `add_fused_lm_head` sets
# Before there was a fused head, up to TRL 1.12: SFTTrainer's `loss_type="chunked_nll"`, and sums that it returns.
TRL_CHUNKED: Final = ("trl.trainer.sft_trainer", "_chunked_ce_forward")
CHUNKED_SUMS: Final = ("num_correct_tokens", "entropy_sum", "num_valid_tokens")
TRL_CAST: Final = "cast_forward_to_fp32"  # a head's forward with `cast_lm_head_to_fp32`
KNOWN_OUTPUTS: Final = frozenset({"log_probs", "entropy", "is_top1"})  # which `parts.token_metrics` returns


@dataclass(frozen=True)
class TrlHead:
    """Arguments of TRL's `add_fused_lm_head` for one model."""

    temperature: float
    outputs: tuple[str, ...]
    casts_to_float32: bool  # the head's product

    @property
    def is_known(self) -> bool:
        """Returns whether our head computes the same."""
        return not self.casts_to_float32 and KNOWN_OUTPUTS.issuperset(self.outputs)


def trl_head_of(model: PreTrainedModel) -> TrlHead | None:
    """Returns the settings of a model's TRL head; None without one, or for unknown versions of TRL."""
    function = next((one for one in _forwards(model) if _written_as(one) == TRL_FUNCTION), None)
    if function is None:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    given = {name: cell.cell_contents for name, cell in cells}
    try:
        return TrlHead(
            temperature=float(given["temperature"]),
            outputs=tuple(given["outputs"]),
            casts_to_float32=bool(given["cast_lm_head_to_fp32"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def has_chunked_head(model: PreTrainedModel) -> bool:
    """Returns whether TRL's `loss_type="chunked_nll"` computes the loss of a model from the head's weight."""
    return any(_written_as(one) == TRL_CHUNKED for one in _forwards(model))


def _forwards(model: PreTrainedModel) -> Iterator[Any]:
    """Yields a model's forward, and what it wraps. accelerate wraps it, to cast and to convert outputs."""
    function: Any = model.forward
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "model_forward", None) or getattr(function, "__wrapped__", None)


def _written_as(function: Any) -> tuple[str | None, str | None]:
    """Returns the module and name of a function's code, because `__module__` may be copied from a wrapped function."""
    return getattr(function, "__globals__", {}).get("__name__"), _code_name(function)


def change_beside_trl(head: nn.Linear) -> str | None:
    """Returns why a head may compute more than TRL's function does, which casts the product as TRL's head does."""
    own = vars(head).get("forward")
    is_cast = _code_name(own) == TRL_CAST and own.__module__.startswith("trl.")
    return hook_of(head) if is_cast else product_change(head)


def _code_name(function: Any) -> str | None:
    return getattr(getattr(function, "__code__", None), "co_name", None)
