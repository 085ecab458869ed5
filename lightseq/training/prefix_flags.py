"""Shared prefixes as a run's flags ask for them, and the models that take none."""

from transformers import PreTrainedConfig

from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.train_config import TrainConfig
from lightseq.sequence.shared_prefixes import LEAST_SAVED, WHOLE_ROWS_ONLY


def least_saved(config: TrainConfig, model_config: PreTrainedConfig) -> float | None:
    """Returns the share of a batch's tokens that trees must save; None if documents stay whole."""
    if config.share_prefixes:
        return 0.0  # rows were packed for trees
    by_itself = config.share_prefixes is None and config.objective == "dpo"
    return LEAST_SAVED if by_itself and not inspect_architecture(model_config).has_recurrences else None


def check_share_prefixes(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    """Raises ValueError if prefixes shall be shared, but the model has layers that do not take trees."""
    architecture = inspect_architecture(model_config)
    if config.share_prefixes and architecture.has_recurrences:
        name = architecture.name
        raise ValueError(
            f"--share_prefixes True does not work with {name}: {WHOLE_ROWS_ONLY}; give False or leave it out"
        )
