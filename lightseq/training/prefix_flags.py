"""Shared prefixes as a run's flags ask for them, and the models that take none."""

from transformers import PreTrainedConfig

from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.train_config import TrainConfig
from lightseq.sequence.shared_prefixes import LEAST_SAVED, why_whole_rows
from lightseq.training.router_flags import router_coefficient


def least_saved(config: TrainConfig, model_config: PreTrainedConfig) -> float | None:
    """Returns the share of a batch's tokens that trees must save; None if documents stay whole."""
    if config.share_prefixes:
        return 0.0  # rows were packed for trees
    by_itself = config.share_prefixes is None and config.objective == "dpo"
    return LEAST_SAVED if by_itself and _why_whole(config, model_config) is None else None


def check_share_prefixes(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    """Raises ValueError if prefixes shall be shared, but the model or another flag does not allow that."""
    if config.share_prefixes and (reason := _why_whole(config, model_config)) is not None:
        name = inspect_architecture(model_config).name
        raise ValueError(f"--share_prefixes True does not work with {name}: {reason}; give False or leave it out")


def _why_whole(config: TrainConfig, model_config: PreTrainedConfig) -> str | None:
    return why_whole_rows(
        carries_states=inspect_architecture(model_config).has_recurrences,
        counts_router_tokens=bool(router_coefficient(config, model_config) or config.router_bias_update_rate),
    )
