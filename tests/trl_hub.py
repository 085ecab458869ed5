"""Stand-ins for the hub's models and data sets that TRL's tests name.

python tests/trl_hub.py FOLDER

The folder gets the layout of the hub. In it as the working directory, `from_pretrained` and `load_dataset` find models
and data sets under their names on the hub. Models have the hub's architectures, random weights, and a tokenizer trained
here. Data sets have the columns and numbers of rows of those on the hub; their text is the Zen of Python.
"""

import argparse
import codecs
import contextlib
import json
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from tiny_processors import model_of, processor_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

with contextlib.redirect_stdout(None):
    import this

ZEN = [line for line in codecs.decode(this.s, "rot13").splitlines()[1:] if line]
TEST_ROWS = 2
ORGANIZATION = "trl-internal-testing"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Name on the hub: model type, options of its config beside SIZES, chat template among TRL's.
MODELS: Mapping[str, tuple[str, dict[str, Any], str | None]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {}, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("qwen3", {}, "qwen3"),
    "small-Qwen3ForCausalLM": ("qwen3", {"hidden_size": 32, "num_hidden_layers": 3}, "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", {**MIXTURE, "num_experts": 4}, "qwen3"),
    "tiny-GptOssForCausalLM": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}, "gptoss"),
    "tiny-Glm4MoeForCausalLM": ("glm4_moe", {**MIXTURE, "n_routed_experts": 4, "head_dim": 4}, "glm4moe"),
    "tiny-Cohere2ForCausalLM": ("cohere2", {}, "cohere2"),
    "tiny-Gemma2ForCausalLM": ("gemma2", {"head_dim": 4}, None),
    "tiny-Olmo3ForCausalLM": ("olmo3", {}, "qwen3"),
    "tiny-Lfm2ForCausalLM": ("lfm2", {"full_attn_idxs": [1], "block_multiple_of": 8}, "lfm2"),
    "tiny-Lfm2ForCausalLM-2.5": ("lfm2", {"full_attn_idxs": [1], "block_multiple_of": 8}, "lfm2_2_5"),
    "tiny-NemotronHForCausalLM-nano": (
        "nemotron_h",
        {
            **MIXTURE,
            "layers_block_type": ["mamba", "attention", "moe"],
            "num_hidden_layers": 3,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "ssm_state_size": 16,
        },
        "nemotron_3_nano",
    ),
    "tiny-GPTNeoXForCausalLM": ("gpt_neox", {}, None),
    "tiny-LlamaForCausalLM-3.2": ("llama", {}, "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("mistral", {}, None),
}
CLASSIFIERS: Mapping[str, tuple[str, str]] = {  # model type, chat template; each gives a token one score
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", "llama3_2"),
}
VISION_MODELS: Mapping[str, str] = {  # kind of model among those of tiny_processors.py
    "tiny-Gemma3ForConditionalGeneration": "gemma3",
    "tiny-Gemma4ForConditionalGeneration": "gemma4",
    "tiny-LlavaForConditionalGeneration": "llava",
    "tiny-LlavaNextForConditionalGeneration": "llava_next",
    "tiny-Qwen2VLForConditionalGeneration": "qwen2_vl",
    "tiny-Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "tiny-Qwen3VLForConditionalGeneration": "qwen3_vl",
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": "qwen3_5",
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": "qwen3_5_moe",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>")
REMOTE_CODE = """from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteModel(LlamaModel):
    config_class = RemoteConfig


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig


class RemoteForSequenceClassification(LlamaForSequenceClassification):
    config_class = RemoteConfig
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    generate(parser.parse_args().folder)


def generate(folder: Path) -> None:
    for name, configs in data_sets().items():
        write_data_set(folder / ORGANIZATION / name, configs)
    for name, configs in image_data_sets().items():
        write_data_set(folder / ORGANIZATION / name, configs, "image" if name == "zen-image" else "images")
    tokenizer = train_tokenizer([*ZEN, json.dumps(TOOL), *(chat_template(t) for _, _, t in MODELS.values() if t)])
    for name, (model_type, options, template) in MODELS.items():
        write_model(folder / ORGANIZATION / name, tokenizer, model_type, options, template)
    for name, (model_type, template) in CLASSIFIERS.items():
        write_model(folder / ORGANIZATION / name, tokenizer, model_type, {"num_labels": 1}, template)
    for name, kind in VISION_MODELS.items():
        write_vision_model(folder / ORGANIZATION / name, tokenizer, kind)
    write_remote_model(folder / ORGANIZATION / "tiny-RemoteForCausalLM", tokenizer)
    save_tokenizer(folder / "Qwen" / "Qwen3-4B", tokenizer, "qwen3")  # a test takes only its chat template


# ---- data sets -------------------------------------------------------------------------------------------------------


def data_sets() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns the rows of each config of each data set."""
    prompts, answers = zip(*(_halves(line) for line in ZEN), strict=True)
    wrong = answers[1:] + answers[:1]
    user = [[{"role": "user", "content": text}] for text in prompts]
    good = [[{"role": "assistant", "content": text}] for text in answers]
    bad = [[{"role": "assistant", "content": text}] for text in wrong]
    zen = {
        "standard_language_modeling": _rows(text=ZEN),
        "standard_prompt_only": _rows(prompt=prompts),
        "standard_prompt_completion": _rows(prompt=prompts, completion=answers),
        "standard_preference": _rows(prompt=prompts, chosen=answers, rejected=wrong),
        "standard_implicit_prompt_preference": _rows(
            chosen=[a + b for a, b in zip(prompts, answers, strict=True)],
            rejected=[a + b for a, b in zip(prompts, wrong, strict=True)],
        ),
        "standard_unpaired_preference": _rows(
            prompt=prompts, completion=answers, label=[index % 2 == 0 for index in range(len(ZEN))]
        ),
        "conversational_language_modeling": _rows(messages=_joined(user, good)),
        "conversational_prompt_only": _rows(prompt=user),
        "conversational_prompt_completion": _rows(prompt=user, completion=good),
        "conversational_preference": _rows(prompt=user, chosen=good, rejected=bad),
        "conversational_implicit_prompt_preference": _rows(chosen=_joined(user, good), rejected=_joined(user, bad)),
    }
    thoughtful = [[{**m[0], "thinking": text}] for m, text in zip(good, prompts, strict=True)]
    thoughtful_bad = [[{**m[0], "thinking": text}] for m, text in zip(bad, prompts, strict=True)]
    options = [{"reasoning_effort": "low", "model_identity": "You are a tiny model."}] * len(ZEN)
    harmony = {
        "language_modeling": _rows(messages=_joined(user, thoughtful), chat_template_kwargs=options),
        "prompt_completion": _rows(prompt=user, completion=thoughtful, chat_template_kwargs=options),
        "preference": _rows(prompt=user, chosen=thoughtful, rejected=thoughtful_bad, chat_template_kwargs=options),
    }
    calls = [_tool_call(text) for text in prompts]
    tools = [json.dumps([TOOL])] * len(ZEN)
    toolcall = {
        "language_modeling": _rows(messages=_joined(user, calls, good), tools=tools),
        "preference": _rows(prompt=_joined(user, calls), chosen=good, rejected=bad, tools=tools),
    }
    return {"zen": zen, "harmony": harmony, "toolcall": toolcall}


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up how a line of the Zen of Python ends.",
        "parameters": {"type": "object", "properties": {"line": {"type": "string"}}, "required": ["line"]},
    },
}


def _tool_call(text: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"line": text}}}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "look_up", "content": "found"},
    ]


def _halves(line: str) -> tuple[str, str]:
    words = line.split()
    middle = len(words) // 2
    return " ".join(words[:middle]), " " + " ".join(words[middle:])


def _joined(*parts: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [list(chain(*messages)) for messages in zip(*parts, strict=True)]


def _rows(**columns: Any) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def image_data_sets() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns the same for data sets of images with text: one in each row, or up to three beside the text."""
    prompts, answers = zip(*(_halves(line) for line in ZEN), strict=True)
    answer, wrong = ([_message("assistant", text) for text in texts] for texts in (answers, answers[1:] + answers[:1]))
    generator = np.random.default_rng(0)

    def pictures(count: int) -> list[np.ndarray]:
        sides = generator.integers(32, 64, (count, 2))
        return [generator.integers(0, 256, (*side, 3), dtype=np.uint8) for side in sides]

    plain = [_message("user", text) for text in prompts]
    one = {"image": [pictures(1)[0] for _ in ZEN]}
    counts = [1 + row % 3 if row % 6 != 4 else 0 for row in range(len(ZEN))]
    mixed = [
        _message("user", [*[{"type": "image"}] * count, {"type": "text", "text": text}])
        for text, count in zip(prompts, counts, strict=True)
    ]
    several = {"images": [pictures(count) for count in counts]}
    in_parts = [_message("assistant", [{"type": "text", "text": text}]) for text in answers]
    wrong_parts = in_parts[1:] + in_parts[:1]
    return {
        "zen-image": _vision_configs(plain, answer, wrong, one),
        "zen-multi-image": _vision_configs(mixed, in_parts, wrong_parts, several),
    }


def _vision_configs(prompts: Any, answers: Any, wrong: Any, images: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {
        "conversational_language_modeling": _rows(messages=_joined(prompts, answers), **images),
        "conversational_prompt_only": _rows(prompt=prompts, **images),
        "conversational_prompt_completion": _rows(prompt=prompts, completion=answers, **images),
        "conversational_preference": _rows(prompt=prompts, chosen=answers, rejected=wrong, **images),
    }


def _message(role: str, content: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def write_data_set(folder: Path, configs: Mapping[str, list[dict[str, Any]]], images: str | None = None) -> None:
    """Writes configs of a data set; `images` is the column of images."""
    described = []
    for config, rows in configs.items():
        (folder / config).mkdir(parents=True)
        features = None if images is None else _features(rows[0], images)
        for split, part in (("train", rows[:-TEST_ROWS]), ("test", rows[-TEST_ROWS:])):
            Dataset.from_list(part, features).to_parquet(folder / config / f"{split}.parquet")
        described.append({"config_name": config, "data_dir": config})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(described)}\n---\n")  # JSON is YAML


def _features(row: Mapping[str, Any], images: str) -> Features:
    part = {"type": Value("string"), "text": Value("string")}
    content = {
        name: Value("string") if isinstance(row[name][0]["content"], str) else List(part)
        for name in row
        if name != images
    }
    messages = {name: List({"role": Value("string"), "content": kind}) for name, kind in content.items()}
    return Features({**messages, images: Image() if images == "image" else List(Image())})


# ---- models ----------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def chat_template(name: str) -> str:
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def save_tokenizer(folder: Path, tokenizer: Tokenizer, template: str | None) -> None:
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if template is not None:
        whole.chat_template = chat_template(template)
    whole.save_pretrained(folder)


def write_model(
    folder: Path, tokenizer: Tokenizer, model_type: str, options: Mapping[str, Any], template: str | None
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SIZES, **options}, **vocabulary(tokenizer))
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if "num_labels" in options else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    save_tokenizer(folder, tokenizer, template)


def write_vision_model(folder: Path, tokenizer: Tokenizer, kind: str) -> None:
    """Writes a model that takes images, and its processor."""
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    processor = processor_of(kind, whole)
    model_of(kind, processor).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_remote_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a model whose classes are code in its folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, **vocabulary(tokenizer))).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModel": "modeling_remote.RemoteModel",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
            "AutoModelForSequenceClassification": "modeling_remote.RemoteForSequenceClassification",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_remote.py").write_text(REMOTE_CODE)
    save_tokenizer(folder, tokenizer, "llama3_2")


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


if __name__ == "__main__":
    main()
