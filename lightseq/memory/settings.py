"""Settings of a run's memory, from the flags or from the planner."""

import math
from dataclasses import dataclass

from lightseq.memory.planner.placement import Placement
from lightseq.memory.planner.plan import Plan


@dataclass(frozen=True)
class MemorySettings:
    """Settings of weights, optimizer state and activations in host memory."""

    state_on_host: bool = False  # weights, gradients and optimizer state
    layers_with_state_on_gpu: int = 0  # the first layers, whose state stays on the device
    reshard_after_forward: bool = True  # False keeps the layers' gathered weights for the backward pass
    placement: Placement | None = None  # each layer's activations, with --offload auto
    activation_bytes: float = math.inf  # limit of this rank's host memory for offloaded activations
    plan: Plan | None = None  # which the settings come from; None: no planner decided, as on CPUs
