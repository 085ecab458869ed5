"""Sequence-parallel versions of axolotl's trainers, installed by `integrations.axolotl`."""

from typing import Any

from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.integrations.base import PluginManager

from lightseq.integrations.trainer import SequenceParallel


class LightseqTrainer(SequenceParallel, AxolotlTrainer):
    """axolotl's trainer of causal models, whose samples may be packed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_options(), **kwargs)

    def _packs_documents(self) -> bool:
        return bool(self.args.sample_packing)

    def _longest_row(self) -> int:
        rows = self.args.per_device_train_batch_size if self.args.sample_packing else 1  # packed rows are joined
        return int(self.args.max_seq_length) * rows

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts the tokens of ranks that share a sequence once, in the metrics `tokens/...`."""
        before = dict(getattr(self.state, "tokens", {}))
        found = super().compute_loss(model, *args, **kwargs)
        for name, count in getattr(self.state, "tokens", {}).items():
            past = before.get(name, 0)
            self.state.tokens[name] = past + (count - past) / self._ranks_per_batch
        return found


class LightseqDPOTrainer(SequenceParallel, AxolotlDPOTrainer):
    """axolotl's trainer of preferences, which splits the reference model's sequences too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_options(), **kwargs)


def _options() -> dict[str, Any]:
    """Returns the arguments of `SequenceParallel` that the YAML file gives."""
    cfg = PluginManager.get_instance().cfg
    return {
        "sequence_parallel_size": cfg.lightseq_sequence_parallel_size,
        "compile_layers": cfg.lightseq_compile_layers,
        "attention_options": {"schedule": cfg.lightseq_schedule} if cfg.lightseq_schedule else {},
    }
