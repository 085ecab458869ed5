"""Files of plain text as rows: each file is one document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lightseq.utils.files import read_text
from lightseq.utils.formatting import first_line

TEXT_SUFFIXES: Final = (".txt", ".md")
TEXT_BYTES: Final = 4 << 30  # limit of a file: each is one document, held in memory


def read_text_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the text of a file as one row. Raises ValueError if it is not UTF-8 text."""
    try:
        text = read_text(path, TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is {first_line(error)}; convert it, or move it away") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); correct it, or move it away") from error
    if "\0" in text:
        raise ValueError(
            f"{path} is a binary file (character {text.index(chr(0)):,} is NUL); give text, or move it away"
        )
    yield str(path), {"text": text}
