"""The commit and changes that a run records of its source."""

import subprocess
from pathlib import Path

import pytest

from lightseq.utils import source
from lightseq.utils.source import digest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one file and one commit."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "a.py").write_text("a = 1\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m one"):
        subprocess.run(["git", "-C", str(root), *words.split()], check=True)
    return root


def head(root: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_commit_names_the_checkout_and_marks_changed_files(checkout: Path) -> None:
    assert source.commit(checkout) == head(checkout)
    (checkout / "new.py").write_text("new = 1\n")  # nothing that git knows
    assert source.commit(checkout) == head(checkout)
    (checkout / "a.py").write_text("a = 2\n")
    assert source.commit(checkout) == f"{head(checkout)}-changed"


def test_a_tag_and_a_linked_worktree_have_the_commits_own_name(checkout: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "-C", str(checkout), "tag", "v1"], check=True)
    subprocess.run(["git", "-C", str(checkout), "worktree", "add", "-q", str(tmp_path / "linked")], check=True)
    assert source.commit(checkout) == source.commit(tmp_path / "linked") == head(checkout)


def test_there_is_no_commit_where_git_cannot_tell(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "site-packages").mkdir()
    assert source.commit(checkout / "site-packages") is None  # the checkout is somebody else's
    (tmp_path / "broken" / ".git").mkdir(parents=True)
    assert source.commit(tmp_path / "broken") is None
    monkeypatch.setenv("PATH", "")
    assert source.commit(checkout) is None


def test_a_git_that_takes_long_is_not_waited_for(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(source, "GIT_SECONDS", 0.1)
    assert source.commit(checkout) is None


def test_the_digest_is_of_names_and_lines(checkout: Path) -> None:
    before = digest(checkout)
    assert before == digest(checkout)
    (checkout / "a.py").write_text("a = 3\n")
    assert digest(checkout) != before
