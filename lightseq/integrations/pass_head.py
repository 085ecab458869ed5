"""LM head of one pass: it computes a loss, or TRL's token metrics, in place of logits, which exist only if read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightseq.integrations.trl_head import change_beside_trl
from lightseq.parts.head import known_logit_transform, tensor_version
from lightseq.parts.identity import is_known_code
from lightseq.parts.loss import cross_entropy_sum
from lightseq.parts.token_metrics import TokenMetrics, token_metrics
from lightseq.utils.logit_transform import LogitTransform


@dataclass(frozen=True)
class HeadInput:
    """Input of an LM head, stored so that logits can be computed later, and the head's state at that time."""

    hidden: Tensor
    weight: nn.Parameter
    weight_version: int
    autocast_dtype: torch.dtype | None  # None without autocast


@dataclass
class PassHead:
    """The LM head of a model in one pass: `loss_sum` and `token_log_probs` stand in for its forward pass."""

    model: PreTrainedModel
    transform: LogitTransform
    labels: Tensor  # this rank's, shifted
    input: HeadInput | None = None  # what `loss_sum` got
    metrics: TokenMetrics | None = None  # what `token_log_probs` computed

    def loss_sum(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the sum of the losses of this rank's tokens."""
        head, device = self.model.get_output_embeddings(), hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.input = HeadInput(hidden, head.weight, tensor_version(head.weight), dtype)
        return cross_entropy_sum(hidden, weight, self.labels, transform=self.transform, bias=bias)

    def token_log_probs(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, equal_factors: bool) -> Tensor:
        """Returns the log-probabilities of this rank's targets, and stores their other metrics."""
        self.metrics = token_metrics(hidden, weight, self.labels, self.transform, bias, equal_factors=equal_factors)
        return self.metrics.log_probs

    def logits(self, outermost: nn.Module) -> Tensor:
        """Computes logits of this rank's tokens from the input that the head had. `outermost` is FSDP2's root."""
        head, given = self.model.get_output_embeddings(), self.input
        assert given is not None
        with gathered_weight(outermost, head):
            if head.weight is given.weight and tensor_version(head.weight) != given.weight_version:
                raise ValueError("the weights have changed since these logits; read outputs.logits before the update")
            device, dtype = given.hidden.device.type, given.autocast_dtype
            with torch.autocast(device, dtype, enabled=dtype is not None):
                local = self.transform.logits(head.forward(given.hidden))  # without the hooks of FSDP2
        return local if dtype is None else local.float()  # as accelerate does


def check_trl_reads_all(model: PreTrainedModel, of_config: LogitTransform | None) -> None:
    """Raises ValueError for a model whose loss TRL's fused head computes only in part, on one process too.

    It reads the LM head's weights, and from the config the function that makes logits of their product, `of_config`.
    """
    name, head = type(model).__name__, model.get_output_embeddings()
    change = f"'s LM head {x}" if isinstance(head, nn.Linear) and (x := change_beside_trl(head)) else None
    if not is_known_code(model.forward) and is_known_code(type(model).forward):
        change = " has a forward of its own"
    found = known_logit_transform(model)
    if change is None and None not in (found, of_config) and found != of_config:
        change = f" makes logits with {found}, not with its config's {of_config}"
    if change is not None:
        raise ValueError(
            f"{name}{change}, which TRL's fused head leaves out; undo that, or use SequenceParallelTrainer"
        )


def check_trl_head(model: PreTrainedModel) -> None:
    """Raises ValueError if TRL took a trained head's weight outside FSDP2's hooks, which sum its gradients."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(weight, DTensor) and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "FSDP2 shards the LM head by itself, and TRL's fused head would not sum its gradients over ranks; use "
            "DDP, or leave lm_head out of modules_to_save"
        )


@contextmanager
def gathered_weight(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Gathers an LM head's weight where FSDP2 has sharded it; with gradients, the backward pass shards it again."""
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and any(child is head for child in m.modules())]
    if not units and getattr(head, "_is_fsdp_managed_module", False):
        raise ValueError("FSDP1 has sharded the weights that logits need; use FSDP2, or leave labels out of the call")
    if units:
        units[-1].unshard()  # the innermost
    yield
    if units and not torch.is_grad_enabled():
        units[-1].reshard()
