"""Changes of an enabled model's modules: undone the latest first, and only where nobody has changed them since."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_models import ids, plain_model, tiny_config
from lightseq import hf
from lightseq.hf.record import record_of
from lightseq.integrations.whole_batches import WholeBatches
from lightseq.memory.remat import capture_forwards
from lightseq.models.decoder import decoder_layers
from lightseq.parts.changes import Changes, changes_of
from lightseq.parts.chosen_experts import run_chosen_experts
from lightseq.parts.fit import fit
from lightseq.parts.part import Ranks, choices_of_policy

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | changes)).eval()


def twice(module: nn.Module, forward: Any, x: Tensor) -> Tensor:
    return 2 * forward(x)


def test_undoing_restores_attributes_forwards_and_hooks_once() -> None:
    module, x, changes, order = nn.Linear(2, 2), torch.ones(1, 2), Changes(), list[str]()
    before, expected = dict(vars(module)), module(x)
    module.mark = "before"  # type: ignore[assignment]
    for value in ("first", "second"):
        changes.set_attribute(module, "mark", value)
        changes.call_later(partial(order.append, value))
    changes.set_attribute(module, "new", 1)
    changes.replace_forward(module, twice)
    changes.replace_forward(module, twice)
    changes.add_hook(module.register_forward_hook(lambda *_: order.append("called")))
    assert torch.equal(module(x), 4 * expected)
    for _ in range(2):
        changes.undo()
        assert torch.equal(module(x), expected) and order == ["called", "second", "first"]
    assert module.mark == "before"
    del module.mark
    assert vars(module) == before


def test_what_another_library_has_set_since_stays_unless_it_was_to_be_restored() -> None:
    module, x, changes = nn.Linear(2, 2), torch.ones(1, 2), Changes()
    changes.set_attribute(module, "mark", "ours")
    changes.replace_forward(module, twice)
    changes.restore_later(module, "other")
    module.mark, module.other, module.forward = "theirs", 1, partial(twice, module, module.forward)  # type: ignore
    theirs = module.forward
    changes.undo()
    assert module.mark == "theirs" and module.forward is theirs and not hasattr(module, "other")
    assert torch.equal(module(x), 4 * nn.functional.linear(x, module.weight, module.bias))


def test_a_disabled_model_runs_beneath_the_wrapper_that_another_library_put_on(alone: None) -> None:
    ids = torch.arange(24)[None]
    model, want = (llama(rope_parameters=DYNAMIC) for _ in range(2))
    hf.enable(model)
    rope = model.model.rotary_emb
    rope.forward = theirs = partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), rope.forward)
    for _ in range(2):  # enabled again, it asks for the whole length once
        context = hf.enable(model)
        assert torch.allclose(model(**hf.shard_batch(context, ids)).logits, want(ids).logits, atol=1e-6)
    hf.disable(model)
    assert rope.forward is theirs and torch.equal(model(ids).logits, want(ids).logits)


def test_disabling_removes_what_was_added_for_whole_batches(alone: None) -> None:
    model, ids = llama(), torch.arange(8)[None]

    def found() -> dict[str, dict[str, int]]:
        return {name: {key: len(x) for key, x in vars(module).items() if "hooks" in key} | {"own": len(vars(module))}
                for name, module in model.named_modules()}  # fmt: skip

    before, expected = found(), model(ids).logits
    whole = WholeBatches(model, hf.enable(model))
    whole.change_layers(recompute=True, compile_each=False)
    assert torch.allclose(model(input_ids=ids, labels=ids).logits, expected, atol=1e-6)
    hf.disable(model)
    assert found() == before and torch.equal(model(ids).logits, expected)


def test_models_that_share_a_config_are_disabled_one_after_the_other(alone: None) -> None:
    first, tokens = llama(), torch.arange(8)[None]
    second = LlamaForCausalLM(first.config)
    expected = first(tokens, use_cache=False).logits
    hf.enable(first)
    hf.enable(second)
    for model in (first, second):
        hf.disable(model)
    assert torch.equal(first(tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "llama4_text"])
def test_what_training_replaces_in_a_model_is_undone(model_type: str) -> None:
    config, x = tiny_config(model_type), ids()
    changed, plain = plain_model(config), plain_model(config)
    layers, changes = decoder_layers(changed), changes_of(changed)
    run_chosen_experts(changed, changes)
    choices = choices_of_policy("attention+linears", ends_with_mlp=True)
    fit(layers, replace(choices, tiles_mlp=model_type != "llama4_text"), Ranks(), changes)
    tiled = capture_forwards([layers[0]], lambda: changes.replace_forward(layers[0], _twice))
    assert kinds(changed) != kinds(plain) and tiled[0] is not layers[0].forward
    changes.undo()
    assert kinds(changed) == kinds(plain)
    assert torch.equal(changed(x, use_cache=False).logits, plain(x, use_cache=False).logits)


def kinds(model: nn.Module) -> dict[str, tuple[type, list[str]]]:
    """Returns the class and the names of the attributes of every module."""
    return {name: (type(x), sorted({*vars(x)} - {"lightseq_changes"})) for name, x in model.named_modules()}


def _twice(layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def test_an_attention_implementation_chosen_after_enabling_stays(alone: None) -> None:
    model = llama(attn_implementation="eager")
    hf.enable(model)
    model.set_attn_implementation("sdpa")
    hf.disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_holds_one_record_and_its_layers_no_reference_to_the_whole(alone: None) -> None:
    model = llama()
    context = hf.enable(model)
    record = record_of(model)
    assert record is not None and record.context is context
    assert [name for name, module in model.named_modules() if record in vars(module).values()] == [""]
    base = copy.deepcopy(model.model)
    assert all(x is not base for x in copy.deepcopy(model.model.layers[0]).modules())
    with pytest.raises(ValueError, match="is not enabled"):
        hf.disable(base)
