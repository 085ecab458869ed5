"""Knows which source this is: its commit, where git can tell, and a digest of its lines, which is always there."""

import hashlib
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
GIT_SECONDS = 2.0  # a run waits no longer for its name: a file system may be slow


def commit(root: Path = PACKAGE.parent) -> str | None:
    """The commit of the checkout at `root`, with `-changed` where files differ from it; None where there is no such.

    An installed package may lie inside somebody else's checkout: only the `.git` beside it counts.
    """
    if not (root / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    words = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=-changed"]
    try:
        found = subprocess.run(
            [*git, *words], capture_output=True, text=True, check=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def digest(directory: Path = PACKAGE) -> str:
    """Of this package's own lines."""
    total = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        total.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return total.hexdigest()[:12]
