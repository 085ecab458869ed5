"""A tokenizer of single bytes with the special tokens of a chat, and rows read with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from lightseq.data.examples import WindowExamples
from lightseq.data.open_examples import open_examples
from lightseq.data.sources import ReadOptions
from lightseq.data.tokenizer import PretrainedTokenizer, Tokenizer

VOCABULARY = 300
SPECIAL = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
# Writes every turn alike, with reasoning, calls and functions.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(template: str | None = CHATML) -> PretrainedTokenizer:
    """Returns the tokenizer with a chat template."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL[:3], *sorted(ByteLevel.alphabet())])}
    made = tokenizers.Tokenizer(BPE(vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    backend = PreTrainedTokenizerFast(tokenizer_object=made, **ends)
    backend.chat_template = template
    return PretrainedTokenizer("bytes", VOCABULARY, backend)


def published(name: str) -> str:
    """Returns a chat template of a published model, which TRL ships."""
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


@dataclass(frozen=True)
class Document:
    """A tokenized row: its ids and mask of targets, and as text the whole and each run of targets."""

    ids: list[int]
    mask: list[bool]
    text: str
    targets: list[str]


def write_rows(path: Path, *rows: Any) -> Path:
    """Writes rows as lines of JSON."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def open_path(path: Path, tokenizer: Tokenizer, **options: Any) -> WindowExamples:
    """Opens the rows of a file as `lightseq train` does."""
    options.setdefault("cache", path.parent / "cache")
    found = open_examples(path, 1 << 20, VOCABULARY, tokenizer, False, True, ReadOptions(**options))
    assert isinstance(found, WindowExamples)
    return found


def read_path(path: Path, tokenizer: PretrainedTokenizer, **options: Any) -> list[Document]:
    """Returns the tokenized rows of a file."""
    source = open_path(path, tokenizer, **options).source
    return [_document(source.document(i), source.targets_of(i), tokenizer) for i in range(len(source.offsets) - 1)]


def read_rows(folder: Path, tokenizer: PretrainedTokenizer, *rows: Any, **options: Any) -> list[Document]:
    """Returns rows as `lightseq train` tokenizes them."""
    return read_path(write_rows(folder / f"rows-{len(list(folder.iterdir()))}.jsonl", *rows), tokenizer, **options)


def _document(ids: Any, targets: Any, tokenizer: PretrainedTokenizer) -> Document:
    mask = np.ones(len(ids), bool) if targets is None else np.asarray(targets, bool)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    runs = [tokenizer.backend.decode(ids[a:b]) for a, b in pairwise(borders) if mask[a]]
    return Document(ids.tolist(), mask.tolist(), tokenizer.backend.decode(ids), runs)
