"""Inputs of a run: model, data, tokenizer and checkpoint, found and checked before anything is written.

setup_checks.py has the checks of flags.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lightseq.architecture.family import context_warning
from lightseq.architecture.flops import count_adapter_parameters, total_parameters
from lightseq.architecture.inspection import inspect_architecture
from lightseq.checkpoint import checkpoints, resume
from lightseq.checkpoint.model_differences import check_model, start_notes
from lightseq.checkpoint.resume import FRESH_START, ResumePoint, changed_length_note, changed_ranks_note, check_flags
from lightseq.config.deepspeed import DeepSpeedSettings, deepspeed_settings
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream
from lightseq.data.content import hash_content
from lightseq.data.examples import Examples
from lightseq.data.load_tokenizer import has_tokenizer, read_chat_template
from lightseq.data.mixture import paths_of
from lightseq.data.token_directory import made_with_one
from lightseq.data.tokenizer import ByteTokenizer
from lightseq.distributed.parallel_dims import ParallelDims
from lightseq.distributed.world import World
from lightseq.models import weight_files
from lightseq.models.decoder import text_config
from lightseq.models.presets import ModelFamily
from lightseq.parts.adapter_files import check_start
from lightseq.parts.adapters import Lora
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.packed_base import FLAG, PackedBase, check_four_bits, check_package
from lightseq.plan.document_lengths import DocumentLengths, document_lengths_of
from lightseq.training.find_model import FoundModel, fetch_weights, find_model, tokenizer_directory
from lightseq.training.find_teacher import FetchedTeacher, find_teacher
from lightseq.training.optimization import check_lr_schedule
from lightseq.training.output_directory import check_output_dir
from lightseq.training.run_data import evaluation_stream, open_data
from lightseq.training.sample_prompts import SamplePrompts, read_sample_prompts
from lightseq.training.setup_checks import (
    Notes,
    check_disk_space,
    check_packages,
    check_profiled,
    require_chats,
    warn_unreached,
)


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run."""

    model_config: PreTrainedConfig
    weights: Path | None  # None: random
    stream: BatchStream
    eval_stream: BatchStream | None
    total_steps: int
    dims: ParallelDims
    deepspeed: DeepSpeedSettings | None  # None: FSDP2
    notes: Notes  # lines to print at the start
    resume_point: ResumePoint = FRESH_START
    lora: Lora | None = None  # None: all weights are trained
    lora_adapter: Path | None = None  # to start from
    packed_base: PackedBase | None = None  # how frozen weights are stored
    teacher: FetchedTeacher | None = None  # only with --objective distill
    documents: DocumentLengths | None = None  # None: rows are not packed
    tokenizer: Path | None = None  # directory of the tokenizer to save with checkpoints
    bytes_are_tokens: bool = False  # the tokenizer of bytes is saved with checkpoints
    chat_template: str | None = None  # to save instead of the tokenizer's
    prompts: SamplePrompts | None = None

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint to resume from."""
        return self.resume_point.path


@dataclass(frozen=True)
class _Streams:
    """Data of a run, from its first step on, and the number of its steps."""

    training: BatchStream
    evaluation: BatchStream | None
    total_steps: int
    notes: Notes  # on the position in the data


def prepare(config: TrainConfig, family: ModelFamily, world: World, resume_point: ResumePoint = FRESH_START) -> Inputs:
    """Finds and checks a run's inputs. Raises ValueError with one line for invalid ones.

    Writes nothing and waits for no other rank.
    """
    _check_flags(config, world, resume_point)
    model = find_model(config, family, world)
    _check_adapters(config, model, resume_point.path)
    found = find_teacher(config, family, model, world)
    deepspeed = deepspeed_settings(config, model.dims.data_ranks, text_config(model.config).hidden_size)
    checkpoint_notes = _check_checkpoint(config, world, model, deepspeed, resume_point.path)
    streams = _open_streams(config, world, model, resume_point.path)
    stream, total_steps = streams.training, streams.total_steps
    check_lr_schedule(config, total_steps)
    tokenizer = model.tokenizer or made_with_one(paths_of(config.data_path))
    profile_notes = check_profiled(config, world.device, stream.first_step, total_steps)
    trained = count_adapter_parameters(model.lora, model.config) or total_parameters(model.config)
    base_bytes = 0 if model.lora or not isinstance(model.weights, Path) else weight_files.bytes_of(model.weights)
    disk_notes = check_disk_space(config, trained, base_bytes, stream, total_steps)
    prompts = read_sample_prompts(config, tokenizer, text_config(model.config).vocab_size)
    # Last, because a download can take hours and all other checks should come first.
    directory = fetch_weights(model, world, verified=resume_point.path)
    teacher = found.fetch(world, verified=resume_point.path) if found else None
    check_notes = checkpoint_notes + streams.notes + profile_notes + disk_notes + (found.notes if found else ())
    documents = document_lengths_of(
        stream.examples, config.model_max_length, inspect_architecture(model.config), config.share_prefixes is True
    )
    return Inputs(
        model_config=model.config,
        weights=directory,
        stream=stream,
        eval_stream=streams.evaluation,
        total_steps=total_steps,
        dims=model.dims,
        deepspeed=deepspeed,
        notes=_collect_notes(config, model, streams, resume_point, check_notes, documents),
        resume_point=resume_point,
        lora=model.lora,
        lora_adapter=Path(config.lora_adapter) if config.lora_adapter else None,
        packed_base=model.packed_base,
        teacher=teacher,
        documents=documents,
        tokenizer=tokenizer_directory(model, directory) if config.save_strategy != "no" else None,
        bytes_are_tokens=_bytes_are_tokens(config, directory),
        prompts=prompts,
        chat_template=read_chat_template(config.chat_template) if config.chat_template is not None else None,
    )


def _check_flags(config: TrainConfig, world: World, resume_point: ResumePoint) -> None:
    """Raises ValueError for flags that are invalid for every model."""
    if config.max_eval_samples is not None and config.eval_data_path is None:
        given = f"--max_eval_samples {config.max_eval_samples} limits evaluation data, but there is none"
        raise ValueError(f"{given}; add --eval_data_path and --eval_strategy, or leave it out")
    check_packages(config)
    if world.is_main:  # another host may see an older state of a shared directory
        check_output_dir(Path(config.output_dir), config, resume_point, world)


def _check_adapters(config: TrainConfig, model: FoundModel, resume_from: Path | None) -> None:
    """Raises ValueError if checkpoints would hold adapters of weights that no file has, or adapters cannot start."""
    if model.lora and config.lora_adapter and resume_from is None:
        check_start(Path(config.lora_adapter), model.lora)
    if model.packed_base is not None:
        _check_packed_base(config, model, model.packed_base)
    if model.lora and config.random_init and config.save_strategy != "no":
        given = f"--lora_rank {config.lora_rank}"
        raise ValueError(
            f"{given} saves only adapters, and the weights of --random_init would be lost; leave one of them out, "
            "or add --save_strategy no"
        )


def _check_packed_base(config: TrainConfig, model: FoundModel, packed_base: PackedBase) -> None:
    given = f"--model_name_or_path {config.model_name_or_path} in {packed_base.bits}" if packed_base.in_files else FLAG
    if model.lora is None:
        raise ValueError(f"{given} has weights that do not train; add --lora_rank")
    if config.expert_ranks > 1:
        raise ValueError(
            f"--expert_parallel_size {config.expert_parallel_size} does not run with {given}; give 1, or other weights"
        )
    if packed_base.is_nf4:
        check_package(given)
    if not packed_base.in_files:
        check_four_bits(build_to_train(model.config))


def _check_checkpoint(
    config: TrainConfig, world: World, model: FoundModel, deepspeed: DeepSpeedSettings | None, path: Path | None
) -> Notes:
    """Raises ValueError if the checkpoint does not fit the run. Returns notes on changed flags and adapters."""
    if path is None:
        if model.lora is None or config.lora_adapter is None:
            return ()
        return start_notes(Path(config.lora_adapter), config, model.config, model.packed_base)
    resume.check_engine(path, deepspeed.name if deepspeed else None, world.size)
    notes = check_model(path, config, model.config, model.lora, model.packed_base) + check_flags(path, config)
    return notes + changed_ranks_note(path, world)


def _open_streams(config: TrainConfig, world: World, model: FoundModel, resume_from: Path | None) -> _Streams:
    """Opens the data at the run's position. Raises ValueError if it does not fit the run."""
    data_ranks = model.dims.data_ranks
    examples, eval_examples = open_data(config, world, model)
    stream, notes = _resume_stream(_training_stream(examples, config, world, data_ranks), resume_from)
    eval_stream = None
    if eval_examples is not None:
        eval_stream = evaluation_stream(eval_examples, config.model_max_length, config, data_ranks)
    require_chats(config, [stream.examples, *([eval_stream.examples] if eval_stream else [])])
    total_steps = config.max_steps or stream.steps
    if resume_from is not None and total_steps < stream.first_step:
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} was saved after step {stream.first_step}, but this run ends at "
            f"step {total_steps}; give a larger --max_steps"
        )
    return _Streams(stream, eval_stream, total_steps, notes)


def _training_stream(examples: Examples, config: TrainConfig, world: World, data_ranks: int) -> BatchStream:
    return BatchStream(
        examples,
        length=config.model_max_length,
        batch_size=config.per_device_train_batch_size,
        data_ranks=data_ranks,
        accumulation=config.gradient_accumulation_steps,
        epochs=None if config.max_steps else config.num_train_epochs,
        seed=config.seed,
        packed=config.packing != "none",
        content=hash_content(examples) if world.is_main else None,
    )


def _resume_stream(stream: BatchStream, resume_from: Path | None) -> tuple[BatchStream, Notes]:
    """Returns the stream at the checkpoint's position, and notes. The batch size may have changed since."""
    if resume_from is None:
        return stream, ()
    facts = checkpoints.read_trainer_state(resume_from)
    found = facts.get(checkpoints.DATA_POSITION)
    data: dict[str, Any] = found if isinstance(found, dict) else {}
    needed = stream.state(0).keys() - {"sequences_per_step", "fingerprint", "content"}  # missing in older checkpoints
    if not all(isinstance(data.get(key), int) for key in needed) or not isinstance(data.get("content", ""), str):
        raise ValueError(f"--resume_from_checkpoint {resume_from} has no position in the data; give another checkpoint")
    return stream.resume_at(facts["step"], data, resume_from)


def _collect_notes(
    config: TrainConfig,
    model: FoundModel,
    streams: _Streams,
    resume_point: ResumePoint,
    check_notes: Notes,
    documents: DocumentLengths | None,
) -> Notes:
    """Returns the lines to print at the start. `check_notes` come from the checks of flags and checkpoint."""
    stream, total_steps, resume_from = streams.training, streams.total_steps, resume_point.path
    notes = stream.examples.notes
    if streams.evaluation:
        notes += tuple(_of_evaluation(note) for note in streams.evaluation.examples.notes)
    notes += tuple(f"warning: passed over {path}: {damage}" for path, damage in resume_point.damaged)
    notes += check_notes + warn_unreached(config, stream, total_steps)
    if resume_from is not None:
        notes += changed_length_note(resume_from, config.lr_scheduler_type, total_steps)
    if resume_from is not None and total_steps == stream.first_step:
        notes += (
            f"nothing left to train: {resume_from} was saved after step {stream.first_step} of {total_steps}; give a "
            "larger --max_steps or --num_train_epochs to continue",
        )
    context = context_warning(model.config, documents.longest_tokens, model.unscaled) if documents else None
    return notes + ((f"warning: {context}",) if context else ()) + model.warnings


def _bytes_are_tokens(config: TrainConfig, directory: Path | None) -> bool:
    """Returns whether the run trains on bytes, and the weights' `directory` has no tokenizer that says so."""
    if config.tokenizer is not None:
        return config.tokenizer == ByteTokenizer.name
    own = directory is not None and has_tokenizer(str(directory))
    return not own and made_with_one(paths_of(config.data_path)) == ByteTokenizer.name


def _of_evaluation(note: str) -> str:
    """Marks a note as one on the evaluation data."""
    warning = "warning: "
    return f"{warning}evaluation: {note.removeprefix(warning)}" if note.startswith(warning) else f"evaluation: {note}"
