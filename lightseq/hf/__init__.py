"""Distributed attention for Hugging Face causal language models, in three lines of a user's own script.

context = hf.enable(model, group)
batch = hf.shard_batch(context, input_ids, labels)
loss = model(**batch).loss   # this rank's share: losses are summed over ranks
loss.backward()              # so are gradients: all-reduce them, or wrap the model in DDP or FSDP2

Losses of log-probabilities, such as DPO and GRPO, take these lines instead of the last one:

log_probs = hf.token_log_probs(context, model, batch)      # this rank's tokens; logits never exist whole
sums = hf.sequence_sums(context, log_probs, batch)         # whole sequences, the same on every rank
in_order = hf.gather_tokens(context, log_probs, batch)     # all tokens, the same on every rank

Rows that begin alike, such as completions of a prompt, are computed as trees:

batch = hf.shard_rows(context, rows, weights)              # lists of token ids, and a weight for each token

Distillation takes a frozen teacher, which may have another architecture:

hf.enable_beside(teacher, context)
values = hf.divergence(context, model, teacher, batch)     # this rank's tokens; use them as log-probabilities

hf.disable(model)   # the plain model again, to generate for example
"""

from importlib import import_module
from typing import Any

from lightseq.hf.divergence import divergence
from lightseq.hf.enable import ENABLE_OPTIONS, IMPLEMENTATION, disable, enable, enable_beside
from lightseq.hf.log_probs import (
    gather_padded_tokens,
    gather_tokens,
    sequence_sums,
    sum_over_ranks,
    token_log_probs,
)
from lightseq.hf.shard_batch import shard_batch
from lightseq.hf.shard_rows import shard_rows

__all__ = [
    "ENABLE_OPTIONS",
    "IMPLEMENTATION",
    "disable",
    "divergence",
    "enable",
    "enable_beside",
    "gather_padded_tokens",
    "gather_tokens",
    "plan_memory",
    "sequence_sums",
    "shard_batch",
    "shard_rows",
    "sum_over_ranks",
    "token_log_probs",
]


def __getattr__(name: str) -> Any:
    """Imports the memory planner when it is asked for, because nothing else here needs it."""
    if name == "plan_memory":
        return import_module("lightseq.plan.make_plan").plan_memory
    raise AttributeError(f"module {__name__} has no attribute {name}")
