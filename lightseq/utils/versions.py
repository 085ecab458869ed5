"""Newest tested versions of torch and transformers, and a warning for newer ones."""

from functools import cache
from importlib import metadata
from typing import Final

from packaging.version import Version

OLDEST_TRANSFORMERS: Final = "5.9"
OLDEST_FOR_EXPERTS: Final = "5.20"  # marks modules of stacked experts with all that lightseq reads
OLDEST_FOR_RECURRENCES: Final = "5.22"  # every such mixer passes its keywords on
version = cache(metadata.version)  # parsing the metadata of a package takes 20 ms
NEWEST_TESTED: Final = {"torch": "2.13", "transformers": "5.24"}


class UntestedVersionWarning(UserWarning):
    """Warning about a torch or transformers newer than lightseq was tested with."""


def untested_versions() -> list[str]:
    """Returns a warning line for each installed package that is newer than its newest tested version."""
    found = {name: version(name).split("+")[0] for name in NEWEST_TESTED}
    return [
        f"{name} {found[name]} is newer than {newest}, the newest that this lightseq was tested with; run "
        "`lightseq verify` with your model before you trust its losses"
        for name, newest in NEWEST_TESTED.items()
        if Version(found[name]).release[:2] > Version(newest).release
    ]


def check_transformers() -> None:
    """Raises ImportError for a transformers without the names that lightseq imports."""
    found = version("transformers")
    if Version(found) < Version(OLDEST_TRANSFORMERS):
        raise ImportError(
            f"transformers {found} is too old for lightseq; install {OLDEST_TRANSFORMERS} or newer: "
            f"pip install 'transformers>={OLDEST_TRANSFORMERS},<6'"
        )


def check_version(package: str, oldest: str, part: str) -> None:
    """Raises ValueError if an installed package is too old for a part of lightseq or of a model."""
    found = version(package)
    if Version(found) < Version(oldest):
        raise ValueError(f"{package} {found} is too old for {part}; install {oldest} or newer")
