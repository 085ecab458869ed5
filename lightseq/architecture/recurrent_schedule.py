"""Request and choice of how the scans of a model span the ranks of a sequence."""

from collections.abc import Iterable

from transformers import PreTrainedConfig

from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.recurrent_schedules import AUTO, HEADS
from lightseq.parts.facts import LinearMixer
from lightseq.recurrent.chain_or_heads import check_heads_divide, choose
from lightseq.schedule.layout import Layout


def check_recurrent_schedule(requested: str, name: str, mixers: Iterable[LinearMixer], ranks: int) -> None:
    """Raises ValueError if a model with these mixers has no scan to schedule, or its heads do not divide by the ranks.

    `auto` always passes. `name` is the model's.
    """
    if requested == AUTO:
        return
    scans = [mixer for mixer in mixers if mixer.scan_heads or mixer.is_stored]
    if not scans:
        raise ValueError(
            f"--recurrent_schedule {requested}: {name} has no layer that carries a state through the sequence; leave "
            "it out"
        )
    for mixer in scans:
        if requested == HEADS:
            check_heads_divide(mixer.scan_heads, ranks, mixer.kind)


def chosen_recurrent_schedule(config: PreTrainedConfig, requested: str, layout: Layout, tokens: int) -> str | None:
    """Returns `chain` or `heads` for the scans of a model; None for one rank, or without scans.

    Ranks of `layout` hold `tokens` tokens of a sequence each.
    """
    heads = [mixer.scan_heads for layer in inspect_architecture(config).layers for mixer in layer.linear_mixers]
    most = max(heads, default=0)
    if layout.world == 1 or not most:
        return None
    return choose(requested, layout.world, most, layout.fragments_per_rank(tokens))
