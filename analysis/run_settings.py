"""Settings of runs as text, differences between two runs, and settings that several runs share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .records import Record
from .runs import section

PATHS = ("output_dir", "overwrite_output_dir")  # without effect on results
SOFTWARE = {"torch": "torch", "cuda": "CUDA", "transformers": "transformers", "flash-attn-4": "flash-attn-4"}
COMMIT_LETTERS = 10


@dataclass(frozen=True)
class Difference:
    """A setting with its values in two runs."""

    name: str
    first: object
    second: object

    def __str__(self) -> str:
        return f"{self.name}: {setting_text(self.name, self.first)} and {setting_text(self.name, self.second)}"


def setting_text(name: str, value: object) -> str:
    """Returns a flag's value as text; an empty `--fsdp` means DDP."""
    if name == "fsdp" and value == "":
        return "off (DDP)"
    return {"": '""', "None": "none", "True": "yes", "False": "no"}.get(str(value), str(value))


def differing_flags(first: Record, second: Record) -> list[Difference]:
    """Returns differing flags that both runs have, and the number of ranks if it differs."""
    if not (first and second):
        return []
    one, other = section(first, "config"), section(second, "config")
    pairs = [Difference(name, one[name], other[name]) for name in one if name in other and name not in PATHS]
    pairs.append(Difference("ranks", first.get("world_size"), second.get("world_size")))
    return [pair for pair in pairs if pair.first != pair.second]


def differing_machines(first: Record, second: Record) -> list[Difference]:
    """Returns differing device and software versions."""
    if not (first and second):
        return []
    devices = (section(info, "hardware").get("device") for info in (first, second))
    one, other = section(first, "versions"), section(second, "versions")
    versions = [Difference(name, one.get(name), other.get(name)) for name in dict.fromkeys((*one, *other))]
    return [pair for pair in (Difference("device", *devices), *versions) if pair.first != pair.second]


def hardware_and_versions(infos: Sequence[Record]) -> str:
    """Returns one line with the device, versions and commit that all runs share."""

    def shared(values: Iterable[object]) -> str:
        found = {str(value) if value is not None else "" for value in values}
        return found.pop() if len(found) == 1 else ""

    device = shared(section(info, "hardware").get("device") for info in infos)
    ranks = shared(info.get("world_size") for info in infos)
    if device == "cpu":
        hardware = f"CPU, {ranks} process{'es' if ranks != '1' else ''}" if ranks else "CPU"
    else:
        hardware = f"{ranks} × {device}" if ranks and device else device
    versions = {name: shared(section(info, "versions").get(key) for info in infos) for key, name in SOFTWARE.items()}
    commit = shared(info.get("commit") for info in infos)
    words = [hardware, *(f"{name} {version}" for name, version in versions.items() if version not in ("", "none"))]
    return ", ".join(word for word in (*words, f"commit {short_commit(commit)}" if commit else "") if word)


def short_commit(commit: str) -> str:
    """Returns the first ten letters of a commit, with `(changed)` if the work tree had changes."""
    letters, _, changed = commit.partition("-")
    return f"{letters[:COMMIT_LETTERS]} ({changed})" if changed else letters[:COMMIT_LETTERS]
