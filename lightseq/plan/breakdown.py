"""Memory of a training step by purpose."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from lightseq.config.optimizers import OPTIMIZERS
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import local_part
from lightseq.models.decoder import text_config
from lightseq.objectives.registry import objective_of
from lightseq.plan.rates import GIB
from lightseq.schedule.timing import FLOAT32_BYTES


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one GPU by purpose. `working` is a layer's temporaries, gathered weights and unreduced gradients."""

    parameters: int
    gradients: int
    optimizer: int
    stored_activations: int
    loss: int
    attention_buffers: int
    working: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def at_peak(self, peak: int) -> "Breakdown":
        """Fits the breakdown to a measured peak.

        Working memory is the rest of the peak. If they exceed the peak, the smaller of gradients and stored
        activations shrinks by the excess, because the two do not peak together.
        """
        excess = max(0, self.total - peak)
        smaller = "gradients" if self.gradients < self.stored_activations else "stored_activations"
        rest = replace(self, **{smaller: max(0, getattr(self, smaller) - excess)})
        return replace(rest, working=max(0, peak - rest.total))

    def lines(self) -> list[str]:
        """Returns the lines of a table, largest part first, with the total."""
        parts = sorted(asdict(self).items(), key=lambda part: -part[1])
        shown = [(name.replace("_", " "), size) for name, size in [*parts, ("total", self.total)]]
        return [f"{name:<18}{size / GIB:9.2f} GiB" for name, size in shown]


class State(NamedTuple):
    """Bytes of one rank's parameters, gradients and optimizer state, or shares of them."""

    parameters: float
    gradients: float
    optimizer: float


def measured_state_bytes(models: Sequence[nn.Module], config: TrainConfig, on_host: bool) -> State:
    """Returns this rank's state on the GPU, once allocated. `on_host`: some or all of it is in host memory.

    DeepSpeed's state is unknown here and counts as working memory.
    """
    if config.deepspeed:
        return State(0, 0, 0)
    every = [p for model in models for p in model.parameters()]
    here = [p for p in every if not (on_host and p.device.type == "cpu")]
    parameters = sum(local_part(p).nbytes for p in here)
    gradients = sum(local_part(p).nbytes for p in here if p.requires_grad)
    return State(parameters, gradients, int(moments_of(config) * gradients))


def moments_of(config: TrainConfig) -> float:
    """Returns the size of the optimizer's state, in float32 values per weight."""
    return OPTIMIZERS[config.optim].moments


def loss_bytes(model: PreTrainedConfig, config: TrainConfig, tokens: int) -> tuple[int, int]:
    """Returns the bytes of a chunk's logits, and of the gradients of the head (float32) and hidden states."""
    text = text_config(model)
    logits = objective_of(config).logit_bytes(tokens, text.vocab_size, config.itemsize)
    head = 0 if config.lora_rank else FLOAT32_BYTES * text.vocab_size * text.hidden_size
    return logits, head + tokens * text.hidden_size * config.itemsize
