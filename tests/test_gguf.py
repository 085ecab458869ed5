"""`lightseq gguf`: starts llama.cpp's converter on a model, or says what to type. A stand-in has its flags."""

import sys
from pathlib import Path

import pytest
from programs import refusal

from lightseq.cli import main as lightseq
from lightseq.tools.gguf import ADAPTER, CONVERTER

STAND_IN = """import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile", type=pathlib.Path)
parser.add_argument("--no-mtp", action="store_true")
parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto"])
args = parser.parse_args()
args.outfile.write_text(f"{args.model} {args.outtype}")
if "unknown" in args.model:
    sys.exit("INFO: reading\\nERROR:hf-to-gguf:Model StrangeForCausalLM is not supported")
assert args.no_mtp or "qwen" not in args.model
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / CONVERTER).write_text(STAND_IN)
    return folder


def model(folder: Path, name: str, file: str = "config.json") -> Path:
    (folder / name).mkdir()
    (folder / name / file).write_text("{}")
    return folder / name


def test_a_model_is_converted_to_the_type_that_was_asked_for(llama_cpp: Path, tmp_path: Path) -> None:
    checkpoint, output = model(tmp_path, "checkpoint-3"), tmp_path / "model.gguf"
    words = [str(checkpoint), "--output", str(output), "--type", "q8_0", "--llama_cpp", str(llama_cpp)]
    assert lightseq(["gguf", *words]) == 0
    assert output.read_text() == f"{checkpoint} q8_0"
    qwen = [str(model(tmp_path, "qwen")), "--output", str(tmp_path / "qwen.gguf"), "--converter_flags=--no-mtp"]
    assert lightseq(["gguf", *qwen, "--llama_cpp", str(llama_cpp)]) == 0
    assert not [*tmp_path.glob("*.partial")]


def test_a_converter_on_the_path_is_found(llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = llama_cpp / CONVERTER
    converter.write_text(f"#!{sys.executable}\n{STAND_IN}")
    converter.chmod(0o755)
    monkeypatch.setenv("PATH", str(llama_cpp), prepend=":")
    checkpoint, output = model(tmp_path, "checkpoint-3"), tmp_path / "model.gguf"
    assert lightseq(["gguf", str(checkpoint), "--output", str(output)]) == 0
    assert output.read_text() == f"{checkpoint} auto"


def test_what_cannot_be_converted_is_one_line_and_leaves_no_file(
    llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plain, output = model(tmp_path, "checkpoint-3"), tmp_path / "model.gguf"
    (tmp_path / "taken.gguf").write_text("mine")
    cpp = ["--llama_cpp", str(llama_cpp)]
    said = {
        "lightseq merge --adapter": [str(model(tmp_path, "adapter", ADAPTER)), *cpp],
        "without config.json": [str(model(tmp_path, "run", "run.json")), *cpp],
        "is not a directory": [str(tmp_path / "missing"), *cpp],
        "Model StrangeForCausalLM is not supported": [str(model(tmp_path, "unknown")), *cpp],
        "failed: AssertionError (File ": [str(model(tmp_path, "qwen")), *cpp],
        f"{CONVERTER} is not on the PATH; type: git clone": [str(plain)],
        f"has no {CONVERTER}": [str(plain), "--llama_cpp", str(plain)],
        "taken.gguf exists": [str(plain), "--output", str(tmp_path / "taken.gguf"), *cpp],
        "nowhere is not a directory": [str(plain), "--output", str(tmp_path / "nowhere" / "x.gguf"), *cpp],
    }
    for reason, words in said.items():
        printed = refusal(lightseq, "gguf", "--output", output, *words)
        assert reason in printed and printed.startswith("error: ")
    assert not output.exists() and not [*tmp_path.glob("*.partial")]
    assert (tmp_path / "taken.gguf").read_text() == "mine"
