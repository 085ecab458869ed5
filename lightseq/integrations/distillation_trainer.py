"""TRL's DistillationTrainer with sequences split over ranks. In a file of its own, because TRL has it from 1.16 on."""

from lightseq.utils.versions import check_version

check_version("trl", "1.16", "SequenceParallelDistillationTrainer")

from trl import DistillationTrainer  # noqa: E402

from lightseq.integrations.distillation import SequenceParallelDistillation  # noqa: E402


class SequenceParallelDistillationTrainer(SequenceParallelDistillation, DistillationTrainer):
    """TRL's DistillationTrainer with sequences split over ranks, in the teacher too."""
