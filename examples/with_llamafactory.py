"""LLaMA-Factory with sequences split over all ranks, for `stage: sft` and `pt`; its YAML file stays as it is.

DISABLE_VERSION_CHECK=1 python3 -m torch.distributed.run --nproc_per_node=2 examples/with_llamafactory.py config.yaml
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from llamafactory.train import tuner
from llamafactory.train.pt import workflow as pretraining
from llamafactory.train.sft import workflow as fine_tuning

from lightseq.integrations import SequenceParallel


class SplitSequences(SequenceParallel):
    """LLaMA-Factory's settings for `SequenceParallel`; all ranks share a sequence."""

    def __init__(self, *, model: Any, args: Any, data_collator: Any, **kwargs: Any) -> None:
        # Masks (batch, length) that number the samples, instead of (batch, 1, length, length).
        data_collator.block_diag_attn = data_collator.neat_packing = False
        # LLaMA-Factory enables it in the model only, where attention would be computed twice.
        args.gradient_checkpointing = model.is_gradient_checkpointing
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)


class FineTuning(SplitSequences, fine_tuning.CustomSeq2SeqTrainer):  # type: ignore[misc]
    """LLaMA-Factory's trainer of `stage: sft`."""


class Pretraining(SplitSequences, pretraining.CustomTrainer):  # type: ignore[misc]
    """LLaMA-Factory's trainer of `stage: pt`."""


def run_sft(models: Any, data: Any, training: Any, finetuning: Any, *others: Any) -> None:
    refused = {
        "packing: true without neat_packing": data.packing and not data.neat_packing,
        "predict_with_generate": training.predict_with_generate,
        "use_asft_loss": finetuning.use_asft_loss,
    }
    for setting in [setting for setting, is_set in refused.items() if is_set]:
        raise ValueError(f"{setting} does not work with split sequences; change it, or train without lightseq")
    fine_tuning.run_sft(models, data, training, finetuning, *others)


def refuse(stage: str, *arguments: Any) -> None:
    raise ValueError(f"stage: {stage} does not split sequences; use sft or pt, or TRL's trainers with lightseq")


fine_tuning.CustomSeq2SeqTrainer, pretraining.CustomTrainer = FineTuning, Pretraining
tuner.run_sft = run_sft
for stage in ("dpo", "kto", "ppo", "rm"):
    setattr(tuner, f"run_{stage}", partial(refuse, stage))

if __name__ == "__main__":
    tuner.run_exp()
