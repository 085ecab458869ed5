"""Hybrid models are recognized by transformers' own code, and come and go like other models."""

import copy
import inspect
import json
import operator
import sys
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import Ended, programs
from small import VOCABULARY, losses, words, write_inputs
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5
from worlds import spawn

from benchmarks.architectures import compare_training, expect
from benchmarks.command_line import NEEDED
from benchmarks.tiny_models import ids, plain_model, tiny_config
from lightseq import hf
from lightseq.architecture.family import context_warning
from lightseq.architecture.flops import describe_recurrences
from lightseq.architecture.inspection import check_attention, inspect_architecture
from lightseq.config.command_line import parse
from lightseq.kernels.recurrent.scan_kernel_choice import why_slow
from lightseq.parts import recurrences as mixers
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.transformers_recurrences import without_kernels
from lightseq.training.setup_checks import check_mixers
from lightseq.utils import versions

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


class OwnCall(modeling_lfm2.Lfm2ShortConv):
    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(hidden_states + hidden_states.roll(1, 1), **kwargs)


@pytest.mark.parametrize("own", [OwnForward, OwnCall])
def test_a_class_with_a_forward_or_call_of_its_own_is_refused(own: type, alone: None) -> None:
    model = tiny("lfm2")
    for module in model.modules():
        if type(module) is modeling_lfm2.Lfm2ShortConv:
            module.__class__ = own
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


@pytest.mark.parametrize("enabled_before", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "torch_chunk_gated_delta_rule",
        "l2norm",  # which that calls
        "apply_mask_to_padding_states",
        "Qwen3_5GatedDeltaNet.forward",
    ],
)
def test_patches_that_copy_the_name_of_the_code_inside_are_refused(
    name: str, enabled_before: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if enabled_before:
        first = tiny("qwen3_5_text")
        hf.enable(first, length=LENGTH)
        hf.disable(first)
    path = f"{modeling_qwen3_5.__name__}.{name}"
    plain = operator.attrgetter(name)(modeling_qwen3_5)
    monkeypatch.setattr(path, wraps(plain)(lambda *args, **kwargs: plain(*args, **kwargs)))
    assert "or patched code" in refusal(tiny("qwen3_5_text"))
    monkeypatch.undo()
    hf.enable(tiny("qwen3_5_text"), length=LENGTH)


def test_mixers_run_without_the_kernels_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for GPUs with fla, whose kernels transformers takes when it is imported."""
    model, batch = tiny("qwen3_5_text"), ids()
    want = model(input_ids=batch, use_cache=False).logits
    package = ModuleType("scans")
    package.chunked = lambda *args, **kwargs: pytest.fail("the package's kernel runs")
    monkeypatch.setitem(sys.modules, "scans", package)
    plain = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    with_kernel = use_kernel_func_from_hub_with_fallback("chunked", "scans")(plain)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", with_kernel)
    with without_kernels(model):
        assert torch.equal(model(input_ids=batch, use_cache=False).logits, want)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is with_kernel


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("qwen3_5_text", {"linear_num_value_heads": 3}), ("olmo_hybrid", {"linear_num_value_heads": 3})],
)
def test_heads_of_values_that_are_no_multiple_of_those_of_keys_are_refused(
    model_type: str, changes: dict[str, int]
) -> None:
    """The model is not built for it: its own first forward pass fails."""
    with pytest.raises(ValueError, match=r"a recurrence has \d heads of values, \d of queries and \d of keys; set"):
        inspect_architecture(tiny_config(model_type, **changes))


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


@pytest.mark.slow
def test_a_hybrid_is_enabled_twice_copied_disabled_and_adapted() -> None:
    spawn(2, life)


def exchanged(rank: int, runs: list[str]) -> list[Ended]:
    """Trains with exchanged heads in a loop, packed in a striped layout, and by the command line."""
    model = tiny("qwen3_5_text")
    context = hf.enable(model, length=LENGTH, recurrent_schedule="heads")
    assert loss_of(model, context) == pytest.approx(expect(tiny("qwen3_5_text"), packed=False), abs=1e-5)
    flags = ("--recurrent_schedule", "heads", "--schedule", "striped")
    compare_training(tiny_config("qwen3_5_text"), packed=True, flags=flags)
    return programs(rank, "any", runs)


@pytest.mark.slow
def test_a_hybrid_trains_with_exchanged_heads(tmp_path: Path) -> None:
    config = tiny_config("qwen3_5_text")
    assert config.vocab_size == VOCABULARY
    write_inputs(tmp_path)
    config.save_pretrained(tmp_path / "model")
    ways = {"chain": "states in a chain", "heads": "heads exchanged"}
    runs = [words(tmp_path, way, f"--max_steps 2 --recurrent_schedule {way}") for way in ways]
    ends = spawn(2, exchanged, runs)[0]
    for end, (way, phrase) in zip(ends, ways.items(), strict=True):
        assert end.status == 0, end.err
        assert phrase in end.out
        assert json.loads((tmp_path / way / "run.json").read_text())["recurrent_schedule"] == way
    assert losses(tmp_path, "heads") == pytest.approx(losses(tmp_path, "chain"), abs=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes", "way", "line"),
    [
        (
            "qwen3_5_text", {"linear_num_value_heads": 3, "linear_num_key_heads": 3}, "heads",
            "--recurrent_schedule heads needs the 3 value heads of Qwen3_5GatedDeltaNet to divide by 2 ranks; use "
            "chain",
        ),
        ("llama", {}, "chain", "--recurrent_schedule chain: LlamaForCausalLM has no layer that carries a state"),
        ("lfm2", {}, "heads", "--recurrent_schedule heads: Lfm2ForCausalLM has no layer that carries a state"),
    ],
)  # fmt: skip
def test_a_recurrent_schedule_that_cannot_run_is_refused(
    model_type: str, changes: dict[str, int], way: str, line: str
) -> None:
    config = tiny_config(model_type)
    config.update(changes)
    architecture = inspect_architecture(config)
    check_mixers(parse([*NEEDED, "--recurrent_schedule", "auto"], ""), architecture, 2)
    with pytest.raises(ValueError) as error:
        check_mixers(parse([*NEEDED, "--recurrent_schedule", way], ""), architecture, 2)
    assert str(error.value).startswith(line)


def test_an_unknown_recurrent_schedule_is_refused(alone: None) -> None:
    with pytest.raises(ValueError, match="recurrent_schedule 'head' is unknown; choose one of auto, chain, heads"):
        hf.enable(tiny("qwen3_5_text"), length=LENGTH, recurrent_schedule="head")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer that carries a state"):
        hf.enable(tiny("llama"), length=LENGTH, recurrent_schedule="heads")


def compiled_batches(rank: int, recurrent_schedule: str) -> None:
    model = tiny("qwen3_5_text")
    want = tiny("qwen3_5_text")
    batch = torch.cat([ids(), ids().flip(1)])
    context = hf.enable(model, length=LENGTH, recurrent_schedule=recurrent_schedule)
    for layer in model.model.layers:
        layer.compile()
    loss = model(**hf.shard_batch(context, batch, batch), use_cache=False).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert float(total) == pytest.approx(float(want(input_ids=batch, labels=batch, use_cache=False).loss), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recurrent_schedule", ["chain", "heads"])
def test_compiled_layers_take_several_sequences(recurrent_schedule: str) -> None:
    spawn(2, compiled_batches, recurrent_schedule)


def test_a_model_without_positions_takes_any_length() -> None:
    assert context_warning(tiny_config("nemotron_h"), 1_000_000) is None
    assert "exceed the 256 positions" in str(context_warning(tiny_config("qwen3_5_text"), 1_000_000))


def test_a_run_says_which_layers_are_recurrent() -> None:
    found = {name: describe_recurrences(tiny_config(name)) for name in ("llama", "lfm2", "qwen3_5_text", "nemotron_h")}
    assert found == {
        "llama": None,
        "lfm2": "1 of 2 layers (Lfm2ShortConv)",
        "qwen3_5_text": "2 of 3 layers (Qwen3_5GatedDeltaNet); on GPUs by flash-linear-attention, "
        "which compiles kernels in the first step on a machine",
        "nemotron_h": "1 of 4 layers (NemotronHMamba2Mixer); on GPUs by flash-linear-attention, "
        "which compiles kernels in the first step on a machine",
    }
    slow = describe_recurrences(tiny_config("nemotron_h"), slow_reason=why_slow(torch.float32))
    assert slow == (
        "1 of 4 layers (NemotronHMamba2Mixer); slowly, on matrix products of torch: "
        "the fast kernel takes bfloat16, not torch.float32; train in bfloat16"
    )


def test_mixers_of_an_old_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = modeling_lfm2.Lfm2ShortConv
    monkeypatch.setattr(mixers, "replaced_functions", lambda _: ("causal_conv1d_fn",))
    monkeypatch.setattr(versions, "version", lambda _: "5.21.0")
    assert mixers.kind_of(mixer) is not None
    monkeypatch.setattr(mixer, "forward", lambda self, hidden_states: hidden_states)  # it passes no keywords on
    with pytest.raises(ValueError, match=r"transformers 5.21.0 is too old for Lfm2ShortConv; install 5.22 or newer"):
        mixers.kind_of(mixer)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("lfm2", "layers.0.conv.in_proj"), ("qwen3_next", "layers.0.linear_attn.out_proj"),
     ("nemotron_h", "layers.0.mixer.in_proj"), ("llama", "layers.0.mlp.down_proj")],
)  # fmt: skip
def test_a_convolution_inside_a_projection_is_refused_wherever_it_is(model_type: str, name: str) -> None:
    for inner in (True, False):
        model = build_to_train(tiny_config(model_type))
        check_attention(model)
        convolution = nn.Conv1d(32, 32, 3, padding=1)
        model.base_model.set_submodule(name, nn.Sequential(convolution) if inner else convolution)
        with pytest.raises(ValueError, match=rf"convolution over tokens \({name}.*\) in no known mixer"):
            check_attention(model)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next", "nemotron_h", "granitemoehybrid"])
def test_hybrids_without_recurrent_layers_are_taken(model_type: str) -> None:
    kinds = ["full_attention"] * tiny_config(model_type).num_hidden_layers
    found = inspect_architecture(tiny_config(model_type, layer_types=kinds))
    assert len(found.attentions) == len(kinds) and not found.has_recurrences
