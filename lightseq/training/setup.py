"""Inputs of a run: model, data, tokenizer and checkpoint, checked before anything is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from warnings import filterwarnings

import torch
from transformers import PreTrainedConfig

from lightseq.checkpoint import checkpoints, resume
from lightseq.checkpoint.checkpoints import check_disk, saved_bytes, saves_left
from lightseq.checkpoint.manifest import check_weights
from lightseq.checkpoint.resume import FRESH_START, ResumePoint, check_flags, check_model
from lightseq.config.deepspeed import DeepSpeedSettings, deepspeed_settings
from lightseq.config.lr_schedules import stable_decay_warning
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP
from lightseq.config.train_config import TrainConfig, warmup_steps
from lightseq.data.batches import BatchStream, open_examples, require_target
from lightseq.data.examples import Examples, WindowExamples
from lightseq.data.packing import PackedExamples, open_packed
from lightseq.data.sources import holds_rows
from lightseq.data.targets import CHAT, PAIR
from lightseq.data.token_directory import ReadOptions
from lightseq.data.tokenizer import ByteTokenizer, read_chat_template
from lightseq.distributed.mesh import World, check_devices, check_sequence_size
from lightseq.kernels import KernelSpec, select
from lightseq.memory.planner.documents import PackedDocuments, documents_of
from lightseq.models import weights
from lightseq.models.adapters import Lora, count_adapter_parameters, lora_from_config
from lightseq.models.architecture import (
    LENGTH_DEPENDENT_ROPE,
    Architecture,
    caps_scores,
    inspect_architecture,
    matrix_sizes,
    rope_types,
)
from lightseq.models.family import apply_rope, context_warning, resolve
from lightseq.models.flops import total_parameters
from lightseq.models.heads import heads_of
from lightseq.models.presets import ModelFamily
from lightseq.modules.fp8 import check_fp8
from lightseq.modules.tiled import check_layer_class
from lightseq.schedule.algorithms import SCHEDULES
from lightseq.schedule.auto import ScheduleChoice, choose_windowed
from lightseq.training.metrics import check_mirror
from lightseq.training.optimization import check_optimizer
from lightseq.training.output_directory import check_output_dir
from lightseq.utils.versions import UntestedVersionWarning, untested_versions


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run."""

    model_config: PreTrainedConfig
    weights: Path | None  # None: random
    stream: BatchStream
    eval_stream: BatchStream | None
    total_steps: int
    sequence_size: int
    data_rank: int
    resume_from: Path | None
    deepspeed: DeepSpeedSettings | None  # None: FSDP2
    notes: tuple[str, ...]  # lines to print at the start
    lora: Lora | None = None  # None: all weights are trained
    documents: PackedDocuments | None = None  # None: rows are not packed
    passed_over: tuple[Path, ...] = ()  # damaged checkpoints later than the one resumed from
    tokenizer: Path | None = None  # directory of the tokenizer to save with checkpoints
    chat_template: str | None = None  # to save instead of the tokenizer's


def prepare(config: TrainConfig, family: ModelFamily, world: World, found: ResumePoint = FRESH_START) -> Inputs:
    """Finds and checks a run's inputs. Raises ValueError with one line for invalid ones.

    Writes nothing and waits for no other rank.
    """
    if config.max_eval_samples is not None and config.eval_data_path is None:
        given = f"--max_eval_samples {config.max_eval_samples} limits evaluation data, but there is none"
        raise ValueError(f"{given}; add --eval_data_path and --eval_strategy, or leave it out")
    check_mirror(config.report_to)
    check_optimizer(config.optim, world.device)
    check_output_dir(Path(config.output_dir), config, found, world)
    model = find_model(config, family, world)
    if model.lora and config.random_init and config.save_strategy != "no":
        given = f"--lora_rank {config.lora_rank}"
        raise ValueError(
            f"{given} saves only adapters, and the weights of --random_init would be lost; leave one of them out, "
            "or add --save_strategy no"
        )
    data_ranks = world.size // model.sequence_size
    if config.deepspeed is not None and find_spec("deepspeed") is None:
        raise ValueError(
            f"--deepspeed {config.deepspeed} needs DeepSpeed, which is not installed; pip install deepspeed"
        )
    deepspeed = deepspeed_settings(config, data_ranks, model.config.hidden_size)
    changed = _check_checkpoint(config, world, model, deepspeed, found.path)
    stream, resumed = _resumed(_training_stream(config, world, model, data_ranks), found.path)
    eval_stream = None
    if config.eval_data_path and config.eval_strategy != "no":
        eval_examples = find_examples(config.eval_data_path, model, config, world, evaluates=True)
        require_target(eval_examples, config.eval_data_path)
        eval_stream = evaluation_stream(eval_examples, config.model_max_length, config, data_ranks)
    require_chats(config, [stream.examples, *([eval_stream.examples] if eval_stream else [])])
    total_steps = config.max_steps or stream.steps
    if found.path is not None and total_steps < stream.first_step:
        raise ValueError(
            f"--resume_from_checkpoint {found.path} was saved after step {stream.first_step}, but this run ends at "
            f"step {total_steps}; give a larger --max_steps"
        )
    profiled = _check_profiled(config, world.device, stream.first_step, total_steps)
    room = _check_disk_space(config, model, stream, total_steps)
    # Last, because a download can take hours and all other checks should come first.
    directory = fetch(model, world, found.path)
    notes = stream.examples.notes + (eval_stream.examples.notes if eval_stream else ())
    notes += tuple(f"warning: passed over {path}: {damage}" for path, damage in found.damaged)
    notes += changed + resumed + profiled + warn_unused_lazy(config) + room
    notes += warn_unreached(config, stream, total_steps)
    if found.path is not None and total_steps == stream.first_step:
        notes += (
            f"nothing left to train: {found.path} was saved after step {stream.first_step} of {total_steps}; give a "
            "larger --max_steps or --num_train_epochs to continue",
        )
    documents = documents_of(stream.examples, config.model_max_length, inspect_architecture(model.config))
    context = context_warning(model.config, documents.longest_tokens, model.unscaled) if documents else None
    return Inputs(
        model_config=model.config,
        weights=directory,
        stream=stream,
        eval_stream=eval_stream,
        total_steps=total_steps,
        sequence_size=model.sequence_size,
        data_rank=world.rank // model.sequence_size,
        resume_from=found.path,
        deepspeed=deepspeed,
        notes=notes + ((f"warning: {context}",) if context else ()) + model.warnings,
        lora=model.lora,
        documents=documents,
        passed_over=tuple(path for path, _ in found.damaged),
        tokenizer=tokenizer_directory(model, directory) if config.save_strategy != "no" else None,
        chat_template=read_chat_template(config.chat_template) if config.chat_template is not None else None,
    )


def _check_checkpoint(
    config: TrainConfig, world: World, model: "FoundModel", deepspeed: DeepSpeedSettings | None, path: Path | None
) -> tuple[str, ...]:
    """Raises ValueError if the checkpoint does not fit the run. Returns notes on changed flags."""
    if path is None:
        return ()
    resume.check_engine(path, deepspeed.name if deepspeed else None, world.size)
    return check_model(path, config, model.config, model.lora) + check_flags(path, config)


def _training_stream(config: TrainConfig, world: World, model: "FoundModel", data_ranks: int) -> BatchStream:
    return BatchStream(
        find_examples(config.data_path, model, config, world),
        config.model_max_length,
        config.per_device_train_batch_size,
        data_ranks,
        config.gradient_accumulation_steps,
        epochs=None if config.max_steps else config.num_train_epochs,
        seed=config.seed,
        packed=config.packing != "none",
    )


def _check_disk_space(
    config: TrainConfig, model: "FoundModel", stream: BatchStream, total_steps: int
) -> tuple[str, ...]:
    """Returns a note on disk space. Raises ValueError if not even one checkpoint fits."""
    trained = count_adapter_parameters(model.lora, model.config) or total_parameters(model.config)
    epochs_left = stream.epochs_after(total_steps) - stream.epochs_after(stream.first_step)
    saves = saves_left(config, stream.first_step, total_steps, epochs_left)
    directory = Path(config.output_dir)
    room = check_disk(
        directory, saved_bytes(trained, config), saves, len(checkpoints.list_checkpoints(directory)), config
    )
    return (room,) if room else ()


def warn_unused_lazy(config: TrainConfig) -> tuple[str, ...]:
    """Returns a note if --lazy_preprocess has no effect. Not an error, so that scripts can always pass it."""
    rows = [path for path in (config.data_path, config.eval_data_path) if path and holds_rows(path)]
    if not config.lazy_preprocess or any(Path(path).is_file() for path in rows):
        return ()
    reason = f"{', '.join(rows)} is not a single file" if rows else f"{config.data_path} contains tokens already"
    return (f"--lazy_preprocess True has no effect: {reason}",)


def warn_unreached(config: TrainConfig, stream: BatchStream, total_steps: int) -> tuple[str, ...]:
    """Returns warnings about evaluations and warm-up that would come only after the last step."""
    found, first = [], stream.first_step
    if total_steps == first:
        return ()  # nothing to train, which `prepare` notes
    passed = {
        "steps": total_steps // config.eval_steps - first // config.eval_steps,
        "epoch": int(stream.epochs_after(total_steps)) - int(stream.epochs_after(first)),
    }
    if config.eval_strategy != "no" and not passed[config.eval_strategy] and not config.keep_best:
        every = f"every {config.eval_steps} steps" if config.eval_strategy == "steps" else "at the end of an epoch"
        found.append(f"warning: evaluation runs {every}, but this run ends at step {total_steps} without one")
    if config.warmup_steps > total_steps:
        found.append(
            f"warning: --warmup_steps {config.warmup_steps} is past the last step, {total_steps}, so the learning rate "
            "never reaches its peak"
        )
    if config.lr_scheduler_type == "warmup_stable_decay":
        warning = stable_decay_warning(config.lr_scheduler_kwargs or {}, warmup_steps(config, total_steps), total_steps)
        found += [warning] if warning else []
    return tuple(found)


def _resumed(stream: BatchStream, resume_from: Path | None) -> tuple[BatchStream, tuple[str, ...]]:
    """Returns the stream at the checkpoint's position, and notes. The batch size may have changed since."""
    if resume_from is None:
        return stream, ()
    facts = checkpoints.read_trainer_state(resume_from)
    data = facts.get(checkpoints.DATA)
    needed = stream.state(0).keys() - {"sequences_per_step", "fingerprint"}  # missing in older checkpoints
    if not isinstance(data, dict) or not all(isinstance(data.get(key), int) for key in needed):
        raise ValueError(f"--resume_from_checkpoint {resume_from} has no position in the data; name another checkpoint")
    return stream.resumed(facts["step"], data, resume_from)


def _check_profiled(config: TrainConfig, device: torch.device, first_step: int, total_steps: int) -> tuple[str, ...]:
    """Returns a warning if the steps to profile are already done. Not an error, because a restart keeps the flags.

    Raises ValueError if they come after the last step, or --profile_memory has no GPU.
    """
    if config.profile_steps is None:
        return ()
    if config.profile_memory and device.type != "cuda":
        raise ValueError("--profile_memory needs a GPU, and there is none; leave it out")
    first, last = config.profile_steps
    if first > total_steps:
        raise ValueError(
            f"--profile_steps {first}:{last} begins after the last step, {total_steps}; give earlier steps"
        )
    warning = f"warning: --profile_steps {first}:{last}: the run resumes after step {first_step}; nothing is profiled"
    return (warning,) if last <= first_step else ()


@dataclass(frozen=True)
class FoundModel:
    """Model that was checked for groups of `sequence_size` ranks. Its weights may not be downloaded yet."""

    config: PreTrainedConfig
    weights: Path | str | None
    tokenizer: str | None
    sequence_size: int
    warnings: tuple[str, ...]
    lora: Lora | None = None
    unscaled: PreTrainedConfig | None = None  # the config without --rope_scaling, if that was given


def find_model(config: TrainConfig, family: ModelFamily, world: World) -> FoundModel:
    check_devices(world)
    sequence_size = check_sequence_size(world, config.sequence_parallel_size)
    source = resolve(family, config.model_name, config.random_init)
    model_config = apply_rope(source.config, config.rope_theta, config.rope_scaling, config.model_max_length)
    check_layers(config, inspect_architecture(model_config))
    _check_kernel(config, model_config, world.device)
    if config.packing != "none":
        _check_packing(config.packing, model_config)
    check_fp8(config.fp8, config.fp8_emulate, matrix_sizes(model_config), world.device)
    tokenizer = config.tokenizer or (str(source.weights) if source.weights else None)
    unscaled = source.config if config.rope_scaling else None
    context = None  # of packed rows the documents count, see prepare
    if config.packing == "none":
        context = context_warning(model_config, config.model_max_length, unscaled)
    filterwarnings("ignore", category=UntestedVersionWarning)  # printed with the other warnings below
    lines = [*untested_versions(), *_warnings(config.for_planner(world.device.type == "cuda"), context, sequence_size)]
    warnings = tuple(f"warning: {line}" for line in lines)
    lora = lora_from_config(config, model_config)
    return FoundModel(model_config, source.weights, tokenizer, sequence_size, warnings, lora, unscaled)


def _check_packing(packing: str, model_config: PreTrainedConfig) -> None:
    for rope in sorted(rope_types(model_config) & LENGTH_DEPENDENT_ROPE):
        raise ValueError(
            f"--packing {packing} does not work with RoPE {rope}, which depends on a document's length; "
            "give another --rope_scaling"
        )
    found = inspect_architecture(model_config)
    if not found.passes_documents:
        raise ValueError(
            f"--packing {packing} does not work with {found.name}, whose layers do not pass document boundaries to "
            "attention; leave it out"
        )


def _warnings(config: TrainConfig, context: str | None, sequence_size: int) -> list[str]:
    eager = config.fp8 is not None and config.torch_compile is False
    casts = "without --torch_compile, casts to FP8 run as separate kernels and may cost more than FP8 saves; add it"
    algorithm = SCHEDULES.get(config.schedule)
    uneven = algorithm is not None and algorithm.packed_work == "uneven"
    uneven = uneven and config.packing != "none" and sequence_size > 1
    even = " or ".join(name for name, row in SCHEDULES.items() if row.packed_work == "even")
    areas = (
        f"--schedule {config.schedule} does not balance packed documents: some ranks may compute several times as much "
        f"attention as others (attention_balance in metrics.jsonl); leave --schedule out, or use {even}"
    )
    return ([context] if context else []) + ([casts] if eager else []) + ([areas] if uneven else [])


def find_examples(path: str, model: FoundModel, config: TrainConfig, world: World, evaluates: bool = False) -> Examples:
    """Opens data for training or, with `evaluates`, the part for evaluation that --max_eval_samples allows."""
    length, vocab_size = config.model_max_length, model.config.vocab_size
    opened = open_examples if config.packing == "none" else open_packed
    limit = config.max_train_samples if path == config.data_path else None
    cuts_documents = evaluates and config.max_eval_samples is not None
    read_options = ReadOptions(
        config.text_column,
        config.max_eval_samples if cuts_documents else limit,
        Path(config.data_cache).expanduser(),
        config.chat_template,
        limits_documents=cuts_documents,
    )
    return opened(path, length, vocab_size, model.tokenizer, config.lazy_preprocess, world.is_main, read_options)


def require_chats(config: TrainConfig, opened: Sequence[Examples]) -> None:
    """Raises ValueError if --chat_template is given, but renders no row of the data."""
    if config.chat_template is None:
        return
    windows = [examples.windows if isinstance(examples, PackedExamples) else examples for examples in opened]
    kinds = {x.source.meta.get("kind") for x in windows if isinstance(x, WindowExamples)}
    if not kinds & {CHAT, PAIR}:
        raise ValueError(
            "--chat_template applies to chats and to prompts with answers, which the data does not hold; leave it out"
        )


def evaluation_stream(examples: Examples, length: int, config: TrainConfig, data_ranks: int) -> BatchStream:
    """Returns a stream of all examples, once and in order."""
    packed = isinstance(examples, PackedExamples)
    return BatchStream(
        examples, length, config.per_device_eval_batch_size, data_ranks, epochs=1, shuffle=False, packed=packed
    )


def fetch(model: FoundModel, world: World, looked_at: Path | None = None) -> Path | None:
    """Returns the directory of a model's weights, after downloading them if needed; None for random weights.

    Raises ValueError if their manifest shows damage. `looked_at`: a directory that was already verified.
    """
    directory = weights.download(model.weights) if isinstance(model.weights, str) else model.weights
    if world.is_main and directory is not None and directory != looked_at:
        check_weights(directory)
    return directory


def tokenizer_directory(model: FoundModel, directory: Path | None) -> Path | None:
    """Returns the directory of the tokenizer: that of the weights, or the one given by --tokenizer."""
    named = model.tokenizer
    if named == ByteTokenizer.name or named is None:
        return None
    if named == str(model.weights):
        return directory
    return Path(named) if Path(named).is_dir() else weights.download_tokenizer(named)


def check_layers(config: TrainConfig, found: Architecture) -> None:
    """Raises ValueError if the flags need something that the model's layers do not support."""
    if config.tiles_layers:
        check_layer_class(found.layer_class)
    if found.has_windows(config.model_max_length):
        choose_windowed(ScheduleChoice(config.schedule))
    if config.remat_policy in STORES_MLP and not found.gated_mlp:
        raise ValueError(
            f"--remat {config.remat_policy} needs a gated MLP of plain linear layers, which {found.layer_class} does "
            "not have; give --remat attention"
        )
    if config.remat_policy in STORES_MLP and not found.can_store_mlp:
        raise ValueError(
            f"--remat {config.remat_policy} does not recompute the MLP's output, but {found.layer_class} needs it in "
            "the backward pass (for a norm after the MLP, for example); give --remat attention"
        )
    if config.remat_policy == STORE_LINEARS and not found.plain_projections:
        raise ValueError(
            f"--remat {STORE_LINEARS} needs four attention projections without bias, which {found.layer_class} does "
            "not have; give --remat attention+mlp"
        )
    asked = config.fsdp_transformer_layer_cls_to_wrap
    if asked is not None and asked != found.layer_class:
        raise ValueError(
            f"--fsdp_transformer_layer_cls_to_wrap {asked}: the layers of {config.model_name_or_path} are of the class "
            f"{found.layer_class}; give that, or leave it out"
        )


def _check_kernel(config: TrainConfig, model_config: PreTrainedConfig, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    dtype = getattr(torch, config.compute_dtype)
    dim, packed = heads_of(model_config).dim, config.packing != "none"
    softcap = caps_scores(model_config)
    spec = KernelSpec(device.type, capability, dtype, dim, config.deterministic, packed, softcap=softcap)
    select(config.kernel_name, spec)
