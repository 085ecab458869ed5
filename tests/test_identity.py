"""Modules that somebody changed compute what they would without lightseq, or are refused by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from transformers import (
    BitNetConfig,
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
)
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from worlds import spawn

from lightseq import hf
from lightseq.integrations import pass_head
from lightseq.integrations.whole_batches import WholeBatches
from lightseq.memory.remat import checkpoint_groups
from lightseq.parts import loss, mlp
from lightseq.parts.adapters import Lora, add_adapters
from lightseq.parts.changes import Changes
from lightseq.parts.fp8 import to_fp8
from lightseq.parts.head import required_logit_transform
from lightseq.parts.low_rank import is_linear
from lightseq.parts.mlp import tile_mlps
from lightseq.parts.projections import store_projections
from lightseq.parts.tiled import tile_layers

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(0))
Change = Callable[[Any], Any]


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def cohere() -> CohereForCausalLM:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.5))


def built(make: Callable[[], Any], change: Change) -> Any:
    torch.manual_seed(0)
    model = make().double()
    change(model)
    return model


# ---- the language model's head -------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def give_class(module: Any, kind: type) -> None:
    module.__class__ = kind


class Doubles(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class DoublesItsLogits(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size, **kwargs)
        return output


def with_another_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2


def double_output(module: Any) -> None:
    module.register_forward_hook(lambda _module, _args, output: output * 2)


def with_trained_scale(model: Any) -> None:
    del model.logit_scale
    model.logit_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))


def quantized_in_training(model: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    qat = pytest.importorskip("torchao.quantization.qat")
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=16)
    torchao.quantize_(model.float(), qat.QATConfig(weight_config=weights, step="prepare"))  # knows no float64


def with_own_forward_through(model: Any) -> None:
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = watched


HEADS: dict[str, tuple[Callable[[], Any], Change]] = {
    "class": (llama, lambda model: give_class(model.lm_head, Doubled)),
    "forward": (llama, lambda model: with_another_forward(model.lm_head)),
    "hook": (llama, lambda model: double_output(model.lm_head)),
    "pre-hook": (llama, lambda model: model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))),
    "parametrization": (llama, lambda model: parametrize.register_parametrization(model.lm_head, "weight", Doubles())),
    "quantization-aware training": (llama, quantized_in_training),
    "the model's class": (lambda: DoublesItsLogits(LlamaConfig(**SIZES)), lambda model: None),
    "the model's forward": (llama, with_own_forward_through),
    "the model's attribute": (cohere, lambda model: setattr(model, "logit_scale", 2.0)),
    "a trained scale": (cohere, with_trained_scale),
    "the model's config": (
        lambda: NanoChatForCausalLM(NanoChatConfig(**SIZES)),
        lambda model: setattr(model.config, "final_logit_softcapping", 1.5),
    ),
}


def relative(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else 1.0
    return float((got - want).detach().norm() / want.detach().norm())


def assert_same_gradients(model: nn.Module, want: nn.Module, label: str) -> None:
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert relative(p.grad, q.grad) < 1e-5, f"{label}: {name}"


def plain_log_probs(model: Any, temperature: float) -> Tensor:
    logits = model(input_ids=IDS).logits[:, :-1] / temperature
    return F.pad(logits.log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1), (0, 1))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.filterwarnings("ignore:.*exist whole")
def test_log_probs_of_changed_heads_equal_the_model(alone: None, name: str) -> None:
    check_log_probs(*HEADS[name], name)


def test_log_probs_follow_a_function_that_replaces_torchs_linear(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: 2 * linear(x, weight, bias))
    check_log_probs(llama, lambda model: None, "linear")


def check_log_probs(make: Callable[[], Any], change: Change, name: str) -> None:
    model, want = built(make, change), built(make, change)
    context = hf.enable(model)
    batch = hf.shard_batch(context, IDS, IDS)
    got, plain = hf.token_log_probs(context, model, batch, 0.7), plain_log_probs(want, 0.7)
    assert relative(got, plain) < 1e-6
    for x in (got, plain):
        x.square().mean().backward()
    assert_same_gradients(model, want, name)


def test_log_probs_of_an_adapted_head_equal_peft(alone: None) -> None:
    def adapt(model: Any) -> None:
        inject_adapter_in_model(LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False), model)

    model, want = built(llama, adapt), built(llama, adapt)
    want.load_state_dict(model.state_dict())
    context = hf.enable(model)
    with pytest.warns(UserWarning, match=r"LM head is a peft\.tuners\.lora\.layer\.Linear, so .* exist whole"):
        got = hf.token_log_probs(context, model, hf.shard_batch(context, IDS, IDS))
    assert relative(got, plain_log_probs(want, 1.0)) < 1e-6


def test_hooks_on_the_model_or_on_all_modules_change_the_logits(alone: None) -> None:
    def double(_module: Any, _args: Any, output: Any) -> None:
        output.logits = output.logits * 2

    model, want = built(llama, lambda model: None), built(llama, lambda model: None)
    context = hf.enable(model)
    batch = hf.shard_batch(context, IDS, IDS)
    hooks = [x.register_forward_hook(double) for x in (model, want)]
    with pytest.warns(UserWarning, match="LlamaForCausalLM has a forward hook, so the logits"):
        assert relative(hf.token_log_probs(context, model, batch), plain_log_probs(want, 1.0)) < 1e-6
    for hook in hooks:
        hook.remove()
    everywhere = register_module_forward_hook(lambda m, _, out: out * 2 if isinstance(m, nn.Linear) else None)
    try:
        with pytest.warns(UserWarning, match="LM head has a forward hook, as all modules do"):
            got = hf.token_log_probs(context, model, batch)
        assert relative(got, plain_log_probs(want, 1.0)) < 1e-6
    finally:
        everywhere.remove()


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[int]]:
    calls, function = list[int](), getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs))
        yield calls


def whole_losses(rank: int, names: list[str]) -> None:
    for name in names:
        model, want = built(*HEADS[name]), built(*HEADS[name])
        WholeBatches(model, hf.enable(model))
        with counted(pass_head, "cross_entropy_sum") as chunked:
            loss = model(input_ids=IDS, labels=IDS).loss
        plain = want(input_ids=IDS, labels=IDS).loss
        assert relative(loss, plain) < 1e-6, name
        assert bool(chunked) == (name in ("the model's attribute", "the model's config")), name
        loss.backward()
        plain.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= dist.get_world_size()
        assert_same_gradients(model, want, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exist whole")
def test_losses_of_whole_batches_with_changed_heads_equal_one_process() -> None:
    spawn(2, whole_losses, ["class", "hook", "the model's class", "the model's attribute", "a trained scale"])


def in_place(model: Any, scale: float) -> None:
    model.logit_scale.fill_(scale)


def behind_torch(model: Any, scale: float) -> None:
    model.logit_scale.data.fill_(scale)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda model: None, lambda model, scale: setattr(model, "logit_scale", scale)),
        (lambda model: vars(model).update(logit_scale=torch.tensor(0.5)), in_place),
        (lambda model: with_buffer(model), behind_torch),
        (lambda model: None, lambda model, scale: setattr(model, "logit_scale", np.float32(scale))),
    ],
)
def test_a_scale_that_changes_between_steps_changes_the_next_loss(
    alone: None, make: Change, change: Callable[[Any, float], None]
) -> None:
    model, want = built(cohere, make), built(cohere, make)
    WholeBatches(model, hf.enable(model))
    for scale in (0.5, 3.0, 0.1):
        for one in (model, want):
            change(one, scale)
        got, plain = (x(input_ids=IDS, labels=IDS).loss for x in (model, want))
        assert relative(got, plain) < 1e-6


def with_buffer(model: Any) -> None:
    del model.logit_scale
    model.register_buffer("logit_scale", torch.tensor(0.5))


def wrapped_by_libraries(rank: int) -> None:
    def shard(model: Any) -> Any:
        for module in (model.lm_head, model):
            fully_shard(module)
        return model

    def with_gradients_of_inputs(model: Any) -> Any:
        model.enable_input_require_grads()
        return model

    wrappers: list[Callable[[Any], Any]] = [
        lambda model: model,
        shard,
        Accelerator(cpu=True, mixed_precision="bf16").prepare,
        with_gradients_of_inputs,
        lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])),
    ]
    for wrap in wrappers:
        model = built(llama, lambda model: None).float()
        context = hf.enable(model)
        whole = WholeBatches(model, context)
        wrapped = wrap(model)
        with counted(pass_head, "cross_entropy_sum") as chunked:
            wrapped(input_ids=IDS, labels=IDS).loss.backward()
        whole.remove()
        with counted(loss, "token_log_probs") as in_head:
            hf.token_log_probs(context, wrapped, hf.shard_batch(context, IDS, IDS))
        assert chunked and in_head  # twice under autocast


def test_hooks_of_libraries_leave_the_loss_in_chunks() -> None:
    spawn(1, wrapped_by_libraries)  # because accelerate keeps its precision for a whole process


def test_changes_that_the_fused_head_of_trl_would_ignore_are_refused(alone: None) -> None:
    changes: dict[str, tuple[Callable[[], Any], Change]] = {
        "LM head has a forward hook, which TRL's fused head leaves out": HEADS["hook"],
        "LM head is a test_identity.Doubled": HEADS["class"],
        "makes logits with .*scale=2.0.*, not with its config's .*scale=0.5": HEADS["the model's attribute"],
    }
    for line, change in changes.items():
        model = built(*change)
        WholeBatches(model, hf.enable(model))
        with pytest.raises(ValueError, match=line):
            model(input_ids=IDS, labels=IDS, fused_lm_head=True)


@pytest.mark.parametrize("name", ["class", "forward", "hook", "the model's forward", "a trained scale"])
def test_training_refuses_a_changed_head(alone: None, name: str) -> None:
    model = built(*HEADS[name])
    with pytest.raises(ValueError, match=r"use your own loop around hf\.enable"):
        required_logit_transform(model)


# ---- modules in the layers -----------------------------------------------------------------------------------------


class DoubledMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OtherSiLU(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


MLPS: dict[str, Change] = {
    "class": lambda m: give_class(m, DoubledMLP),
    "forward": with_another_forward,
    "hook": double_output,
    "activation": lambda m: setattr(m, "act_fn", OtherSiLU()),
    "forward of the activation": lambda m: with_another_forward(m.act_fn),
    "hook of the activation": lambda m: double_output(m.act_fn),
    "class of a linear": lambda m: give_class(m.gate_proj, Doubled),
    "forward of a linear": lambda m: with_another_forward(m.up_proj),
    "hook of a linear": lambda m: double_output(m.down_proj),
    "parametrization of a linear": lambda m: parametrize.register_parametrization(m.up_proj, "weight", Doubles()),
}


def gated(change: Change) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Module()
    layer.mlp = LlamaMLP(LlamaConfig(**SIZES)).double()
    change(layer.mlp)
    return layer


@pytest.mark.parametrize("name", MLPS)
def test_a_changed_mlp_keeps_its_own_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "TILE_TOKENS", 4)
    ours, plain = gated(MLPS[name]), gated(MLPS[name])
    kind = type(ours.mlp)
    tile_mlps([ours], Changes())
    x = torch.randn(1, 11, SIZES["hidden_size"], dtype=torch.float64)
    torch.testing.assert_close(ours.mlp(x), plain.mlp(x))
    assert type(ours.mlp) is kind
    with pytest.raises(ValueError, match="has no gated MLP of plain linears"):
        tile_mlps([gated(MLPS[name])], Changes(), store=True)


def test_an_mlp_that_computes_more_than_a_gated_one_keeps_its_own_forward() -> None:
    layer = nn.Module()
    layer.mlp = BitNetMLP(BitNetConfig(**SIZES, hidden_act="silu"))
    tile_mlps([layer], Changes())
    assert type(layer.mlp) is BitNetMLP


class SquaresItsMLP(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.mlp(hidden_states).square()


def test_a_layer_of_another_class_keeps_its_mlps_output_for_the_backward_pass() -> None:
    layer = SquaresItsMLP(LlamaConfig(**SIZES), 0)
    tile_mlps([layer], Changes(), ends_layer=True)
    assert isinstance(layer.mlp, LlamaMLP) and not layer.mlp.ends_layer


LINEARS: dict[str, Change] = {
    "class": lambda linear: give_class(linear, Doubled),
    "forward": with_another_forward,
    "hook": double_output,
    "parametrization": lambda linear: parametrize.register_parametrization(linear, "weight", Doubles()),
}


@pytest.mark.parametrize("name", LINEARS)
def test_changed_projections_are_neither_stored_nor_converted_to_fp8(name: str) -> None:
    model = llama()
    LINEARS[name](model.model.layers[1].self_attn.k_proj)
    with pytest.raises(ValueError, match="has no four plain linears"):
        store_projections(model.model.layers, Changes())
    pytest.importorskip("torchao")
    with pytest.raises(ValueError, match=r"--fp8 tensorwise: linear 1\.self_attn\.k_proj .*, which would be lost"):
        to_fp8(model.model.layers, "tensorwise", True, 16)


ADAPTERS: dict[str, tuple[dict[str, Any], Change]] = {
    "DoRA": ({"use_dora": True}, lambda linear: None),
    "dropout": ({"lora_dropout": 0.1}, lambda linear: None),
    "hook": ({}, double_output),
    "forward": ({}, with_another_forward),
    "hook of A": ({}, lambda linear: double_output(linear.lora_A["default"])),
    "forward of B": ({}, lambda linear: with_another_forward(linear.lora_B["default"])),
    "hook of the base": ({}, lambda linear: double_output(linear.base_layer)),
    "class of the base": ({}, lambda linear: give_class(linear.base_layer, Doubled)),
    "another adapter": ({}, lambda linear: linear.set_adapter([])),
    "merged": ({}, lambda linear: linear.merge()),
    "disabled": ({}, lambda linear: linear.enable_adapters(False)),
}


def adapted(options: dict[str, Any], change: Change) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False)})
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options), layer)
    change(layer["q_proj"])
    return layer["q_proj"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_changed_adapters_are_not_joined_with_their_linear(name: str) -> None:
    assert is_linear(adapted({}, lambda linear: None)) and is_linear(adapted({"use_rslora": True}, lambda linear: None))
    assert not is_linear(adapted(*ADAPTERS[name]))


def test_an_adapter_that_is_joined_can_be_disabled_and_merged() -> None:
    model, want = llama(), llama()
    want.load_state_dict(model.state_dict())
    add_adapters(model, Lora(rank=2, alpha=4.0, targets=("q_proj",)), torch.float32)
    linear = model.model.layers[0].self_attn.q_proj
    linear.to_empty(device="cpu") if linear.lora_A["default"].weight.is_meta else None
    linear.base_layer.load_state_dict(want.model.layers[0].self_attn.q_proj.state_dict())
    for x in (linear.lora_A["default"].weight, linear.lora_B["default"].weight):
        nn.init.normal_(x)
    x = torch.randn(3, SIZES["hidden_size"])
    plain, joined = linear.base_layer(x), linear(x)
    assert relative(joined, plain) > 0.1
    linear.merge()
    torch.testing.assert_close(linear(x), joined)
    linear.unmerge()
    linear.enable_adapters(False)
    torch.testing.assert_close(linear(x), plain)


# ---- layers --------------------------------------------------------------------------------------------------------


class OtherAttention(LlamaAttention):
    pass


LAYERS: dict[str, tuple[Change, str]] = {
    "forward": (with_another_forward, "LlamaDecoderLayer has a forward of its own"),
    "forward of attention": (lambda x: with_another_forward(x.self_attn), "self_attn has a forward of its own"),
    "hook of attention": (lambda x: double_output(x.self_attn), "self_attn has a forward hook"),
    "class of attention": (lambda x: give_class(x.self_attn, OtherAttention), "self_attn is a test_identity.OtherAtte"),
    "hook of a norm": (lambda x: double_output(x.post_attention_layernorm), "post_attention_layernorm has a forward h"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_changed_layers_do_not_run_in_tiles(name: str) -> None:
    change, line = LAYERS[name]
    model = llama()
    change(model.model.layers[1])
    with pytest.raises(ValueError, match=f"--tile_layers: {line}.*, which tiles would leave out"):
        tile_layers(model.model.layers, Changes())


def test_layers_with_hooks_do_not_share_a_checkpoint() -> None:
    model = llama()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="LlamaDecoderLayer has a forward hook, which groups of layers"):
        checkpoint_groups([list(model.model.layers)])


def test_a_window_that_the_config_gets_after_enable_is_refused(alone: None) -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
    batch = hf.shard_batch(hf.enable(model, schedule="prefix"), IDS, IDS)
    model(**batch)
    model.config.sliding_window = 8
    with pytest.raises(ValueError, match=r"changed after hf\.enable; call hf\.enable again"):
        model(**batch)
