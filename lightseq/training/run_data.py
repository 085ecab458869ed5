"""Examples of a run, opened from --data_path and --eval_data_path as the flags say."""

from collections.abc import Sequence
from pathlib import Path

from lightseq.config.objectives import OBJECTIVES
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream
from lightseq.data.column_flags import renamed_columns, split_columns
from lightseq.data.examples import Examples
from lightseq.data.held_out import hold_out
from lightseq.data.mixture import WeightedPath, mix, paths_of, weighted_paths
from lightseq.data.open_examples import open_examples, require_target
from lightseq.data.packing import PackedExamples, open_windows_to_pack, pack
from lightseq.data.sources import ReadOptions, holds_columns, holds_rows, names_for
from lightseq.distributed.world import World
from lightseq.models.decoder import placeholder_ids, text_config
from lightseq.training.find_model import FoundModel


def open_data(config: TrainConfig, world: World, model: FoundModel) -> tuple[Examples, Examples | None]:
    """Opens the examples to train on, and those to evaluate on, if the run evaluates."""
    if config.eval_fraction is not None:
        return _hold_out(config, world, model)
    examples = find_examples(config.data_path, model, config, world)
    if not config.eval_data_path or config.eval_schedule == "no":
        return examples, None
    held = find_examples(config.eval_data_path, model, config, world, evaluates=True)
    require_target(held, config.eval_data_path)
    return examples, held


def _hold_out(config: TrainConfig, world: World, model: FoundModel) -> tuple[Examples, Examples]:
    """Splits the rows of each source, so that a mixture holds out a share of every one. Held-out rows count once."""
    path, fraction = config.data_path, config.eval_fraction
    assert fraction is not None, "the caller checks"
    sources = weighted_paths(path)
    opened = _open_sources(sources, model, config, world, trains=True)
    split = [hold_out(rows, fraction, config.seed, source.path) for rows, source in zip(opened, sources, strict=True)]
    trained = mix([rows for rows, _ in split], sources, config.seed)
    held = mix([rows for _, rows in split], [WeightedPath(source.path) for source in sources], config.seed)
    require_target(held, f"the part of {path} that --eval_fraction {fraction} holds out")
    return _packed(path, trained, config), _packed(path, held, config)


def find_examples(path: str, model: FoundModel, config: TrainConfig, world: World, evaluates: bool = False) -> Examples:
    """Opens data for training or, with `evaluates`, the part for evaluation that --max_eval_samples allows.

    `path` may name several sources. Raises ValueError if the data cannot be opened or does not fit the model.
    """
    trains = path == config.data_path and not (evaluates and path == config.eval_data_path)
    sources = weighted_paths(path, "--data_path" if trains else "--eval_data_path")
    if not trains and any(source.weight != 1 for source in sources):
        raise ValueError(f"--eval_data_path {path} has weights, but evaluation reads every row once; leave them out")
    opened = _open_sources(sources, model, config, world, trains, evaluates)
    return _packed(path, mix(opened, sources, config.seed), config)


def _packed(path: str, examples: Examples, config: TrainConfig) -> Examples:
    """Returns the examples of `path` in the form that --packing asks for."""
    if config.packing == "none":
        return examples
    names = ", ".join(source.path for source in weighted_paths(path))
    return pack(names, examples, shares_prefixes=config.share_prefixes is True)  # type: ignore[arg-type]


def _open_sources(
    sources: Sequence[WeightedPath],
    model: FoundModel,
    config: TrainConfig,
    world: World,
    trains: bool,
    evaluates: bool = False,
) -> list[Examples]:
    """Opens each source by itself, with whole windows if they are to be packed."""
    length, vocab_size = config.model_max_length, text_config(model.config).vocab_size
    opener = open_examples if config.packing == "none" else open_windows_to_pack
    # --text_column, --columns and --ignore_columns may be meant for other sources, which have rows.
    everything = [path for text in (config.data_path, config.eval_data_path) if text for path in paths_of(text)]
    limits_evaluation = evaluates and config.max_eval_samples is not None
    opened: list[Examples] = []
    for source in sources:
        reads_text = holds_rows(source.path) or not any(map(holds_rows, everything))
        reads_columns = holds_columns(source.path) or not any(map(holds_columns, everything))
        options = ReadOptions(
            text_column=config.text_column if reads_text else TrainConfig.text_column,
            ignored_columns=split_columns(config.ignore_columns) if reads_columns else (),
            renamed_columns=names_for(source.path, everything, renamed_columns(config.columns)),
            limit=config.max_eval_samples if limits_evaluation else config.max_train_samples if trains else None,
            cache=Path(config.data_cache).expanduser(),
            chat_template=config.chat_template,
            limits_documents=limits_evaluation,
            refused_ids=placeholder_ids(model.config),
            pairs=OBJECTIVES[config.objective].reads_pairs,
            shares_prefixes=config.share_prefixes is True,
        )
        tokenizer, lazy = model.tokenizer, config.lazy_preprocess
        opened.append(opener(source.path, length, vocab_size, tokenizer, lazy, world.is_main, options))
    return opened


def evaluation_stream(examples: Examples, length: int, config: TrainConfig, data_ranks: int) -> BatchStream:
    """Returns a stream of all examples, once and in order."""
    packed = isinstance(examples, PackedExamples)
    return BatchStream(
        examples, length, config.per_device_eval_batch_size, data_ranks, epochs=1, shuffle=False, packed=packed
    )
