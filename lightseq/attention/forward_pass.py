"""State of a patched model's forward pass, for the checks of its inputs, its loss and its next pass."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightseq.distributed.roll_call import RollCall


@dataclass
class ForwardPass:
    """State of a model's forward pass, read by the checks of attention, loss and the next pass."""

    outermost: object = None  # the module that the user called
    attention_passes: int = 0  # launched before this forward pass
    loss: tuple[Tensor, int] | None = None  # result of the loss function, and its tensor version
    router_losses: int = 0  # shares of router losses computed in this pass, which the model adds to its loss
    # (batch, local): how often one process would count a token, as a bool or number of rows; None: once
    counted_tokens: Tensor | None = None
    loss_weights: Tensor | None = None  # factors of the losses of a rank's targets, (batch, local); None: 1
    batches: int = 0  # batches passed to the model so far
    checksums: Tensor | None = None  # hashes of the batches since ranks last compared theirs, on the device
    comparison: tuple[dist.Work, list[Tensor]] | None = None  # all-gather of every rank's documents
    shared: bool = False  # a deep copy of the model uses the context too; never reset
    gradients_are_averaged_outside: bool = False  # as in trainers, which scale gradients themselves
    gradient_factor: int = 1  # multiplies gradients where a wrapper such as DDP averages them
    averaging_checked: tuple[Any, ...] | None = None  # wrappers that `gradient_factor` was computed for
    announced: bool = False  # the call is in `roll_call` already, from a module around the model
    roll_call: RollCall | None = None  # calls of the ranks; set by `hf.enable`
