"""TRL's DistillationTrainer with sequences split over ranks. A separate file, because TRL before 1.16 lacks it."""

from lightseq.utils.versions import check_version

check_version("trl", "1.16", "SequenceParallelDistillationTrainer")

from trl import DistillationTrainer  # noqa: E402

from lightseq.integrations.distillation import SequenceParallelDistillation  # noqa: E402


class SequenceParallelDistillationTrainer(SequenceParallelDistillation, DistillationTrainer):
    """TRL's DistillationTrainer with sequences split over ranks, in the teacher too."""
