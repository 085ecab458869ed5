"""Merges a trained adapter into the weights of its model, tensor by tensor.

python3 -m lightseq merge --adapter outputs/books/checkpoint-1000 --output_dir outputs/books/merged
"""

from collections.abc import Sequence
from pathlib import Path

from lightseq.config.parser import Parser, answered
from lightseq.models.presets import ModelFamily


def parser() -> Parser:
    about = "Adds a trained adapter (--lora_rank) to the weights of its model."
    out = Parser(prog="python3 -m lightseq merge", description=about)
    out.add_argument("--adapter", type=Path, required=True, help="directory of an adapter, as a checkpoint is")
    out.add_argument("--output_dir", type=Path, required=True, help="where the merged model goes; a new directory")
    out.add_argument("--model_name_or_path", help="the model it was trained on (default: what the adapter names)")
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return answered(lambda: _merge(words))


def _merge(words: Sequence[str]) -> None:
    asked = parser().parse_args(words)
    from lightseq.tools.merged_weights import merge  # imports torch, which takes seconds

    print(merge(asked.adapter, asked.output_dir, asked.model_name_or_path))
