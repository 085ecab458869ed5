"""Writes the tables of columns and roles into docs/data.md: python3 docs/make_columns.py"""

import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightseq.data.columns import (
    BESIDE,
    CHAT,
    CHAT_COLUMNS,
    HARMLESS,
    IDS,
    PAIR,
    PREFERENCE,
    PREFERENCE_COLUMNS,
    PROMPT_COLUMNS,
    TARGET_KEYS,
    TEXT,
)

PAGE = Path(__file__).with_name("data.md")
BEGIN, END = "<!-- Made by docs/make_columns.py from lightseq/data/columns.py. -->\n", "<!-- End of what it made. -->\n"

KINDS = (
    (IDS, "tokens"), (CHAT, "chats, prompts"), (PAIR, "prompts"), (PREFERENCE, "preferences"), (TEXT, "text"),
)  # fmt: skip
CHAT_KINDS = "chats of OpenAI and ChatML (turns with `role` and `content`) and of ShareGPT (`from` and `value`)"
PAIR_KINDS = "prompts and answers, as text or turns: Alpaca, Dolly, TRL's prompt and completion"


def code(names: Iterable[str], join: str = ", ") -> str:
    """Returns names as code, separated by commas."""
    return join.join(f"`{name}`" for name in names)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def by_meaning(columns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the columns of each meaning, and the meaning."""
    found = defaultdict(list)
    for name, meaning in columns.items():
        found[meaning].append(name)
    return [(code(names), meaning) for meaning, names in found.items()]


def tables() -> str:
    """Returns the tables."""
    pairs = "; ".join(code(pair, " and ") for pair in PROMPT_COLUMNS)
    formats = [
        ("`input_ids`", "tokens", "every token, or those that a mask names"),
        (code(CHAT_COLUMNS, " or "), CHAT_KINDS, "the assistant's turns"),
        (pairs, PAIR_KINDS, "the answer; with a chat template, text is a chat of two turns"),
        (code(PREFERENCE_COLUMNS, " and "), "[preferences](preferences.md), with `--objective dpo`", "both answers"),
        ("`text`, or the one that `--text_column` names", "text", "every token, and the end-of-sequence token"),
    ]
    parts = [
        table(("columns", "rows", "targets"), formats),
        "Columns beside them:\n",
        table(
            ("column", "meaning"),
            [
                (names, f"{kind}: {meaning}")
                for format_name, kind in KINDS
                for names, meaning in by_meaning(_own(format_name))
                if not meaning.startswith("not used")
            ],
        ),
        textwrap.fill(
            f"In a turn, 0 or false under one of {code(TARGET_KEYS)} means that the answer is no target. "
            f"`lightseq/data/columns.py` lists the names of roles, and {len(HARMLESS)} columns that are ignored, "
            "because they only describe a row. Columns of images, sound and weights of targets are refused.",
            120,
        )
        + "\n",
    ]
    return "\n".join(parts)


def _own(format_name: str) -> Mapping[str, str]:
    """Returns the columns beside a format that are not listed with the chats already."""
    shared = BESIDE[CHAT] if format_name in (PAIR, PREFERENCE) else {}
    return {name: meaning for name, meaning in BESIDE[format_name].items() if name not in shared}


def page(text: str) -> str:
    """Returns the page with the tables made again."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
