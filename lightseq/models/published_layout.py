"""Names and shapes of a model's tensors in its published files, which may differ from transformers' classes.

transformers renames tensors, and splits, fuses or stacks them, when it loads a model. Its own rules are used both ways,
so the files that a run writes have the layout of the files that it read.
"""

import copy
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    revert_weight_conversion,
)

from lightseq.models.build import model_class
from lightseq.models.decoder import has_towers, head_weight_name, module_name, text_config, ties_embeddings

DERIVED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")  # older files store what the config says
IN_LIST = re.compile(r"(.+?)\.(\d+)\.(.+)")  # the name of a list of modules, a place in it, and the rest of a name
Shapes = Mapping[str, Sequence[int]]  # shapes of whole tensors by name


class MissingTensorsError(ValueError):
    """Files hold only tensors of the model, but not all."""


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files that together become some of the model's tensors, by operations of transformers."""

    converter: WeightConverter
    sources: tuple[tuple[str, str], ...]  # the pattern that a name in the files matches, and the name
    first: str  # name of the first of the model's tensors

    def load(self, model: PreTrainedModel, read: Callable[[str], Tensor], shapes: Shapes) -> dict[str, Tensor]:
        """Returns the model's tensors by name. `read` returns a whole tensor of the files, `shapes` are the model's."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.first, name, pattern, read(name))  # type: ignore[arg-type]
        found = converter.convert(self.first, model=_WithShapes(model, shapes), config=model.config)  # type: ignore[arg-type]
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class _WithShapes:
    """Model whose parameters have the shapes that transformers' conversions ask for.

    Its own have none under ZeRO-3, and other names where adapters wrap them.
    """

    def __init__(self, model: PreTrainedModel, shapes: Shapes) -> None:
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(tuple(self._shapes[name]), device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@dataclass(frozen=True)
class PublishedLayout:
    """Place of each tensor of a model in its files, by the tensor's name in the model."""

    renamed: Mapping[str, str]  # tensors stored without conversion: name in the files
    converted: Mapping[str, Conversion]
    tied_head: str | None  # name in the files of a head's weight that the model ties to its embeddings
    untouched: tuple[str, ...]  # names in the files of tensors that the model lacks, such as an image encoder's

    def shapes_in_files(self, shape_of: Callable[[str], Sequence[int]]) -> Shapes:
        """Returns the shapes of tensors that the files have each in one, by their names in the model."""
        alone = {name: found.sources for name, found in self.converted.items() if len(found.sources) == 1}
        return {name: shape_of(sources[0][1]) for name, sources in alone.items()}

    @property
    def converted_from(self) -> set[str]:
        """Returns the names in the files of tensors that are converted."""
        return {source for found in self.converted.values() for _, source in found.sources}

    def dtypes(self, in_files: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Converts dtypes by file names to dtypes by model names. Joined tensors get the widest dtype.

        Tensors that `in_files` lacks have none.
        """
        sources = {name: [source] for name, source in self.renamed.items()}
        sources |= {name: [source for _, source in found.sources] for name, found in self.converted.items()}
        known = {name: [in_files[x] for x in parts if x in in_files] for name, parts in sources.items()}
        return {name: reduce(torch.promote_types, dtypes) for name, dtypes in known.items() if dtypes}


def layout_of_files(model: PreTrainedModel, tensors: Collection[str], files: Iterable[str]) -> PublishedLayout:
    """Returns the layout of files that have tensors of these names. `tensors` are the names of the model's own.

    Files may lack buffers. Sets the model's `_weight_conversions`, which `publish` reverses. Raises ValueError naming
    tensors that are missing, or that are in the files and belong nowhere.
    """
    rules = get_model_conversion_mapping(model)
    by_pattern = {pattern: rule for rule in _converters(rules) for pattern in rule.source_patterns}
    head = head_weight_name(model) if ties_embeddings(model) else None
    computed = _computed_buffers(model)
    buffers = [name for name, _ in model.named_buffers() if name not in computed]
    known = dict.fromkeys([*tensors, *buffers, *computed, *([head] if head else [])], True)
    renamed, tied_head, others, matched = dict[str, str](), None, list[str](), list[str]()
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(files, key=dot_natural_key):
        target, pattern = _in_model(model, name, rules, known)
        if target not in known or target in computed:
            others.append(name)
            continue
        matched.append(name)
        if target == head:
            tied_head = name
        elif pattern is None:
            renamed[target] = name
        else:
            sources.setdefault(target, []).append((pattern, name))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]  # type: ignore[assignment]
    converted: dict[str, Conversion] = {}
    for first, found in sources.items():
        conversion = Conversion(by_pattern[found[0][0]], tuple(found), first)
        converted |= dict.fromkeys(_targets(conversion, known), conversion)
    missing = [name for name in tensors if name not in renamed and name not in converted]
    untouched = _untouched(model, others, rules, computed)
    untouched += _multi_token_heads(model, sorted(set(others) - set(untouched), key=dot_natural_key), matched)
    if missing or len(untouched) < len(others):
        unknown = sorted(set(others) - set(untouched))
        listed = (("missing", missing), ("unknown", unknown))
        kind_of_error = ValueError if unknown else MissingTensorsError
        raise kind_of_error(", ".join(f"{kind} tensors {names[:3]}" for kind, names in listed if names))
    return PublishedLayout(renamed, converted, tied_head, tuple(untouched))


def publish(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], layout: PublishedLayout | None, shapes: Shapes
) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's whole tensors as its files have them; without a layout, as transformers saves a new model.

    Tensors that are fused or stacked in the files are converted once all of them have come. A tensor that may be
    transposed in the files gets its shape in `shapes`.
    """
    if layout is None:  # as in `revert_weight_conversion`: nobody knows whether a prefix was removed
        rules = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [rule for rule in rules if not isinstance(rule, PrefixChange)]  # type: ignore[assignment]
    reverse = [rule.reverse_transform() for rule in model._weight_conversions[::-1]]  # type: ignore[union-attr, index]
    groups: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        target, pattern = _match(name, _converters(reverse))
        if pattern is not None:
            groups.setdefault(target, set()).add(name)
    group_of = {name: group for group in groups.values() for name in group}
    pending: dict[str, Tensor] = {}
    shaped: Any = _WithShapes(model, shapes)
    twice = embeddings_name(model) if layout is not None and layout.tied_head is not None else None
    for name, tensor in tensors:
        if name in group_of:
            pending[name] = tensor
            if (group := group_of[name]) <= pending.keys():
                yield from revert_weight_conversion(shaped, {each: pending.pop(each) for each in group}).items()
        elif layout is not None and name in layout.renamed:
            yield layout.renamed[name], tensor
            if name == twice and layout.tied_head is not None:
                yield layout.tied_head, tensor.clone()
        else:
            yield _rename(name, reverse), tensor
    assert not pending, f"tensors are missing beside {min(pending)}"


def embeddings_name(model: PreTrainedModel) -> str:
    """Returns the name of the input embeddings' weight in the model."""
    return f"{module_name(model, model.get_input_embeddings())}.weight"


def _converters(rules: Iterable[WeightTransform]) -> list[WeightConverter]:
    return [rule for rule in rules if isinstance(rule, WeightConverter)]


def _rename(name: str, rules: Iterable[WeightTransform]) -> str:
    """Applies all renaming rules to the name of a tensor, in turn."""
    for rule in rules:
        if isinstance(rule, WeightRenaming):
            name, _ = rule.rename_source_key(name)
    return name


def _match(name: str, converters: Iterable[WeightConverter]) -> tuple[str, str | None]:
    """Applies the first converter that matches a tensor's name. Returns the new name and the pattern, if any."""
    for converter in converters:
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return target, pattern
    return name, None


def _in_model(
    model: PreTrainedModel, name: str, rules: list[WeightTransform], known: Collection[str]
) -> tuple[str, str | None]:
    """Returns the name in the model of a tensor in the files, and the pattern by which it is converted, if it is."""
    target, pattern = _match(_rename(name, rules), _converters(rules))
    target = _with_prefix(model, target, known)
    if target not in known and (same := _with_prefix(model, name, known)) in known:  # the files have the model's names
        return same, None
    return target, pattern


def _with_prefix(model: PreTrainedModel, name: str, known: Collection[str]) -> str:
    """Returns a name with or without the prefix of the model inside, whichever is known."""
    prefix = f"{model.base_model_prefix}."
    others = (name, name.removeprefix(prefix), prefix + name)
    return next((other for other in others if other in known), name)


def _targets(conversion: Conversion, known: Iterable[str]) -> list[str]:
    """Returns the names of the model's tensors that a conversion makes."""
    patterns = conversion.converter.target_patterns
    names = [conversion.first.replace(patterns[0], pattern) for pattern in patterns]
    return [name for pattern in names for name in ([pattern] if "*" not in pattern else fnmatch.filter(known, pattern))]


def _computed_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the buffers, by name, that a model computes from its config and does not read from files."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, owner in model.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name in owner._non_persistent_buffers_set
    }


def _untouched(
    model: PreTrainedModel, names: list[str], rules: list[WeightTransform], computed: Collection[str]
) -> list[str]:
    """Returns the names of tensors that belong to the whole model, or that transformers leaves out knowingly.

    `computed` are the model's computed buffers. Other tensors may mean that the config does not describe the files.
    """
    found = _left_out(model, names, rules, computed)
    if len(found) < len(names) and has_towers(model.config):
        with torch.device("meta"):
            whole = model_class(model.config)._from_config(copy.deepcopy(model.config))
        known = dict.fromkeys([*whole.state_dict(), *_computed_buffers(whole)], True)
        seen = set(found)
        others = [name for name in names if name not in seen]
        found += _left_out(whole, others, get_model_conversion_mapping(whole), known)
    return found


def _left_out(
    model: PreTrainedModel, names: Iterable[str], rules: list[WeightTransform], known: Collection[str]
) -> list[str]:
    """Returns the names of tensors that are known in a model, or that transformers does not load into it."""
    patterns = [DERIVED, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    found = []
    for name in names:
        target, _ = _in_model(model, name, rules, known)
        if target in known or any(pattern.search(each) for pattern in patterns for each in (name, target)):
            found.append(name)
    return found


def _multi_token_heads(model: PreTrainedModel, names: Iterable[str], matched: Iterable[str]) -> list[str]:
    """Returns the names of tensors in layers after the last that hold more than the model's layers do.

    Such a layer predicts tokens beyond the next one. A layer like the others means that config.json has too few.
    """
    plain = {_place_in_layer(found) for name in matched if (found := IN_LIST.fullmatch(name))}
    lists, after = {layers for layers, _ in plain}, dict[tuple[str, str], list[re.Match[str]]]()
    for name in names:
        found = IN_LIST.fullmatch(name)
        if found and found[1] in lists and int(found[2]) >= text_config(model.config).num_hidden_layers:
            after.setdefault((found[1], found[2]), []).append(found)
    heads = [layer for layer in after.values() if not plain.issuperset(map(_place_in_layer, layer))]
    return [found.string for layer in heads for found in layer]


def _place_in_layer(name: re.Match[str]) -> tuple[str, str]:
    """Returns the name of a list of layers, and of a tensor in a layer, with {} for the numbers of experts."""
    return name[1], re.sub(r"(?<=\.)\d+(?=\.)", "{}", name[3])
