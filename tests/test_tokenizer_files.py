"""Checkpoints get every file of a tokenizer, and no weights or states beside it."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from lightseq.data.load_tokenizer import has_tokenizer
from lightseq.models import hub
from lightseq.models.tokenizer_files import copy_tokenizer, remove_chat_templates

SETTINGS = ["added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"]
TEMPLATES = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.jinja"]
OTHERS = [  # that are not the tokenizer's
    *(
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "trainer_state.json",
    ),
    *("pytorch_model.bin", "optimizer.pt", "rng_state_0.pth", "training_args.bin", "README.md", "state/tokenizer.json"),
    *("original/tokenizer.model", "trainer_state.json"),
]
VOCABULARIES = {  # by the name of the class, or by the type of the model
    "GPT2Tokenizer": ["merges.txt", "vocab.json"],
    "BertTokenizerFast": ["tokenizer.json", "vocab.txt"],
    "T5Tokenizer": ["spiece.model"],
    "XLMRobertaTokenizer": ["sentencepiece.bpe.model"],
    "LlamaTokenizer": ["tokenizer.model"],
    "ProphetNetTokenizer": ["prophetnet.tokenizer"],
    "PhobertTokenizer": ["bpe.codes", "vocab.txt"],
    "gpt_neox_japanese": ["emoji.json", "vocab.txt"],
    "NoSuchTokenizer": ["tokenizer.json"],
}


def make(folder: Path, name: str) -> list[str]:
    """Writes a model's files with the tokenizer of a class or a type. Returns those of the tokenizer."""
    files = sorted([*SETTINGS, *TEMPLATES, *VOCABULARIES[name]])
    for file in (*files, *OTHERS):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    of_class = name.endswith(("Tokenizer", "Fast"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} if of_class else {}))
    (folder / "config.json").write_text(json.dumps({} if of_class else {"model_type": name}))
    return files


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_copy_has_the_files_that_the_class_names_and_no_others(name: str, tmp_path: Path) -> None:
    files = make(tmp_path / "from", name)
    (tmp_path / "to").mkdir()
    copy_tokenizer(tmp_path / "from", tmp_path / "to")
    assert files_in(tmp_path / "to") == files
    assert has_tokenizer(str(tmp_path / "from")) and has_tokenizer(str(tmp_path / "to"))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "ProphetNetTokenizer", "gpt_neox_japanese"])
def test_the_hub_gives_the_same_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, fetched = make(tmp_path, name), set[str]()

    def fetch(_: str, allow_patterns: list[str], ignore_patterns: list[str] | None) -> str:
        held = files_in(tmp_path)
        fetched.update(filter_repo_objects(held, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    hub.download_tokenizer("some/model")
    assert fetched == {*files, "config.json"}
    hub.download("some/model")
    assert fetched >= {*files, "config.json", "model.safetensors", "generation_config.json"}
    assert not any(name.startswith(("original/", "state/", "pytorch")) for name in fetched)


def test_another_chat_template_leaves_none_of_the_former_ones(tmp_path: Path) -> None:
    make(tmp_path, "GPT2Tokenizer")
    (tmp_path / "chat_template.json").write_text("{}")
    remove_chat_templates(tmp_path)
    assert not [name for name in files_in(tmp_path) if "chat_template" in name]


def test_a_setting_that_is_no_name_is_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "from", "GPT2Tokenizer")
    (tmp_path / "to").mkdir()
    for text in ('{"tokenizer_class": ["x"]}', "[]", "{", '{"tokenizer_class": "../x"}'):
        (tmp_path / "from" / "tokenizer_config.json").write_text(text)
        copy_tokenizer(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "vocab.json").is_file()
