"""Document lengths of packed rows, for the time of attention."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from lightseq.architecture.inspection import Architecture, inspect_architecture
from lightseq.config.train_config import TrainConfig
from lightseq.data.column_flags import renamed_columns, split_columns
from lightseq.data.examples import Example, Examples
from lightseq.data.packing import PackedExamples, best_fit, open_windows_to_pack, pack, read_window_sizes
from lightseq.data.sources import ReadOptions
from lightseq.data.token_directory import META
from lightseq.models.decoder import text_config
from lightseq.schedule.nodes import Nodes
from lightseq.sequence.shared_prefixes import share_prefixes

MAX_TREES = 64  # rows of trees that are made to plan
MAX_READ = 2**17  # documents that are packed to plan without training; best fit takes 0.3 s


@dataclass(frozen=True)
class DocumentLengths:
    """Sizes of documents in packed rows, and the mean attention per token, padding included."""

    mean_tokens: float
    area_per_token: float  # `Architecture.attention_area` of all documents over the tokens of all rows
    longest_tokens: int  # the model has to cover positions of the longest document


def document_lengths_of(
    examples: Examples, length: int, architecture: Architecture, shares_prefixes: bool = False
) -> DocumentLengths | None:
    """Returns the documents of packed rows of `length` tokens; None for rows that are not packed.

    With `shares_prefixes`, rows hold trees, of which evenly spaced ones are made.
    """
    if not isinstance(examples, PackedExamples):
        return None
    if not shares_prefixes:
        return _documents(examples.windows.sizes, len(examples) * length, architecture)
    places = range(0, len(examples), -(-len(examples) // MAX_TREES))
    area = sum(area_of_nodes(_nodes_of(examples[place]), architecture) for place in places)
    sizes = examples.windows.sizes
    return DocumentLengths(float(sizes.mean()), area / (len(places) * length), int(sizes.max()))


def area_of_nodes(nodes: Nodes, architecture: Architecture) -> float:
    """Returns the attention area of nodes. Each node also sees its ancestors."""
    before = nodes.first_positions
    return architecture.attention_area(before + np.diff(nodes.edges)) - architecture.attention_area(before)


def _nodes_of(example: Example) -> Nodes:
    assert example.boundaries is not None, "rows are packed"
    return share_prefixes([example.input_ids[a:b] for a, b in pairwise(example.boundaries)]).nodes


def read_document_lengths(config: TrainConfig, model: PreTrainedConfig) -> DocumentLengths | None:
    """Returns the documents that a run would pack, from their lengths only, unless they become trees.

    Evenly spaced ones stand for more than MAX_READ documents. Returns None without packing, for data that is not here,
    and for rows of text, whose lengths are not known before they are tokenized.
    """
    if config.packing == "none" or not config.data_path or not Path(config.data_path).exists():
        return None
    length, vocab_size = config.model_max_length, text_config(model).vocab_size
    options = ReadOptions(
        limit=config.max_train_samples,
        ignored_columns=split_columns(config.ignore_columns),
        renamed_columns=renamed_columns(config.columns),
    )
    if config.share_prefixes and (Path(config.data_path) / META).exists():
        windows = open_windows_to_pack(config.data_path, length, vocab_size, read_options=options)
        packed = pack(config.data_path, windows, shares_prefixes=True)
        return document_lengths_of(packed, length, inspect_architecture(model), shares_prefixes=True)
    sizes = read_window_sizes(Path(config.data_path), length, vocab_size, options)
    if sizes is None or not len(sizes):
        return None
    sizes = sizes[:: -(-len(sizes) // MAX_READ)]
    _, offsets = best_fit(sizes, length)
    return _documents(sizes, (len(offsets) - 1) * length, inspect_architecture(model))


def _documents(sizes: NDArray[np.int64], tokens: int, architecture: Architecture) -> DocumentLengths:
    return DocumentLengths(float(sizes.mean()), architecture.attention_area(sizes) / tokens, int(sizes.max()))
