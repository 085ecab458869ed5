"""TRL's trainers with sequences split over ranks: packed or padded, all weights or adapters.

class MySFT(SequenceParallel, SFTTrainer): ...
"""

from trl import DPOTrainer, SFTTrainer

from lightseq.integrations.trainer import SequenceParallel


class SequenceParallelSFTTrainer(SequenceParallel, SFTTrainer):
    """TRL's SFTTrainer with sequences split over ranks."""


class SequenceParallelDPOTrainer(SequenceParallel, DPOTrainer):
    """TRL's DPOTrainer with sequences split over ranks, those of the reference model too."""
