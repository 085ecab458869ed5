"""Recipes: found by name, planned for the hardware that they name, and trained at tiny scale."""

import copy
import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_level import VOCABULARY, byte_level
from cases import slow_except
from pages import ROOT
from programs import program
from test_mxfp4 import CONFIG as MXFP4
from test_mxfp4 import write_published
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from worlds import spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq.architecture.family import resolve
from lightseq.cli import BOTH, main
from lightseq.config.command_line import parse
from lightseq.config.recipes import recipe_files
from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import has_towers, text_config
from lightseq.tools.plan.command import split_flags
from lightseq.tools.recipes import PLANS, recipes

peft = pytest.importorskip("peft")
NAMES = sorted(recipe_files())
QUICK = ["qwen3-4b-agent-128k", "qwen3-8b-lora-128k"]  # all weights, and adapters
DATA = ("--data_path", "data")


def flags_of(name: str) -> TrainConfig:
    return parse(["--config", name, *DATA], "test")


# ---- files and the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_does_and_leaves_the_data_to_the_user(name: str) -> None:
    lines = recipe_files()[name].read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert lines[0].startswith("# ") and len(comments) >= 4
    assert any(f"lightseq train --config {name} --data_path " in line for line in comments)
    assert all(len(line) <= 120 for line in lines)
    assert flags_of(name).output_dir == f"outputs/{name}"
    with pytest.raises(ValueError, match="--data_path is missing"):
        parse(["--config", name], "test")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_models_are_planned_without_a_hub(name: str) -> None:
    own, training = split_flags(["--config", name])
    planned = parse(training, "test", ())
    assert own.gpus >= 1 and planned.model_name in BOTH.aliases
    assert planned.teacher is None or planned.teacher in BOTH.aliases


def test_a_second_stage_starts_from_the_last_checkpoint_of_the_first() -> None:
    first, second = flags_of("llama3-8b-extend-64k"), flags_of("llama3-8b-extend-512k")
    assert second.model_name_or_path == f"{first.output_dir}/checkpoint-{first.max_steps}"


def test_the_command_line_wins_over_a_recipe_and_a_file_over_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flags_of("qwen3-8b-lora-128k").lora_rank == 32
    assert parse(["--config=qwen3-8b-lora-128k", "--lora_rank", "4", *DATA], "test").lora_rank == 4
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b-lora-128k").write_text("{model_name_or_path: mine, output_dir: o, lora_rank: 2}")
    assert flags_of("qwen3-8b-lora-128k").lora_rank == 2


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^--config: there is no such file, and qwen3-8b-lora is no recipe; did you"):
        flags_of("qwen3-8b-lora")
    with pytest.raises(ValueError, match=r"^runs/mine cannot be read \(No such file"):
        flags_of("runs/mine")
    assert main(["recipes", "zzz"]) == 2
    assert capsys.readouterr().err == "error: zzz is no recipe; lightseq recipes lists them\n"


def test_recipes_are_listed_and_printed_to_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in NAMES) and max(map(len, listed.splitlines())) <= 90
    assert "4 x h100-80gb      128K" in listed and "Agent traces with tools, all weights: Qwen/Qwen3-4B" in listed
    assert main(["recipes", QUICK[0]]) == 0
    copied = tmp_path / "mine.yaml"
    copied.write_text(capsys.readouterr().out)
    assert parse(["--config", str(copied), *DATA], "test") == flags_of(QUICK[0])


def test_only_a_plan_reads_the_group_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model_name_or_path: mine\nplan: {gpus: 2, model_name_or_path: tiny-llama3}\n")
    own, training = split_flags(["--config", str(file)])
    assert own.gpus == 2 and parse(training, "test", ()).model_name == "tiny-llama3"
    own, training = split_flags(["--config", str(file), "--gpus", "4", "--model_name_or_path", "tiny-llama2"])
    assert own.gpus == 4 and parse(training, "test", ()).model_name == "tiny-llama2"
    assert parse(["--config", str(file)], "test", ()).model_name == "mine"
    file.write_text("plan: 2\n")
    with pytest.raises(ValueError, match=r"mine.yaml: plan: give `flag: value` lines below it"):
        split_flags(["--config", str(file)])


# ---- plans -----------------------------------------------------------------------------------------------------------

MAKER = "docs/make_recipes.py"


@pytest.mark.parametrize("name", slow_except(["qwen3-8b-qlora-24gb"], NAMES))
def test_a_recipe_fits_its_hardware_with_the_listed_memory_and_speed(name: str) -> None:
    found = runpy.run_path(str(ROOT / MAKER))["figures"](name)  # raises if it does not fit
    assert json.loads(PLANS.read_text())[name] == pytest.approx(found, rel=0.02), f"run python3 {MAKER} {name}"


def test_the_page_lists_every_recipe_and_shape() -> None:
    page = ROOT / "docs" / "recipes.md"
    assert sorted(json.loads(PLANS.read_text())) == NAMES == [recipe.name for recipe in recipes()]
    assert runpy.run_path(str(ROOT / MAKER))["page"](page.read_text()) == page.read_text(), f"run python3 {MAKER}"


# ---- training --------------------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "search", "arguments": {"text": "ghost"}}}
TOOL = {"type": "function", "function": {"name": "search", "description": "Finds text.", "parameters": {}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Who is there?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "line 1"},
    {"role": "assistant", "content": "Nay, answer me."},
]
SENTENCE = "It was a dark and stormy night; the rain fell in torrents. "


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Yields rows of the kind that a recipe expects."""
    for number in range(8):
        if flags_of(name).objective == "dpo":
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("Blue.", number * "Green. "))
            yield {"prompt": CHAT[:1], "chosen": chosen, "rejected": rejected}
        elif "extend" in name or "pretrain" in name:
            yield {"text": (number + 1) * SENTENCE}
        else:
            yield {"messages": (1 + number % 2) * CHAT, "tools": [TOOL]}


def tiny(model: str, **sizes: int) -> PreTrainedConfig:
    """Returns a small config of the class that a hub id has, with room for the bytes of the tokenizer."""
    config = tiny_config(resolve(BOTH, model, random_init=True).config.model_type, **sizes)
    text_config(config).vocab_size = VOCABULARY
    placeholders = {name for name in vars(config) if name.endswith(("token_id", "token_index"))}
    for place, name in enumerate(sorted(placeholders - {"bos_token_id", "eos_token_id", "pad_token_id"})):
        setattr(config, name, VOCABULARY - 1 - place)
    return config


BLOCKS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # four bits come in blocks of 64


def make_model(model: str, folder: Path, **sizes: int) -> None:
    """Writes a random checkpoint of a model's class. gpt-oss's is in MXFP4, with `plain` beside it."""
    config = tiny(model, **sizes)
    if config.model_type == "gpt_oss":
        mxfp4 = copy.deepcopy(MXFP4)
        mxfp4.vocab_size = VOCABULARY
        write_published(folder.parent, mxfp4)
        shutil.move(folder.parent / "packed", folder)
    else:
        plain_model(config).save_pretrained(folder)
    byte_level().backend.save_pretrained(folder)


def reloaded(checkpoint: Path, base: Path, config: PreTrainedConfig, has_adapters: bool) -> Any:
    """Loads a checkpoint in plain transformers, and an adapter through peft."""
    kind = AutoModelForImageTextToText if has_towers(config) else AutoModelForCausalLM
    model = kind.from_pretrained(base if has_adapters else checkpoint)
    return peft.PeftModel.from_pretrained(model, checkpoint) if has_adapters else model


@pytest.mark.parametrize("name", slow_except(QUICK, NAMES))
def test_a_recipe_trains_three_steps_and_loads_in_plain_transformers(name: str, tmp_path: Path) -> None:
    own, training = split_flags(["--config", name])
    config, hub_id = flags_of(name), parse(training, "test", ()).model_name
    base, out = tmp_path / "model", tmp_path / "out"
    make_model(hub_id, base, **(BLOCKS if config.load_in_4bit else {}))
    words = f"--config {name} --model_name_or_path {base} --data_path {tmp_path}/rows.jsonl --output_dir {out} "
    words += f"--data_cache {tmp_path}/cache --model_max_length 384 --max_steps 3 --save_strategy steps --save_steps 3"
    if config.sequence_parallel_size:
        words += f" --sequence_parallel_size {min(2, config.sequence_parallel_size)}"
    if config.teacher is not None:
        make_model(config.teacher, tmp_path / "teacher")
        words += f" --teacher {tmp_path}/teacher"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    ranks = min(2, own.gpus)
    end = spawn(ranks, program, "any", words)[0]
    assert end.status == 0 and "step 3/3" in end.out, end.err
    if (plain := tmp_path / "plain").is_dir():
        base = plain  # transformers needs a GPU for MXFP4
    model = reloaded(out / "checkpoint-3", base, tiny(hub_id), config.lora_rank is not None)
    with torch.no_grad():
        assert model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.isfinite().all()
    if config.lora_rank is not None:
        assert any(weight.any() for weight_name, weight in model.named_parameters() if "lora_B" in weight_name)
