"""The reference: some sequences, and plain `transformers` on one process, with its own loss and shift of the labels."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightseq.data.batches import BatchStream
from lightseq.models import weights
from lightseq.models.architecture import LENGTH_DEPENDENT_ROPE, rope_types
from lightseq.modules.loss import IGNORE_INDEX

PROMPT, HOLES = 0.4, 0.1  # shares of a made-up sequence whose labels are ignored: at its beginning, and anywhere
MOST_SCALINGS = 24  # halvings of a float16 loss scale that starts at 2 ** 16


@dataclass(frozen=True)
class Sample:
    """Ids and labels as Hugging Face has them: aligned, not shifted.

    Where training cuts a sequence, they go on for one more token: the last one's target, which nothing attends to.
    """

    ids: Tensor
    labels: Tensor

    @property
    def targets(self) -> Tensor:
        """The label of every token but the last: the token after it, or IGNORE_INDEX."""
        return self.labels[1:]

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())


def made_up(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Random sequences, one longer than `length` and others shorter, with ignored labels: ranks get unequal targets."""
    rng, sizes = np.random.default_rng(count), (length + 3, length // 2 + 1, length, length // 5 + 2)
    samples = []
    for i in range(count):
        ids = rng.integers(0, vocabulary, sizes[i % len(sizes)])
        labels = np.where(rng.random(len(ids)) < HOLES, IGNORE_INDEX, ids)
        labels[: int(PROMPT * len(ids))] = IGNORE_INDEX
        border = min(length, len(ids) - 1)
        labels[border] = ids[border]
        samples.append(Sample(torch.from_numpy(ids), torch.from_numpy(labels)))
    return samples


def write(path: Path, samples: Sequence[Sample]) -> None:
    """As a file that training reads."""
    path.write_bytes(
        pickle.dumps({"input_ids": [s.ids.tolist() for s in samples], "labels": [s.labels.tolist() for s in samples]})
    )


def cut(samples: Sequence[Sample], length: int) -> list[Sample]:
    """What training should see of them."""
    return [Sample(s.ids[: length + 1], s.labels[: length + 1]) for s in samples]


def given(stream: BatchStream) -> list[list[Sample]]:
    """The documents of each sequence of a stream's first step: one, where they are not packed."""
    found = []
    for place in range(stream.sequences_per_step):
        example = stream.example(place)
        assert example is not None, "the stream of a run with max_steps does not end"
        ids, shifted = torch.from_numpy(example.input_ids), torch.from_numpy(example.labels)
        borders = pairwise(example.boundaries or (0, len(ids)))
        found.append([_document(ids[begin:end], shifted[begin:end]) for begin, end in borders])
    return found


def _document(ids: Tensor, shifted: Tensor) -> Sample:
    last = shifted[-1:].clamp_min(0)
    return Sample(torch.cat([ids, last]), torch.cat([torch.full((1,), IGNORE_INDEX), shifted]))


def plain_model(config: PreTrainedConfig, seed: int, device: torch.device) -> nn.Module:
    """LlamaForCausalLM of transformers, float32, with the weights that a run draws from the seed."""
    model = weights.build_on_meta(config)
    weights.materialize(model, device)
    weights.initialize(model, seed, device=device)
    return model


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: the frequencies of RoPE are buffers, and stay float32 in any model that transformers loads."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True)
class Result:
    loss: float
    token_losses: Tensor  # of every target, float32, on the device
    gradients: dict[str, Tensor]  # float32, on the device


def run_plain(model: nn.Module, samples: Sequence[Sample], length: int, scale: float = 1.0) -> Result:
    """Mean loss over all targets of all sequences, and its gradients, one sequence after the other.

    `scale` multiplies the loss before the backward pass, as float16 needs, and is halved until gradients are finite.
    """
    for _ in range(MOST_SCALINGS):
        result = _run_plain(model, samples, length, scale)
        if all(bool(torch.isfinite(g).all()) for g in result.gradients.values()) or scale <= 1.0:
            break
        scale /= 2
    return result


def _run_plain(model: nn.Module, samples: Sequence[Sample], length: int, scale: float) -> Result:
    device = next(model.parameters()).device
    total = max(1, sum(s.valid_tokens for s in samples))
    loss, token_losses = 0.0, []
    gradients = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    for sample in (s for s in samples if s.valid_tokens):  # of no target the mean is NaN
        ids, labels, more = _inputs(model, sample, length, device)
        output = model(input_ids=ids, labels=labels, use_cache=False, **more)
        share = output.loss * (sample.valid_tokens / total)
        (share * scale).backward()
        loss += share.item()
        with torch.no_grad():
            logits, targets = output.logits[0, :-1].float(), labels[0, 1:]
            token_losses.append(F.cross_entropy(logits, targets, reduction="none")[targets != IGNORE_INDEX])
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] += parameter.grad.float() / scale
            parameter.grad = None
    return Result(loss, torch.cat(token_losses), gradients)


def _inputs(model: nn.Module, sample: Sample, length: int, device: torch.device) -> tuple[Tensor, Tensor, dict]:
    """Padded on the right, where nothing looks at it, to the length that RoPE may depend on."""
    missing = max(0, length - len(sample.ids))
    ids, labels = F.pad(sample.ids, (0, missing)), F.pad(sample.labels, (0, missing), value=IGNORE_INDEX)
    more, config = {}, cast(PreTrainedConfig, model.config)
    if rope_types(config) & LENGTH_DEPENDENT_ROPE:  # the one token more is not part of it
        more = {"position_ids": torch.arange(len(ids), device=device).clamp_max(length - 1)[None]}
    return ids[None].to(device), labels[None].to(device), more
