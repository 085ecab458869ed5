"""Lists recipes with what the planner says of them, or prints one.

lightseq recipes
lightseq recipes qwen3-8b-lora-128k > mine.yaml
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightseq.config.command_line import REQUIRED_BY_TOOLS, parse
from lightseq.config.parser import Parser, run_command
from lightseq.config.recipes import FOLDER, recipe_file, recipe_files
from lightseq.models.presets import ModelFamily
from lightseq.tools.plan.command import split_flags

PLANS: Final = FOLDER / "plans.json"  # made by docs/make_recipes.py
HOURS_OF: Final = 100_000_000  # tokens
COLUMNS: Final = ("recipe", "job", "model", "tokens", "GPUs", "GiB per GPU", "hours")
ABOUT: Final = """\
GiB and hours are what lightseq plan --config RECIPE predicts, the hours for 100 million
tokens in full sequences of one document each; packed documents take less.
    lightseq recipes RECIPE                               prints a recipe
    lightseq train --config RECIPE --data_path DATA       trains it"""


@dataclass(frozen=True)
class Recipe:
    """A recipe, with the hardware that it was planned for and the planner's figures."""

    name: str
    job: str
    model: str
    length: int
    hardware: str
    gib_per_gpu: float
    tokens_per_second: float

    @property
    def row(self) -> tuple[str, ...]:
        """The texts of its row in a table with `COLUMNS`."""
        hours = HOURS_OF / self.tokens_per_second / 3600
        length, gib = f"{self.length // 1024}K", f"{self.gib_per_gpu:.0f}"
        return (self.name, self.job, self.model, length, self.hardware, gib, f"{hours:.1f}")


def recipes() -> Iterator[Recipe]:
    """Yields every recipe."""
    plans = json.loads(PLANS.read_text(encoding="utf-8"))
    for name, path in recipe_files().items():
        yield _read(name, path, plans[name])


def _read(name: str, path: Path, plan: dict[str, Any]) -> Recipe:
    own, training = split_flags(["--config", name])
    config = parse(training, "lightseq recipes", REQUIRED_BY_TOOLS)
    chip = own.chip if own.gpu_memory is None else f"{own.gpu_memory:g} GiB"
    return Recipe(
        name=name,
        job=path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "),
        model=config.model_name_or_path,
        length=config.model_max_length,
        hardware=f"{own.gpus} x {chip}",
        gib_per_gpu=plan["gib_per_gpu"],
        tokens_per_second=plan["tokens_per_second"],
    )


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    """Runs `lightseq recipes`. Returns the exit status."""
    parser = Parser(prog="lightseq recipes", description="Lists recipes for --config, or prints one.")
    parser.add_argument("name", nargs="?", metavar="RECIPE", help="recipe to print, to copy and change it")
    return run_command(lambda: _print(parser.parse_args(words).name))


def _print(name: str | None) -> None:
    if name is not None:
        sys.stdout.write(recipe_file(name).read_text(encoding="utf-8"))
        return
    lines = [f"{'recipe':<30}{'GPUs':<16}{'tokens':>7}{'GiB per GPU':>14}{'hours':>8}"]
    for recipe in recipes():
        name, job, model, length, hardware, gib, hours = recipe.row
        lines += [f"{name:<30}{hardware:<16}{length:>7}{gib:>14}{hours:>8}", f"    {job}: {model}"]
    print(*lines, "", ABOUT, sep="\n")
