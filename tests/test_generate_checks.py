"""Prompts as a model expects them, and damaged models, adapters and settings: one line and status 2 each."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from byte_level import CHATML, byte_level
from peft import LoraConfig, get_peft_model
from programs import alone, refusal, shown
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.tiny_models import model_class, tiny_config
from lightseq.cli import main
from lightseq.tools.pretrained import load_pretrained
from lightseq.tools.writer import to_float16

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
CPU = torch.device("cpu")


def save(model: PreTrainedModel, folder: Path, template: str | None = None) -> Path:
    model.save_pretrained(folder)
    backend = byte_level(template).backend
    backend.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair="$A $B", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    backend.save_pretrained(folder)
    return folder


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, bos_token_id=2, eos_token_id=1, **sizes))


def generated(folder: Path, *flags: str, prompt: str = "hi") -> list[str]:
    return ["generate", str(folder), "--prompt", prompt, "--max_new_tokens", "4", "--temperature", "0", *flags]


def encoded(text: str) -> list[int]:
    return byte_level().encode_part(text).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def adapter(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    base = LlamaForCausalLM.from_pretrained(plain)
    made = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False))
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of each prompt that a model gets, and its end ids."""
    seen: list[list[int]] = []
    generate = GenerationMixin.generate

    def spy(self: Any, ids: torch.Tensor, **settings: Any) -> Any:
        seen.extend([ids[0].tolist(), settings["eos_token_id"]])
        return generate(self, ids, **settings)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    return seen


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_has_one_begin_token_and_no_end(
    plain: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    for prompt in ("hi", "<bos>hi"):
        assert main(generated(plain, prompt=prompt)) == 0
    assert prompts[0] == prompts[2] and prompts[0][0] == 2 and prompts[0].count(2) == 1 and 1 not in prompts[0]
    assert "continued as it is written, without a chat template" in capsys.readouterr().err


def test_a_chat_model_gets_a_turn_unless_the_prompt_is_raw_and_stops_at_every_end(
    tmp_path: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level(CHATML).backend
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = llama()
    with torch.no_grad():  # every answer is the end of a turn at once
        model.lm_head.weight.zero_()
        model.lm_head.weight[im_end] = 1
        model.model.embed_tokens.weight.fill_(1)
    model.generation_config = GenerationConfig(eos_token_id=[1, im_end], max_length=20)
    folder = save(model, tmp_path, CHATML)
    assert main(generated(folder)) == 0
    assert tokenizer.decode(prompts[0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[1] == [1, im_end]
    shown = capsys.readouterr()
    assert "is a user's turn of the chat template; --raw" in shown.err and shown.out == "\n"
    assert "the answer to prompt 1 is empty: the model stopped after 1 token" in shown.err
    assert main(generated(folder, "--raw")) == 0
    assert tokenizer.decode(prompts[2]) == "<bos>hi" and capsys.readouterr().out == "hi\n"


# ---- models ----------------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        file = next(folder / name for name in (WEIGHTS, ADAPTER) if (folder / name).exists())
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def settings(name: str, **changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **changes}))

    return damage


def cut(name: str, size: int | None = None, content: bytes | None = None) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[:size] if content is None else content
    )


HUGE_HEADER = (2**60).to_bytes(8, "little") + b"{}"
HEAD = "lm_head.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut(WEIGHTS, -100), "model.safetensors cannot be read ("),
    "empty": (cut(WEIGHTS, 0), "model.safetensors cannot be read ("),
    "huge header": (cut(WEIGHTS, content=HUGE_HEADER), "model.safetensors cannot be read ("),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors"),
    "missing": (rewritten(lambda x: x.pop(HEAD)), "missing tensors ['lm_head.weight']"),
    "unknown": (rewritten(lambda x: x.update(other=torch.ones(1))), "unknown tensors ['other']"),
    "misshapen": (rewritten(lambda x: x.update({HEAD: torch.ones(8, 32)})), "has shape [8, 32], not the model's"),
    "NaN": (rewritten(lambda x: x[HEAD].fill_(math.nan)), "holds NaN"),
    "tokenizer": (cut("tokenizer.json", content=b"{}"), "'added_tokens'; copy its files again, or give another"),
    "config": (cut("config.json", content=b"[]"), "config.json is not a JSON object"),
    "generation": (cut("generation_config.json", content=b"{"), "generation_config.json cannot be read ("),
    "generation type": (settings("generation_config.json", top_k="many"), "generation_config.json"),
    "size": (settings("config.json", vocab_size="x"), "config.json cannot be loaded by transformers: Validation error"),
    "activation": (settings("config.json", hidden_act="foo"), "transformers: hidden_act is 'foo'; correct it"),
    "rope": (settings("config.json", rope_parameters={"rope_type": "foo", "rope_theta": 1e4}), "rope_type is 'foo'"),
    "dtype": (settings("config.json", dtype="float99"), "config.json cannot be loaded by transformers: "),
    "large end id": (settings("generation_config.json", eos_token_id=2**40), "eos_token_id is 1099511627776, not an"),
    "end ids": (settings("generation_config.json", eos_token_id="a"), "eos_token_id is 'a', not an id"),
}
ADAPTER_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut(ADAPTER, -10), "adapter_model.safetensors cannot be read ("),
    "empty": (cut(ADAPTER, 0), "adapter_model.safetensors cannot be read ("),
    "huge header": (cut(ADAPTER, content=HUGE_HEADER), "adapter_model.safetensors cannot be read ("),
    "alpha": (settings("adapter_config.json", lora_alpha=math.nan), "lora_alpha is nan, not a number above 0"),
    "NaN": (rewritten(lambda x: [each.fill_(math.nan) for each in x.values()]), "holds NaN"),
    "missing": (rewritten(lambda x: x.pop(min(x))), "adapter_model.safetensors lacks base_model.model.model.layers.0"),
    "base": (settings("adapter_config.json", base_model_name_or_path=None), "does not name its base model"),
    "lost base": (settings("adapter_config.json", base_model_name_or_path="/no/where"), "/no/where cannot be fetched"),
    "rank": (settings("adapter_config.json", r=3), "2, 32]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_is_one_line(name: str, plain: Path, tmp_path: Path) -> None:
    damage, reason = DAMAGE[name]
    damage(shutil.copytree(plain, tmp_path / "model"))
    assert reason in refusal(main, *generated(tmp_path / "model"))


@pytest.mark.parametrize("name", ADAPTER_DAMAGE)
def test_a_damaged_adapter_is_one_line(name: str, adapter: Path, tmp_path: Path) -> None:
    damage, reason = ADAPTER_DAMAGE[name]
    damage(shutil.copytree(adapter, tmp_path / "adapter"))
    assert reason in refusal(main, *generated(tmp_path / "adapter"))
    if name == "lost base":
        remedy = f"edit base_model_name_or_path in {tmp_path}/adapter/adapter_config.json, or merge the adapter with"
        assert remedy in refusal(main, *generated(tmp_path / "adapter"))
    if name != "missing":
        assert reason in refusal(
            main, "merge", "--adapter", f"{tmp_path}/adapter", "--output_dir", f"{tmp_path}/merged"
        )


@pytest.mark.parametrize("name", ["truncated", "NaN"])
def test_training_does_not_start_from_a_damaged_adapter(name: str, plain: Path, adapter: Path, tmp_path: Path) -> None:
    damage, reason = ADAPTER_DAMAGE[name]
    damage(shutil.copytree(adapter, tmp_path / "adapter"))
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8]}))
    end = alone(
        f"--model_name_or_path {plain} --data_path {tmp_path}/data.jsonl --output_dir {tmp_path}/run --max_steps 1 "
        f"--model_max_length 8 --lora_rank 2 --lora_alpha 4 --lora_target_modules q_proj "
        f"--lora_adapter {tmp_path}/adapter --data_cache {tmp_path}/cache"
    )
    assert end.status == 2 and reason in end.err and end.err.count("\n") == 1


@pytest.mark.parametrize("name", ["truncated", "missing", "NaN"])
def test_an_adapter_is_not_merged_into_a_damaged_model(name: str, plain: Path, adapter: Path, tmp_path: Path) -> None:
    damage, reason = DAMAGE[name]
    damage(shutil.copytree(plain, tmp_path / "base"))
    words = ["merge", "--adapter", f"{adapter}", "--output_dir", f"{tmp_path}/merged"]
    assert reason in refusal(main, *words, "--model_name_or_path", f"{tmp_path}/base")
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_not_evaluated(plain: Path, tmp_path: Path) -> None:
    DAMAGE["NaN"][0](shutil.copytree(plain, tmp_path / "model"))
    (tmp_path / "data.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8]}))
    words = f"evaluate --model_name_or_path {tmp_path}/model --data_path {tmp_path}/data.jsonl --model_max_length 8"
    done = forked.run(f"-m lightseq {words} --output_dir {tmp_path}/out --data_cache {tmp_path}/cache", tmp_path)
    assert done.returncode == 2 and "holds NaN; copy or download the weights again" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "asked",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=str,
)
def test_an_adapter_of_peft_is_generated_with(
    asked: dict, plain: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    made = get_peft_model(LlamaForCausalLM.from_pretrained(plain), LoraConfig(r=2, init_lora_weights=False, **asked))
    made.save_pretrained(tmp_path)
    warnings.simplefilter("always")  # until `recwarn` ends
    recwarn.clear()
    found = shown(main, *generated(tmp_path))
    assert not [str(warning.message) for warning in recwarn if issubclass(warning.category, FutureWarning)]
    (ids,) = made.generate(torch.tensor([[2, *encoded("hi")]]), max_new_tokens=4, do_sample=False).tolist()
    assert found == byte_level().decode(ids) + "\n"


RESULTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")


@pytest.mark.parametrize(
    "asked",
    [
        {"eos_token_id": -1},
        dict.fromkeys(RESULTS, True),
        {"num_return_sequences": 3, "do_sample": True},
        {"stop_strings": ["no such text"]},
    ],
    ids=str,
)
def test_valid_settings_for_generation_leave_the_text_as_it_is(asked: dict[str, Any], tmp_path: Path) -> None:
    folder = save(llama(), tmp_path, CHATML)
    expected = shown(main, *generated(folder))
    settings("generation_config.json", **asked)(folder)
    assert shown(main, *generated(folder)) == expected


def test_a_class_that_cannot_generate_is_named_with_the_reason(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("no attribute 'image_outputs'")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    reason = "cannot generate with LlamaForCausalLM (AttributeError: no attribute 'image_outputs'); give another model"
    assert reason in refusal(main, *generated(plain))


def test_an_unpaired_surrogate_in_a_prompt_is_one_line(plain: Path) -> None:
    assert "--prompt: character 1 is \\udcff, an unpaired surrogate" in refusal(
        main, *generated(plain, prompt="a\udcff")
    )


@pytest.mark.parametrize(
    ("kind", "part", "change", "reason"),
    [
        ("qwen3_next", "A_log", None, "missing tensors"),
        ("qwen3_moe", "experts.1.down_proj", None, ""),
        ("qwen3_moe", "experts.1.down_proj", lambda x: x[:, :-1], ""),
    ],
)
def test_a_model_without_a_part_or_with_another_shape_of_it_is_one_line(
    kind: str, part: str, change: Any, reason: str, tmp_path: Path
) -> None:
    config = tiny_config(kind)
    config.vocab_size = 300
    folder = save(model_class(config)._from_config(config), tmp_path)
    assert shown(main, *generated(folder))

    def alter(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in sorted(tensors) if part in name)
        whole = tensors.pop(name)
        if change is not None:
            tensors[name] = change(whole).contiguous()

    rewritten(alter)(folder)
    assert reason in refusal(main, *generated(folder))


def test_a_loaded_model_equals_the_one_of_transformers(tmp_path: Path) -> None:
    config = tiny_config("qwen3_next")
    for dtype in (torch.float32, torch.bfloat16):
        made = model_class(config)._from_config(config, dtype=dtype)
        made.save_pretrained(tmp_path)
        (loaded, plain) = load_pretrained(tmp_path, CPU), type(made).from_pretrained(tmp_path, dtype="auto")
        kinds = {name: x.dtype for name, x in plain.named_parameters()}
        assert kinds == {name: x.dtype for name, x in loaded.named_parameters()}
        ids = torch.arange(12)[None]
        assert torch.equal(loaded(ids).logits, plain(ids).logits)


def test_weights_in_bfloat16_are_read_as_float16_where_a_gpu_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(llama().bfloat16(), tmp_path)
    said = {}
    for capability in ((0, 0), (7, 5), (8, 0)):
        monkeypatch.setattr("lightseq.kernels.attention.base.compute_capability", lambda device, c=capability: c)
        assert main(generated(tmp_path)) == 0
        said[capability] = "bfloat16 weights are read as float16" in capsys.readouterr().err
    assert said == {(0, 0): False, (7, 5): True, (8, 0): False}


def test_no_other_weights_are_cast_to_float16(plain: Path) -> None:
    model = load_pretrained(plain, CPU)
    assert not to_float16(model) and model.dtype is torch.float32
    model = model.bfloat16()
    assert to_float16(model) and all(x.dtype != torch.bfloat16 for x in (*model.parameters(), *model.buffers()))
