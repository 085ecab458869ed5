"""Knows how a figure becomes files: which formats there are, and how a command is asked for them."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

FORMATS: Mapping[str, tuple[str, ...]] = {"png": ("png",), "svg": ("svg",), "both": ("png", "svg")}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="png", help="of the pictures (default: %(default)s)")


def save(figure: Figure, output: Path, name: str, form: str = "png") -> list[Path]:
    """Writes the figure into `output`, which is there, once a format. Names may hold dots, as llama3.2-1b does."""
    paths = [output / f"{name}.{suffix}" for suffix in FORMATS[form]]
    for path in paths:
        figure.savefig(path)
    return paths
