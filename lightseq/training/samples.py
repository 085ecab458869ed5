"""Continuations of --sample_prompts by the model in training: greedy, on all ranks.

Each new token takes a forward pass over the whole text, split over the ranks as every sequence is. That needs neither
gathered weights nor a cache of keys and values, and works for every model that trains. A text is padded to one of few
lengths, so that compiled layers are not compiled for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightseq.data.batches import Batch
from lightseq.objectives.objective import evaluating
from lightseq.training.errors import exit_on_write_error
from lightseq.training.metrics import SAMPLES, MetricsFile
from lightseq.training.sample_prompts import SamplePrompts, end_ids
from lightseq.training.trainer import Trainer
from lightseq.utils.logit_transform import LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX

MARK: Final = 0  # label of the tokens whose successor is wanted


class Samples:
    """Continuations of a run's prompts. All ranks compute them, and the main rank prints and writes them."""

    def __init__(self, trainer: Trainer, prompts: SamplePrompts) -> None:
        self._trainer, self._prompts = trainer, prompts
        config = trainer.config
        self._count, self._rows = config.sample_max_new_tokens, config.per_device_eval_batch_size
        self._ends = end_ids(trainer.model, prompts.tokenizer.stop_ids)
        self._file: MetricsFile | None = None
        if trainer.world.is_main:
            with self._exit_on_write_error():
                self._file = MetricsFile(trainer.output_dir, trainer.first_step, name=SAMPLES)

    def write(self, step: int) -> None:
        """Continues every prompt after `step` steps."""
        prompts, ids = self._prompts.ids, list[list[int]]()
        for first in range(0, len(prompts), self._rows):
            ids += self._continue(prompts[first : first + self._rows])
        if self._file is None:
            return
        for prompt, found in zip(self._prompts.texts, ids, strict=True):
            text = self._prompts.tokenizer.decode(found)
            self._trainer.terminal.sample(step, text)
            with self._exit_on_write_error():
                self._file.write({"step": step, "prompt": prompt, "text": text})

    def _continue(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the prompts with their continuations, as tokens."""
        texts, open_rows = [list(prompt) for prompt in prompts], set(range(len(prompts)))
        length = self._trainer.shortest_length(max(map(len, texts)) + self._count)
        with evaluating(self._trainer.models.trained):
            for _ in range(self._count):
                self._trainer.mark(None, "samples")
                tokens = self._next_tokens(texts, length)
                for row in sorted(open_rows):
                    texts[row].append(tokens[row])
                    if tokens[row] in self._ends:
                        open_rows.remove(row)
                if not open_rows:
                    break
        return texts

    def _next_tokens(self, texts: Sequence[Sequence[int]], length: int) -> list[int]:
        """Returns the likeliest token after each text, the same on every rank."""
        ids = torch.zeros(self._rows, length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORE_INDEX)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            labels[row, len(text) - 1] = MARK
        sizes = tuple(map(len, texts)) + (0,) * (self._rows - len(texts))
        shard = self._trainer.shard(Batch(ids, labels, valid_tokens=len(texts), sizes=sizes))
        found = self._trainer.models.trained(*shard, likeliest_tokens).amax(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)  # one rank of a group has the last token of a text
        return found.tolist()  # type: ignore[no-any-return]

    def _exit_on_write_error(self) -> Any:
        trainer = self._trainer
        saves = trainer.config.save_strategy != "no"
        return exit_on_write_error(trainer.output_dir / SAMPLES, trainer.world, trainer.terminal, saves)


def likeliest_tokens(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform, bias: Tensor | None = None
) -> Tensor:
    """Returns the token with the largest logit after each marked token, and -1 elsewhere. Shaped as the labels.

    The transform of logits keeps their order.
    """
    marked = labels != IGNORE_INDEX
    found = torch.full_like(labels, -1)
    found[marked] = F.linear(hidden[marked], weight, bias).argmax(-1)
    return found
