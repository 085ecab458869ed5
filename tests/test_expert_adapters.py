"""Adapters of stacked experts: losses, gradients, files and merged weights of peft, without the sum of W and B·A."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_training import plain_losses
from programs import programs
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from worlds import spawn

from lightseq.architecture.flops import count_adapter_parameters
from lightseq.cli import main as lightseq
from lightseq.config.command_line import parse
from lightseq.models.weights import base_parameters
from lightseq.parts import adapters
from lightseq.parts.adapter_targets import find_targets
from lightseq.parts.changes import Changes
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import use_grouped_experts
from lightseq.parts.fp8 import to_fp8
from lightseq.training.metrics import read_records

peft = pytest.importorskip("peft")
BaseTunerLayer = peft.tuners.tuners_utils.BaseTunerLayer

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.3, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(moe_intermediate_size=16, num_experts=4, head_dim=8, **SIZES),
    "mixtral": MixtralConfig(num_local_experts=4, **SIZES),
    "gpt_oss": GptOssConfig(num_local_experts=4, head_dim=8, **SIZES),  # (inputs, outputs), square, with biases
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, n_routed_experts=4, moe_intermediate_size=16, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    ),
    # (inputs, outputs), which transformers does not mark; scores on inputs
    "llama4_text": Llama4TextConfig(num_local_experts=4, head_dim=8, interleave_moe_layer_step=2, **SIZES),
}  # fmt: skip
WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")
LENGTH, STEPS = 43, 3
FLAGS = f"--lora_rank 3 --lora_alpha 5 --lora_target_modules o_proj --lora_target_parameters {','.join(WEIGHTS)}"


def lora_of(config: PreTrainedConfig) -> adapters.Lora:
    return adapters.Lora(3, 5.0, ("o_proj",), None, tuple(find_targets(config).parameters))


def adapted(model: Any) -> Any:
    """Returns peft's model around transformers' own with the same weights, with adapters that change it."""
    own = type(model)(copy.deepcopy(model.config))
    own.load_state_dict(model.state_dict())
    found = peft.get_peft_model(own, adapters.peft_config(lora_of(model.config)))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return found


def named(model: Any) -> dict[str, nn.Parameter]:
    return {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}


def both(family: str) -> tuple[Any, Any]:
    """Returns a model with our adapters, and peft's with the same weights."""
    torch.manual_seed(0)
    model = build_to_train(copy.deepcopy(CONFIGS[family]), "cpu")
    plain, theirs = {name for name, _ in model.named_parameters()}, adapted(model)
    adapters.add_adapters(model, lora_of(model.config), torch.float32)
    assert base_parameters(model).keys() == plain
    trained = {name: p.detach().clone() for name, p in named(theirs).items()}
    assert not model.load_state_dict(trained, strict=False, assign=True).unexpected_keys
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    use_grouped_experts(model, Changes())
    return model, theirs


@pytest.mark.slow
def test_experts_with_adapters_compile_into_one_graph() -> None:
    mlp = both("gpt_oss")[0].model.layers[0].mlp
    x = torch.randn(1, 20, 32)
    found, expected = torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.compat("5.20")
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_gradients_equal_pefts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, theirs = both(family)
    ids = torch.randint(0, 64, (2, 20))
    expected = theirs(input_ids=ids, labels=ids).loss
    expected.backward()
    monkeypatch.setattr(torch, "baddbmm", None)  # peft's sum of W and B·A
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    gradients = {name: p.grad for name, p in named(theirs).items() if p.requires_grad}
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, gradient in gradients.items():
        found = model.get_parameter(name).grad
        assert (found - gradient).norm() < 1e-5 * gradient.norm(), name
    with torch.no_grad():
        for layer in filter(lambda x: isinstance(x, BaseTunerLayer), model.modules()):
            layer.enable_adapters(False)
        with theirs.disable_adapter():
            torch.testing.assert_close(model(input_ids=ids).logits, theirs(input_ids=ids).logits)


@pytest.mark.compat("5.20")
@pytest.mark.parametrize("family", CONFIGS)
def test_merged_weights_equal_pefts(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = build_to_train(copy.deepcopy(CONFIGS[family]), "cpu")
    base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    theirs = adapted(base)
    theirs.save_pretrained(tmp_path / "adapter")
    words = ["--adapter", f"{tmp_path}/adapter", "--model_name_or_path", f"{tmp_path}/base"]
    assert lightseq(["merge", *words, "--output_dir", f"{tmp_path}/merged"]) == 0
    found, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), theirs.merge_and_unload()
    state, before = expected.state_dict(), base.state_dict()
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, state[name], rtol=1e-6, atol=1e-6)
        changes = name.endswith(("o_proj.weight", *WEIGHTS))
        assert changes == bool((weight - before[name]).abs().max() > 1e-3), name
    names = [
        {x for file in (tmp_path / part).glob("*.safetensors") for x in load_file(file)} for part in ("base", "merged")
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("family", "flags", "line"),
    [
        ("qwen3_moe", "--lora_target_parameters mlp.gate.weight", "mlp.gate.weight is not a weight of the model's"),
        ("gpt_oss", "--lora_target_parameters gate_up_proj_bias", "choose from mlp.experts.gate_up_proj, mlp.experts"),
        ("llama4_text", "--lora_target_modules router", "router is not a linear of the model's layers; choose from"),
        ("deepseek_v3", "--lora_target_modules up_proj", "peft puts adapters for up_proj on this model's experts"),
    ],
)
def test_targets_that_are_no_weights_of_experts_are_refused(family: str, flags: str, line: str) -> None:
    config = parse(f"--model_name_or_path x --data_path x --output_dir x --lora_rank 2 {flags}".split(), "train")
    with pytest.raises(ValueError) as refusal:
        adapters.lora_from_config(config, CONFIGS[family])
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "flags", "line"),
    [
        ("qwen3_moe", "", "all-linear leaves out the experts; to adapt experts, add --lora_target_parameters mlp.ex"),
        ("qwen3_moe", "--lora_target_modules q_proj", None),
        ("qwen3_moe", "--lora_target_parameters experts.down_proj", None),
        ("deepseek_v3", "", "out the experts and down_proj, gate_proj, up_proj (peft takes these names for experts); "),
        ("deepseek_v3", "--lora_target_parameters down_proj", "leaves out down_proj, gate_proj, up_proj (peft takes"),
    ],
)
def test_one_line_says_what_all_linear_leaves_out(family: str, flags: str, line: str | None) -> None:
    config = parse(f"--model_name_or_path x --data_path x --output_dir x --lora_rank 2 {flags}".split(), "train")
    notes = adapters.notes_on_targets(config, adapters.lora_from_config(config, CONFIGS[family]), CONFIGS[family])
    assert (len(notes) == 0) if line is None else (line in notes[0])


def test_weights_of_experts_are_named_by_their_ends_and_counted() -> None:
    config = CONFIGS["qwen3_moe"]
    words = "--model_name_or_path x --data_path x --output_dir x --lora_rank 2 --lora_target_parameters down_proj"
    lora = adapters.lora_from_config(parse([*words.split(), "--lora_target_modules="], "train"), config)
    assert lora == adapters.Lora(2, 4.0, (), None, ("mlp.experts.down_proj",))
    assert count_adapter_parameters(lora, config) == 2 * 2 * 4 * (16 + 32)
    assert count_adapter_parameters(lora, config, active=True) == 2 * 2 * 2 * (16 + 32)
    assert not find_targets(config).taken


def test_fp8_leaves_experts_and_routers() -> None:
    pytest.importorskip("torchao")
    model = build_to_train(copy.deepcopy(CONFIGS["deepseek_v3"]), "cpu")
    block = model.model.layers[1].mlp
    block.gate = nn.Linear(32, 4, bias=False)  # a router of other families
    to_fp8(model.model.layers, "rowwise", True, 16)
    assert type(block.gate) is nn.Linear and type(block.shared_experts.up_proj) is not nn.Linear
    assert type(block.experts.gate_up_proj) is nn.Parameter


# ---- whole runs ------------------------------------------------------------------------------------------------------


def peft_losses(model: Any, data: list[list[int]]) -> list[float]:
    """Returns the losses of every step, by peft and plain torch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, weight_decay=0.0)
    return plain_losses(model, data, STEPS, optimizer)[:-1]


def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=torch.arange(30)[None] % 64).logits.detach()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_runs_train_adapters_of_peft_and_save_them_for_peft(family: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    build_to_train(copy.deepcopy(CONFIGS[family]), "cpu").save_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    data = np.random.default_rng(3).integers(3, 64, (STEPS, LENGTH)).tolist()
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"input_ids": data}))
    theirs = adapted(plain)
    theirs.save_pretrained(tmp_path / "start")
    common = (
        f"--model_name_or_path {tmp_path}/model --data_path {tmp_path}/data.pkl --model_max_length {LENGTH} "
        f"--learning_rate 3e-2 --lr_scheduler_type constant {FLAGS} --lora_adapter {tmp_path}/start"
    )
    runs = [
        f"{common} --output_dir {tmp_path}/whole --max_steps {STEPS}",
        f"{common} --output_dir {tmp_path}/parts --max_steps 2",
        f"{common} --output_dir {tmp_path}/parts --max_steps {STEPS} --resume_from_checkpoint True",
        f"{common} --output_dir {tmp_path}/split --max_steps {STEPS} --expert_parallel_size 2",
        f"{common} --output_dir {tmp_path}/other --max_steps 1 --lora_rank 2",
    ]
    *ends, refused = spawn(2, programs, "any", runs)[0]
    assert [end.status for end in ends] == [0] * 4, [end.err for end in ends]
    assert refused.status == 2 and "has lora_rank 3, not 2; give --lora_rank 3" in refused.err
    found = [[x["loss"] for x in read_records(tmp_path / run / "metrics.jsonl")] for run in ("whole", "parts", "split")]
    expected = pytest.approx(peft_losses(theirs, data), abs=1e-5)
    assert found[0] == expected and found[1] == found[0] and found[2] == expected
    opened = peft.PeftModel.from_pretrained(plain, tmp_path / "whole" / f"checkpoint-{STEPS}")
    torch.testing.assert_close(logits(opened), logits(theirs), rtol=1e-3, atol=1e-3)
