"""Tokens that stand for images or audio, in the rows of a model that is trained on text."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq import hf
from lightseq.config.command_line import parse
from lightseq.data.packing import PackedExamples, open_packed
from lightseq.data.sources import ReadOptions
from lightseq.distributed.world import World
from lightseq.integrations.whole_batches import WholeBatches
from lightseq.models.decoder import placeholder_ids
from lightseq.models.presets import LLAMA3
from lightseq.training.find_model import find_model
from lightseq.training.run_data import find_examples

IMAGE = 62


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("gemma3", ["boi_token_index", "eoi_token_index", "image_token_index"]),
        ("gemma4", ["audio_token_id", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"]),
        ("mistral3", ["image_token_index"]),
        ("qwen3_vl", ["image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id"]),
        ("llama", []),
        ("gemma3_text", []),
    ],
)
def test_placeholders_are_read_from_the_config(model_type: str, names: list[str]) -> None:
    assert set(names) <= set(placeholder_ids(CONFIG_MAPPING[model_type]()).values())
    assert bool(names) == bool(placeholder_ids(CONFIG_MAPPING[model_type]()))


def rows(path: Path, *rows: list[int]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("packing", ["none", pytest.param("best_fit", marks=pytest.mark.slow)])
def test_a_row_with_an_image_is_refused_by_name(tmp_path: Path, packing: str) -> None:
    tiny_config("qwen3_vl", image_token_id=IMAGE).save_pretrained(tmp_path / "model")
    good, bad = rows(tmp_path / "good.jsonl", [3, 4, 5] * 9), rows(tmp_path / "bad.jsonl", [3, 4], [5, IMAGE, 6])
    flags = f"--model_name_or_path {tmp_path / 'model'} --random_init --output_dir o --model_max_length 16"
    flags += f" --data_cache {tmp_path / 'cache'} --packing {packing} --data_path"
    config, world = parse([*flags.split(), str(good)], ""), World(0, 1, 0, 1, torch.device("cpu"))
    model = find_model(config, LLAMA3, world)
    assert len(find_examples(str(good), model, config, world)) > 0
    refused = rf"bad.jsonl.*2 has token id {IMAGE}, the model's image_token_id, but only text is trained"
    with pytest.raises(ValueError, match=refused):
        find_examples(str(bad), model, config, world)


@pytest.mark.parametrize("suffix", ["jsonl", "pkl"])
def test_data_that_another_model_tokenized_is_checked(tmp_path: Path, suffix: str) -> None:
    path = rows(tmp_path / "rows.jsonl", [3, 4], [5, IMAGE, 6])
    if suffix == "pkl":
        path = tmp_path / "rows.pkl"
        path.write_bytes(pickle.dumps({"input_ids": [[3, 4], [5, IMAGE, 6]]}))
    open_packed(path, 16, 64, read_options=ReadOptions(cache=tmp_path))
    options = ReadOptions(cache=tmp_path, refused_ids={IMAGE: "image_token_id"})

    def read() -> PackedExamples:
        packed = open_packed(path, 16, 64, read_options=options)
        assert packed[0]
        return packed

    with pytest.raises(ValueError, match=r"(document|sequence) 1 has token id 62, the model's image_token_id"):
        read()


def test_trainers_refuse_a_batch_with_an_image(alone: None) -> None:
    model = plain_model(tiny_config("qwen3_vl", image_token_id=IMAGE))
    WholeBatches(model, hf.enable(model, length=8))
    text = torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert model(input_ids=text, labels=text).loss.isfinite()
    text[1, 2] = IMAGE
    with pytest.raises(ValueError, match="row 1 has token id 62, the model's image_token_id"):
        model(input_ids=text, labels=text)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_omni_thinker"])
def test_loops_refuse_a_batch_with_tokens_of_images_or_audio(model_type: str, alone: None) -> None:
    model = plain_model(tiny_config(model_type))
    context = hf.enable(model, length=8)
    text = torch.tensor([[3, 4, 5], [6, 7, 8]])
    hf.shard_batch(context, text, text)
    text[1, 2], name = next(iter(placeholder_ids(model.config).items()))
    with pytest.raises(ValueError, match=f"row 1 has token id {text[1, 2]}, the model's {name}"):
        hf.shard_batch(context, text, text)
    with pytest.raises(ValueError, match=f"the model's {name}.*trees of rows hold text only; use shard_batch for"):
        hf.shard_rows(context, text.tolist(), [[0.0, 1.0, 1.0]] * 2)


def test_random_weights_of_a_composite_say_what_checkpoints_lack(tmp_path: Path) -> None:
    world, lacking = World(0, 1, 0, 1, torch.device("cpu")), "checkpoints will lack the weights of the image"
    for model_type, more, told in (("gemma3", "", 1), ("gemma3", "--save_strategy no", 0), ("gemma3_text", "", 0)):
        tiny_config(model_type).save_pretrained(tmp_path / model_type)
        flags = f"--model_name_or_path {tmp_path / model_type} --random_init --data_path d --output_dir o {more}"
        warnings = find_model(parse([*flags.split(), "--model_max_length", "16"], ""), LLAMA3, world).warnings
        assert sum(lacking in line for line in warnings) == told
