"""Every probe recognizes transformers' own code, and refuses code that somebody changed to compute something else."""

import re
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextExperts, Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from benchmarks.tiny_models import tiny_config
from lightseq.parts import probes
from lightseq.parts.transformers_recurrences import HARMLESS, REPLACEMENTS

Change = Callable[[Any, pytest.MonkeyPatch], Any]  # changes the code or returns other code


class Case(NamedTuple):
    """Code of transformers that a probe recognizes, and changes after which it does not."""

    make: Callable[[], Any]
    is_recognized: Callable[[Any], bool]
    changes: dict[str, Change]


def other_forward(forward: Callable[..., Any]) -> dict[str, Change]:
    """Returns the ways to give a module another forward through its class."""

    def subclass(module: Any, _patch: pytest.MonkeyPatch) -> None:
        module.__class__ = type("Other", (type(module),), {"forward": forward})

    def patch_class(module: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(type(module), "forward", wraps(type(module).forward)(forward))

    return {"a subclass": subclass, "a wraps patch": patch_class}


def hook(choose: Callable[[Any], nn.Module] = lambda module: module) -> dict[str, Change]:
    return {"a hook": lambda module, _: choose(module).register_forward_hook(lambda _m, _a, out: out.cumsum(1))}


def llama_config() -> LlamaConfig:
    config: Any = tiny_config("llama")
    return config  # type: ignore[no-any-return]


def identity(_self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return hidden_states, None


def doubled_mlp(self: Any, x: Tensor) -> Any:
    return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def shifted_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = PLAIN_LLAMA(self, *args, **kwargs)
    output.logits = output.logits + 0.01
    return output


PLAIN_LLAMA, PLAIN_EXPERTS = LlamaForCausalLM.forward, Llama4TextExperts.forward


def has_logit_transform(model: Any) -> bool:
    try:
        probes.find_logit_transform(model)
    except ValueError as error:
        assert "changes its logits" in str(error)
        return False
    return True


def forward_of_experts(package: str, factor: int) -> Change:
    """Patches experts with a function that a package wrote."""

    def times_factor(self: Any, hidden_states: Tensor) -> Tensor:
        return factor_of_file * PLAIN_EXPERTS(self, hidden_states)  # type: ignore[name-defined, no-any-return]  # noqa: F821

    names = {"__name__": package, "PLAIN_EXPERTS": PLAIN_EXPERTS, "factor_of_file": factor}
    return lambda _, patch: patch.setattr(Llama4TextExperts, "forward", FunctionType(times_factor.__code__, names))


CHANGED_EXPERTS: dict[str, Change] = {
    "a hook": lambda block, _: block.experts.register_forward_hook(lambda *_: None),
    "a forward of its own": lambda block, _: setattr(block, "forward", block.forward),
    "a subclass of experts": lambda block, _: setattr(
        block.experts, "__class__", type("Other", (Llama4TextExperts,), {"forward": lambda self, x: 2 * x})
    ),
    "a parametrization": lambda block, _: register_parametrization(block.router, "weight", nn.Identity()),
    "biases": lambda block, _: block.experts.register_parameter("bias", nn.Parameter(torch.zeros(4, 32))),
    "other results of a later transformers": forward_of_experts("transformers", 2),
    "the same results of another package": forward_of_experts("other", 1),
}


def other_loss(_function: Any, _patch: pytest.MonkeyPatch) -> Any:
    @wraps(load_balancing_loss_func)
    def doubled(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        return 2 * load_balancing_loss_func(gate_logits, num_experts, top_k, attention_mask)

    return doubled


def other_masks(model: Any, patch: pytest.MonkeyPatch) -> None:
    plain = modeling_gemma3.create_masks_for_vision_model

    @wraps(plain)
    def causal(*args: Any, **kwargs: Any) -> Any:
        return {name: mask.tril() for name, mask in plain(*args, **kwargs).items()}

    patch.setattr(modeling_gemma3, "create_masks_for_vision_model", causal)
    text = model.config.text_config
    text.__class__ = type("Other", (type(text),), {})  # answers are cached by classes


CASES: dict[str, Case] = {
    "calls_attention_interface": Case(
        lambda: LlamaAttention(llama_config(), 0),
        lambda module: probes.calls_attention_interface(type(module).forward, type(module)),
        other_forward(identity),
    ),
    "counts_its_tokens": Case(
        lambda: Llama4TextAttention(tiny_config("llama4_text"), 0), probes.counts_its_tokens, other_forward(identity)
    ),
    "functions_of_mixer": Case(
        lambda: Lfm2ShortConv(tiny_config("lfm2"), 0),
        lambda module: bool(probes.functions_of_mixer(type(module), REPLACEMENTS, HARMLESS)),
        other_forward(identity),
    ),
    "is_gated_mlp": Case(
        lambda: LlamaMLP(llama_config()),
        lambda mlp: probes.is_gated_mlp(mlp, nn.functional.silu),
        other_forward(doubled_mlp) | hook(),
    ),
    "blocks_running_every_expert": Case(
        lambda: Llama4TextMoe(tiny_config("llama4_text")),
        lambda block: probes.blocks_running_every_expert(block) == [block],
        other_forward(identity) | CHANGED_EXPERTS,
    ),
    "works_on_each_token": Case(
        lambda: LlamaMLP(llama_config()),
        lambda layer: probes.works_on_each_token(layer, 32),
        other_forward(lambda self, x: self.down_proj(self.up_proj(x)).cumsum(1)) | hook(),
    ),
    "find_logit_transform": Case(
        lambda: LlamaForCausalLM(llama_config()), has_logit_transform, other_forward(shifted_logits)
    ),
    "is_load_balancing_loss": Case(
        lambda: load_balancing_loss_func, probes.is_load_balancing_loss, {"a wraps patch": other_loss}
    ),
    "sees_later_tokens_of_images": Case(
        lambda: modeling_gemma3.Gemma3ForConditionalGeneration(tiny_config("gemma3")),
        probes.sees_later_tokens_of_images,
        {"a wraps patch": other_masks},
    ),
}


@pytest.mark.parametrize(("name", "change"), [(name, x) for name, case in CASES.items() for x in case.changes])
def test_a_probe_recognizes_transformers_code_and_refuses_it_changed(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, is_recognized, changes = CASES[name]
    with torch.device("meta"):
        code = make()
    assert is_recognized(code)
    other = changes[change](code, monkeypatch)
    assert not is_recognized(other if isinstance(other, FunctionType) else code)


def test_every_probe_is_listed_and_tested() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", str(probes.__doc__), re.MULTILINE)
    own = [name for name, x in vars(probes).items() if getattr(x, "__module__", None) == probes.__name__]
    assert listed == [*CASES] == [name for name in own if name.islower() and not name.startswith("_")]


def test_a_probe_answers_on_the_cpu_whatever_the_caller_has_set() -> None:
    mlp = LlamaMLP(llama_config())
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert probes.is_gated_mlp(mlp, nn.functional.silu) and probes.works_on_each_token(mlp, 32)
