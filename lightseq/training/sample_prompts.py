"""Prompts of --sample_prompts, read and tokenized before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightseq.config.train_config import TrainConfig
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.data.tokenizer import Tokenizer, encode_prompt
from lightseq.utils.files import CONFIG_BYTES, read_text
from lightseq.utils.formatting import first_line, plural


@dataclass(frozen=True)
class SamplePrompts:
    """Prompts as text and as tokens, and their tokenizer."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokenizer: Tokenizer


def read_sample_prompts(config: TrainConfig, tokenizer: str | None, vocab_size: int) -> SamplePrompts | None:
    """Reads the file of --sample_prompts; returns None without the flag.

    Raises ValueError if it cannot be read, holds no prompt or one that is too long, or without a tokenizer.
    """
    if config.sample_prompts is None:
        return None
    given = f"--sample_prompts {config.sample_prompts}"
    try:
        lines = read_text(Path(config.sample_prompts), CONFIG_BYTES).splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ValueError(f"{given} cannot be read ({reason}); give a text file with one prompt per line") from error
    if tokenizer is None:
        raise ValueError(f"{given} needs a tokenizer; give --tokenizer a directory, a hub id, or byte")
    loaded = load_tokenizer(tokenizer)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{given} has no prompt; write one per line")
    ids = [tuple(encode_prompt(loaded, line)) for _, line in numbered]
    for (number, _), found in zip(numbered, ids, strict=True):
        _check(found, f"{given} line {number}", config, vocab_size)
    return SamplePrompts(tuple(line for _, line in numbered), tuple(ids), loaded)


def _check(ids: tuple[int, ...], where: str, config: TrainConfig, vocab_size: int) -> None:
    if not ids:
        raise ValueError(f"{where} has no token in the vocabulary of the tokenizer; give other words, or --tokenizer")
    if max(ids) >= vocab_size:
        raise ValueError(
            f"{where} has token id {max(ids)}, outside the model's vocabulary of {vocab_size}; give the model's "
            "--tokenizer"
        )
    if len(ids) + config.sample_max_new_tokens > config.model_max_length:
        raise ValueError(
            f"{where} has {plural(len(ids), 'token')}, and with --sample_max_new_tokens {config.sample_max_new_tokens} "
            f"exceeds --model_max_length {config.model_max_length}; shorten it, or add fewer tokens"
        )


def end_ids(model: Any, tokenizer_ends: Sequence[int | None]) -> set[int]:
    """Returns the ids that end a text: the model's own, and the tokenizer's."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {*(given if isinstance(given, list) else [given]), *tokenizer_ends}
    return {end for end in ends if end is not None and end >= 0}  # some settings have -1 for none
