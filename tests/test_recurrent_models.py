"""Hybrid models are recognized by transformers' own code, and come and go like other models."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5
from worlds import spawn

from benchmarks.architectures import expect, ids, plain_model, tiny_config
from lightseq import hf
from lightseq.models.family import context_warning
from lightseq.models.flops import describe_recurrences

LENGTH = ids().shape[1]


def tiny(model_type: str) -> PreTrainedModel:
    return plain_model(tiny_config(model_type))


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(ValueError) as error:
        hf.enable(model, length=LENGTH)
    return str(error.value)


class OwnForward(modeling_lfm2.Lfm2ShortConv):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states + hidden_states.roll(1, 1), **kwargs)


def test_a_class_with_a_forward_of_its_own_is_refused(alone: None) -> None:
    model = tiny("lfm2")
    for module in model.modules():
        if type(module) is modeling_lfm2.Lfm2ShortConv:
            module.__class__ = OwnForward
    assert "or patched code" in refusal(model)


def test_a_patched_function_or_class_is_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny("qwen3_5_text")
    hf.enable(first, length=LENGTH)
    hf.disable(first)
    plain = modeling_qwen3_5.torch_chunk_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", lambda *a, **k: plain(*a, **k))
    assert "or patched code" in refusal(tiny("qwen3_5_text"))
    monkeypatch.undo()
    hf.enable(tiny("qwen3_5_text"), length=LENGTH)
    forward = modeling_qwen3_5.Qwen3_5GatedDeltaNet.forward
    monkeypatch.setattr(modeling_qwen3_5.Qwen3_5GatedDeltaNet, "forward", lambda self, *a, **k: forward(self, *a, **k))
    assert "or patched code" in refusal(tiny("qwen3_5_text"))


def test_an_initial_state_is_refused(alone: None) -> None:
    model = tiny("qwen3_5_text")
    context = hf.enable(model, length=LENGTH)
    mixer = next(module for module in model.modules() if hasattr(type(module), "plain_class"))
    plain = mixer.plain_forward
    type(mixer).plain_forward = lambda self, *a, **k: plain(*a, **k, initial_states=torch.ones(1))  # type: ignore[attr-defined]
    try:
        with pytest.raises(ValueError, match="got initial_states"):
            loss_of(model, context)
    finally:
        type(mixer).plain_forward = plain.__func__  # type: ignore[attr-defined]


def loss_of(model: nn.Module, context: Any) -> float:
    """Returns the loss of the whole sequence, over all ranks."""
    loss = model(**hf.shard_batch(context, ids(), ids()), use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def life(rank: int) -> None:
    """Enables a model twice, copies it, disables it, and compares the loss with one process each time."""
    from peft import LoraConfig, get_peft_model

    for model_type in ("qwen3_5_text", "falcon_h1"):
        model, teacher = tiny(model_type), tiny(model_type)
        wanted = pytest.approx(expect(tiny(model_type), packed=False), abs=1e-5)
        context = hf.enable(model, length=LENGTH)
        assert loss_of(model, context) == wanted
        assert expect(teacher, packed=False) == wanted  # of the same class, and not enabled
        context = hf.enable(model, length=LENGTH)
        assert loss_of(model, context) == wanted
        other = copy.deepcopy(model)
        assert loss_of(other, context) == wanted
        hf.disable(model)
        assert expect(model, packed=False) == wanted
        adapted = get_peft_model(teacher, LoraConfig(target_modules="all-linear", exclude_modules=["out_proj"]))
        assert loss_of(adapted, hf.enable(adapted, length=LENGTH)) == wanted


def test_a_hybrid_is_enabled_twice_copied_disabled_and_adapted() -> None:
    spawn(2, life)


def compiled_batches(rank: int) -> None:
    model = tiny("qwen3_5_text")
    want = tiny("qwen3_5_text")
    batch = torch.cat([ids(), ids().flip(1)])
    context = hf.enable(model, length=LENGTH)
    for layer in model.model.layers:
        layer.compile()
    loss = model(**hf.shard_batch(context, batch, batch), use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert float(total) == pytest.approx(float(want(input_ids=batch, labels=batch, use_cache=False).loss), abs=1e-5)


@pytest.mark.slow
def test_compiled_layers_take_several_sequences() -> None:
    spawn(2, compiled_batches)


def test_a_model_without_positions_takes_any_length() -> None:
    assert context_warning(tiny_config("nemotron_h"), 1_000_000) is None
    assert "exceed the 256 positions" in str(context_warning(tiny_config("qwen3_5_text"), 1_000_000))


def test_a_run_says_which_layers_are_recurrent() -> None:
    found = {name: describe_recurrences(tiny_config(name)) for name in ("llama", "lfm2", "qwen3_5_text", "nemotron_h")}
    assert found == {
        "llama": None,
        "lfm2": "1 of 2 layers (Lfm2ShortConv)",
        "qwen3_5_text": "2 of 3 layers (Qwen3_5GatedDeltaNet); on GPUs by flash-linear-attention",
        "nemotron_h": "1 of 4 layers (NemotronHMamba2Mixer); on GPUs slowly, by torch",
    }
