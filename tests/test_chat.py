"""`lightseq chat`: turns from the input, answers as by transformers on the whole chat."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from byte_level import CHATML, byte_level
from programs import refusal, shown
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightseq.cli import main

GREEDY = ["--temperature", "0", "--max_new_tokens", "12"]


def saved(folder: Path, template: str | None) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, bos_token_id=2, eos_token_id=1, max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level(template).backend.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("chat"), CHATML)


def expected_answers(folder: Path, system: str, chats: list[list[str]]) -> list[str]:
    """Returns the answers of transformers to each user's turn of each chat."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for chat in chats:
        turns = [{"role": "system", "content": system}]
        for text in chat:
            turns.append({"role": "user", "content": text})
            written = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            given = tokenizer(written, return_tensors="pt", add_special_tokens=False)
            ids = model.generate(given["input_ids"], do_sample=False, max_new_tokens=12, pad_token_id=0)
            answer = tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
            turns.append({"role": "assistant", "content": answer})
            found.append(answer)
    return found


def test_each_line_is_answered_with_the_chat_so_far_until_it_starts_over(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand then?\n/new\nhi\n/exit\nnever\n"))
    assert main(["chat", str(chat_model), "--system", "be brief", *GREEDY]) == 0
    shown = capsys.readouterr()
    expected = expected_answers(chat_model, "be brief", [["hello", "and then?"], ["hi"]])
    assert shown.out == "".join(f"{answer}\n" for answer in expected) and shown.err == ""


def test_a_chat_beyond_the_models_positions_is_noted(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 300))
    assert main(["chat", str(chat_model), *GREEDY]) == 0
    assert "tokens, and the model covers 256; /new starts over" in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, None)
    said = f"error: the tokenizer of {tmp_path} has no chat template; "
    for words, remedy in (
        (["chat", str(tmp_path)], "train with --chat_template, or use lightseq generate"),
        (["generate", str(tmp_path), "--prompt", "a", "--chat"], "leave --chat out"),
        (["generate", str(tmp_path), "--prompt", "a", "--system", "b"], "leave --system out"),
    ):
        assert refusal(main, *words) == f"{said}{remedy}\n"


def test_generate_takes_a_system_prompt(chat_model: Path) -> None:
    words = ["--chat", "--system", "be brief", "--prompt", "hello", *GREEDY]
    answer = expected_answers(chat_model, "be brief", [["hello"]])[0]
    assert shown(main, "generate", chat_model, *words) == f"{answer}\n"


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_on_a_terminal_and_not_the_chat(chat_model: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lightseq", "chat", str(chat_model), "--max_new_tokens", "1000000"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    shown = read_until(ours, "> ")
    assert "Ctrl-C stops an answer" in shown
    os.write(ours, b"hello\n")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    read_until(ours, "\n> ")
    os.write(ours, b"/exit\n")
    assert process.wait(20) == 0


def read_until(terminal: int, end: str) -> str:
    shown, until = "", time.monotonic() + 60
    while end not in shown:
        assert time.monotonic() < until, shown
        shown += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
    return shown
