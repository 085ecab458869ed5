"""ms-swift's supervised fine-tuning and pre-training with sequences split over all ranks, as a plugin of ms-swift.

NPROC_PER_NODE=2 swift sft --external_plugins examples/with_ms_swift.py --attn_impl sdpa ...
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

import transformers
from packaging.version import Version
from swift.trainers import Seq2SeqTrainer, TrainerFactory

from lightseq.integrations import SequenceParallel


class SequenceParallelSeq2SeqTrainer(SequenceParallel, Seq2SeqTrainer):  # type: ignore[misc]
    """ms-swift's trainer; all ranks share a sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if Version(transformers.__version__) >= Version("5.19"):
            raise ValueError(f"transformers {transformers.__version__} counts tokens otherwise; install 5.16.1")
        super().__init__(*args, **kwargs)
        if self.template.sequence_parallel_size > 1:
            raise ValueError("sequence_parallel_size > 1 is ms-swift's own; leave it out, all ranks share a sequence")
        if self.args.predict_with_generate:
            raise ValueError("predict_with_generate is not supported over several ranks; generate with a checkpoint")
        self.args.use_logits_to_keep = False  # the loss never makes logits
        self._compute_loss_of_model, self.template.compute_sft_loss = self.template.compute_sft_loss, self._sft_loss

    def _packs_documents(self) -> bool:
        return bool(self.template.packing or self.template.padding_free)

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Gives ranks that share a sequence the same rows, as ms-swift does for tensor parallel ranks."""
        loader = super().get_train_dataloader(*args, **kwargs)
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError("streaming gives every rank other rows; leave --streaming out")
        sampler = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        sampler.tp_size = self._ranks_per_batch
        sampler.total_samples = len(self.train_dataset) // sampler.world_size
        return loader

    def _sft_loss(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        """Leaves out token_acc while training, because it would gather whole logits in every step."""
        outputs = self._compute_loss_of_model(model, inputs, **kwargs)
        if model.training and "labels" in inputs:
            outputs.logits = None
        return outputs


TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.{SequenceParallelSeq2SeqTrainer.__name__}"
