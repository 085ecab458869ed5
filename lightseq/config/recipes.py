"""Recipes: files of flags that ship with lightseq, which --config finds by name."""

import argparse
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent.parent / "recipes"


def recipe_files() -> Mapping[str, Path]:
    """Returns the files of all recipes by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def recipe_file(name: str) -> Path:
    """Returns the file of a recipe. Raises ValueError for an unknown name."""
    files = recipe_files()
    if name not in files:
        nearest = difflib.get_close_matches(name.lower(), files, n=3)
        guess = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        raise ValueError(f"{name} is no recipe; {guess}lightseq recipes lists them")
    return files[name]


def config_flag(text: str) -> Path:
    """Parses the value of --config for argparse: a file, or else the name of a recipe."""
    path = Path(text)
    if os.path.isfile(text) or path.name != text or path.suffix in (".yaml", ".yml", ".json"):
        return path
    try:
        return recipe_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"there is no such file, and {error}") from None
