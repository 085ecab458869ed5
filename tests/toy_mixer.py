"""Toy model in which every second layer takes a causal mean over three tokens instead of attending."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn, ones
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightseq.parts.facts import LinearMixer
from lightseq.parts.recurrences import MixerKind, register_mixer
from lightseq.sequence.documents import Documents
from lightseq.sequence.halo import previous_tokens

TOKENS = 3


class CausalMean(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(ones(config.hidden_size))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        windows = F.pad(hidden_states, (0, 0, TOKENS - 1, 0)).unfold(1, TOKENS, 1)
        return windows.sum(-1) / TOKENS * self.weight, None


def distributed_mean(
    self: Any, hidden_states: Tensor, documents: Documents | None = None, **_: Any
) -> tuple[Tensor, None]:
    before = previous_tokens(self.sequence_group, hidden_states, TOKENS - 1, documents)
    return (before.sum(2) + hidden_states) / TOKENS * self.weight, None


class ToyConfig(LlamaConfig):
    model_type = "toy_mixer"


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers[1::2]:
            layer.self_attn = CausalMean(config)


def facts(module: nn.Module) -> LinearMixer:
    return LinearMixer(type(module).__name__, token_flops=(TOKENS + 1) * module.weight.numel())


AutoConfig.register("toy_mixer", ToyConfig, exist_ok=True)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
register_mixer(MixerKind(CausalMean, forward=distributed_mean, facts=facts))
