"""Records of benchmarks: JSONL with commit, date, hardware and versions."""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lightseq.training.machine import hardware, versions
from lightseq.utils import source
from lightseq.utils.files import open_output, parse_json, record_lines
from lightseq.utils.formatting import first_line

PACKAGES = ("triton", "accelerate", "trl", "liger-kernel", "ring-flash-attn", "axolotl-ringmaster")


def provenance(commit: str | None, device: torch.device | None = None) -> dict[str, Any]:
    """Returns commit, date, hardware and versions for records.

    Without `device`, a separate process finds one, because initializing CUDA here would hold GPU memory.
    """
    if device is not None:
        found = environment(device)
    else:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(environment).result()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit or source.commit() or "unknown", "date": date, **found}


def environment(device: torch.device | None = None) -> dict[str, Any]:
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    libraries: dict[str, str] = {}
    if device.type == "cuda":
        libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        libraries["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            libraries[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {key: value for key, value in hardware(device).items() if key != "host"}
    return {"hardware": machine, "versions": {**versions(), **libraries}}


def append(path: Path, record: Mapping[str, Any] | Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_output(path, appends=True) as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file. Reports invalid lines and skips them."""
    lines = record_lines(path)[:-1] if path.is_file() else []  # the last line may be cut off
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse_json(line))
        except ValueError as error:
            print(f"{path} line {number} is not JSON ({first_line(error)}); it is left out", file=sys.stderr)
    return found
