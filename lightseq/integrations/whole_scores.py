"""Models that score tokens, such as reward models: whole batches in, the scores of whole batches out."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.attention.context import SequenceContext
from lightseq.integrations.split_inputs import SplitInputs, split_inputs
from lightseq.integrations.split_model import SplitModel
from lightseq.models.decoder import headless, transformers_model

SCORES: Final = ("score", "classifier")  # names in transformers of the linear that scores each token
NOT_READ: Final = ("use_cache", "margin")  # arguments that TRL's collator returns and the model ignores


class WholeScores(SplitModel):
    """The hooks of one model whose last layer gives each token a few numbers, such as a reward.

    Its base model is enabled. The model's own code runs on the whole batch, but for its base model, which gets a rank's
    tokens, and the linear after it, whose scores are gathered. So the model itself finds the last token of each row.
    """

    def __init__(self, model: nn.Module, context: SequenceContext) -> None:
        scorer = transformers_model(model)
        base, score = headless(scorer), score_of(scorer)
        assert score is not None
        super().__init__(base, context)
        self._inputs: SplitInputs | None = None
        self._changes.add_hook(base.register_forward_pre_hook(self._shard, with_kwargs=True, prepend=True))
        self._changes.add_hook(score.register_forward_hook(self._gather, always_call=True))

    @torch.compiler.disable
    def _shard(self, _base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Replaces a whole batch by this rank's shard."""
        if len(args) > 1:
            raise ValueError(f"{len(args)} positional arguments; pass all but the first by keyword")
        kwargs = {**({"input_ids": args[0]} if args else {}), **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if value is not None and name not in NOT_READ}
        self._inputs = local = split_inputs(
            self.context, self.model.config, kwargs, pad_to=None, keeps_targets=False, packs_rows=False
        )
        return (), {**local.options, **local.batch, "use_cache": False}

    @torch.compiler.disable
    def _gather(self, _score: nn.Module, _args: tuple[Any, ...], scores: Tensor | None) -> Tensor | None:
        """Replaces the scores of a rank's tokens by the whole batch's scores. Does nothing after an exception."""
        inputs, self._inputs = self._inputs, None
        return scores if inputs is None or scores is None else self._in_order(scores, inputs)


def score_of(model: nn.Module) -> nn.Module | None:
    """Returns the layer of a model that scores each token; None if it has none."""
    return next((child for name in SCORES if (child := getattr(model, name, None)) is not None), None)
