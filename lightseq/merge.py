"""Adds a trained adapter to the weights it was trained for, tensor by tensor: a model like any other.

python3 -m lightseq merge --adapter outputs/books/checkpoint-1000 --output_dir outputs/books/merged
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightseq.adapters import CONFIG, ROPE, read_config
from lightseq.adapters import WEIGHTS as ADAPTER_WEIGHTS
from lightseq.checkpoint import FACTS
from lightseq.weights import TOKENIZER_FILES, download

PREFIX: Final = "base_model.model."
OLDER_ROPE: Final = ("rope_theta", "rope_scaling")  # what configs of transformers 4 have in place of rope_parameters


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", type=Path, required=True, help="directory of an adapter, as a checkpoint is")
    parser.add_argument("--output_dir", type=Path, required=True, help="where the merged model goes; a new directory")
    parser.add_argument("--model_name_or_path", help="the model it was trained on (default: what the adapter names)")


def merge(adapter: Path, output_dir: Path, model_name_or_path: str | None) -> str:
    """Writes base + scale · B·A in the base's own dtype, file by file, and a config with the RoPE of the adapter's run.

    Returns a closing line.
    """
    settings = read_config(adapter)
    base = model_name_or_path or settings["base_model_name_or_path"]
    source = Path(base) if Path(base).is_dir() else download(base)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"--output_dir {output_dir} is not empty; name another")
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{source} holds no safetensors; name the model with --model_name_or_path")
    pairs = _pairs(load_file(adapter / ADAPTER_WEIGHTS))
    output_dir.mkdir(parents=True, exist_ok=True)
    scale, left = settings["lora_alpha"] / settings["r"], set(pairs)
    for file in files:
        left -= _merge_file(file, output_dir / file.name, pairs, scale)
    if left:
        shutil.rmtree(output_dir)
        raise ValueError(
            f"{source} has no {min(left)}, which {adapter} adapts; name its model with --model_name_or_path"
        )
    for folder, patterns in ((source, ("*.json", *TOKENIZER_FILES)), (adapter, TOKENIZER_FILES)):
        for path in (p for pattern in patterns for p in folder.glob(pattern) if p.name not in (CONFIG, FACTS)):
            shutil.copyfile(path, output_dir / path.name)
    if (adapter / ROPE).is_file():
        _set_rope(output_dir / "config.json", json.loads((adapter / ROPE).read_text()))
    return f"{len(pairs)} tensors of {base} merged with {adapter} into {output_dir}"


def _set_rope(path: Path, rope: Mapping[str, Any]) -> None:
    """Gives a config.json the RoPE of an adapter's run; older spellings would go before it and are dropped."""
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in OLDER_ROPE}
    path.write_text(json.dumps({**config, **rope}, indent=2) + "\n")


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Name of a weight → A and B."""
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    return {
        f"{name.removeprefix(PREFIX)}.weight": (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in names
    }


def _merge_file(source: Path, target: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> set[str]:
    """The names that it held and that were merged."""
    merged: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            if name in pairs:
                a, b = (x.to(torch.float32) for x in pairs[name])
                if (len(b), a.shape[1]) != tuple(weight.shape):
                    raise ValueError(f"{source}: {name} is {list(weight.shape)}, the adapter {[len(b), a.shape[1]]}")
                weight = (weight.to(torch.float32) + scale * (b @ a)).to(weight.dtype)
            merged[name] = weight
    save_file(merged, target, metadata={"format": "pt"})
    return set(merged) & set(pairs)
