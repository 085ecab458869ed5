"""A tokenizer whose files are damaged or hostile is refused in one line, at once."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightseq.data.load_tokenizer import check_tokenizer, readable_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<s>")
    made.save_pretrained(tmp_path)
    return tmp_path


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    edit(content)
    path.write_text(json.dumps(content))


def refusal(directory: Path) -> str:
    with pytest.raises(ValueError) as refused, readable_tokenizer(str(directory)):
        AutoTokenizer.from_pretrained(directory)
    line = str(refused.value)
    assert line.startswith(f"tokenizer {directory}: ") and "\n" not in line and len(line) < 1000
    return line


def test_a_good_tokenizer_is_read(directory: Path) -> None:
    with readable_tokenizer(str(directory)):
        assert len(AutoTokenizer.from_pretrained(directory)("a b")["input_ids"]) == 2
    change(directory / "tokenizer.json", lambda x: x["model"]["vocab"].update(a=100_000))
    check_tokenizer(directory)


@pytest.mark.parametrize("number", [2**31, 2**33, 10**40, -1, 1.5, "1", None, [], True], ids=str)
def test_an_id_that_is_none_or_far_too_large_is_named(directory: Path, number: Any) -> None:
    good = (directory / "tokenizer.json").read_text()
    change(directory / "tokenizer.json", lambda x: x["model"]["vocab"].update(a=number))
    assert f"'a' has the id {number!r}, not a whole number" in refusal(directory)
    (directory / "tokenizer.json").write_text(good)
    change(directory / "tokenizer.json", lambda x: x["added_tokens"].append({"id": number, "content": "x"}))
    assert "'added token " in refusal(directory)
    (directory / "tokenizer.json").write_text(good)
    change(directory / "added_tokens.json", lambda x: x.update(x=number))
    assert "'x' has the id " in refusal(directory)


FILES: dict[str, tuple[str, str]] = {  # content of tokenizer.json, and what the line says
    "not JSON": ("{", "is not JSON"),
    "nested": ("[" * 100_000, "nested too deeply"),
    "nested below a key": ('{"model": {"type": "BPE", "vocab": {}}, "x": ' + "[" * 300 + "]" * 300 + "}", ""),
    "a list": ("[]", "is not a JSON object"),
    "no model": ("{}", ""),
    "unknown type": ('{"model": {"type": "Tree", "vocab": {}}}', ""),
    "a type that is a list": ('{"model": {"type": [], "vocab": {}}}', ""),
    "no vocabulary": ('{"model": {"type": "BPE"}}', ""),
    "added tokens": ('{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [1]}', ""),
    "a merge of unknown tokens": ('{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}', ""),
}


@pytest.mark.parametrize("case", FILES)
def test_a_tokenizer_file_that_is_damaged_is_one_line(directory: Path, case: str) -> None:
    content, told = FILES[case]
    (directory / "tokenizer.json").write_text(content)
    assert told in refusal(directory)


def test_bytes_that_are_not_text_and_ids_that_are_not_numbers_are_one_line(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')
    assert "'added token x' has the id 'x'" in refusal(directory)
    (directory / "tokenizer_config.json").write_bytes(b"\xff")
    assert "tokenizer_config.json is not JSON" in refusal(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "chat_template.jinja"])
def test_a_pipe_or_a_device_is_no_part_of_a_tokenizer(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert "not a regular file" in refusal(directory)
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")
    assert "not a regular file" in refusal(directory)
