"""Tile sizes and warps of flash-linear-attention's Triton kernels, measured once instead of in every first step.

Triton's autotuner compiles and times up to 48 variants of a kernel, for every number of heads. Which one is fastest
depends on the GPU and the sizes of a head, not on how many heads there are. `hopper.json` holds what
`benchmarks/tune_recurrences.py` found, and a kernel without an entry is tuned as before.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

# fla's modules with kernels that the scans call.
MODULES: Final = (
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_h",
    "fla.ops.common.chunk_o",
    "fla.ops.gated_delta_rule.chunk_fwd",
    "fla.ops.gated_delta_rule.wy_fast",
    "fla.ops.gla.chunk",
    "fla.ops.kda.chunk_bwd",
    "fla.ops.kda.chunk_intra",
    "fla.ops.kda.wy_fast",
    "fla.ops.utils.cumsum",
    "fla.ops.utils.solve_tril",
)
HEADS: Final = ("H", "HV")  # names in tuning keys: heads of queries and keys, of values
FILES: Final = {(9, 0): "hopper.json"}  # by compute capability


def autotuners() -> Iterator[tuple[str, Any]]:
    """Yields fla's autotuners by the name of their kernel."""
    for module in filter(find_spec, MODULES):  # another version may lack some
        for name, found in vars(import_module(module)).items():
            while found is not None and hasattr(found, "fn"):  # heuristics lie around or inside the autotuner
                if hasattr(found, "configs"):
                    yield name, found
                found = found.fn


def measured() -> list[dict[str, Any]]:
    """Returns the autotuners' choices in this process: kernel, key, dtypes of arguments, and choice.

    Raises ValueError for a key whose parts cannot be named.
    """
    out = []
    for kernel, tuner in autotuners():
        names = _key_names(tuner)
        for key, config in tuner.cache.items():
            values, dtypes = key[: len(names)], key[len(names) :]
            if not all(str(dtype).startswith("torch.") for dtype in dtypes) or len(values) < len(names):
                raise ValueError(f"{kernel} has the key {key}, whose parts are not {names}")
            out.append({
                "kernel": kernel,
                "key": {name: None if name in HEADS else value for name, value in zip(names, values, strict=True)},
                "dtypes": list(dtypes),
                "choice": {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages},
            })  # fmt: skip
    return out


def _key_names(tuner: Any) -> list[str]:
    """Returns the names of a tuning key's leading values, without those set by the tuner or its heuristics."""
    inside = {*tuner.configs[0].kwargs, *getattr(tuner.fn, "values", ())}
    return [name for name in tuner.keys if name not in inside]


@cache
def take_tuned_choices(key_heads: int, value_heads: int, device: torch.device) -> None:
    """Gives fla's autotuners the stored choices for this GPU and these numbers of heads."""
    file = FILES.get(torch.cuda.get_device_capability(device))
    if file is None:
        return
    heads = dict(zip(HEADS, (key_heads, value_heads), strict=True))
    tuners = dict(autotuners())
    for entry in json.loads(Path(__file__).with_name(file).read_text()):
        tuner = tuners.get(entry["kernel"])
        if tuner is None or _key_names(tuner) != list(entry["key"]):
            continue  # another version of the kernel
        for counts in _head_counts(entry["key"], heads):
            key = (*(counts.get(name, value) for name, value in entry["key"].items()), *entry["dtypes"])
            tuner.cache.setdefault(key, _config(tuner, entry["choice"]))


def _head_counts(key: Mapping[str, Any], heads: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields values of a key's heads. H alone counts heads of queries in some kernels, and of values in others."""
    if "H" in key and "HV" not in key:
        yield from ({"H": count} for count in {*heads.values()})
    else:
        yield {name: count for name, count in heads.items() if name in key}


def _config(tuner: Any, choice: Mapping[str, Any]) -> Any:
    """Returns a choice as a configuration of Triton."""
    sizes = {name: value for name, value in choice.items() if name not in ("num_warps", "num_stages")}
    return type(tuner.configs[0])(sizes, num_warps=choice["num_warps"], num_stages=choice["num_stages"])
