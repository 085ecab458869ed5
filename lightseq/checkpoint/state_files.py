"""State files of a checkpoint: sharded tensors and random states.

Tensor files are hashed while they are written, and read without unpickling (tensor_index.py).
"""

import hashlib
import io
import math
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from transformers import PreTrainedModel

from lightseq.checkpoint.tensor_index import read_index
from lightseq.models.weights import LORA_INFIX, stored_buffers
from lightseq.utils.files import read_json
from lightseq.utils.formatting import first_line

PARAMETER, BUFFER = "model.", "buffer."  # prefixes of names
# Each thread alternates between hashing and writing, so four threads keep a disk busy.
THREADS, BYTES_FOR_A_THREAD = 4, 256 << 20


class HashingFile:
    """File wrapper that hashes sequential writes."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.failure: OSError | None = None  # torch.save hides the reason

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._hash.update(data)
        return written

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def __getattr__(self, name: str) -> Any:
        assert name != "seek", "the hash needs sequential writes"
        return getattr(self._file, name)


class _HashingFileSystem(FileSystem):
    """File system that records the hash of each file, by name, when it is closed."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        hashed = None
        try:
            with Path(path).open("wb") as file:
                hashed = HashingFile(file)
                yield cast(io.IOBase, hashed)
        except OSError as error:
            self.failure = error
            raise
        finally:
            self.failure = (hashed.failure if hashed else None) or self.failure
        self.written[Path(path).name.removesuffix(".tmp")] = hashed.hexdigest()


class HashingWriter(dcp.FileSystemWriter):
    """Checkpoint writer that records the SHA-256 of this rank's files. Writes large states to several files at once."""

    def __init__(self, directory: Path) -> None:
        # No copying ahead: it would wait for the device, and all tensors are on the host.
        super().__init__(directory, per_thread_copy_ahead=0)
        self.fs: _HashingFileSystem = _HashingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def write_part(part: SavePlan) -> list[WriteResult]:
            return super(HashingWriter, self).write_data(part, planner).wait()

        with ThreadPoolExecutor(THREADS) as threads:
            results = list(threads.map(write_part, _parts(plan)))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for part in results for result in part])
        return done

    @property
    def written(self) -> Mapping[str, str]:
        return self.fs.written


def _parts(plan: SavePlan) -> list[SavePlan]:
    """Splits one rank's plan into parts of about equal size, one per file."""
    sizes = {item.index: _bytes_of(item) for item in plan.items}
    parts: list[list[WriteItem]] = [[] for _ in range(min(THREADS, 1 + sum(sizes.values()) // BYTES_FOR_A_THREAD))]
    if len(parts) == 1:
        return [plan]
    filled = [0] * len(parts)
    for item in sorted(plan.items, key=lambda item: sizes[item.index], reverse=True):
        least = filled.index(min(filled))
        parts[least].append(item)
        filled[least] += sizes[item.index]
    names = plan.storage_data
    return [
        replace(plan, items=part, storage_data=replace(names, prefix=f"{names.prefix}{i}_"))
        for i, part in enumerate(parts)
    ]


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


class TensorReader(dcp.FileSystemReader):
    """Checkpoint reader that executes no pickled code. Raises ValueError for an invalid index."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = read_index(Path(self.path))
        return self._index


def write(directory: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> Mapping[str, str]:
    """Writes every rank's part of the tensors. Returns this rank's files with their SHA-256.

    Raises OSError on the rank whose disk failed, RuntimeError on the others.
    """
    writer = HashingWriter(directory)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # equal on all ranks
        if writer.fs.failure is not None:
            raise writer.fs.failure from error
        rank, (failure, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank}: {first_line(failure)}") from error
    return writer.written


def tensor_shapes(reader: TensorReader) -> dict[str, list[int]]:
    """Returns the shape of every tensor by name."""
    return {name: list(stored.size) for name, stored in _stored(reader).items()}


def read_full_tensors(directory: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the full tensors whose names start with `prefix`, as pairs of the remaining name and the tensor."""
    reader = TensorReader(directory)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    for name, stored in _stored(reader).items():
        if name.startswith(prefix):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            planner = DefaultLoadPlanner()
            planner.set_up_planner({name: tensor}, reader.read_metadata(), is_coordinator=True)
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
            yield name.removeprefix(prefix), tensor


def _stored(reader: TensorReader) -> dict[str, TensorStorageMetadata]:
    return cast(
        dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata
    )  # read_index checked the types


def rng_file(rank: int) -> str:
    """Returns the file name of a rank's random states."""
    return f"random-{rank}.json"


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Returns the random states of Python, numpy and torch (CPU and device). Does not wait for the device."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937", kind
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "device": on_device,
    }


def restore_rng(path: Path, device: torch.device) -> None:
    """Restores random states from a file, if it exists. Raises ValueError if it is damaged."""
    if not path.is_file():
        return
    try:
        state = read_json(path)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(("MT19937", *state["numpy"]))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        if device.type == "cuda" and state["device"] is not None:
            torch.cuda.set_rng_state(torch.tensor(state["device"], dtype=torch.uint8), device)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} has no valid random states; give another checkpoint") from error


def state_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns parameters, stored buffers and optimizer state by name. Tied parameters appear once.

    The parameters are the adapters, if there are any, else all: a model freezes some itself, such as a router's bias.
    """
    parameters = dict(model.named_parameters())
    adapters = {name: parameter for name, parameter in parameters.items() if LORA_INFIX in name}
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = {f"{PARAMETER}{name}": parameter.detach() for name, parameter in (adapters or parameters).items()}
    found |= {f"{BUFFER}{name}": buffer for name, buffer in stored_buffers(model).items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return found
