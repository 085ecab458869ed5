"""Safe reading of the tensor index that torch.distributed.checkpoint writes.

The index is a pickle of torch's classes. Nothing that the pickle names is imported or called: its values are copied
into torch's classes if they have exactly the expected types, and checked against the files.
"""

import math
import pickle
import stat
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightseq.utils.formatting import first_line, is_plain_name
from lightseq.utils.pickles import PICKLE_ERRORS, PickledGlobal, PickledObject, load_described

INDEX: Final = ".metadata"
DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
METADATA_MODULE, FILESYSTEM_MODULE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
ALLOWED_GLOBALS: Final = frozenset(  # names that an index may refer to
    [f"{METADATA_MODULE}.{name}" for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )]
    + [f"{FILESYSTEM_MODULE}._StorageInfo", "torch.Size", "torch.serialization._get_layout"]
    + ["pathlib.PosixPath", "pathlib._local.PosixPath"]
    + ["builtins.getattr"]  # some versions of Python, such as 3.11.2, pickle enum members with it
    + list(DTYPES)
)  # fmt: skip
MAX_DIMENSIONS: Final = 64  # torch's limit


def read_index(directory: Path) -> Metadata:
    """Reads the index of a directory. Raises ValueError if it is invalid or does not match the files."""
    path = directory / INDEX
    try:
        found = load_described(path, _check_name)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; give another checkpoint") from error
    except (*PICKLE_ERRORS, OSError) as error:
        raise ValueError(f"{path} is not a tensor index: {first_line(error)}; give another checkpoint") from error
    try:
        return _rebuild(found, directory)
    except OSError as error:
        raise ValueError(f"{path} names a missing file ({first_line(error)}); give another checkpoint") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}; give another checkpoint") from error


def _check_name(module: str, name: str) -> None:
    if f"{module}.{name}" not in ALLOWED_GLOBALS:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which does not belong in a tensor index")


def _rebuild(found: Any, directory: Path) -> Metadata:
    tensors, storage = _fields(found, f"{METADATA_MODULE}.Metadata", "state_dict_metadata", "storage_data")
    by_index = {_index(key): _storage_info(value) for key, value in _checked(storage, dict).items()}
    _check_files(directory, list(by_index.values()))
    stored: dict[str, Any] = {
        _checked(name, str): _tensor(name, value) for name, value in _checked(tensors, dict).items()
    }
    for name, tensor in stored.items():
        for chunk in tensor.chunks:
            if MetadataIndex(name, chunk.offsets) not in by_index:
                raise ValueError(f"has no file for the part of {name} at {list(chunk.offsets)}")
    return Metadata(stored, {name: (name,) for name in stored}, by_index, StorageMeta())


def _fields(value: Any, name: str, *keys: str) -> list[Any]:
    """Returns attributes of a pickled object of the class `name`, None for missing ones."""
    if type(value) is not PickledObject or value.name != name:
        raise ValueError(f"is not a tensor index: expected a {name.rpartition('.')[2]}")
    state = _checked(value.state, dict)
    return [state.get(key) for key in keys]


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"is not a tensor index: {type(value).__name__} instead of {kind.__name__}")
    return value


def _size(value: Any) -> torch.Size:
    if type(value) is not PickledObject or value.name != "torch.Size" or len(value.arguments) != 1:
        raise ValueError("is not a tensor index: expected a torch.Size")
    numbers = _checked(value.arguments[0], tuple)
    if len(numbers) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise ValueError("has an invalid tensor size")
    return torch.Size(numbers)


def _index(value: Any) -> MetadataIndex:
    name, offset = _fields(value, f"{METADATA_MODULE}.MetadataIndex", "fqn", "offset")
    return MetadataIndex(_checked(name, str), _size(offset))


def _storage_info(value: Any) -> _StorageInfo:
    keys = ("relative_path", "offset", "length", "transform_descriptors")
    file, offset, length, transforms = _fields(value, f"{FILESYSTEM_MODULE}._StorageInfo", *keys)
    if transforms or not is_plain_name(_checked(file, str)):
        raise ValueError(f"names the file {file[:80]!r}, which is not a plain file name")
    return _StorageInfo(file, _checked(offset, int), _checked(length, int))


def _tensor(name: str, value: Any) -> TensorStorageMetadata:
    if type(value) is not PickledObject or value.name != f"{METADATA_MODULE}.TensorStorageMetadata":
        raise ValueError(f"has an entry {name} that is not a tensor")
    properties, size, chunks = _fields(value, value.name, "properties", "size", "chunks")
    shape = _size(size)
    parts = [_chunk(chunk, shape, name) for chunk in _checked(chunks, list)]
    if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
        raise ValueError(f"has parts of {name} that do not add up to its shape {list(shape)}")
    return TensorStorageMetadata(TensorProperties(_dtype(properties)), shape, parts)


def _chunk(value: Any, shape: torch.Size, name: str) -> ChunkStorageMetadata:
    offsets, sizes = map(_size, _fields(value, f"{METADATA_MODULE}.ChunkStorageMetadata", "offsets", "sizes"))
    inside = len(offsets) == len(sizes) == len(shape)
    if not inside or any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"has a part of {name} outside its shape {list(shape)}")
    return ChunkStorageMetadata(offsets, sizes)


def _dtype(properties: Any) -> torch.dtype:
    """Returns the dtype from a tensor's properties. The other properties are deprecated and ignored."""
    if type(properties) is not PickledObject or properties.name != f"{METADATA_MODULE}.TensorProperties":
        raise ValueError("has a tensor without properties")
    state = _checked(properties.state, tuple)
    if not state or type(state[0]) is not PickledGlobal or state[0].text not in DTYPES:
        raise ValueError("has a tensor of an unknown dtype")
    return DTYPES[state[0].text]


def _check_files(directory: Path, entries: list[_StorageInfo]) -> None:
    """Raises ValueError unless every entry lies inside a regular file of the directory. Links and pipes are refused."""
    lengths = {}
    for file in {entry.relative_path for entry in entries}:
        status = (directory / file).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"names the file {file!r}, which is not a regular file")
        lengths[file] = status.st_size
    for entry in entries:
        if min(entry.offset, entry.length) < 0 or entry.offset + entry.length > lengths[entry.relative_path]:
            raise ValueError(f"names bytes outside the file {entry.relative_path!r}")
