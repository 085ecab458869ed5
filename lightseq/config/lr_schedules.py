"""Learning rate schedules of transformers and their settings, by name, without importing transformers."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Setting:
    """Values that a key of --lr_scheduler_kwargs accepts."""

    remedy: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


SHAPES: Final = ("linear", "cosine", "1-sqrt")
STEPS: Final = Setting("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
POSITIVE: Final = Setting("a number above 0", lambda value: _is_number(value) and value > 0)
RATE: Final = Setting("a number of at least 0", lambda value: _is_number(value) and value >= 0)
SHARE: Final = Setting("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
SHAPE: Final = Setting("one of linear, cosine or 1-sqrt", lambda value: value in SHAPES)

MIN_LR: Final[Mapping[str, Setting]] = {"min_lr": RATE, "min_lr_rate": SHARE}
LR_SCHEDULES: Final[Mapping[str, Mapping[str, Setting]]] = {
    "linear": {},
    "cosine": {"num_cycles": POSITIVE},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": POSITIVE},
    "polynomial": {"lr_end": RATE, "power": POSITIVE},
    "inverse_sqrt": {"timescale": POSITIVE},
    "cosine_with_min_lr": {"num_cycles": POSITIVE, **MIN_LR},
    "cosine_warmup_with_min_lr": {"num_cycles": POSITIVE, **MIN_LR, "warmup_lr_rate": SHARE},
    "warmup_stable_decay": {
        "num_decay_steps": STEPS,
        "num_stable_steps": STEPS,
        "warmup_type": SHAPE,
        "decay_type": SHAPE,
        "min_lr_ratio": SHARE,
        "num_cycles": POSITIVE,
    },
}
# Keys of which exactly one must be given, and an example.
REQUIRED: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "cosine_with_min_lr": (tuple(MIN_LR), '{"min_lr_rate": 0.1}'),
    "cosine_warmup_with_min_lr": (tuple(MIN_LR), '{"min_lr_rate": 0.1}'),
    "warmup_stable_decay": (("num_decay_steps",), '{"num_decay_steps": 100}'),
}
DEFAULT_LR_END: Final = 1e-7  # of polynomial in transformers
FOLLOW_A_METRIC: Final = ("reduce_lr_on_plateau", "greedy")  # schedules of transformers without a rate per step


def check_lr_schedule(name: str, kwargs: Mapping[str, Any], learning_rate: float) -> None:
    """Raises ValueError for settings that transformers would reject, ignore or fail with during the run."""
    settings = LR_SCHEDULES[name]
    for key, value in kwargs.items():
        if key not in settings:
            raise ValueError(_unknown_key(name, key))
        if not settings[key].accepts(value):
            raise ValueError(f"--lr_scheduler_kwargs: {key} is {value!r:.80}; give {settings[key].remedy}")
    keys, example = REQUIRED.get(name, ((), ""))
    given = [key for key in keys if key in kwargs]
    if keys and not given:
        raise ValueError(f"--lr_scheduler_type {name} needs {' or '.join(keys)}; add --lr_scheduler_kwargs '{example}'")
    if len(given) > 1:
        raise ValueError(f"--lr_scheduler_kwargs: {' and '.join(given)} both set the lowest learning rate; give one")
    defaults = {"lr_end": DEFAULT_LR_END} if name == "polynomial" else {}
    for key, value in {**defaults, **kwargs}.items():
        if settings[key] is RATE and value >= learning_rate:
            raise ValueError(
                f"--lr_scheduler_kwargs: {key} is {value}, not below --learning_rate {learning_rate}; give a lower "
                f"{key} or a higher --learning_rate"
            )


def _unknown_key(name: str, key: str) -> str:
    settings = LR_SCHEDULES[name]
    if not settings:
        return f"--lr_scheduler_type {name} takes no --lr_scheduler_kwargs, but {key!r:.80} was given; leave it out"
    nearest = difflib.get_close_matches(key, settings, n=1)
    guess = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(settings)}"
    return f"--lr_scheduler_kwargs: {key!r:.80} is unknown to --lr_scheduler_type {name}; {guess}"


def stable_decay_warning(kwargs: Mapping[str, Any], warmup_steps: int, total_steps: int) -> str | None:
    """Returns a warning if the phases of warmup_stable_decay do not add up to the steps of the run."""
    stable, decay = kwargs.get("num_stable_steps"), kwargs["num_decay_steps"]
    planned = warmup_steps + (stable or 0) + decay
    if planned == total_steps or (stable is None and planned < total_steps):
        return None
    if planned < total_steps:
        effect = "the steps after them keep the lowest learning rate"
    else:
        effect = "the decay starts below the peak" if stable is None else "the decay does not end"
    phases = f"warm-up, stable and decay steps of --lr_scheduler_type warmup_stable_decay add up to {planned}"
    return f"warning: {phases}, but this run has {total_steps}, so {effect}"
