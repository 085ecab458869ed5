"""Merging of a LoRA adapter into a copy of its base model, tensor by tensor."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from lightseq.checkpoint.checkpoints import TRAINER_STATE
from lightseq.checkpoint.manifest import MANIFEST, check_weights
from lightseq.models.decoder import head_weight_name, ties_embeddings
from lightseq.models.mxfp4 import is_mxfp4
from lightseq.models.published_layout import MissingTensorsError, embeddings_name, layout_of_files
from lightseq.models.tokenizer_files import SETTINGS, copy_files, copy_tokenizer, remove_chat_templates
from lightseq.models.weight_files import INDEX, WEIGHTS, open_safetensors, open_tensors, save_tensors, tensor_files
from lightseq.models.weights import LORA_INFIX, base_parameters, has_nan, without_wrappers
from lightseq.parts.adapter_files import CONFIG, base_directory, lora_scale, read_config, read_rope
from lightseq.parts.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from lightseq.parts.chosen_experts import build_to_train
from lightseq.tools.merged_base import BaseWeights, find_base_weights
from lightseq.tools.merged_experts import ExpertsChange, LinearChange, changes_of_experts, weights_by_adapter
from lightseq.training.output_directory import create_output_dir
from lightseq.utils.files import read_json_object
from lightseq.utils.formatting import first_line

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
EMBEDDING_INFIX: Final = ".lora_embedding_"
NOT_COPIED: Final = (CONFIG, TRAINER_STATE, MANIFEST)  # files that do not apply to the merged model
MERGED_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # quantized ones have scales
REMEDY: Final = "give its base model with --model_name_or_path"
OLDER_ROPE: Final = ("rope_theta", "rope_scaling")  # transformers 4; rope_parameters replaces them


Pairs = Mapping[str, tuple[Tensor, Tensor]]  # A and B by the module that they adapt
Change = LinearChange | ExpertsChange


def merge(adapter: Path, output_dir: Path, model_name_or_path: str | None, keep_16_bits: bool = False) -> str:
    """Writes base + scale · B·A in the dtype of the base model, and a config with the RoPE settings of the adapter.

    The base has the values that the adapter was trained on, which may be dequantized, or with
    `keep_16_bits` those of its files. Returns a summary line.
    """
    settings, rope = read_config(adapter), read_rope(adapter)
    source = base_directory(settings, adapter, model_name_or_path, "give --model_name_or_path")
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"--output_dir {output_dir} is not empty; give another directory")
    path = adapter / ADAPTER_WEIGHTS
    pairs, copies = _read_adapter(path)
    changes, names = _find_changes(source, pairs, settings, path)
    _check_copies(source, {names.get(name, name): copy for name, copy in copies.items()}, path)
    with _readable(source):
        base = find_base_weights(source, adapter, keep_16_bits)
    for directory in (adapter, source):
        check_weights(directory)
    create_output_dir(output_dir)
    try:
        _merge_weights(source, output_dir, changes, lora_scale(settings), adapter, base)
        unused = {INDEX} if (source / WEIGHTS).is_file() else set()
        copy_files(("*.json",), source, output_dir, left_out={*NOT_COPIED, *unused})
        copy_tokenizer(source, output_dir)
        if (adapter / SETTINGS).is_file():  # it has a tokenizer of its own
            remove_chat_templates(output_dir)
        copy_tokenizer(adapter, output_dir)
        is_packed = base.stored is not None or (
            (source / "config.json").is_file() and is_mxfp4(read_json_object(source / "config.json"))
        )
        if rope is not None or is_packed:
            _write_config(source / "config.json", output_dir / "config.json", rope or {}, is_packed)
        if is_packed and (output_dir / INDEX).is_file():
            _write_index(source, output_dir)
    except BaseException:
        shutil.rmtree(output_dir)  # a partial model would look complete
        raise
    name = model_name_or_path or settings["base_model_name_or_path"]
    return f"merged {adapter} into {len(changes)} tensors of {name}, written to {output_dir}{base.note}"


def _write_config(source: Path, target: Path, rope: Mapping[str, Any], was_packed: bool) -> None:
    """Writes a config.json with the adapter's RoPE settings, if any, and without older keys that would override them.

    Merged weights are no longer in MXFP4, FP8 or NF4, if the base's were.
    """
    found = read_json_object(source)
    if was_packed:
        found.pop("quantization_config", None)
    text = found["text_config"] if isinstance(found.get("text_config"), dict) else found  # beside those of images
    for key in OLDER_ROPE if rope else ():
        text.pop(key, None)
    text.update(rope)
    target.write_text(json.dumps(found, indent=2) + "\n")


def _write_index(source: Path, output_dir: Path) -> None:
    """Writes the index of merged weights whose base was in MXFP4, FP8 or NF4, and had other names."""
    files = {name: file.name for name, file in tensor_files(source, REMEDY).items()}
    size = sum((output_dir / file).stat().st_size for file in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (output_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read_adapter(path: Path) -> tuple[Pairs, dict[str, Tensor]]:
    """Returns A and B by the name of the module they adapt, and the base model's weights that peft saves beside them.

    Those are of an adapted head, or embeddings.
    """
    with open_safetensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  a file is no mapping
    if wrong := [name for name, tensor in tensors.items() if has_nan(tensor)]:
        raise ValueError(f"{path}: {wrong[0]} holds NaN; give an earlier checkpoint")
    names = {name.removesuffix(A) for name in tensors if name.endswith(A)}
    if embeddings := [name for name in tensors if EMBEDDING_INFIX in name]:
        raise ValueError(f"{path}: {min(embeddings)} does not belong to a linear layer; use peft's merge_and_unload")
    if not names:
        raise ValueError(f"{path} has no LoRA tensors of a linear layer; copy the adapter again")
    copies = {name for name in tensors if LORA_INFIX not in name and name.endswith(".weight")}
    if unknown := (tensors.keys() - copies) ^ {name + end for name in names for end in (A, B)}:
        unsupported = "does not belong to a linear layer; merge it with peft"
        problem = unsupported if min(unknown) in tensors else "is missing; copy the adapter again"
        raise ValueError(f"{path}: {min(unknown)} {problem}")
    pairs = {name.removeprefix(PREFIX): (tensors[name + A], tensors[name + B]) for name in names}
    return pairs, {without_wrappers(name.removeprefix(PREFIX)): tensors[name] for name in copies}


def _check_copies(source: Path, copies: Mapping[str, Tensor], path: Path) -> None:
    """Raises ValueError if base weights in an adapter's file differ from the base model's files."""
    with _readable(source):
        files = tensor_files(source, REMEDY)
    with _readable(source), open_tensors(files) as stored:
        for name, copy in copies.items():
            if name not in files or not torch.equal(stored(name)[...].to(copy.dtype), copy):
                raise ValueError(f"{path}: {name} differs from {source}; {REMEDY}, or use peft's merge_and_unload")


def _find_changes(
    source: Path, pairs: Pairs, settings: Mapping[str, Any], path: Path
) -> tuple[dict[str, Change], Mapping[str, str]]:
    """Returns the change by A and B of each tensor in the base model's files, and the model's names there.

    Raises ValueError for A and B that are no matrices of the rank, and for weights that the files have in another
    shape: a transposed square one, as a Conv1D has, would take the wrong product.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        model = build_to_train(config)
    except Exception:  # unknown code: only shapes check the weights
        return _linear_changes(pairs, settings["r"], path), {}
    parameters = _parameters_of_experts(config, settings, path)
    linears = {name: pair for name, pair in pairs.items() if name not in parameters}
    changes = _linear_changes(linears, settings["r"], path)
    for name in linears:
        with suppress(AttributeError):
            if isinstance(model.get_submodule(name), Conv1D):
                raise ValueError(f"{source}: {name}.weight is transposed, as in GPT-2; use peft's merge_and_unload")
    tied = {}
    if ties_embeddings(model):
        tied = {head_weight_name(model): embeddings_name(model)}
        if shared := changes.keys() & tied.keys():
            raise ValueError(
                f"{path} adapts {min(shared)}, which {source} ties to the embeddings; use peft's merge_and_unload"
            )
    with _readable(source):
        files = tensor_files(source, REMEDY)
    try:
        layout = layout_of_files(model, base_parameters(model), files)
    except ValueError as error:  # the files have other tensors, too, which stay as they are
        if len(linears) < len(pairs) or isinstance(error, MissingTensorsError):
            raise ValueError(f"{source} does not match the model: {error}; {REMEDY}") from error
        return changes, tied
    if converted := [name for name in changes if name in layout.converted]:
        raise ValueError(f"{source}: {converted[0]} is stored in one with others; use peft's merge_and_unload")
    changes = {layout.renamed.get(name, name): change for name, change in changes.items()}
    for name in pairs.keys() - linears.keys():
        a, b = pairs[name]
        experts: Any = model.get_submodule(parameters[name].rpartition(".")[0])
        _check_rank(name, a, b, settings["r"] * experts.num_experts, path)
        changes |= changes_of_experts(model, layout, parameters[name], a, b)
    return changes, {**layout.renamed, **{head: layout.renamed[table] for head, table in tied.items()}}


def _parameters_of_experts(config: PreTrainedConfig, settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns the stacked weights that an adapter changes, by the names of its modules."""
    if not (targets := settings.get("target_parameters")):
        return {}
    model = build_to_train(config)
    stacked = {name for name, parameter in model.named_parameters() if parameter.ndim > 2}
    try:
        found = weights_by_adapter(model, list(targets))
    except ValueError as error:
        raise ValueError(
            f"{path.with_name(CONFIG)}: target_parameters is {targets!r:.80}, which the model does not have; {REMEDY}"
        ) from error
    return {module: name for module, name in found.items() if name in stacked}


def _linear_changes(pairs: Pairs, rank: int, path: Path) -> dict[str, Change]:
    for name, (a, b) in pairs.items():
        _check_rank(name, a, b, rank, path)
    return {f"{name}.weight": LinearChange(a, b) for name, (a, b) in pairs.items()}


def _check_rank(name: str, a: Tensor, b: Tensor, rank: int, path: Path) -> None:
    if not (a.ndim == b.ndim == 2 and len(a) == b.shape[1] == rank):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise ValueError(f"{path}: {name} has A and B of {shapes}, not of rank {rank}; copy the adapter again")


def _merge_weights(
    source: Path, output_dir: Path, changes: Mapping[str, Change], scale: float, adapter: Path, base: BaseWeights
) -> None:
    with _readable(source):
        names = tensor_files(source, REMEDY)
    for file in sorted(set(names.values())):
        _merge_file(
            {name: names[name] for name in names if names[name] == file}, output_dir / file.name, changes, scale, base
        )
    if left := changes.keys() - names.keys():
        raise ValueError(
            f"{source} has no {min(left)}, which {adapter} adapts; give its base model with --model_name_or_path"
        )


def _merge_file(
    names: Mapping[str, Path], target: Path, changes: Mapping[str, Change], scale: float, base: BaseWeights
) -> None:
    """Writes the tensors of one file, merged."""
    merged: dict[str, Tensor] = {}
    (source,) = set(names.values())
    with _readable(source), open_tensors(names) as stored:
        for name in names:
            weight, dtype = base.read(name, stored(name))
            if (change := changes.get(name)) is not None:
                if weight.dtype not in MERGED_DTYPES:
                    raise ValueError(
                        f"{source}: {name} is {weight.dtype}, which is quantized; give a model in float32, bfloat16 or "
                        "float16 with --model_name_or_path"
                    )
                if tuple(weight.shape) not in change.shapes:
                    raise ValueError(
                        f"{source}: {name} has the shape {list(weight.shape)}, but the adapter's is "
                        f"{list(change.shapes[0])}; {REMEDY}"
                    )
                weight = change.add_to(weight, scale)
            weight = weight.to(dtype)
            if weight.dtype in MERGED_DTYPES and has_nan(weight):
                raise ValueError(f"{source}: {name} holds NaN; {REMEDY}")
            merged[name] = weight
    try:
        save_tensors(merged, target)
    except SafetensorError as error:
        raise ValueError(f"{target} cannot be written ({first_line(error)}); give another --output_dir") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}); copy or download it again") from error
