"""Models of other names than Llama: what they are made of, which are refused, that they train as one process does."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import loss_at, plain_losses
from programs import Ended, program
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel, PreTrainedConfig
from worlds import spawn

from lightseq.architecture.flops import attention_forward_flops, model_flops
from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.remat_policies import STORES_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.parts import mlp
from lightseq.plan.breakdown import GIB
from lightseq.plan.hardware import Hardware
from lightseq.plan.make_plan import FRUGAL_GROUP, frugal_options
from lightseq.plan.rates import CHIPS
from lightseq.plan.run import PlannedRun
from lightseq.schedule.reach import sliding
from lightseq.training.metrics import read_records
from lightseq.training.setup_checks import check_layers
from lightseq.utils.logit_transform import LogitTransform

LENGTH, VOCABULARY, STEPS = 43, 64, 3
STANDS_IN = {"position_embeddings": (torch.zeros(1, 4, 8, device="meta", dtype=torch.bfloat16),) * 2}
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What each has that Llama has not.
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 44},  # no shorter than a sequence, so full attention
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},  # norms on queries and keys
    "qwen2": {},  # biases on queries, keys and values
    "phi3": {},  # one linear for all three
    "olmo2": {},  # norms behind the sublayers
    "gemma": {"head_dim": 8},  # a buffer that scales the embeddings
    "gemma3_text": {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8}  # windows, RoPE by kind of layer
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "olmo3": {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "nanochat": {"final_logit_softcapping": 5.0},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # buffers in its activation function
}


def config_of(model_type: str, **changes: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**TINY | MODELS.get(model_type, {}) | changes)


@pytest.mark.parametrize("model_type", MODELS)
def test_counts_equal_the_model_and_torch(model_type: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = config_of(model_type, attn_implementation="eager")
    model, found = AutoModelForCausalLM.from_config(config), inspect_architecture(config)
    assert found.total == model.num_parameters()
    assert {layer.kind for layer in found.layers} == {type(model.model.layers[0]).__name__}
    ids = torch.zeros(1, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    rotary = counter.get_flop_counts().get(f"{type(model).__name__}.model.rotary_emb", {})
    square = len(found.layers) * 4 * 16**2 * found.attentions[0].width  # of eager attention, forward
    masked = 3 * (square - attention_forward_flops(config, 16))
    assert counter.get_total_flops() - sum(rotary.values()) == model_flops(config, 16, 1) + masked


def test_what_linears_read_and_write_is_counted() -> None:
    config = config_of("qwen3")
    (layer,) = set(inspect_architecture(config).layers)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    assert layer.linear_inputs == 3 * hidden + q + 2 * hidden + inner and layer.last_linear_input == inner
    assert layer.linear_outputs == q + 2 * kv + hidden + 2 * inner + hidden


def test_a_config_is_inspected_once_and_again_if_it_was_changed() -> None:
    config = config_of("qwen2")
    before, model = inspect_architecture(config), AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    assert inspect_architecture(model.config) is inspect_architecture(config) is before
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    assert (len(before.layers), len(inspect_architecture(config).layers)) == (2, 1)
    config.layer_types[0] = "chunked_attention"
    with pytest.raises(ValueError, match="chunked_attention layers, which no kernel supports"):
        inspect_architecture(config)


@pytest.mark.parametrize(
    ("model_type", "changes", "line"),
    [
        ("doge", {}, "attention"),
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, "use your own loop around"),
        ("ctrl", {"n_embd": 32}, "linear head; use your own loop around hf.enable (examples/README.md), or another"),
        ("bert", {}, "BertLMHeadModel"),
        ("t5", {}, "as a causal language model"),
        ("starcoder2", {"residual_dropout": 0.1}, "residual_dropout 0.1"),
        ("diffllama", {}, "attention"),
        ("stablelm", {}, "does not use the attention interface"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(model_type: str, changes: dict[str, Any], line: str) -> None:
    asked = TrainConfig(model_name_or_path="x", data_path="x", output_dir="x")
    with pytest.raises(ValueError) as refusal:
        check_layers(asked, inspect_architecture(config_of(model_type, **changes)))
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def changing_logits(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Tensor], Tensor]) -> PreTrainedConfig:
    """Lets Llama change its logits; the name makes a config that was not inspected before."""
    forward = LlamaForCausalLM.forward

    def changed(model: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = forward(model, *args, **kwargs)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    return config_of("llama", changes_logits=name)


KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], float, float | None]] = {
    "none": (lambda x: x.float(), 1.0, None),
    "scaled": (lambda x: x * 0.3, 0.3, None),
    "capped": (lambda x: 30 * torch.tanh(x / 30), 1.0, 30.0),
    "hardly capped": (lambda x: 4e4 * torch.tanh(x / 4e4), 1.0, 4e4),
    "scaled and capped": (lambda x: 5 * torch.tanh(0.7 * x / 5), 0.7, 5.0),
    "capped and scaled": (lambda x: 3 * (5 * torch.tanh(0.7 * x / 5)), 2.1, 15.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_scale_and_cap_of_the_logits_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, scale, cap = KNOWN[name]
    found = inspect_architecture(changing_logits(monkeypatch, name, change)).logit_transform
    assert found.scale == pytest.approx(scale, rel=1e-6) and (found.cap or 0) == pytest.approx(cap or 0, rel=1e-6)
    x = torch.linspace(-80, 80, 1000)
    torch.testing.assert_close(found.logits(x), change(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["gemma2", "nanochat"])
def test_the_soft_cap_of_a_config_is_read(name: str) -> None:
    for cap in (7.0, None):
        config = config_of(name, final_logit_softcapping=cap)
        assert inspect_architecture(config).logit_transform == LogitTransform(cap=cap)


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda x: x.clamp(-30, 30),
    "rounded cap": lambda x: 30 * torch.erf(x / 30),
    "shifted": lambda x: x + 0.01,
    "shifted and capped": lambda x: 30 * torch.tanh((x + 0.01) / 30),
    "capped above": lambda x: x.minimum(30 * torch.tanh(x / 30)),
    "negated": lambda x: -x,
    "normalized": lambda x: x.log_softmax(-1),
    "by token": lambda x: x * torch.arange(1, 1 + x.shape[1], device=x.device)[:, None],
    "by word": lambda x: torch.cat([x[..., :-1], x[..., -1:] * 1.001], -1),
    "one word less": lambda x: x[..., :-1],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_changes_of_the_logits_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ValueError, match="changes its logits in a way that the chunked loss does not support") as error:
        inspect_architecture(changing_logits(monkeypatch, name, UNKNOWN[name]))
    assert "\n" not in str(error.value)


def test_the_windows_of_layers_and_their_work_are_known() -> None:
    every = inspect_architecture(config_of("mistral", sliding_window=8))
    assert {mixer.reach for mixer in every.attentions} == {sliding(8)} and every.windows == {8}
    some = inspect_architecture(config_of("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1))
    assert [mixer.reach for mixer in some.attentions] == [None, sliding(8)]
    pairs = [sum(min(i + 1, window) for i in range(1000)) for window in (8, 1000)]
    assert some.attention_share(1000) == pytest.approx(sum(pairs) / (2 * pairs[1]), rel=2e-3)  # no diagonal counted
    assert every.attention_share(8) == 1.0


RAISING: dict[str, dict[str, Any]] = {
    "reformer": {},  # asserts what its own defaults do not meet: AssertionError
    "gpt2": {"n_head": 0},  # ZeroDivisionError
    "llama": {"num_hidden_layers": 10**30},  # which would be built one by one
}


@pytest.mark.parametrize("model_type", RAISING)
def test_an_error_in_a_models_own_code_is_one_line(model_type: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be built as a causal language model|does not run on") as caught:
        inspect_architecture(CONFIG_MAPPING[model_type](**RAISING[model_type]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", STORES_MLP)
def test_storing_the_mlp_is_refused_for_layers_that_cannot(policy: str) -> None:
    found = inspect_architecture(config_of("phi3"))  # gate and up are one product
    asked = TrainConfig(model_name_or_path="x", data_path="x", output_dir="x", remat=policy)
    with pytest.raises(ValueError, match="a gated MLP of plain linear layers"):
        check_layers(asked, found)


def test_groups_of_layers_are_refused_and_not_planned_where_layers_have_their_own_rope() -> None:
    """A group runs with the arguments of its first layer."""
    found = inspect_architecture(config_of("gemma3_text"))
    asked = TrainConfig(model_name_or_path="x", data_path="x", output_dir="x", layers_per_checkpoint=2)
    with pytest.raises(ValueError, match="--layers_per_checkpoint 2 needs layers that get the same arguments"):
        check_layers(asked, found)
    assert not found.layers_share_inputs and inspect_architecture(config_of("llama")).layers_share_inputs
    plain = replace(asked, layers_per_checkpoint=TrainConfig.layers_per_checkpoint, bf16=True)
    for name, groups in (("gemma3_text", {1}), ("llama", {1, FRUGAL_GROUP})):
        run = PlannedRun(config_of(name), plain, Hardware(CHIPS["h100-80gb"], 1, 8, 80 * GIB, 100 * GIB, None))
        assert {option.group_size for option in frugal_options(run)} == groups


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "cohere", "gemma3_text", "olmo2"]
)
def test_a_gated_mlp_may_be_stored_and_a_norm_after_it_needs_its_output(model_type: str) -> None:
    layers = inspect_architecture(config_of(model_type)).layers
    assert all(layer.can_store_mlp for layer in layers)
    assert {layer.mlp_is_last for layer in layers} == {model_type not in ("gemma3_text", "olmo2")}


def test_a_layer_that_is_called_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def twice(model: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        model.layers[0](torch.zeros(1, 4, 32, device="meta", dtype=torch.bfloat16), **STANDS_IN)
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", twice)
    with pytest.raises(ValueError, match="has 2 layers and calls 3; use a model that calls each once"):
        inspect_architecture(config_of("llama", calls_twice=True))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_dependent_rope_is_supported(rope_type: str) -> None:
    rope = {
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "rope_type": rope_type,
    }
    assert inspect_architecture(config_of("llama", rope_parameters=rope, original_max_position_embeddings=32)).linears


def programs(rank: int, runs: list[str]) -> list[Ended]:
    mlp.TILE_TOKENS = 3  # or none of these sequences would be long enough for an MLP over tiles
    return [program(rank, "any", words) for words in runs]


@pytest.mark.compat
@pytest.mark.parametrize("names", [["olmo2"], pytest.param([*MODELS], marks=pytest.mark.slow)])
def test_other_models_train_as_one_process_does(tmp_path: Path, names: list[str]) -> None:
    data = np.random.default_rng(3).integers(3, VOCABULARY, (4, LENGTH)).tolist()
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    torch.manual_seed(0)
    for name in names:
        AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path / name)
    runs = [
        f"--model_name_or_path {tmp_path / name} --data_path {tmp_path}/data.pkl --output_dir {tmp_path}/{name}-out "
        f"--model_max_length {LENGTH} --learning_rate 1e-2 --lr_scheduler_type constant --max_steps {STEPS} "
        f"--fsdp_transformer_layer_cls_to_wrap {inspect_architecture(config_of(name)).layers[0].kind}"
        for name in names
    ]
    for end in spawn(2, programs, runs)[0]:
        assert end.status == 0, end.err
    for name in names:
        losses = [record["loss"] for record in read_records(tmp_path / f"{name}-out" / "metrics.jsonl")]
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
        expected = plain_losses(plain, data, STEPS, optimizer)
        assert losses == pytest.approx(expected[:-1], abs=1e-5), name
        saved = tmp_path / f"{name}-out" / f"checkpoint-{STEPS}"
        model, notes = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(notes.values()) and type(model).__name__ == inspect_architecture(config_of(name)).name
        assert loss_at(model, data, STEPS).item() == pytest.approx(expected[-1], abs=1e-5), name


def test_latent_attention_and_experts_are_facts() -> None:
    """DeepSeek V3: values narrower than keys; of four experts a token is multiplied by two, and by a shared one."""
    config = CONFIG_MAPPING["deepseek_v3"](
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=2, topk_group=1,
    )  # fmt: skip
    found = inspect_architecture(config)
    dense, experts = found.layers
    assert [(a.heads.dim, a.heads.value_dim) for a in found.attentions] == [(24, 16)] * 2
    assert found.attentions[0].pair_flops == 2 * 4 * (24 + 16)
    expert, router = 3 * 64 * 32, 64 * 4
    assert experts.parameters - experts.active == 2 * expert + (dense.parameters - dense.active)  # the norms
    assert experts.active - dense.active == 3 * expert + router - 3 * 64 * 96
