"""Manifest of a checkpoint: length and SHA-256 of every file, to detect damage before loading."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from lightseq.utils.files import open_regular, parse_json, read_text

MANIFEST, VERSION = "manifest.json", 1
STATE, TRAINER_STATE = "state", "trainer_state.json"
CARD = "README.md"  # users may edit the model card
LOADED = ("config.json", "adapter_config.json")  # files that are loaded, besides weights and state
READERS = 4  # files that a rank reads in parallel


@dataclass(frozen=True)
class File:
    """Length and SHA-256 of a file."""

    bytes: int
    sha256: str


def describe(path: Path) -> File:
    """Reads a regular file and returns its length and SHA-256."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), digest)


def describe_all(directory: Path, names: Sequence[str]) -> dict[str, File]:
    """Describes files of a directory in parallel, because hashing takes as long as reading."""
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(lambda name: describe(directory / name), names), strict=True))


def files_below(directory: Path) -> list[str]:
    """Returns the relative path of every file of a checkpoint except the manifest."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def write(directory: Path, files: Mapping[str, File]) -> None:
    """Writes the manifest of a directory."""
    content = {"version": VERSION, "files": {name: asdict(files[name]) for name in sorted(files)}}
    (directory / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def read(directory: Path) -> dict[str, File]:
    """Returns the files of a manifest by name.

    Raises ValueError if the manifest is missing, malformed, or names a file outside the directory.
    """
    try:
        files = _parse(read_text(directory / MANIFEST))
    except FileNotFoundError as error:
        raise ValueError(f"{MANIFEST} is missing") from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged") from error
    if outside := [name for name in files if not _is_inside(name)]:
        raise ValueError(f"{MANIFEST} names {outside[0]!r}, which lies outside the checkpoint")
    return files


def _parse(text: str) -> dict[str, File]:
    content = parse_json(text, unique_keys=True)
    files = {name: File(**file) for name, file in content["files"].items()}
    for file in files.values():
        if (
            type(file.bytes) is not int
            or not 0 <= file.bytes < 1 << 63
            or not re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        ):
            raise ValueError(f"{file} is not a length and a SHA-256")
    if content["version"] != VERSION or not files:
        raise ValueError("another version, or no files")
    return files


def find_damage(directory: Path, share: int = 0, shares: int = 1) -> str | None:
    """Returns a description of the first damage found, or None. Reads every `shares`-th file, starting with `share`."""
    try:
        files = read(directory)
    except ValueError as error:
        return str(error)
    expected = (TRAINER_STATE, *filter(_is_loaded, files_below(directory)))
    if unlisted := [name for name in expected if name not in files]:
        return f"{MANIFEST} does not list {unlisted[0]}"
    checked = sorted(name for name in files if name != CARD)
    return _first_damage(directory, {name: files[name] for name in checked[share::shares]})


def own_files(directory: Path) -> list[str]:
    """Returns the files that a manifest lists, except a card that a user has edited. Raises ValueError like `read`."""
    files = read(directory)
    return [name for name in files if name != CARD or _damage(directory, name, files[name]) is None]


def _is_loaded(name: str) -> bool:
    """Returns whether a file of a checkpoint would be loaded. Users may add other files."""
    return name.startswith(f"{STATE}/") or name in LOADED or ("/" not in name and name.endswith(".safetensors"))


def check_weights(directory: Path) -> None:
    """Raises ValueError if .safetensors files do not match the directory's manifest, if it has one."""
    try:
        files = read(directory)
    except ValueError:
        return  # missing, or written by another program
    tensors = {name: file for name, file in files.items() if name.endswith(".safetensors")}
    unlisted = [path.name for path in sorted(directory.glob("*.safetensors")) if path.name not in tensors]
    if damage := f"{MANIFEST} does not list {unlisted[0]}" if unlisted else _first_damage(directory, tensors):
        remedy = f"use another copy, or remove {MANIFEST} if you changed the files on purpose"
        raise ValueError(f"{directory} is damaged: {damage}; {remedy}")


def _first_damage(directory: Path, files: Mapping[str, File]) -> str | None:
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda name: _damage(directory, name, files[name]), files)
        return next((damage for damage in found if damage is not None), None)


def _damage(directory: Path, name: str, expected: File) -> str | None:
    path = directory / name
    try:
        length = path.stat().st_size
        if length != expected.bytes:
            return f"{name} has {length:,} bytes instead of {expected.bytes:,}"
        if describe(path) != expected:
            return f"the SHA-256 of {name} differs from {MANIFEST}"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def sync(paths: Iterable[Path]) -> None:
    """Flushes files and directories to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_inside(name: str) -> bool:
    path, is_text = PurePosixPath(name), all(not "\ud800" <= character <= "\udfff" for character in name)
    return is_text and bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
