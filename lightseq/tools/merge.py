"""Merges a trained LoRA adapter into the weights of its model, tensor by tensor.

lightseq merge --adapter outputs/books/checkpoint-1000 --output_dir outputs/books/merged
"""

from collections.abc import Sequence
from pathlib import Path

from lightseq.config.parser import Parser, run_command
from lightseq.models.presets import ModelFamily


def parser() -> Parser:
    about = "Merges a LoRA adapter (trained with --lora_rank) into the weights of its model."
    out = Parser(prog="lightseq merge", description=about)
    out.add_argument("--adapter", type=Path, required=True, help="adapter directory, such as a checkpoint")
    out.add_argument("--output_dir", type=Path, required=True, help="new directory for the merged model")
    out.add_argument("--model_name_or_path", help="base model (default: the one named in the adapter's config)")
    out.add_argument(
        "--keep_16_bits",
        action="store_true",
        help="add an adapter of weights in four bits to the 16-bit weights (default: to the dequantized ones, on which "
        "it was trained)",
    )
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return run_command(lambda: _merge(words))


def _merge(words: Sequence[str]) -> None:
    args = parser().parse_args(words)
    from lightseq.tools.merged_weights import merge  # imports torch, which takes seconds

    print(merge(args.adapter, args.output_dir, args.model_name_or_path, args.keep_16_bits))
