"""Optimizers of --optim and the state that each keeps.

training/optimization.py makes them; plan/rates.py has the cost of their updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer. Optimizers with equal states can resume each other's checkpoints."""

    name: str
    moments: float  # size per weight, in float32 values


NO_STATE: Final = OptimizerState("none", 0.0)
ADAMW: Final = OptimizerState("AdamW", 2.0)
ADAMW_8BIT: Final = OptimizerState("8-bit AdamW", 0.5)
OPTIMIZERS: Final[Mapping[str, OptimizerState]] = {
    "adamw_torch": ADAMW,
    "adamw_torch_fused": ADAMW,
    "adamw_8bit": ADAMW_8BIT,
    "adamw_torch_8bit": ADAMW_8BIT,  # transformers' name of the same
    "sgd": NO_STATE,
}
EIGHT_BIT: Final = tuple(name for name, state in OPTIMIZERS.items() if state is ADAMW_8BIT)
