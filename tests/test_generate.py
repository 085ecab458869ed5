"""Continuations of prompts, and the tokenizer of bytes in the files of a checkpoint."""

import re
from pathlib import Path

import pytest
import torch
from programs import alone, refusal, shown
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightseq.architecture.family import resolve
from lightseq.cli import BOTH, main
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.data.tokenizer import ByteTokenizer
from lightseq.models import hub

TEXTS = ("def f(x):\n    return x\t# naïve 你好 😀", "\x00\x7f <|im_end|> ¡\u00ad¿", "")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(path)
    ByteTokenizer().as_transformers().save_pretrained(path)
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_of_bytes_is_one_of_hugging_face_too(checkpoint: Path, text: str) -> None:
    plain, saved = ByteTokenizer(), AutoTokenizer.from_pretrained(checkpoint)
    assert saved(text)["input_ids"] == plain.encode_part(text).tolist()
    assert saved.decode([*plain.encode_part(text), 256], skip_special_tokens=True) == text
    assert saved.eos_token_id == plain.end_of_document and len(saved) == plain.vocab_size


def test_a_model_without_a_tokenizer_gets_the_one_of_its_data(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("one two " * 20)
    made = ["data", "text", str(tmp_path / "text.txt"), "--tokenizer", "byte", "--output", str(tmp_path / "data")]
    assert main(made) == 0
    flags = f"--model_name_or_path {tmp_path}/model --data_path {tmp_path}/data --output_dir {tmp_path}/run"
    end = alone(f"{flags} --model_max_length 32 --max_steps 1")
    assert end.status == 0, end.err
    saved = load_tokenizer(str(tmp_path / "run" / "checkpoint-1"))
    assert isinstance(saved, ByteTokenizer) and saved.fingerprint == ByteTokenizer().fingerprint


def test_prompts_are_continued_as_by_transformers(checkpoint: Path) -> None:
    words = ["--prompt", "one", "--prompt", "two", "--max_new_tokens", "8", "--temperature", "0"]
    found = shown(main, "generate", checkpoint, *words)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    expected = ""
    for prompt in ("one", "two"):
        ids = model.generate(
            **tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
            max_new_tokens=8, do_sample=False, eos_token_id=[2, 256], pad_token_id=256,
        )  # fmt: skip
        expected += tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"
    assert found == expected


def test_sampling_repeats_with_a_seed(checkpoint: Path) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        texts.append(shown(main, "generate", checkpoint, "--prompt", "a", "--max_new_tokens", "16", "--seed", seed))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere", "--prompt", "a"], "nowhere is not a directory, and cannot be fetched from the hub (OSError: no"),
        (["no/such/checkpoint", "--prompt", "a"], "no/such/checkpoint does not exist; give a directory, or a Hub id"),
        (["{}", "--prompt", ""], "--prompt is empty; give at least one word"),
        (["{}", "--prompt", "a", "--max_new_tokens", "0"], "--max_new_tokens 0: give at least 1"),
        (["{}", "--prompt", "a", "--temperature", "-1"], "--temperature -1.0: give a finite number of at least 0"),
        (["{}", "--prompt", "a", "--top_p", "2"], "--top_p 2.0: give a share above 0, at most 1"),
    ],
)
def test_invalid_input_is_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: str
) -> None:
    def without_network(_url: str, timeout: float) -> None:
        raise OSError(f"no network within {timeout:.0f} s")

    monkeypatch.setattr(hub, "get_hf_file_metadata", without_network)
    assert refusal(main, "generate", *(word.format(checkpoint) for word in words)).startswith(f"error: {error}")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path)
    said = refusal(main, "generate", tmp_path, "--prompt", "a")
    assert said == f"error: {tmp_path} has no tokenizer; add one with its save_pretrained\n"


def test_the_output_of_a_run_is_refused_with_its_newest_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-12", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    remedy = f"{tmp_path} is a directory without config.json; give a checkpoint, such as {tmp_path}/checkpoint-12"
    assert refusal(main, "generate", tmp_path, "--prompt", "a") == f"error: {remedy}\n"
    with pytest.raises(ValueError, match=re.escape(f"--model_name_or_path {remedy}")):
        resolve(BOTH, str(tmp_path), random_init=False)
