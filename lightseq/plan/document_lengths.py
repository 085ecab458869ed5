"""Documents of packed rows, as far as the time of attention depends on them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from lightseq.architecture.inspection import Architecture, inspect_architecture
from lightseq.config.train_config import TrainConfig
from lightseq.data.examples import Examples
from lightseq.data.packing import PackedExamples, best_fit, read_window_sizes
from lightseq.data.sources import ReadOptions, split_columns
from lightseq.models.decoder import text_config

MAX_READ = 2**17  # documents that are packed to plan without training; best fit takes 0.3 s


@dataclass(frozen=True)
class DocumentLengths:
    """Documents of packed rows: their sizes, and the attention of a token of a row, padding included."""

    mean_tokens: float
    area_per_token: float  # `Architecture.attention_area` of all documents over the tokens of all rows
    longest_tokens: int  # of the longest document, whose positions the model has to cover

    def attention_share(self, length: int) -> float:
        """Returns the documents' attention as a share of full rows of `length` tokens."""
        return self.area_per_token / length


def document_lengths_of(examples: Examples, length: int, architecture: Architecture) -> DocumentLengths | None:
    """Returns the documents of packed rows of `length` tokens; None for rows that are not packed."""
    if not isinstance(examples, PackedExamples):
        return None
    return _documents(examples.windows.sizes, len(examples) * length, architecture)


def read_document_lengths(config: TrainConfig, model: PreTrainedConfig) -> DocumentLengths | None:
    """Returns the documents that a run would pack, from their lengths only.

    Evenly spaced ones stand for more than MAX_READ documents. Returns None without packing, for data that is not here,
    and for rows of text, whose lengths are not known before they are tokenized.
    """
    if config.packing == "none" or not config.data_path or not Path(config.data_path).exists():
        return None
    length, vocab_size = config.model_max_length, text_config(model).vocab_size
    options = ReadOptions(limit=config.max_train_samples, ignored_columns=split_columns(config.ignore_columns))
    sizes = read_window_sizes(Path(config.data_path), length, vocab_size, options)
    if sizes is None or not len(sizes):
        return None
    sizes = sizes[:: -(-len(sizes) // MAX_READ)]
    _, offsets = best_fit(sizes, length)
    return _documents(sizes, (len(offsets) - 1) * length, inspect_architecture(model))


def _documents(sizes: NDArray[np.int64], tokens: int, architecture: Architecture) -> DocumentLengths:
    return DocumentLengths(float(sizes.mean()), architecture.attention_area(sizes) / tokens, int(sizes.max()))
