"""Links of the documentation lead somewhere, its commands are ones that the programs take, its tables are complete."""

import argparse
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from pages import (
    GUIDES,
    LAUNCHER,
    MADE_UP,
    NOWHERE,
    OTHERS,
    OURS,
    PAGES,
    ROOT,
    Command,
    accepted_by,
    command_lines,
    split,
)

from lightseq.cli import COMMANDS, FOLDERS
from lightseq.config.choices import CHOICES
from lightseq.config.command_line import parse
from lightseq.config.flag_names import FLAGS_OF_OTHER_PROGRAMS, REMEDIES
from lightseq.distributed.rank_launcher import parse_launcher_flags
from lightseq.tools.evaluate import options as evaluate
from lightseq.tools.plan import command as plan


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


def test_tables_of_choices_are_complete() -> None:
    found = dict[str, list[str]]()
    for page in PAGES:
        for flag, rows in re.findall(
            r"^\| `--(\w+)` \|.*\n\|[-|: ]+\n((?:\|.*(?:\n|$))+)", page.read_text(), flags=re.M
        ):
            if flag in CHOICES:
                found[flag] = re.findall(r"^\| `([^`]+)`", rows, flags=re.M)
                assert sorted(found[flag]) == sorted(CHOICES[flag]), f"{page.name}: --{flag}"
    assert {"schedule", "kernel"} <= {*found}


def test_the_page_of_flags_is_what_its_generator_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "docs/make_flags.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "flags.md").read_text() == printed.stdout, "run docs/make_flags.py > docs/flags.md"


def test_names_of_other_programs_are_those_that_errors_know() -> None:
    known = {name: f"--{flag}" for name, flag in FLAGS_OF_OTHER_PROGRAMS.items()}
    for flag, *others, _ in runpy.run_path(str(ROOT / "docs" / "make_flags.py"))["NAMES"]:
        for name in " ".join(others).split():
            assert flag.partition(" ")[0] in (known.get(name), f"--{name}") or name in REMEDIES, name


def test_the_tables_of_columns_match_the_reader() -> None:
    page = ROOT / "docs" / "data.md"
    made = runpy.run_path(str(ROOT / "docs" / "make_columns.py"))["page"](page.read_text())
    assert made == page.read_text(), "run docs/make_columns.py"


def test_files_and_names_on_the_pages_for_contributors_exist() -> None:
    """Reads "`name` (`path.py`)" and "`path.py`"; paths are below lightseq/, or the root, and tests have no folder."""
    text = "".join((ROOT / name).read_text() for name in ("docs/architecture.md", "CONTRIBUTING.md"))
    paths = re.findall(r"`([\w/]+\.py)`", text)
    named = re.findall(r"`(\w+)`\s+\(`([\w/]+\.py)`", text)
    assert len(paths) > 50 and len(named) > 15
    for path in paths:
        assert source_of(path), f"{path} is not there"
    for name, path in named:
        assert re.search(rf"^ *(class|def) {name}\b|^{name}\b.*=", source_of(path), flags=re.M), f"{path} has no {name}"


def source_of(path: str) -> str:
    return next((file.read_text() for x in ("lightseq", ".", "tests") if (file := ROOT / x / path).is_file()), "")


# ---- commands ------------------------------------------------------------------------------------------------------

VERL_PROGRAMS = ("sft_trainer", "main_ppo")  # take settings of Hydra; verl is not installed here


class Parsed(BaseException):
    """Ends a program once its command line has been parsed, with the words that it passes on."""

    def __init__(self, words: list[str]) -> None:
        self.words = words


def check_command(command: Command) -> None:
    """Fails if a program of this repository does not know the command's flags, or one of its files does not exist."""
    for path in inputs(command.words):
        assert any(ROOT.glob(path)), f"{path} does not exist"
    if command.words[0] == "make":
        check_make(command.words[1:])
    elif command.words[0] not in OTHERS or any(LAUNCHER.fullmatch(word) for word in command.words):
        check_program(command.program)


def inputs(words: Sequence[str]) -> Iterator[str]:
    """Yields the files of the repository that a command reads, some of them patterns."""
    for before, word in pairwise(("", *words)):
        name, is_flag, value = word.partition("=") if word.startswith("--") else ("", "", word)
        output = "--output" in (before if not is_flag else name)
        if not output and "/" in value and value.partition("/")[0] in OURS:
            yield value


def check_make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name} *[?:]?=" if is_variable else rf"^{name}:"
        assert re.search(pattern, text, flags=re.M), f"the Makefile has no {name}"


def check_program(program: Sequence[str]) -> None:
    """Checks a Python program; training and its relatives parse their flags after they have joined the ranks."""
    if program[0] == "examples/verl/sft.py" or program[:2] in (("-m", f"verl.trainer.{x}") for x in VERL_PROGRAMS):
        assert all("=" in word or word == "..." for word in program[1 if program[0] != "-m" else 2 :]), program
    elif program[0] in ("llama2/train.py", "llama3/train.py"):
        check_training(program[1:])
    elif program[:2] == ("-m", "lightseq") and program[2:3] and "--attention" not in program:
        check_tool(program)
    elif Path(program[0]).parent == Path("examples"):
        assert not program[1:], "the examples take no flags"
    else:
        name = program[1].partition(".")[0] if program[0] == "-m" else program[0].partition("/")[0]
        assert name in OURS, f"{program[0]} is not a known program"
        run_until_parsed(program)


def check_tool(program: Sequence[str]) -> None:
    name, words = program[2], parse_launcher_flags(program[3:]).rest
    if name in FOLDERS:
        return run_until_parsed(("-m", FOLDERS[name].name, *words))
    assert name in COMMANDS, f"lightseq has no command {name}"
    if name == "evaluate":
        accepted_by(evaluate.flags, words)
    elif name in ("train", "verify", "plan"):
        if name == "plan":
            _, words = accepted_by(plan.split_flags, words)
        check_training(words if name == "train" else [*NOWHERE, *words])
    else:
        run_until_parsed(program)


def check_training(words: Sequence[str]) -> None:
    """Fails for flags that training refuses. A file of flags may stand for those that it needs."""
    if "--help" in words:
        return
    if "--config" in words:
        file = words.index("--config")
        words = [*MADE_UP, *words[:file], *words[file + 2 :]]
    accepted_by(lambda given: parse(given, "train"), words)


def run_until_parsed(program: Sequence[str]) -> None:
    """Runs a program until its parser has accepted the flags. Flags that it leaves to another are training flags."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, given: Sequence[str] | None, passes_on: bool) -> None:
        with patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args):  # subparsers call it
            _, rest = parser.parse_known_args(given)
        if rest and not passes_on:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise Parsed(rest)

    stops = {
        "parse_args": lambda parser, given=None: stop(parser, given, passes_on=False),
        "parse_known_args": lambda parser, given=None: stop(parser, given, passes_on=True),
    }
    is_module = program[0] == "-m"
    name, *words = program[is_module:]
    said, left = io.StringIO(), None
    with patch.multiple(argparse.ArgumentParser, **stops), patch.dict(os.environ):
        folder = [] if is_module else [str((ROOT / name).parent)]
        with patch.object(sys, "argv", [name, *words]), patch.object(sys, "path", [*folder, *sys.path]):
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    if is_module:
                        runpy.run_module(name, run_name="__main__", alter_sys=True)
                    else:
                        runpy.run_path(str(ROOT / name), run_name="__main__")
            except Parsed as parsed:
                left = parsed.words
            except (ImportError, ValueError, SystemExit) as error:
                said.write(f" {error}")
    assert left is not None or "--help" in words or not words, said.getvalue().strip()
    if left:
        check_training([*MADE_UP, *left])


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_of_a_page_are_ones_that_the_programs_take(page: Path) -> None:
    faults = []
    for line in command_lines(page):
        try:
            for command in split(line):
                check_command(command)
        except AssertionError as fault:
            faults.append(f"{line}\n    {str(fault).splitlines()[0]}")
    assert not faults, "\n".join(faults)
