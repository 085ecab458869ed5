"""TRL's DistillationTrainer with sequences split over ranks: its loss, computed from both models' own tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightseq import hf
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.integrations.accelerate import enable
from lightseq.integrations.split_inputs import SplitInputs, split_inputs
from lightseq.integrations.split_model import SplitModel, split_model_of
from lightseq.integrations.trainer import SequenceParallel
from lightseq.models.decoder import headless, transformers_model
from lightseq.parts.divergence import Divergence, HeadInput, token_divergence
from lightseq.parts.head import required_logit_transform
from lightseq.utils.tensors import IGNORE_INDEX


class SequenceParallelDistillation(SequenceParallel):
    """Mixin for TRL's DistillationTrainer, which calls base models, and reads the weights of their heads."""

    own_trl_trainers = ("DistillationTrainer",)
    teacher_model: Any
    beta: float
    temperature: float
    _forward_redirection: Any

    def _enable_models(self) -> None:
        """Splits the base models of student and teacher, which attend over one context."""
        if self._sequence_mesh is None:
            return
        self._refuse_model_init()
        options = {"packed": True, **self._attention_options}
        student = enable(self.model, self._sequence_mesh, self.accelerator, base_only=True, **options)
        if isinstance(teacher := self.teacher_model, nn.Module):
            hf.enable_beside(headless(transformers_model(teacher)), student.context)

    def _compute_loss(
        self, unwrapped_student: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss of the whole batch, and the sum of its entropies and the number of its targets."""
        split = split_model_of(unwrapped_student)
        if split is None:
            return super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)  # type: ignore[misc, no-any-return]
        local, targets = self._split(split, inputs)
        assert local.labels is not None
        student = _head_input(unwrapped_student, local)
        self.teacher_model.eval()
        inner = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():  # through the wrapper, which gathers sharded weights
            teacher = self._forward_redirection(self.teacher_model, inner, _head_input, inner, local)
        kind = {0.0: "forward", 1.0: "reverse"}.get(self.beta, "jsd")
        measure = Divergence(kind, **({"beta": self.beta} if kind == "jsd" else {}), temperature=self.temperature)
        # The loss weighs all targets equally, so its gradients are computed together with it.
        found = token_divergence(student, teacher, local.labels, measure, equal_factors=True, with_entropy=True)
        assert found.student_entropy is not None
        loss, entropy_sum = split.sum(torch.stack([found.divergence.sum(), found.student_entropy.sum()]))
        divisor = targets.clamp_min(1) if num_items_in_batch is None else num_items_in_batch
        return loss / divisor, entropy_sum.detach(), targets

    def _split(self, split: SplitModel, inputs: Mapping[str, Any]) -> tuple[SplitInputs, Tensor]:
        """Joins the rows of a micro-batch, and returns this rank's part and the number of all targets."""
        if "pixel_values" in inputs:
            raise ValueError("pixel_values: distillation over several ranks takes text only; leave images out")
        prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
        targets = inputs["completion_mask"]
        if "tool_mask" in inputs:
            targets = targets * inputs["tool_mask"]
        labels = torch.cat(
            [torch.full_like(prompt, IGNORE_INDEX), completion.masked_fill(targets == 0, IGNORE_INDEX)], 1
        )
        whole = {
            "input_ids": torch.cat([prompt, completion], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "labels": labels,
        }
        local = split_inputs(split.context, split.model.config, whole, pad_to=None, keeps_targets=True, packs_rows=True)
        return local, targets.sum()


def _head_input(model: nn.Module, local: SplitInputs) -> HeadInput:
    """Runs a base model on this rank's tokens. Returns the input of its head."""
    inner: Any = transformers_model(model)
    head, transform = inner.get_output_embeddings(), required_logit_transform(inner)
    hidden = headless(inner)(**local.options, **local.batch, use_cache=False).last_hidden_state
    weight, bias = (_whole(x) for x in (head.weight, head.bias))
    assert weight is not None
    return HeadInput(hidden, weight, bias, transform)


def _whole(parameter: Tensor | None) -> Tensor | None:
    """Gathers a sharded weight of a frozen head. Raises ValueError for a trained one."""
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "FSDP2 shards the student's LM head by itself, so its gradients would not be summed over ranks; leave the "
            "head in the root of FSDP2, or use DDP"
        )
    return whole_tensor(parameter)
