"""Evaluates a model under sequence parallelism: loss by position, or retrieval from long texts.

lightseq evaluate --model_name_or_path outputs/a/checkpoint-9 --data_path data/held-out --model_max_length 131072 \\
    --bf16 --output_dir outputs/a/evaluation
"""

from collections.abc import Sequence

from lightseq.config.command_line import print_help_if_asked
from lightseq.models.presets import ModelFamily
from lightseq.tools.evaluate.options import help_text
from lightseq.utils.process import without_collection


def main(family: ModelFamily, words: Sequence[str]) -> int:
    """Runs `lightseq evaluate` with its own flags and the flags of training."""
    if print_help_if_asked(words, help_text):
        return 0
    with without_collection():
        from lightseq.tools.evaluate.evaluate import evaluate  # imports torch, which takes seconds

    evaluate(family, words)
    return 0
