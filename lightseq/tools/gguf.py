"""Converts a trained model into one GGUF file for llama.cpp, Ollama and LM Studio, by llama.cpp's own converter.

lightseq gguf outputs/chat/checkpoint-1000 --output chat.gguf --type q8_0 --llama_cpp ~/llama.cpp
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightseq.config.parser import Parser, run_command
from lightseq.models.presets import ModelFamily

CONVERTER: Final = "convert_hf_to_gguf.py"
REPOSITORY: Final = "https://github.com/ggml-org/llama.cpp"
TYPES: Final = ("auto", "f32", "f16", "bf16", "q8_0")  # smaller ones are made from these by `llama-quantize`
ADAPTER: Final = "adapter_config.json"


def parser() -> Parser:
    about = "Converts a model into one GGUF file by llama.cpp's converter. For 4 bits run llama-quantize on the file."
    out = Parser(prog="lightseq gguf", description=about)
    out.add_argument("checkpoint", type=Path, help="directory of a checkpoint or a merged model")
    out.add_argument("--output", type=Path, required=True, metavar="FILE", help="new file, such as model.gguf")
    out.add_argument("--type", choices=TYPES, default="auto", help="type of the weights (default: that of the model)")
    found = f"directory of llama.cpp, which has {CONVERTER} (default: the one on the PATH)"
    passed = "flags for the converter, such as --converter_flags=--no-mtp"
    out.add_argument("--converter_flags", default="", metavar="WORDS", help=passed)
    out.add_argument("--llama_cpp", type=Path, metavar="DIR", help=found)
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return run_command(lambda: _convert(parser().parse_args(words)))


def _convert(args: argparse.Namespace) -> None:
    _check(args)
    partial = args.output.with_name(f"{args.output.name}.partial")
    command = [*_converter(args), str(args.checkpoint), "--outfile", str(partial), "--outtype", args.type]
    command += shlex.split(args.converter_flags)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if ended.returncode or not partial.is_file():
            said = [line.strip() for line in ended.stderr.splitlines() if line.strip()] or ["it wrote nothing"]
            frames = [line for line in said if line.startswith("File ")]
            where = f" ({frames[-1]})" if frames and ":" not in said[-1] else ""  # bare AssertionError: name its place
            raise ValueError(
                f"{CONVERTER} failed: {said[-1]}{where}; --converter_flags passes flags on; the command was "
                f"{shlex.join(command)}"
            )
        partial.replace(args.output)
    finally:
        partial.unlink(missing_ok=True)
    print(
        f"{args.output}: {args.output.stat().st_size / 1e9:.2f} GB; try: llama-cli -m {shlex.quote(str(args.output))}"
    )


def _check(args: argparse.Namespace) -> None:
    if not args.checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint} is not a directory; give a checkpoint or a merged model")
    if (args.checkpoint / ADAPTER).is_file():
        raise ValueError(
            f"{args.checkpoint} is an adapter; merge it first: "
            f"lightseq merge --adapter {shlex.quote(str(args.checkpoint))} --output_dir DIR"
        )
    if not (args.checkpoint / "config.json").is_file():
        raise ValueError(f"{args.checkpoint} is a directory without config.json; give checkpoint-N of a run")
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists; give another file, or remove it")
    if not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: {args.output.parent} is not a directory; make it first")


def _converter(args: argparse.Namespace) -> list[str]:
    """Returns the words that start the converter. Raises ValueError with the commands to type if there is none."""
    if args.llama_cpp is not None:
        found = args.llama_cpp / CONVERTER
        if not found.is_file():
            raise ValueError(f"--llama_cpp {args.llama_cpp} has no {CONVERTER}; give a checkout of {REPOSITORY}")
        return [sys.executable, str(found)]
    on_path = shutil.which(CONVERTER)
    if on_path is None:
        again = ["lightseq", "gguf", str(args.checkpoint), "--output", str(args.output), "--type", args.type]
        raise ValueError(
            f"{CONVERTER} is not on the PATH; type: git clone --depth 1 {REPOSITORY} && "
            f"{shlex.join([*again, '--llama_cpp', 'llama.cpp'])}"
        )
    return [on_path]
