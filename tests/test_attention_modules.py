"""Attention modules are those that call transformers' attention interface, not those with certain class names."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import modeling_utils as utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from lightseq import hf
from lightseq.parts.attention import attention_modules


def llama(mixer: type[nn.Module]) -> LlamaForCausalLM:
    """Returns a tiny Llama whose attention modules have another class."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config).eval()
    for index, layer in enumerate(model.model.layers):
        weights = layer.self_attn.state_dict()
        layer.self_attn = mixer(config, index)
        layer.self_attn.load_state_dict(weights)
    return model


class LlamaMixer(LlamaAttention):
    """Attention that reaches the interface in a method, through a decorator."""

    def passed_on(forward: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[misc]
        @wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        return wrapper

    @passed_on
    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **others: Any
    ) -> Any:
        return self._mix(hidden_states, position_embeddings, attention_mask, others), None

    def _mix(self, x: Tensor, cos_sin: Any, mask: Any, others: dict[str, Any]) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *cos_sin)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return self.o_proj(attend(self, q, k, v, mask, scaling=self.scaling, **others)[0].flatten(2))


class Inherits(LlamaAttention):
    pass


class CallsParent(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OtherName(LlamaMixer):
    def _mix(self, *args: Any) -> Any:
        return FUNCTIONS["sdpa"]


class Qualified(LlamaMixer):
    def _mix(self, *args: Any) -> Any:
        return [utils.ALL_ATTENTION_FUNCTIONS for _ in args]


def helper() -> Any:
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


class CallsFunction(LlamaMixer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return helper()


class FooAttention(LlamaMixer):
    """No attention through the interface, but a mean over the values before each token."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:  # type: ignore[override]
        v = self.v_proj(hidden_states).repeat_interleave(self.num_key_value_groups, -1)
        counts = torch.arange(1, v.shape[1] + 1).unsqueeze(-1)
        return self.o_proj(v.cumsum(1) / counts), None


@pytest.mark.parametrize("mixer", [LlamaMixer, Inherits, CallsParent, OtherName, Qualified, CallsFunction])
def test_modules_that_call_the_interface_are_found_under_any_name(mixer: type[nn.Module]) -> None:
    model = llama(mixer)
    assert attention_modules(model) == [layer.self_attn for layer in model.model.layers]


def test_a_forward_that_another_library_has_wrapped_is_looked_into() -> None:
    model = llama(FooAttention)
    first: Any = model.model.layers[0].self_attn
    first.forward = partial(lambda forward, *args: forward(*args), LlamaAttention.forward.__get__(first))
    assert attention_modules(model) == [first]


def test_an_attention_that_does_not_call_the_interface_is_not_patched(alone: None) -> None:
    model = llama(LlamaMixer)
    model.model.foo = FooAttention(model.config, 0)
    hf.enable(model)
    assert not vars(model.model.foo).keys() & {"sequence_context", "reach_of_mask"}
    assert all("sequence_context" in vars(layer.self_attn) for layer in model.model.layers)


def test_a_model_in_which_nothing_calls_the_interface_is_refused(alone: None) -> None:
    line = "^LlamaForCausalLM does not use the attention interface of transformers$"
    with pytest.raises(ValueError, match=line):
        hf.enable(llama(FooAttention))
