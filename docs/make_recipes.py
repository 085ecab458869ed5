"""Plans recipes for lightseq/recipes/plans.json, and writes the table of docs/recipes.md.

python3 docs/make_recipes.py [RECIPE ...]

Without names it plans all, which takes three minutes.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightseq.cli import BOTH
from lightseq.config.recipes import recipe_files
from lightseq.plan.breakdown import GIB
from lightseq.plan.make_plan import make_plan
from lightseq.tools.plan.command import split_flags
from lightseq.tools.plan.training import planned_run
from lightseq.tools.recipes import COLUMNS, PLANS, recipes

PAGE = Path(__file__).with_name("recipes.md")
BEGIN, END = "<!-- Made by docs/make_recipes.py. -->\n", "<!-- End of what it made. -->\n"
LEFT_OUT = COLUMNS.index("GiB per GPU")  # most plans fill the GPU


def figures(name: str) -> dict[str, float]:
    """Returns what the planner says of a recipe on its hardware. Raises ValueError if it does not fit."""
    plan = make_plan(planned_run(BOTH, *split_flags(["--config", name])))
    if not plan.fits:
        raise ValueError(f"{name} does not fit: lightseq plan --config {name}")
    return {
        "gib_per_gpu": round(plan.parts.total / GIB, 1),
        "gib_per_host": round(plan.host_bytes / GIB),
        "tokens_per_second": round(plan.tokens_per_second),
    }


def page(text: str) -> str:
    """Returns the page with the table and the list of shapes made again."""
    rows = [(f"`{row[0]}`", *row[1:]) for row in (recipe.row for recipe in recipes())]
    shown = [(*row[:LEFT_OUT], *row[LEFT_OUT + 1 :]) for row in (COLUMNS, *rows)]
    head, *lines = [f"| {' | '.join(row)} |" for row in shown]
    table = [head, "|---" * len(shown[0]) + "|", *lines]
    names = ", ".join(f"`{name}`" for name in BOTH.presets)
    shapes = textwrap.fill(f"With `--random_init`, `--model_name_or_path` takes {names}.", 120, break_on_hyphens=False)
    before, rest = text.split(BEGIN)
    made = "\n".join([*table, "", "## Shapes", shapes, ""])
    return before + BEGIN + made + END + rest.split(END)[1]


def main(names: Sequence[str]) -> None:
    known = json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.is_file() else {}
    planned = {name: figures(name) for name in names or recipe_files()}
    plans = {name: planned.get(name, known.get(name)) for name in recipe_files()}
    PLANS.write_text(json.dumps(plans, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
