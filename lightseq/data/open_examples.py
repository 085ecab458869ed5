"""Opening of --data_path: a token directory, a pickle, or a file or folder of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightseq.data.columns import IDS
from lightseq.data.examples import IGNORE_INDEX, MAX_NAMED, Examples, open_lazy_texts, open_windows
from lightseq.data.load_tokenizer import has_tokenizer, load_tokenizer
from lightseq.data.sequences import open_pickle
from lightseq.data.sources import (
    FOLDER_SUFFIXES,
    HUB_PREFIX,
    READERS,
    ReadOptions,
    holds_columns,
    holds_rows,
    ignored_files,
    row_suffix,
)
from lightseq.data.text_files import TEXT_SUFFIXES
from lightseq.data.token_cache import format_and_rows, open_rows
from lightseq.data.token_directory import META, TokenDirectory
from lightseq.data.tokenizer import Tokenizer, placeholder_tokenizer
from lightseq.utils.formatting import alternatives, first_line


def open_examples(
    path: str | Path,
    length: int,
    vocab_size: int,
    tokenizer: str | Tokenizer | None = None,
    lazy: bool = True,
    progress: bool = True,
    read_options: ReadOptions | None = None,
) -> Examples:
    """Opens a token directory, a .pkl file or rows. Raises ValueError with a one-line reason if that fails.

    `lazy` tokenizes the texts of a file on access. `progress` shows a bar while rows are tokenized; processes without
    one let the process with the bar tokenize.
    """
    assert length > 0, length
    read_options = read_options or ReadOptions()
    if not str(path).startswith(HUB_PREFIX) and not Path(path).exists():
        raise ValueError(f"{path} does not exist; {_how_to_make(Path(path))}")
    if holds_rows(path):
        if _is_tokenized(path, read_options, has_tokenizer=tokenizer is not None):
            return open_rows(path, length, vocab_size, placeholder_tokenizer(vocab_size), read_options, progress)
        if tokenizer is None:
            raise ValueError(
                f"{path} holds text, which needs a tokenizer; give --tokenizer a directory, a hub id, or byte"
            )
        template = read_options.chat_template
        loaded = load_tokenizer(tokenizer, template) if isinstance(tokenizer, str) else tokenizer
        if lazy and Path(path).is_file():
            return open_lazy_texts(Path(path), length, vocab_size, loaded, read_options)
        return open_rows(path, length, vocab_size, loaded, read_options, progress)
    path = Path(path)
    limits_rows = read_options.limit is not None and not read_options.limits_documents
    given = f"--max_train_samples {read_options.limit}" if limits_rows else None
    if read_options.text_column != "text":
        given = f"--text_column {read_options.text_column}"
    if read_options.ignored_columns and not holds_columns(path):
        given = f"--ignore_columns {','.join(read_options.ignored_columns)}"
    if read_options.renamed_columns and not holds_columns(path):
        given = "--columns"
    if given is not None:
        raise ValueError(f"{given} applies to rows, which {path} does not hold; leave it out")
    if path.is_dir() and not (path / META).exists():
        holds = ", ".join(ignored_files(path)[:MAX_NAMED]) or "nothing"
        raise ValueError(
            f"{path} is neither a token directory (no {META}) nor a folder of "
            f"{alternatives((*FOLDER_SUFFIXES, *TEXT_SUFFIXES))} files; "
            f"it holds {holds}; give a file, or make tokens with lightseq data"
        )
    if path.is_dir():
        opened = open_windows(path, length, vocab_size, read_options.limit, read_options.refused_ids)
        notes = compare_tokenizers(opened.source, tokenizer) if tokenizer is not None else ()
        return replace(opened, notes=(*opened.notes, *notes))
    if path.suffix == ".pkl":
        return open_pickle(path, length, vocab_size, read_options)
    kinds = alternatives(["a token directory", ".pkl", *READERS])
    raise ValueError(
        f"{path} is not {kinds}; write chats and other rows as .jsonl, or make tokens of a text with lightseq data text"
    )


def _how_to_make(path: Path) -> str:
    """Returns the remedy for a missing source: check the path of a file, or make the token directory."""
    if path.suffix in TEXT_SUFFIXES:
        return "check the path, or give another file"
    if (suffix := row_suffix(path)) is not None:
        return f"check the path, or write {suffix} rows there (docs/data.md says of which columns)"
    if path.suffix == ".pkl":
        return "check the path, or make the file with data_gen"
    return "check the path, make a token directory with lightseq data, or give hf:NAME for a data set of the hub"


def _is_tokenized(source: str | Path, read_options: ReadOptions, has_tokenizer: bool) -> bool:
    """Returns whether the first row holds token ids, so that no tokenizer is needed.

    With a tokenizer, returns False for sources that are slow to open: a download, or a JSON array.
    """
    if has_tokenizer and (str(source).startswith(HUB_PREFIX) or row_suffix(Path(source)) == ".json"):
        return False
    return format_and_rows(source, replace(read_options, limit=1))[0].name == IDS


def compare_tokenizers(source: TokenDirectory, tokenizer: str | Tokenizer) -> tuple[str, ...]:
    """Raises ValueError if tokens were made with another tokenizer, because their ids mean other text to the model.

    Returns a note if that cannot be told. Directories of models without a tokenizer are not compared.
    """
    made, fingerprint = source.meta.get("tokenizer"), source.meta.get("tokenizer_fingerprint")
    if made is None or (isinstance(tokenizer, str) and not has_tokenizer(tokenizer)):
        return ()
    try:
        given = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    except ValueError as error:
        return (f"{source.path}: tokenizer {made} could not be compared with the model's: {first_line(error)}",)
    if fingerprint is None and "byte" not in (made, given.name):
        return (f"{source.path}: made by an older version with tokenizer {made}, which is not compared",)
    if made != given.name if fingerprint is None else fingerprint != given.vocabulary_fingerprint:
        raise ValueError(
            f"{source.path} was made with tokenizer {made}, but the model has tokenizer {given.name}, to which these "
            f"ids mean other text; make the data again with --tokenizer {given.name}, or give --tokenizer {made}"
        )
    return ()


def require_target(examples: Examples, path: str | Path) -> None:
    """Raises ValueError if no example has a target. For most data the first example settles it."""
    if not any(bool((examples[i].labels != IGNORE_INDEX).any()) for i in range(len(examples))):
        raise ValueError(f"{path} has no target: every label is {IGNORE_INDEX}; give data with other labels")
