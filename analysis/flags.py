"""Knows what a run was asked for, from its run.json: its flags, which of them the command named, and what differs."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Where a run goes and what becomes of an earlier one there: nothing that a figure depends on.
PLACES = ("output_dir", "overwrite_output_dir")
# What is done beside training; a difference is listed, but explains nothing.
BYSTANDERS = ("save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps", "report_to")
# What must be alike for two courses of the loss to be one.
SAME_COURSE = ("seed", "data_path", "model_name_or_path", "random_init", "model_max_length")

# What a figure's line names of the versions.
SOFTWARE = {"torch": "torch", "cuda": "CUDA", "transformers": "transformers", "flash-attn-4": "flash-attn-4"}
COMMIT_LETTERS = 10

About = Mapping[str, object]


@dataclass(frozen=True)
class Difference:
    """One thing that two runs do not share, by the name it has in run.json."""

    name: str
    first: object
    second: object

    def __str__(self) -> str:
        return f"{self.name}: {shown_setting(self.name, self.first)} and {shown_setting(self.name, self.second)}"


def shown(value: object) -> str:
    """A value as a reader takes it: what is empty or absent is said."""
    return {"": '""', "None": "none", "True": "yes", "False": "no"}.get(str(value), str(value))


def shown_setting(name: str, value: object) -> str:
    """The value of a flag, with what an empty one means where the flag does not say it."""
    return "off (DDP)" if name == "fsdp" and value == "" else shown(value)


def section(about: About, name: str) -> Mapping[str, object]:
    """One of the objects inside run.json; empty where the run wrote none."""
    found = about.get(name)
    return found if isinstance(found, dict) else {}


def named(about: About) -> set[str]:
    """The flags that the command names.

    What a flag is when it is left out changes from version to version; the run's own command says what was asked for.
    """
    command = about.get("command")
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:  # a quote is missing: somebody shortened the command by hand
        words = str(command).split()
    return {word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def differing_flags(first: About, second: About) -> list[Difference]:
    """The flags and the number of ranks that differ; a flag that one run's version does not know is left out."""
    if not (first and second):
        return []
    configs = section(first, "config"), section(second, "config")
    names = [name for name in configs[0] if name in configs[1] and name not in PLACES]
    found = [Difference(name, *(config[name] for config in configs)) for name in names]
    ranks = Difference("ranks", first.get("world_size"), second.get("world_size"))
    return [difference for difference in (*found, ranks) if difference.first != difference.second]


def differing_machines(first: About, second: About) -> list[Difference]:
    """Devices and versions that differ."""
    found: list[Difference] = []
    if not (first and second):
        return found
    for name, keys in (("hardware", ("device",)), ("versions", None)):
        sides = section(first, name), section(second, name)
        wanted = keys or tuple(dict.fromkeys((*sides[0], *sides[1])))
        found += [Difference(key, *(side.get(key) for side in sides)) for key in wanted]
    return [difference for difference in found if difference.first != difference.second]


def stands_on(abouts: Sequence[About]) -> str:
    """The hardware and software of several runs in a line, as far as all of them have the same."""

    def shared(values: Iterable[object]) -> str:
        found = {str(value) if value is not None else "" for value in values}
        return found.pop() if len(found) == 1 else ""

    device, ranks = (
        shared(section(a, "hardware").get("device") for a in abouts),
        shared(a.get("world_size") for a in abouts),
    )
    if device == "cpu":
        hardware = f"CPU, {ranks} process{'es' if ranks != '1' else ''}" if ranks else "CPU"
    else:
        hardware = f"{ranks} × {device}" if ranks and device else device
    versions = {name: shared(section(a, "versions").get(key) for a in abouts) for key, name in SOFTWARE.items()}
    commit = shared(a.get("commit") for a in abouts)
    words = [hardware, *(f"{name} {version}" for name, version in versions.items() if version and version != "none")]
    return ", ".join(word for word in (*words, f"commit {short_commit(commit)}" if commit else "") if word)


def short_commit(commit: str) -> str:
    """Ten letters of it, and whether files differed from it."""
    letters, _, changed = commit.partition("-")
    return f"{letters[:COMMIT_LETTERS]} ({changed})" if changed else letters[:COMMIT_LETTERS]
