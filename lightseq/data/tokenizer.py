"""Tokenizers: raw bytes, or a Hugging Face tokenizer. Both also compute the mask of targets.

`encode` adds a document's begin and end ids, `encode_part` does not. `encode_parts` encodes texts given in parts and
also returns the masks of targets. A model stops at `stop_ids`. `vocabulary_fingerprint` identifies the ids of a text,
`fingerprint` also the text of a chat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightseq.data.chat_template import ChatTemplate
from lightseq.data.token_directory import IntArray

TextPart = tuple[str, bool]  # text, and whether it is a target
TargetMask = NDArray[np.bool_]
# Texts for the fingerprint: words, numbers, whitespace, code and scripts that tokenizers split differently.
SAMPLE_TEXTS: Final = (
    "Hello, world! It's 1,234,567.89 o'clock -- don't\t\n\n  def f(x):\n    return x**2  # naïve café "
    "Привет, мир. 你好，世界。 こんにちは 안녕하세요 مرحبا नमस्ते 😀👍🏽 <s>[INST]</s> ÀÉÎõü ﬁ ½ \u00a0\u200b\r\nEND",
    # Characters that normalizers change: combining marks, wide and joined forms, case, spaces, quotes and dashes.
    "  e\u0301 A\u030a ﬀ ｆｕｌｌ ① ™ Ω Å ẞ İ ſ ÄÖ Café CAFÉ “quoted” ‘it’s’ – — … ",
    "_under_ ▁ Ġ `` '' \u3000\u2003\x00\x7f\ufeff  ",
    "\n\n  tabs\t\tand    spaces   ", "가", "ΐ ά",
)  # fmt: skip


def _byte_vocabulary() -> dict[str, int]:
    """Maps GPT-2's printable stand-ins for bytes, which byte-level tokenizers use, to the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_VOCABULARY: Final = _byte_vocabulary()
END_OF_DOCUMENT: Final = "<|endoftext|>"  # id 256 of the tokenizer of bytes


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, ids 0 to 255; id 256 ends a document."""

    name: str = "byte"
    vocab_size: int = 257
    end_of_document: int = 256
    begin: tuple[int, ...] = ()
    chat_template: ChatTemplate | None = None
    fingerprint: str = "byte"
    special_texts: tuple[str, ...] = ()

    @property
    def vocabulary_fingerprint(self) -> str:
        return self.fingerprint

    @property
    def end(self) -> tuple[int, ...]:
        return (self.end_of_document,)

    stop_ids = special_ids = end

    def encode(self, text: str) -> IntArray:
        return np.append(self.encode_part(text), np.uint16(self.end_of_document))

    def encode_part(self, text: str) -> IntArray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str], whole: bool) -> list[IntArray]:
        return [self.encode(text) if whole else self.encode_part(text) for text in texts]

    def encode_parts(self, texts: list[tuple[TextPart, ...]]) -> list[tuple[IntArray, TargetMask]]:
        return [_concatenate([(self.encode_part(text), target) for text, target in parts]) for parts in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def as_transformers(self) -> Any:
        """Returns the same tokenizer as one of transformers, whose files `AutoTokenizer` loads."""
        import tokenizers
        from transformers import PreTrainedTokenizerFast  # takes seconds to import

        made = tokenizers.Tokenizer(tokenizers.models.BPE(BYTE_VOCABULARY, merges=[]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        end = tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)
        made.add_special_tokens([end])
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_DOCUMENT)


def placeholder_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a tokenizer for tokenized rows, which only has a vocabulary size."""
    return ByteTokenizer(name="", vocab_size=vocab_size, fingerprint=f"ids below {vocab_size}")


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A Hugging Face tokenizer. Every document ends with the EOS id, even if the tokenizer adds none.

    Begin and end ids that a text has already are not added again.
    """

    name: str
    vocab_size: int
    backend: Any
    template_replaced: bool = False  # by --chat_template
    end_ids: tuple[int, ...] = ()  # further stop ids besides the tokenizer's EOS

    @cached_property
    def _added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the tokenizer adds before and after a text."""
        plain, whole = (self.backend("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
        starts = range(len(whole) - len(plain) + 1) if plain else [int(whole[:1] == [self.backend.bos_token_id])]
        start = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
        return tuple(whole[:start]), tuple(whole[start + len(plain) :])

    @property
    def begin(self) -> tuple[int, ...]:
        return self._added[0]

    @property
    def end(self) -> tuple[int, ...]:
        return (self.backend.eos_token_id,) if self.backend.eos_token_id is not None else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (*self.end_ids, *self.end)

    @property
    def chat_template(self) -> ChatTemplate | None:
        if not getattr(self.backend, "chat_template", None):
            return None
        name = "--chat_template" if self.template_replaced else f"the chat template of {self.name}"
        ends = tuple(end for end in self.backend.convert_ids_to_tokens(list(self.stop_ids)) if end)
        return ChatTemplate(self.backend, name, (*self.special_texts, *ends), ends)

    @property
    def fingerprint(self) -> str:
        """Returns a hash of everything that determines the ids of a text, but not of the tokenizer's name."""
        fast = getattr(self.backend, "backend_tokenizer", None)
        words = fast.to_str() if fast is not None else json.dumps(self.backend.get_vocab(), sort_keys=True)
        made = (
            words,
            self.begin,
            self.end,
            self.end_ids,
            self._settings,
            str(getattr(self.backend, "chat_template", None)),
        )
        return hashlib.sha256(repr(made).encode()).hexdigest()

    @property
    def _settings(self) -> tuple[Any, ...]:
        """Settings that are not in the tokenizer's own file: a chat template may read the special tokens by name."""
        splits = bool(getattr(self.backend, "split_special_tokens", False))
        return splits, sorted(self.backend.special_tokens_map.items())

    @property
    def vocabulary_fingerprint(self) -> str:
        """Returns a hash of the vocabulary and of the ids of sample texts, not of the tokenizer's files."""
        words = sorted(self.backend.get_vocab().items())
        texts = [*SAMPLE_TEXTS, " ".join(self.special_texts)]
        # A whole text ends with one EOS, but may begin with two BOS: token directories hold this hash.
        whole = [ids if tuple(ids[-1:]) == self.end else [*ids, *self.end] for ids in self._encode(texts, True)]
        ids = [[int(id) for id in found] for found in (*whole, *self._encode(texts, False))]
        return hashlib.sha256(repr((words, ids)).encode()).hexdigest()[:16]

    @property
    def special_ids(self) -> tuple[int, ...]:
        return tuple(self.backend.all_special_ids)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        added = getattr(self.backend, "added_tokens_decoder", {}).values()
        return (*self.backend.all_special_tokens, *(token.content for token in added if token.special))

    def encode_part(self, text: str) -> IntArray:
        return self.encode_batch([text], whole=False)[0]

    def encode(self, text: str) -> IntArray:
        return self.encode_batch([text], whole=True)[0]

    def as_transformers(self) -> Any:
        """Returns the tokenizer of transformers."""
        return self.backend

    def encode_batch(self, texts: list[str], whole: bool) -> list[IntArray]:
        """Encodes whole documents or, without begin and end ids, parts; a fast tokenizer uses all cores."""
        found = self._encode([strip_after_end(text, self) for text in texts] if whole else texts, False)
        return [np.asarray(self._whole(ids) if whole else ids, dtype=np.int64) for ids in found]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        if self.backend.is_fast:  # without character offsets, which take three quarters of the time
            encodings = self._rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        found: list[list[int]] = self.backend(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return found

    def _whole(self, ids: list[int]) -> list[int]:
        """Adds a document's begin and end ids if they are missing."""
        begin, added = self._added
        ids = ids if tuple(ids[: len(begin)]) == begin else [*begin, *ids]
        for end in (added, self.end):
            ids = ids if tuple(ids[len(ids) - len(end) :]) == end else [*ids, *end]
        return ids

    def encode_parts(self, texts: list[tuple[TextPart, ...]]) -> list[tuple[IntArray, TargetMask]]:
        """Encodes each text as a whole, as at inference. An id that overlaps a target part is a target."""
        if not texts:
            return []
        if not self.backend.is_fast:
            return [_concatenate([(self.encode_part(text), target) for text, target in parts]) for parts in texts]
        whole = ["".join(text for text, _ in parts) for parts in texts]
        found = self._rust.encode_batch(whole, add_special_tokens=False)
        return [
            (np.asarray(encoding.ids, dtype=np.int64), _target_mask(encoding, parts))
            for encoding, parts in zip(found, texts, strict=True)
        ]

    @property
    def _rust(self) -> Any:
        """The tokenizer of the tokenizers package, set as transformers sets it to encode without padding."""
        rust = self.backend.backend_tokenizer
        rust.no_truncation()
        rust.no_padding()
        rust.encode_special_tokens = bool(getattr(self.backend, "split_special_tokens", False))
        return rust

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))


Tokenizer = ByteTokenizer | PretrainedTokenizer


def strip_after_end(text: str, tokenizer: Tokenizer) -> str:
    """Removes whitespace behind the end token of a text, which would otherwise get another end."""
    if not text[-1:].isspace() or not (stripped := text.rstrip()).endswith(tokenizer.special_texts):
        return text
    ends = bool(tokenizer.end) and tuple(tokenizer.encode_part(stripped)[-len(tokenizer.end) :]) == tokenizer.end
    return stripped if ends else text


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text to continue: with the begin ids unless it has them, and without end ids."""
    ids, begin = tokenizer.encode_part(text).tolist(), tokenizer.begin
    return ids if tuple(ids[: len(begin)]) == begin else [*begin, *ids]


def _concatenate(pieces: list[tuple[IntArray, bool]]) -> tuple[IntArray, TargetMask]:
    ids = np.concatenate([ids for ids, _ in pieces])
    return ids, np.concatenate([np.full(len(ids), target) for ids, target in pieces])


def _target_mask(encoding: Any, parts: tuple[TextPart, ...]) -> TargetMask:
    """Returns a mask of the ids whose character spans overlap a target part. Several ids can share one character."""
    starts, ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    found, end = np.zeros(len(starts), dtype=np.bool_), 0
    for text, target in parts:
        start, end = end, end + len(text)
        found[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end)] |= target
    return found
