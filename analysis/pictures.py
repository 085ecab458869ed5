"""Knows how a figure becomes files: which formats there are, and how a command is asked for them."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import matplotlib
from matplotlib.figure import Figure

COMPARED = Path("outputs/compare")  # of several results together, beside none of which it belongs
FORMATS: Mapping[str, tuple[str, ...]] = {"png": ("png",), "svg": ("svg",), "both": ("png", "svg")}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="png", help="of the pictures (default: %(default)s)")


def add_output(parser: argparse.ArgumentParser, beside: str) -> None:
    text = f"where the pictures go (default: {beside}; of several, {COMPARED})"
    parser.add_argument("--output", metavar="DIR", type=Path, help=text)


def folder_of(asked: Path | None, beside: Sequence[Path]) -> Path:
    """Returns where pictures go: what shows one result lies beside it, where it replaces that result's own alone."""
    if asked is not None:
        return asked
    return beside[0] if len(beside) == 1 else COMPARED


class Drawable(Protocol):
    """What one picture shows, under a setting that names it where there are several."""

    @property
    def setting(self) -> Any: ...


T = TypeVar("T", bound=Drawable)


def draw_each(
    kind: str, items: Sequence[T], figure: Callable[[T], Figure], style: Mapping[str, Any], output: Path, form: str
) -> list[Path]:
    """A picture an item in `output`, which is made where it is missing; named by what differs between the items."""
    output.mkdir(parents=True, exist_ok=True)
    settings = [asdict(item.setting) for item in items]
    varying = [key for key in settings[0] if len({setting[key] for setting in settings}) > 1]
    paths: list[Path] = []
    with matplotlib.rc_context(dict(style)):
        for item, setting in zip(items, settings, strict=True):
            parts = [kind, *(f"{key}-{setting[key]}".replace("/", "-").replace(" ", "-") for key in varying)]
            paths += save(figure(item), output, "-".join(parts), form)
    return paths


def save(figure: Figure, output: Path, name: str, form: str = "png") -> list[Path]:
    """Writes the figure into `output`, which is there, once a format. Names may hold dots, as llama3.2-1b does."""
    paths = [output / f"{name}.{suffix}" for suffix in FORMATS[form]]
    for path in paths:
        figure.savefig(path)
    return paths
