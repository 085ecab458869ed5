"""Record of an enabled model: its context and the changes of its modules."""

from dataclasses import dataclass, field
from typing import Final

from torch import nn

from lightseq.attention.context import SequenceContext
from lightseq.models.decoder import transformers_model
from lightseq.parts.changes import Changes

RECORD: Final = "lightseq_record"  # attribute of the transformers model


@dataclass
class EnabledModel:
    """Record of one enabled model, which the transformers model holds."""

    context: SequenceContext
    changes: Changes = field(default_factory=Changes)
    disabled_by: str | None = None  # the function to call instead of `hf.disable`, of a trainer that added changes


def record_of(model: nn.Module) -> EnabledModel | None:
    """Returns the record of a transformers model, which may be inside wrappers; None if it is not enabled."""
    return vars(transformers_model(model)).get(RECORD)
