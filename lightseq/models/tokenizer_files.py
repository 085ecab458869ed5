"""Files of tokenizers: files named by transformers' class, their settings, and chat templates."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightseq.utils.files import read_json
from lightseq.utils.formatting import is_plain_name

SETTINGS: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"  # folder of templates with other names
VOCABULARY_FILES: Final = (  # files of widely used classes; others are named by their class
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("sentencepiece.model", "spm.model", "tekken.json"),
)
TOKENIZER_FILES: Final = (
    *("tokenizer*", *VOCABULARY_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template*", f"{MORE_TEMPLATES}/*.jinja"),
)
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def named_files(directory: Path) -> set[str]:
    """Returns the files that transformers' classes of a directory's tokenizer read, whether they are there or not."""
    # Takes seconds to import; the tokenizer of bytes does not need it.
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    names = {_setting(directory / SETTINGS, "tokenizer_class")}
    found: Any = TOKENIZER_MAPPING_NAMES.get(_setting(directory / "config.json", "model_type"))
    names |= {found} if isinstance(found, str) else set(found or ())
    names |= {name.removesuffix("Fast") for name in names if name}
    files: set[str] = set()
    for name in filter(None, names):
        with suppress(Exception):  # its module may need a package that is not installed
            files |= set(getattr(tokenizer_class_from_name(name), "vocab_files_names", {}).values())
    return {name for name in files if is_plain_name(name)}


def _setting(path: Path, key: str) -> str | None:
    """Returns the text of a key in a JSON file; None if it is missing or not text."""
    with suppress(OSError, ValueError):
        found = read_json(path) if path.is_file() else None
        value = found.get(key) if isinstance(found, dict) else None
        return value if isinstance(value, str) else None
    return None


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copies the files of a tokenizer."""
    copy_files((*TOKENIZER_FILES, *sorted(named_files(source))), source, directory)


def copy_files(patterns: Iterable[str], source: Path, directory: Path, left_out: Iterable[str] = ()) -> None:
    """Copies the files of a directory that match one of the patterns, without `left_out`."""
    found = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
    for file in sorted(found):
        if file.name not in left_out:
            target = directory / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())


def remove_chat_templates(directory: Path) -> None:
    """Removes the chat templates that lie in files of their own, before others take their place."""
    for file in directory.glob("chat_template*"):
        file.unlink()
    shutil.rmtree(directory / MORE_TEMPLATES, ignore_errors=True)
