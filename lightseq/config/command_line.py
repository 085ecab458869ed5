"""The command line of training: a flag for every field of `TrainConfig`, its help read off the field's comment."""

import argparse
import dataclasses
import difflib
import functools
import inspect
import json
import re
import shutil
import signal
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightseq.config.checks import CHOICES
from lightseq.config.lengths import length_flag
from lightseq.config.parser import Parser
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.environment import is_main_process

REQUIRED: Final = ("model_name_or_path", "data_path", "output_dir")
OLDER_SPELLINGS: Final[Mapping[str, str]] = {"evaluation_strategy": "eval_strategy", "set_seed": "seed"}


def parse(argv: Sequence[str], program: str) -> TrainConfig:
    """The config that the words after the program's name ask for; `ValueError` with one line if they cannot be met."""
    values, unknown = _parser(program).parse_known_args([underscored(word) for word in argv])
    if unknown:
        raise ValueError(_unknown_flag(unknown[0], program))
    config = TrainConfig(**vars(values))
    help_of = {flag: comment for flags in help_groups().values() for flag, comment in flags.items()}
    for flag in REQUIRED:
        if not getattr(config, flag):
            raise ValueError(f"--{flag} is missing: {help_of[flag].removesuffix(' (required)')}")
    return config


def shows_help(words: Sequence[str], text: Callable[[], str]) -> bool:
    """Whether the words ask for help; it is printed then, once for all ranks."""
    if not {"-h", "--help"} & set(words):
        return False
    if is_main_process():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads the first lines alone may leave
        print(text())
    return True


def help_text(program: str, about: str = "") -> str:
    """Every flag that can be given, by group, with what it means, its choices and its default.

    `about` is of a tool that takes them beside training, and makes up data.
    """
    paths = "" if about else " --data_path PATH --output_dir PATH"
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    lines = [f"usage: {program} --model_name_or_path NAME{paths} [--flag value ...]"]
    lines += ["", *textwrap.wrap(about, width)] if about else []
    for title, flags in help_groups().items():
        lines += ["", title]
        lines += [_help_line(flag, comment, width) for flag, comment in flags.items()]
    return "\n".join(lines)


def _help_line(flag: str, comment: str, width: int) -> str:
    """In a narrow terminal under the flag, if that is long."""
    default, name, column = _defaults()[flag], f"  --{flag}", 41 if width >= 100 else 24
    notes = [f"choices: {', '.join(CHOICES[flag])}"] if flag in CHOICES else []
    notes += [f"default: {default}"] if default not in (None, "") else []
    text = comment + (f" [{'; '.join(notes)}]" if notes else "")
    first, *more = textwrap.wrap(text, max(20, width - column))
    lines = [name.ljust(column) + first] if len(name) < column else [name, " " * column + first]
    return "\n".join([*lines, *(" " * column + line for line in more)])


@functools.cache
def help_groups() -> Mapping[str, Mapping[str, str]]:
    """Title -> flag -> help, read from the source of `TrainConfig` so that the two cannot drift apart."""
    groups: dict[str, dict[str, str]] = {}
    above: list[str] = []
    for line in inspect.getsource(TrainConfig).splitlines():
        if title := re.fullmatch(r"    # \[(.+)\]", line):
            groups[title[1]] = {}
        elif comment := re.fullmatch(r"    # (.+)", line):
            above.append(comment[1])
        elif field := re.fullmatch(r"    (\w+): .*?  # (.+)", line):
            groups[list(groups)[-1]][field[1]] = " ".join([*above, field[2]])
            above = []
    return groups


def underscored(word: str) -> str:
    """--learning-rate=1 names --learning_rate."""
    flag, *value = word.split("=", 1)
    return "=".join(["--" + flag[2:].replace("-", "_"), *value]) if flag.startswith("--") else word


def _parser(program: str) -> Parser:
    parser = Parser(prog=program, add_help=False, allow_abbrev=False)
    hints = typing.get_type_hints(TrainConfig)
    for flag, default in _defaults().items():
        kind = _kind(hints[flag])
        names = [f"--{flag}"] + [f"--{older}" for older, now in OLDER_SPELLINGS.items() if now == flag]
        convert = BY_FLAG.get(flag, CONVERTERS[kind])
        # A flag of yes or no may stand alone; `--bf16` then means True.
        bare: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
        parser.add_argument(*names, dest=flag, type=convert, default=default, **bare)
    return parser


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(TrainConfig)}


def _kind(hint: Any) -> type:
    """The type of a given value: `int | None` is int, `dict[str, Any] | None` is dict."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return words[text.lower()]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _json_object(text: str) -> dict[str, Any]:
    example = """give a JSON object, as '{"rope_type": "linear", "factor": 4.0}'"""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not JSON ({error}); {example}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; {example}")
    return value


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a span of steps; give first:last, as 10:12")
    return int(match[1]), int(match[2])


def _checkpoint(text: str) -> str | None:
    return {"true": "True", "auto": "auto", "false": None}.get(text.lower(), text)


CONVERTERS: Final[Mapping[type, Callable[[str], Any]]] = {
    str: str,
    bool: _boolean,
    int: _integer,
    float: _number,
    dict: _json_object,
    tuple: _span,
}
BY_FLAG: Final[Mapping[str, Callable[[str], Any]]] = {
    "resume_from_checkpoint": _checkpoint,
    "model_max_length": length_flag,
}


def _unknown_flag(word: str, program: str) -> str:
    if not word.startswith("--"):
        return f"unexpected {word!r}: every value follows its flag; {program} --help lists them"
    flag = word.split("=")[0]
    names = (*_defaults(), *OLDER_SPELLINGS)
    ends = Counter(name.rpartition("_")[2] for name in names)
    known = {end: name for name in names if ends[end := name.rpartition("_")[2]] == 1}  # --lenght
    known |= {name: name for name in names}
    nearest = difflib.get_close_matches(flag.removeprefix("--"), known, n=1)
    guess = f"; did you mean --{known[nearest[0]]}?" if nearest else f"; {program} --help lists them"
    return f"unknown flag {flag}{guess}"
