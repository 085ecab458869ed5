"""Options of distributed attention."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lightseq.config.remat_policies import may_keep_gathered
from lightseq.schedule.algorithms import SCHEDULES, schedule_without_steps
from lightseq.schedule.auto import AUTO
from lightseq.schedule.documents import local_tokens

if TYPE_CHECKING:
    from lightseq.config.train_config import TrainConfig


@dataclass(frozen=True)
class AttentionConfig:
    """Options of distributed attention. `lightseq train --help` lists schedules, kernels and transports."""

    schedule: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    # Ranks in a Ulysses group, which split its heads; divides the ranks (default: set by the schedule).
    ulysses_size: int | None = None
    # Groups of heads that a rank computes one after the other (default: chosen by predicted time).
    head_groups: int | None = None
    dtype: torch.dtype | None = None  # dtype of q, k and v (default: the parameters'; set it under autocast)
    device: torch.device | None = None  # device of q, k and v (default: the parameters')
    # Sequence length in tokens for which `schedule="auto"` chooses.
    length: int = 65536
    deterministic: bool = False  # bit-identical gradients in every run
    gpus_per_host: int | None = None  # neighbouring ranks of the group that share a host (default: all)
    packed: bool = False  # most sequences hold several documents; `auto` is then prefix, which balances them
    windows: bool = False  # some layers have a window shorter than the rows, padding included; `auto` is then prefix
    softcap: bool = False  # some layers cap their scores softly, which few kernels support
    # Under ulysses, save gathered q, k and v for the backward pass instead of the rank's own, so that they travel once.
    # Set it to False if a checkpoint recomputes q, k and v.
    keep_gathered: bool = True
    # How scans of recurrent layers span the ranks: auto, chain or heads.
    recurrent_schedule: str = "auto"
    carries_states: bool = False  # some layers carry a state through the sequence, so tokens must not be scattered
    # Layers pass slices of their heads in turn (`tile_layers`), so a schedule needs fewer head groups.
    layers_slice_heads: bool = False

    def with_windows(self, windows: Collection[int], ranks: int) -> "AttentionConfig":
        """Returns the config for layers with these windows: `windows` is set if one does not see a whole row.

        Raises ValueError for a requested schedule that these ranks cannot form.
        """
        return self if not windows or min(windows) >= self.longest_row(ranks) else replace(self, windows=True)

    def longest_row(self, ranks: int) -> int:
        """Returns the most tokens that a row of `length` tokens can have once it is padded for a group of ranks.

        Tables cover the padding, too. Raises ValueError for a requested schedule that these ranks cannot form.
        """
        if self.schedule == AUTO:
            made = [schedule_without_steps(name, ranks) for name, x in SCHEDULES.items() if x.ulysses_group == "one"]
        else:
            made = [schedule_without_steps(self.schedule, ranks, ulysses_size=self.ulysses_size)]
        return ranks * max(local_tokens(schedule, self.length, self.packed) for schedule in made)

    @classmethod
    def from_flags(
        cls, flags: "TrainConfig", device: torch.device, gpus_per_host: int | None = None
    ) -> "AttentionConfig":
        """Returns the options from the flags of a run, without the requirements of the model's layers."""
        return cls(
            schedule=flags.schedule,
            kernel=flags.kernel_name,
            transport=flags.transport,
            ulysses_size=flags.ulysses_size,
            dtype=getattr(torch, flags.compute_dtype),
            device=device,
            length=flags.model_max_length,
            deterministic=flags.deterministic,
            gpus_per_host=gpus_per_host,
            packed=flags.packing != "none",
            keep_gathered=may_keep_gathered(flags.remat_policy),
            recurrent_schedule=flags.recurrent_schedule,
            layers_slice_heads=flags.slices_heads,
        )
