"""Configuration of a training run: its flags (flags.py), checked together (checks.py)."""

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from lightseq.config.all_flags import Flags
from lightseq.config.checks import check
from lightseq.utils.masking import mask_secrets


@dataclass(frozen=True)
class TrainConfig(Flags):
    """All flags of a training run, checked on construction."""

    def __post_init__(self) -> None:
        check(self)

    def resolve_memory_flags(self, on_gpu: bool) -> "TrainConfig":
        """Returns the config unchanged if the planner decides, else with default memory flags.

        The planner decides on GPUs, except under DeepSpeed.
        """
        return self if on_gpu and not self.deepspeed else self.with_default_memory_flags()

    def with_default_memory_flags(self) -> "TrainConfig":
        """Sets every memory flag that is not given to its default.

        With a memory budget, --offload stays auto, because placing activations within a budget needs a plan.
        """
        moves_nothing = self.offload == "auto" and self.device_memory_budget is None and self.host_memory_budget is None
        return replace(
            self,
            torch_compile=self.compiles,
            remat=self.remat_policy,
            layers_per_checkpoint=self.group_size,
            tile_layers=self.tiles_layers,
            offload="none" if moves_nothing else self.offload,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns every flag as a plain JSON value, with secrets masked. Paths that tools do not need may be None."""
        plain: dict[str, Any] = mask_secrets(json.loads(json.dumps(asdict(self))))
        return plain | {name: plain[name] or None for name in ("data_path", "output_dir")}


@cache
def flag_types() -> Mapping[str, type]:
    """Returns each flag's value type: int for `int | None`, dict for `dict[str, Any] | None`."""
    return {name: _value_type(hint) for name, hint in typing.get_type_hints(TrainConfig).items()}


def _value_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def warmup_steps(config: TrainConfig, total: int) -> int:
    """Returns the number of warm-up steps in a run of `total` steps; --warmup_ratio is rounded up."""
    return config.warmup_steps or math.ceil(config.warmup_ratio * total)
