"""Safetensors files of a directory of weights, one or several with an index, and the tensors in them by name."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightseq.models import bnb4, fp8_blocks, mxfp4
from lightseq.utils.files import open_regular, read_json
from lightseq.utils.formatting import first_line, is_plain_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with default permissions; the library would make it private to the owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises ValueError if it is damaged or no regular file."""
    try:
        open_regular(path).close()
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({reason_of(error)}); copy or download it again") from error
    with opened as file:
        yield file


def reason_of(error: SafetensorError | OSError) -> str:
    """Returns the reason without the path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


@contextmanager
def open_tensors(files: Mapping[str, Path]) -> Iterator[Callable[[str], Any]]:
    """Yields a function that returns a tensor in the files by name; only its parts that are asked for are read."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        held: dict[Path, set[str]] = {}

        def names_in(file: Path) -> set[str]:
            if file not in opened:
                opened[file] = stack.enter_context(open_safetensors(file))
                held[file] = set(opened[file].keys())
            return held[file]

        def tensor(name: str) -> Any:
            file, names = files[name], names_in(files[name])
            part = partial(beside, file)
            if name + mxfp4.BLOCKS in names and name not in names:
                return mxfp4.Mxfp4Slice(part(name + mxfp4.BLOCKS), part(name + mxfp4.SCALES))
            if is_in_four_bits(file, name):
                return bnb4.FourBitSlice(name, part)
            found, scales = opened[file].get_slice(name), name + fp8_blocks.SCALES
            if found.get_dtype() == fp8_blocks.CODES and is_there(file, scales) and (dtype := dtype_in(file.parent)):
                return fp8_blocks.Fp8Slice(name, found, part(scales), dtype)
            return found

        def beside(file: Path, name: str) -> Any:
            """Returns a tensor of a file, or of another one of the same model."""
            found = file if name in names_in(file) else file.parent / weight_map(file.parent)[name]
            names_in(found)
            return opened[found].get_slice(name)

        def is_in_four_bits(file: Path, name: str) -> bool:
            return is_there(file, name + bnb4.FACTS)

        def is_there(file: Path, name: str) -> bool:
            return name in held[file] or (not (file.parent / WEIGHTS).is_file() and name in weight_map(file.parent))

        @cache
        def dtype_in(directory: Path) -> str | None:
            return fp8_blocks.dtype_in(directory)

        @cache
        def weight_map(directory: Path) -> dict[str, str]:
            index = directory / INDEX
            return _weight_map(index) if index.is_file() else {}

        yield tensor


def tensor_files(directory: Path, remedy: str) -> dict[str, Path]:
    """Returns the file of each tensor by name, and of a weight in MXFP4, FP8 or four bits the file of its blocks.

    An index beside a single file is not read, as in transformers. Raises ValueError for missing files.
    """
    files = fp8_blocks.join_scales(bnb4.join_parts(_stored_files(directory, remedy)), directory)
    return mxfp4.join_packed(files, directory)


def stored_form(directory: Path) -> str | None:
    """Returns the packed form that files have weights in: `nf4` of bitsandbytes, or `fp8`; None without such."""
    files = _stored_files(directory, "copy it again")
    if bnb4.weights_in(files):
        return bnb4.READ_FORMAT
    return fp8_blocks.METHOD if fp8_blocks.weights_in(files) and fp8_blocks.dtype_in(directory) else None


def _stored_files(directory: Path, remedy: str) -> dict[str, Path]:
    if (directory / WEIGHTS).is_file():
        with open_safetensors(directory / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), directory / WEIGHTS)
    if (directory / INDEX).is_file():
        names = _weight_map(directory / INDEX)
        absent = [file for file in names.values() if not is_plain_name(file) or not (directory / file).is_file()]
        if absent:
            raise ValueError(f"{directory / INDEX} names {absent[0]}, which is missing; copy the whole directory")
        return {name: directory / file for name, file in names.items()}
    raise ValueError(f"{directory} has no {WEIGHTS}; {remedy}")


def bytes_of(directory: Path) -> int:
    """Returns the total size of a model's weight files that exist."""
    single, index = directory / WEIGHTS, directory / INDEX
    names = {WEIGHTS} if single.is_file() or not index.is_file() else set(_weight_map(index).values())
    files = (directory / name for name in names if is_plain_name(name))
    return sum(file.stat().st_size for file in files if file.is_file())


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the file name of each tensor by name, from an index."""
    try:
        names = read_json(path)["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as an index of weights; copy or download it again") from error


def write_index(directory: Path, written: dict[str, str]) -> None:
    """Gives the files that hold the written tensors their final names, and writes an index if there are several."""
    files = sorted(set(written.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / WEIGHTS)
        return
    names = {file: f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files)}
    for file, name in names.items():
        (directory / file).rename(directory / name)
    size = sum((directory / name).stat().st_size for name in names.values())
    index = {"metadata": {"total_size": size}, "weight_map": {k: names[f] for k, f in written.items()}}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
