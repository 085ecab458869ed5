"""Every link of the documentation leads somewhere: to a file that is there, and to a heading that it has."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightseq.config.checks import CHOICES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(target), f"{target} has no heading #{anchor}"


def test_the_links_are_seen() -> None:
    assert len(PAGES) > 10 and sum(len([*links(page)]) for page in PAGES) > 30
    assert "how-it-works" in anchors(ROOT / "docs" / "packing.md")


def tables(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields a flag and the names below it for each table whose first column has a flag as its title."""
    for flag, rows in re.findall(r"^\| `--(\w+)` \|.*\n\|[-|: ]+\n((?:\|.*(?:\n|$))+)", page.read_text(), flags=re.M):
        yield flag, re.findall(r"^\| `([^`]+)`", rows, flags=re.M)


def test_tables_of_choices_name_those_that_the_program_has() -> None:
    found = [(page, flag, names) for page in PAGES for flag, names in tables(page) if flag in CHOICES]
    assert {"schedule", "kernel"} <= {flag for _, flag, _ in found}
    for page, flag, names in found:
        assert sorted(names) == sorted(CHOICES[flag]), f"{page.name}: --{flag}"
