"""A model's weights: memory for them, loading from a directory in Hugging Face's format, and saving to one.

A model is built and sharded on the meta device. Each rank then allocates and fills only its own part.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from lightseq.distributed.parallel_dims import local_part, whole_tensor
from lightseq.models.build import constructed_buffers
from lightseq.models.decoder import has_towers, text_config, ties_embeddings
from lightseq.models.hub import download
from lightseq.models.packed import PackedWeight
from lightseq.models.packed_slice import PackedSlice
from lightseq.models.published_layout import PublishedLayout, layout_of_files, publish
from lightseq.models.stored_tensors import StoredTensors, float_dtypes
from lightseq.models.tokenizer_files import PROCESSOR_FILES, copy_files, copy_tokenizer
from lightseq.models.weight_files import INDEX, WEIGHTS, open_tensors, save_tensors, tensor_files, write_index
from lightseq.utils.formatting import first_line

SHARD_BYTES = 4 << 30  # largest file; rank 0 collects it in host memory
ONE_MODEL = "copy config.json and the weights from one model, and remove tensors that it does not have"
ROWS_AT_ONCE = 4096  # rows compared at a time
LORA_INFIX = ".lora_"  # in the names of adapter parameters only
GENERATION_CONFIG = "generation_config.json"


FillParameter = Callable[[nn.Parameter, Callable[[tuple[slice, ...]], Tensor]], None]


def fill(parameter: nn.Parameter, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fills a parameter with this rank's part of a whole tensor; `read` returns the slices it is given.

    A weight in four bits reads the whole tensor, because all its rows share one offset.
    """
    local, place = local_part_and_slices(parameter)
    if isinstance(local, PackedWeight):
        local.fill_rows(read(tuple(map(slice, local.whole))), place[0].start)
    elif local.numel():
        local.copy_(read(place))


def local_part_and_slices(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Returns a view of this rank's part of a parameter, and the part's slices in the whole tensor."""
    data = parameter.detach()
    if isinstance(data, DTensor):
        shape, offset = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
        local = data.to_local()
    else:
        shape, offset, local = tuple(data.shape), (0,) * data.ndim, data
    return local, tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def is_packed(parameter: Tensor) -> bool:
    """Returns whether a parameter, or a rank's part of it, is in fewer bits than it computes in."""
    return isinstance(local_part(parameter.detach()), PackedWeight)


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole parameter; under ZeRO-3 `ds_shape` holds it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def materialize(
    model: PreTrainedModel,
    device: torch.device,
    parameters_on: Callable[[Tensor], torch.device] | None = None,
    made: Callable[[Tensor], object] | None = None,
    root: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Allocates this rank's part of every parameter, uninitialized, and computes every buffer.

    `parameters_on` chooses the device of each parameter; the default is `device`. `made` receives each allocated part
    before FSDP2 sees it, because FSDP2 copies parts that should be page-locked and are not. `root` is the module around
    the model that FSDP2 was applied to, if any. Layers compute in `dtype` (`rebuild_buffers`).
    """

    def empty(like: Tensor) -> Tensor:
        if not isinstance(like, nn.Parameter):
            return torch.empty_like(like, device=device)
        new = torch.empty_like(like, device=parameters_on(like) if parameters_on else device)
        if made is not None:
            made(local_part_and_slices(new)[0])
        return new

    tied = ties_embeddings(model)
    (root or model)._apply(empty)
    if tied:  # `_apply` gave tied parameters separate memory
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    rebuild_buffers(model, device, dtype)


def rebuild_buffers(model: PreTrainedModel, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Computes the buffers of a model that was built on the meta device, as its own constructor does.

    Layers compute in `dtype`. Buffers that the model's files store get the values of a model built in it. Others, such
    as RoPE's frequencies, get the values of a float32 model. Raises ValueError if the constructor makes other buffers
    than the model has.
    """
    made = constructed_buffers(model.config)
    if left := [name for name, _ in model.named_buffers() if name not in made]:
        raise ValueError(f"the model has buffers that cannot be rebuilt: {', '.join(left)}")
    if (stored := stored_buffers(model)) and dtype is not torch.float32:
        computed = constructed_buffers(model.config, dtype)
        made |= {name: computed[name] for name in stored}
    for name, buffer in made.items():  # their modules may be patched, so only the buffers are replaced
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, buffer.to(device))


def stored_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the persistent buffers of a model or of a part of it, which its files store, by name."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def base_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Returns the model's parameters without adapters, by their names in the model's files."""
    found = ((name, p) for name, p in model.named_parameters() if LORA_INFIX not in name)
    return {without_wrappers(name): p for name, p in found}


def without_wrappers(name: str) -> str:
    """Removes peft's wrappers from the name of a parameter or module."""
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def load(model: PreTrainedModel, source: Path | str, fill: FillParameter = fill) -> None:
    """Loads this rank's part of every parameter from a local directory, or from the hub with one download per host.

    Buffers that the files store are loaded whole; one that is missing keeps its value. Raises ValueError naming tensors
    that are missing, unknown to the model, of another shape, or NaN.
    """
    directory = source if isinstance(source, Path) else download(source)
    files = tensor_files(directory, "save the model as safetensors, or add --random_init")
    parameters, buffers = base_parameters(model), stored_buffers(model)
    layout = _layout(model, files, directory)
    if layout.tied_head is not None:
        _check_tied_head(model, files, layout, directory)
    shapes = {name: global_shape(tensor) for name, tensor in (parameters | buffers).items()}
    converted: dict[str, Tensor] = {}
    with open_tensors(files) as stored:

        def part_of(name: str, tensor: Tensor) -> Callable[[tuple[slice, ...]], Tensor]:
            conversion = layout.converted.get(name)
            if conversion is None:
                found = stored(layout.renamed[name])
                shape, read = tuple(found.get_shape()), found.__getitem__
                if isinstance(found, PackedSlice) and is_packed(tensor):  # MXFP4 is else read as a dense weight
                    read = found.packed().__getitem__
            else:
                if name not in converted:
                    try:
                        converted.update(conversion.load(model, lambda source: stored(source)[...], shapes))
                    except (RuntimeError, LookupError, TypeError) as error:  # torch's, for shapes that do not fit
                        file = files[conversion.sources[0][1]]
                        raise ValueError(f"{file}: {name} cannot be made ({first_line(error)}); {ONE_MODEL}") from error
                whole = converted.pop(name)
                shape, read = tuple(whole.shape), whole.__getitem__
            if shape != shapes[name]:
                file = files[layout.renamed.get(name) or layout.converted[name].sources[0][1]]
                raise ValueError(f"{file}: {name} has shape {[*shape]}, not the model's {[*shapes[name]]}; {ONE_MODEL}")
            return read

        for name, parameter in parameters.items():
            fill(parameter, without_nan(part_of(name, parameter), f"{directory}: {name}"))
        for name, buffer in buffers.items():
            if name in layout.renamed or name in layout.converted:
                buffer.copy_(without_nan(part_of(name, buffer), f"{directory}: {name}")(...))  # type: ignore[arg-type]


def without_nan(read: Callable[[tuple[slice, ...]], Tensor], what: str) -> Callable[[tuple[slice, ...]], Tensor]:
    """Returns a function that reads slices of a tensor, and raises ValueError if they hold NaN."""

    def checked(place: tuple[slice, ...]) -> Tensor:
        found = read(place)
        if has_nan(found):
            raise ValueError(f"{what} holds NaN; copy or download the weights again, or give others")
        return found

    return checked


def has_nan(x: Tensor) -> bool:
    """Returns whether a tensor holds NaN. Infinities may be meant, as in biases of experts that nothing may choose."""
    # The sum takes no memory, but is NaN also for infinities of both signs.
    return x.is_floating_point() and bool(x.sum(dtype=torch.float32).isnan()) and bool(x.isnan().any())


def _layout(model: PreTrainedModel, files: Iterable[str], directory: Path) -> PublishedLayout:
    """Returns the layout of a model's files. Raises ValueError if they do not match the model."""
    try:
        return layout_of_files(model, base_parameters(model), files)
    except ValueError as error:
        raise ValueError(f"{directory} does not match the model: {error}; {ONE_MODEL}") from error


def _check_tied_head(model: PreTrainedModel, files: dict[str, Path], layout: PublishedLayout, directory: Path) -> None:
    """Raises ValueError if the files have an LM head that differs from the embeddings the config ties it to."""
    embeddings, alias = model.get_input_embeddings().weight, layout.tied_head
    assert alias is not None
    name = next(layout.renamed[name] for name, x in base_parameters(model).items() if x is embeddings)
    with open_tensors(files) as stored:
        head, table = stored(alias), stored(name)
        same = head.get_shape() == table.get_shape() and all(
            bool((head[start : start + ROWS_AT_ONCE] == table[start : start + ROWS_AT_ONCE]).all())
            for start in range(0, head.get_shape()[0], ROWS_AT_ONCE)
        )
    if not same:
        raise ValueError(
            f"{directory}: {alias} differs from {name}, though config.json ties them; set tie_word_embeddings "
            "to false to train both"
        )


def load_or_refuse(model: PreTrainedModel, source: Path | str, flag: str, fill: FillParameter = fill) -> None:
    """Calls `load`; raises errors in the files as a ValueError that names the flag."""
    try:
        load(model, source, fill)
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"{flag} {source}: its weights cannot be read ({first_line(error)}); copy or download them again"
        ) from error


def refuse_nan(model: nn.Module, source: Path | str) -> None:
    """Raises ValueError if this rank's part of a parameter holds NaN. `source` is where they were read."""
    for name, parameter in model.named_parameters():
        if has_nan(local_part_and_slices(parameter)[0]):
            raise ValueError(f"{source}: {name} holds NaN; give an earlier checkpoint")


def save_pretrained(
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    tokenizer_from: Path | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
    trained_from: Path | None = None,
) -> None:
    """Writes a directory for transformers' `from_pretrained`. Every rank must call it; rank 0 writes.

    `tensors` are whole parameters and stored buffers by name; by default the model's own are gathered. `trained_from`
    is the directory of the weights that training began with. The new one gets its layout, the tensors that did not
    train, and its settings for generation and for images.

    Trained in float32, all parameters are stored so. Otherwise each tensor has its dtype in `trained_from`. Those that
    it lacks have `dtype`, in which the model computed, or float32 where the model's class says so.
    """
    main, buffers = dist.get_rank() == 0, stored_buffers(model)
    written: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    if main:
        directory.mkdir(parents=True, exist_ok=True)
        for old in (directory / WEIGHTS, directory / INDEX, *directory.glob("model-*.safetensors")):
            old.unlink(missing_ok=True)  # an earlier model's

    def flush() -> None:
        file = f"model-{len(set(written.values())) + 1:05d}.safetensors"
        save_tensors(pending, directory / file)
        written.update(dict.fromkeys(pending, file))
        pending.clear()

    files = _source_files(model, trained_from) if main else {}
    layout = _layout(model, files, trained_from or directory) if files else None
    with open_tensors(files) as stored:
        in_files = {} if dtype is torch.float32 else float_dtypes(files, stored)
        stores = StoredTensors(model, buffers.keys(), dtype, layout, in_files, stored)

        def cast() -> Iterator[tuple[str, Tensor]]:
            for name, whole in chain(full_parameters(model), buffers.items()) if tensors is None else tensors:
                if main:
                    yield name, stores(name, whole)

        untouched = ((name, stored(name)[...]) for name in (layout.untouched if layout else ()))
        shapes: dict[str, Sequence[int]] = {name: global_shape(x) for name, x in base_parameters(model).items()}
        if layout is not None:
            shapes |= layout.shapes_in_files(lambda name: stored(name).get_shape())
        converted = layout.converted_from if layout else set()
        for name, whole in chain(publish(model, cast(), layout, shapes), untouched):
            in_file = in_files.get(name, whole.dtype) if name in converted else whole.dtype
            pending[name] = whole.to(in_file).contiguous()
            if sum(x.numel() * x.element_size() for x in pending.values()) >= SHARD_BYTES:
                flush()
    if main:
        if pending:
            flush()
        write_index(directory, written)
        config = model.config.__class__.from_dict(model.config.to_dict())
        _set_dtype(config, dtype)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        text_config(config).use_cache = True
        config.save_pretrained(directory)
        if trained_from is not None and (settings := trained_from / GENERATION_CONFIG).is_file():
            (directory / GENERATION_CONFIG).write_bytes(settings.read_bytes())
        else:
            GenerationConfig.from_model_config(config).save_pretrained(directory)
        if trained_from is not None:
            copy_files(PROCESSOR_FILES, trained_from, directory)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, directory)


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Sets the dtype of a config and of the configs inside it."""
    config.dtype = dtype
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            _set_dtype(part, dtype)


def _source_files(model: PreTrainedModel, trained_from: Path | None) -> dict[str, Path]:
    """Returns the file of each tensor that training began with; none for random weights, or if the directory is gone.

    Raises FileNotFoundError if a part of the model is only there.
    """
    if trained_from is not None and trained_from.is_dir():
        return tensor_files(trained_from, "copy the directory again")
    if trained_from is not None and has_towers(model.config):
        raise FileNotFoundError(f"{trained_from} is gone, which has the parts of the model that do not train")
    return {}


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter, gathered whole from all ranks; tied ones once. Every rank must iterate to the end."""
    for name, parameter in model.named_parameters():
        yield name, whole_tensor(parameter.detach())
