"""Merging of a LoRA adapter into a copy of its base model, tensor by tensor."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from lightseq.checkpoint.checkpoints import TRAINER_STATE
from lightseq.checkpoint.manifest import MANIFEST, check_weights
from lightseq.models.adapters import CONFIG, lora_scale, read_config, read_json_object, read_rope
from lightseq.models.adapters import WEIGHTS as ADAPTER_WEIGHTS
from lightseq.models.build import build_on_meta
from lightseq.models.published_layout import layout_of_files
from lightseq.models.weights import TOKENIZER_FILES, base_parameters, download, save_tensors, tensor_files
from lightseq.training.output_directory import create_output_dir
from lightseq.utils.files import open_regular
from lightseq.utils.formatting import first_line

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
NOT_COPIED: Final = (CONFIG, TRAINER_STATE, MANIFEST)  # files that do not apply to the merged model
MERGED_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # quantized ones have scales
OLDER_ROPE: Final = ("rope_theta", "rope_scaling")  # transformers 4; rope_parameters replaces them


def merge(adapter: Path, output_dir: Path, model_name_or_path: str | None) -> str:
    """Writes base + scale · B·A in the dtype of the base model, and a config with the RoPE settings of the adapter.

    Returns a summary line.
    """
    settings, rope = read_config(adapter), read_rope(adapter)
    base, revision = model_name_or_path or settings.get("base_model_name_or_path"), settings.get("revision")
    if base is None:
        raise ValueError(f"{adapter / CONFIG} does not name its base model; give --model_name_or_path")
    if model_name_or_path is None and revision not in (None, "main"):
        raise ValueError(
            f"{adapter / CONFIG}: revision is {revision!r}; download that revision of {base} and give its directory "
            "with --model_name_or_path"
        )
    source = Path(base) if Path(base).is_dir() else download(base, "give a local directory")
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"--output_dir {output_dir} is not empty; give another directory")
    pairs = _pairs(adapter / ADAPTER_WEIGHTS, settings["r"])
    pairs = _by_name_in_files(source, pairs)
    for directory in (adapter, source):
        check_weights(directory)
    create_output_dir(output_dir)
    try:
        _merge_weights(source, output_dir, pairs, lora_scale(settings), adapter)
        for folder, patterns in ((source, ("*.json", *TOKENIZER_FILES)), (adapter, TOKENIZER_FILES)):
            for path in (p for pattern in patterns for p in folder.glob(pattern)):
                if path.is_file() and path.name not in NOT_COPIED:
                    shutil.copyfile(path, output_dir / path.name)
        if rope is not None:
            _write_config(source / "config.json", output_dir / "config.json", rope)
    except BaseException:
        shutil.rmtree(output_dir)  # a partial model would look complete
        raise
    return f"merged {adapter} into {len(pairs)} tensors of {base}, written to {output_dir}"


def _write_config(source: Path, target: Path, rope: Mapping[str, Any]) -> None:
    """Writes a config.json with the adapter's RoPE settings, and without older keys that would override them."""
    found = read_json_object(source)
    text = found["text_config"] if isinstance(found.get("text_config"), dict) else found  # beside those of images
    for key in OLDER_ROPE:
        text.pop(key, None)
    text.update(rope)
    target.write_text(json.dumps(found, indent=2) + "\n")


def _pairs(path: Path, rank: float) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns A and B by the name of the weight they adapt. Raises ValueError unless they are matrices of the rank."""
    with _readable(path):
        if path.exists():
            open_regular(path).close()
        tensors = load_file(path)
    names = {name.removesuffix(A) for name in tensors if name.endswith(A)}
    if not names:
        raise ValueError(f"{path} has no LoRA tensors of a linear layer; copy the adapter again")
    if unknown := tensors.keys() ^ {name + end for name in names for end in (A, B)}:
        unsupported = "does not belong to a linear layer; merge it with peft"
        problem = unsupported if min(unknown) in tensors else "is missing; copy the adapter again"
        raise ValueError(f"{path}: {min(unknown)} {problem}")
    for name in names:
        a, b = tensors[name + A], tensors[name + B]
        if not (a.ndim == b.ndim == 2 and len(a) == b.shape[1] == rank):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ValueError(f"{path}: {name} has A and B of {shapes}, not of rank {rank}; copy the adapter again")
    return {f"{name.removeprefix(PREFIX)}.weight": (tensors[name + A], tensors[name + B]) for name in names}


def _by_name_in_files(source: Path, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns A and B by the name of their weight in the files of the base model, which may differ from the model's.

    Raises ValueError for weights that the files have in another shape: a transposed square one, as a Conv1D has, would
    take the wrong product.
    """
    try:
        model = build_on_meta(AutoConfig.from_pretrained(source, trust_remote_code=False))
    except Exception:  # a model of other code, whose weights the shapes check alone
        return dict(pairs)
    for name in pairs:
        with suppress(AttributeError):
            if isinstance(model.get_submodule(name.removesuffix(".weight")), Conv1D):
                raise ValueError(f"{source}: {name} is transposed, as in GPT-2; use peft's merge_and_unload")
    with _readable(source):
        files = tensor_files(source, "give the model with --model_name_or_path")
    try:
        layout = layout_of_files(model, base_parameters(model), files, [name for name, _ in model.named_buffers()])
    except ValueError:  # the files have other tensors, too, which stay as they are
        return dict(pairs)
    if converted := [name for name in pairs if name in layout.converted]:
        raise ValueError(f"{source}: {converted[0]} is stored in one with others; use peft's merge_and_unload")
    return {layout.renamed.get(name, name): pair for name, pair in pairs.items()}


def _merge_weights(
    source: Path, output_dir: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float, adapter: Path
) -> None:
    with _readable(source):
        names = tensor_files(source, "give the model with --model_name_or_path")
    left = set(pairs)
    for file in sorted(set(names.values())):
        left -= _merge_file(file, output_dir / file.name, pairs, scale)
    if left:
        raise ValueError(
            f"{source} has no {min(left)}, which {adapter} adapts; give its base model with --model_name_or_path"
        )


def _merge_file(source: Path, target: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> set[str]:
    """Merges one file. Returns the names of the weights that changed."""
    merged: dict[str, Tensor] = {}
    with _readable(source), safe_open(source, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            if name in pairs:
                a, b = (x.to(torch.float32) for x in pairs[name])
                if (len(b), a.shape[1]) != tuple(weight.shape):
                    raise ValueError(
                        f"{source}: {name} has the shape {list(weight.shape)}, but the adapter's is "
                        f"{[len(b), a.shape[1]]}; give its base model with --model_name_or_path"
                    )
                if weight.dtype not in MERGED_DTYPES:
                    raise ValueError(
                        f"{source}: {name} is {weight.dtype}, which is quantized; give a model in float32, bfloat16 or "
                        "float16 with --model_name_or_path"
                    )
                weight = (weight.to(torch.float32) + scale * (b @ a)).to(weight.dtype)
            merged[name] = weight
    try:
        save_tensors(merged, target)
    except SafetensorError as error:
        raise ValueError(f"{target} cannot be written ({first_line(error)}); give another --output_dir") from error
    return set(merged) & set(pairs)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}); copy or download it again") from error
