"""The versions of torch and transformers that the tests are run with, and a warning for newer ones."""

from importlib.metadata import version
from typing import Final

from packaging.version import Version

NEWEST_TESTED: Final = {"torch": "2.13", "transformers": "5.24"}


class UntestedVersionWarning(UserWarning):
    """torch or transformers is newer than the newest version that lightseq was tested with."""


def untested_versions() -> list[str]:
    """Returns a line for each package here that is newer than the newest tested version."""
    found = {name: version(name).split("+")[0] for name in NEWEST_TESTED}
    return [
        f"{name} {found[name]} is not tested with this version of lightseq, whose tests go up to {newest}; run "
        "`python3 -m lightseq verify` with your model before you trust its losses"
        for name, newest in NEWEST_TESTED.items()
        if Version(found[name]).release[:2] > Version(newest).release
    ]
