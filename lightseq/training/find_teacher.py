"""The teacher that --teacher names, checked against the flags and the model that learns from it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedConfig

from lightseq.architecture.family import ModelSource, context_warning, resolve
from lightseq.architecture.inspection import Architecture, inspect_architecture
from lightseq.attention.config import AttentionConfig
from lightseq.checkpoint.manifest import check_weights
from lightseq.config.train_config import TrainConfig
from lightseq.data.load_tokenizer import has_tokenizer, load_tokenizer
from lightseq.distributed.world import World
from lightseq.models import hub
from lightseq.models.decoder import text_config
from lightseq.models.presets import ModelFamily
from lightseq.objectives.teacher import flags_for_teacher
from lightseq.schedule.auto import AUTO
from lightseq.training.find_model import FoundModel
from lightseq.training.setup_checks import Notes, check_kernel, check_layers, check_mixers, check_packing

T = TypeVar("T")


@dataclass(frozen=True)
class Teacher:
    """A model to learn from. Its weights may not be downloaded yet."""

    config: PreTrainedConfig
    source: Path | str  # directory, or Hub id
    notes: Notes = ()

    def fetch(self, world: World, verified: Path | None = None) -> "FetchedTeacher":
        """Returns the teacher with its weights. Raises ValueError if their manifest shows damage."""
        source = self.source
        directory = _named(lambda: hub.download(source)) if isinstance(source, str) else source
        if world.is_main and directory != verified:
            check_weights(directory)
        return FetchedTeacher(self.config, directory)


@dataclass(frozen=True)
class FetchedTeacher:
    """A model to learn from, and the directory of its weights."""

    config: PreTrainedConfig
    weights: Path


def find_teacher(config: TrainConfig, family: ModelFamily, model: FoundModel, world: World) -> Teacher | None:
    """Finds the teacher, if the flags name one.

    Raises ValueError if there is none of that name, if it cannot run beside the model with these flags, or if their
    tokens differ.
    """
    if config.teacher is None:
        return None
    source = teacher_source(family, config.teacher)
    assert source.weights is not None, "presets are refused"
    check_vocabularies(config, model.config, source.config)
    if world.is_main:
        _check_tokenizers(config, model)
    architecture = inspect_architecture(source.config)
    flags = flags_for_teacher(config, architecture.has_recurrences)
    check_layers(flags, architecture)
    check_mixers(flags, architecture, model.dims.sequence)
    _check_schedule(config, architecture, inspect_architecture(model.config), model.dims.sequence)
    check_kernel(flags, source.config, world.device, model.dims.sequence)
    if config.packing != "none":
        check_packing(config.packing, source.config)
    warning = context_warning(source.config, config.model_max_length)
    notes = (f"warning: --teacher {config.teacher}: {warning}",) if warning and config.packing == "none" else ()
    return Teacher(source.config, source.weights, notes)


def teacher_source(family: ModelFamily, name: str, needs_weights: bool = True) -> ModelSource:
    """Resolves the name of --teacher. Raises ValueError for unknown names, and for a preset if weights are needed."""
    if needs_weights and family.preset(name) is not None:
        raise ValueError(f"--teacher {name} is a preset, which has no weights; give a directory (./name) or a hub id")
    return _named(lambda: resolve(family, name, random_init=not needs_weights))


def check_vocabularies(config: TrainConfig, student: PreTrainedConfig, teacher: PreTrainedConfig) -> None:
    """Raises ValueError if the models have vocabularies of different sizes."""
    ours, theirs = (text_config(x).vocab_size for x in (student, teacher))
    if ours != theirs:
        raise ValueError(
            f"--teacher {config.teacher} has a vocabulary of {theirs} tokens, but --model_name_or_path "
            f"{config.model_name} one of {ours}; give a teacher with the same tokenizer"
        )


def _check_tokenizers(config: TrainConfig, model: FoundModel) -> None:
    """Raises ValueError if both models come with a tokenizer, and these make other tokens of a text."""
    names = [name for name in (model.tokenizer, config.teacher) if name is not None and has_tokenizer(name)]
    if len(names) < 2 or names[0] == names[1]:
        return
    ours, theirs = (load_tokenizer(name).vocabulary_fingerprint for name in names)
    if ours != theirs:
        raise ValueError(
            f"--teacher {config.teacher} has another tokenizer than {names[0]}, so its tokens mean something else; "
            "give a teacher with the same tokenizer"
        )


def _check_schedule(config: TrainConfig, teacher: Architecture, student: Architecture, ranks: int) -> None:
    """Raises ValueError if --schedule auto, which looks at the trained model only, may not suit the teacher."""
    if config.schedule != AUTO:
        return
    options = AttentionConfig.from_flags(config, torch.device("cpu"))
    needs = [options.with_windows(x.windows, ranks).windows for x in (teacher, student)]
    given = f"--teacher {config.teacher} has"
    if needs[0] and not needs[1] and config.packing == "none":  # auto is prefix with packing
        raise ValueError(f"{given} sliding windows, which not every schedule supports; add --schedule prefix")
    if teacher.has_recurrences and not student.has_recurrences and config.packing != "none" and ranks > 1:
        raise ValueError(f"{given} recurrent layers, which packed rows do not suit; add --schedule zigzag")


def _named(find: Callable[[], T]) -> T:
    """Calls a function of --model_name_or_path for --teacher. Raises its ValueError with that name."""
    try:
        return find()
    except ValueError as error:
        raise ValueError(str(error).replace("--model_name_or_path", "--teacher")) from error
