"""Command line of training: a flag for every field of `TrainConfig`."""

import argparse
import dataclasses
import difflib
import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from lightseq.config.choices import CHOICES
from lightseq.config.flag_names import FLAGS_OF_OTHER_PROGRAMS, OLDER_SPELLINGS, REMEDIES, normalize_flag
from lightseq.config.flags import GROUPS
from lightseq.config.lengths import length_flag
from lightseq.config.objectives import OBJECTIVES
from lightseq.config.parser import MOST, Parser, whole_number
from lightseq.config.recipes import config_flag
from lightseq.config.train_config import TrainConfig, flag_types
from lightseq.distributed.environment import is_main_process
from lightseq.distributed.rank_launcher import (
    add_launcher_flags,
    parse_launcher_flags,
    started_by_another_launcher,
    started_with,
)

REQUIRED: Final = ("model_name_or_path", "data_path", "output_dir")
REQUIRED_BY_TOOLS: Final = ("model_name_or_path",)
CLOSE: Final = 0.8  # similarity of a word with one or two typos


def parse(argv: Sequence[str], program: str, required: Sequence[str] = REQUIRED) -> TrainConfig:
    """Parses a command line into a config. Raises ValueError with one line for invalid and for missing flags."""
    given = _values(argv, program)
    if (path := given.pop("config", None)) is not None:
        given = {**_values_in_file(path, program), **given}
    if (objective := OBJECTIVES.get(str(given.get("objective")))) is not None:
        given = {**objective.defaults, **given}
    config = TrainConfig(**given)
    for field in dataclasses.fields(TrainConfig):
        if field.name in required and not getattr(config, field.name):
            raise ValueError(f"--{field.name} is missing: {field.metadata['help']}")
    return config


def _values(words: Sequence[str], program: str) -> dict[str, Any]:
    given, unknown = _parser(program).parse_known_args([normalize_flag(word) for word in words])
    if unknown:
        raise ValueError(_unknown_flag(unknown[0], program))
    return vars(given)


def config_file_of(words: Sequence[str]) -> Path | None:
    """Returns the file that `--config` of a command line names. None also for a value that `parse` refuses."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=config_flag)
    try:
        path: Path | None = parser.parse_known_args(list(words))[0].config
    except argparse.ArgumentError:
        return None
    return path


def launcher_flags_in_file(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the launcher flags in the file that `--config` of a command line names. Raises ValueError if invalid."""
    path = config_file_of(words)
    if path is None:
        return ()
    from lightseq.config.config_file import launcher_arguments_in  # imports PyYAML, which nothing else here needs

    found = launcher_arguments_in(path)
    try:
        parse_launcher_flags(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(found)


def launcher_flags_note(words: Sequence[str], processes: int) -> tuple[str, ...]:
    """Returns a note if another launcher started other processes or restarts than the file of `--config` asks for."""
    if not started_by_another_launcher():  # ours lets the command line override the file
        return ()
    flags = parse_launcher_flags(launcher_flags_in_file(words))
    asked = {"nproc_per_node": flags.processes, "max_restarts": flags.max_restarts}
    has = started_with(processes)
    other = [name for name, value in asked.items() if value not in (None, has[name])]
    if not other:
        return ()
    there = " and ".join(f"{name} {asked[name]}" for name in other)
    here = ", ".join(str(has[name]) for name in other)
    give = " ".join(f"--{name} {asked[name]}" for name in other)
    return (f"--config has {there}, but the run started with {here}; give {give} to the launcher",)


def _values_in_file(path: Path, program: str) -> dict[str, Any]:
    from lightseq.config.config_file import arguments_in  # imports PyYAML, which nothing else here needs

    arguments = arguments_in(path)
    launcher_flags_in_file(["--config", str(path)])  # raises ValueError if invalid
    try:
        found = _values(arguments, program)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if "config" in found:
        raise ValueError(f"{path}: config names another file; put the flags of {found['config']} here")
    return found


def print_help_if_asked(words: Sequence[str], text: Callable[[], str]) -> bool:
    """Prints help on the main rank if the words contain --help. Returns whether they do."""
    if not {"-h", "--help"} & set(words):
        return False
    if is_main_process():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may close the pipe early, as `head` does
        print(text())
    return True


def help_text(program: str, about: str = "", starts_ranks: bool = False) -> str:
    """Returns the help of a program: every flag by group, with its choices and default.

    `about` describes a tool that takes the flags of training; such tools do not require data. `starts_ranks`: the
    program also takes the flags of a launcher.
    """
    parser = _parser(program, REQUIRED_BY_TOOLS if about else REQUIRED)
    if starts_ranks:
        add_launcher_flags(parser)
    paths = "" if about else " --data_path PATH --output_dir PATH"
    parser.usage = f"{program} --model_name_or_path NAME{paths} [--flag value ...]"
    parser.description = about
    return parser.format_help().rstrip()


def _parser(program: str, required: Sequence[str] = REQUIRED) -> Parser:
    """Returns a parser that sets only the flags given; `TrainConfig` has the defaults. Help marks `required` flags."""
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    layout = partial(argparse.HelpFormatter, width=width, max_help_position=41 if width >= 100 else 24)
    parser = Parser(
        prog=program, formatter_class=layout, argument_default=argparse.SUPPRESS, add_help=False, allow_abbrev=False
    )
    file_help = (
        "YAML or JSON file of flags, the name of a recipe (lightseq recipes lists them), or the run.json of an earlier "
        "run. The command line overrides it; `--flag none` takes a flag of the file back if it has no default."
    )
    parser.add_argument_group().add_argument("--config", type=config_flag, metavar="FILE", help=file_help)
    types = flag_types()
    for title, group in GROUPS.items():
        section = parser.add_argument_group(title)
        for field in dataclasses.fields(group):
            kind = types[field.name]
            # --bf16 alone means --bf16 True.
            bare: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
            convert = BY_FLAG.get(field.name, CONVERTERS[kind])
            if "default" in field.metadata:  # the run decides
                convert = partial(_auto_or, convert)
            elif field.default is None and "none" not in CHOICES.get(field.name, ()):
                convert = partial(_none_or, convert)
            section.add_argument(
                f"--{field.name}", type=convert, metavar=METAVARS[kind], help=_help(field, required), **bare
            )
    for older, name in OLDER_SPELLINGS.items():
        parser.add_argument(f"--{older}", dest=name, type=CONVERTERS[types[name]], help=argparse.SUPPRESS)
    return parser


def _help(field: dataclasses.Field[Any], required: Sequence[str]) -> str:
    notes = ["required"] if field.name in required else []
    notes += [f"choices: {', '.join(CHOICES[field.name])}"] if field.name in CHOICES else []
    default = field.metadata.get("default", field.default)
    notes += [f"default: {default}"] if default not in (None, "") else []
    text = field.metadata["help"] + (f" [{'; '.join(notes)}]" if notes else "")
    return text.replace("%", "%%")  # argparse expands % in help texts


def _auto_or(convert: Callable[[str], Any], text: str) -> Any:
    """Converts a value, but `auto` to None."""
    try:
        return None if text.lower() == "auto" else convert(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto for the planner's choice") from None


def _none_or(convert: Callable[[str], Any], text: str) -> Any:
    """Converts a value, but `none` to None, as if the flag were not given."""
    return None if text.lower() == "none" else convert(text)


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is not a boolean; give True or False")
    return words[text.lower()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _json_object(text: str, example: str = '{"rope_type": "linear", "factor": 4.0}') -> dict[str, Any]:
    remedy = f"give a JSON object such as '{example}'"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.200} is not a JSON object; {remedy}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's parser takes and no setting means."""
    raise ValueError(f"{name} is not a number")


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,19}):(\d{1,19})", text)
    if not match or max(map(int, match.groups())) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a range of steps; give first:last, such as 10:12")
    return int(match[1]), int(match[2])


def _checkpoint(text: str) -> str | None:
    return {"true": "True", "auto": "auto", "false": None}.get(text.lower(), text)


CONVERTERS: Final[Mapping[type, Callable[[str], Any]]] = {
    str: str,
    bool: _boolean,
    int: whole_number,
    float: _number,
    dict: _json_object,
    tuple: _span,
}
METAVARS: Final[Mapping[type, str]] = {
    str: "TEXT",
    bool: "BOOL",
    int: "N",
    float: "X",
    dict: "JSON",
    tuple: "FIRST:LAST",
}
BY_FLAG: Final[Mapping[str, Callable[[str], Any]]] = {
    "resume_from_checkpoint": _checkpoint,
    "model_max_length": length_flag,
    "lr_scheduler_kwargs": partial(_json_object, example='{"min_lr_rate": 0.1}'),
}


def _unknown_flag(word: str, program: str) -> str:
    if not word.startswith("--"):
        return f"unexpected argument {word!r} without a flag; {program} --help lists the flags"
    flag = word.split("=")[0]
    typed = flag.removeprefix("--").rpartition(".")[2]  # torchtitan has --training.seq_len
    if typed in REMEDIES:
        return f"unknown flag {flag}; {REMEDIES[typed]}"
    known = {name: name for name in ("config", *flag_types(), *OLDER_SPELLINGS)} | dict(FLAGS_OF_OTHER_PROGRAMS)
    nearest = difflib.get_close_matches(typed, known, n=1, cutoff=CLOSE)
    guess = f"; did you mean --{known[nearest[0]]}?" if nearest else f"; {program} --help lists them"
    return f"unknown flag {flag}{guess}"
