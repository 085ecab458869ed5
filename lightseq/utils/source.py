"""Identity of this copy of lightseq: its version, its commit if it is a checkout, a digest of its files."""

import hashlib
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "lightseq-long"
UNKNOWN: Final = "0.0.0"  # a copy that nobody installed; also in pyproject.toml
PACKAGE: Final = Path(__file__).resolve().parent.parent
GIT_SECONDS = 2.0  # timeout for git, because a file system may be slow


def own_version() -> str:
    """Returns the version of the installed distribution."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def is_checkout(root: Path = PACKAGE.parent) -> bool:
    """Tells a git checkout from an installed copy.

    Only a `.git` in `root` itself counts, because a package may be installed inside another checkout.
    """
    return (root / ".git").exists()


def commit(root: Path = PACKAGE.parent) -> str | None:
    """Returns the commit of the checkout at `root`, with `-changed` if files differ; None if it is not a checkout."""
    if not is_checkout(root):
        return None
    git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    command = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=-changed"]
    try:
        found = subprocess.run(
            [*git, *command], capture_output=True, text=True, check=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def describe_source() -> str:
    """Returns the version, and for a checkout its commit, instead of the one at which it was installed."""
    found = commit()
    return f"{own_version().partition('+')[0]}, checkout at commit {found}" if found else own_version()


@cache
def source_digest() -> str:
    """Returns a digest of lightseq's source files, which tells edited versions apart."""
    return digest(PACKAGE)


def digest(directory: Path) -> str:
    """Returns a digest of the names and contents of a package's source files."""
    total = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        total.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return total.hexdigest()[:12]
