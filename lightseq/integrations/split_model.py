"""Base of models that are split inside trainers: hooks, removed or paused together, and values of whole batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq import hf
from lightseq.attention.context import SequenceContext
from lightseq.hf.record import record_of
from lightseq.integrations.split_inputs import SplitInputs
from lightseq.memory.remat import apply_remat
from lightseq.models.decoder import decoder_layers, transformers_model
from lightseq.parts.changes import Changes
from lightseq.parts.compilation import allow_graphs_per_length

SPLIT_MODEL: Final = "lightseq_split_model"  # attribute of the transformers model


@dataclass(frozen=True)
class TrainerBatches:
    """Properties of a trainer's batches and loss. The defaults fit a loop with accelerate."""

    keeps_targets: bool = False  # first tokens of documents stay targets, because the trainer has counted them
    pad_to: int | None = None  # tokens of every packed row, so that compiled layers see one length
    weighs_tokens_equally: bool = False  # the loss is the mean over all tokens (see `parts.token_metrics`)
    packs_rows: bool = False  # left-padded prompts with their completions become documents of one row
    shares_prefixes: bool = False  # rows that begin alike become trees of one row, even if others stay padded
    # Our head computes what TRL's is asked for, in all models of the trainer: two heads would round differently.
    own_head: bool = False


class SplitModel:
    """An enabled model that takes whole batches. Its hooks split batches, and gather outputs.

    Gradients are right where the reduction over all ranks averages them, as DDP and FSDP do: gradients of a rank's
    tokens are multiplied by the ranks of its group.
    """

    def __init__(self, model: nn.Module, context: SequenceContext) -> None:
        self.model, self.context = transformers_model(model), context
        context.forward_pass.gradients_are_averaged_outside = True  # DDP's average is scaled here, not by the checks
        self._ranks = context.layout.world
        self._layers_are_changed = False
        self._routes: Tensor | None = None
        self._changes = Changes()
        record = record_of(model)
        assert record is not None, "its context comes from hf.enable"
        self.record = record
        record.changes.call_later(self.remove)

    def configure(self, batches: TrainerBatches) -> None:
        """Sets the properties of a trainer's batches and loss."""

    @property
    def shares_prefixes(self) -> bool:
        """Returns whether rows that begin alike become trees."""
        return False

    @contextmanager
    def replaying(self, routed_experts: Tensor) -> Iterator[None]:
        """Replays the experts of these rows inside the block, (batch, length, layers, experts of a token)."""
        self._routes = routed_experts
        try:
            yield
        finally:
            self._routes = None

    def next_routes(self, rows: int) -> Tensor | None:
        """Returns the experts of the next rows, if passes replay a rollout's."""
        if self._routes is None:
            return None
        taken, self._routes = self._routes[:rows], self._routes[rows:]
        return taken

    def watch(self, outermost: nn.Module) -> None:
        """Prepares a module around the model, such as DDP, for the model's lazy outputs."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs the plain model inside the block, on whole sequences of each rank, to generate."""
        with self._changes.paused(), self.record.changes.paused():
            yield

    def change_layers(self, recompute: bool, compile_each: bool) -> None:
        """Checkpoints everything but attention in each layer, and compiles it. A second call changes nothing."""
        layers: Any = decoder_layers(self.model)
        if self._layers_are_changed:
            return
        self._layers_are_changed = True
        for layer in layers:
            self._changes.restore_later(layer, "forward")
        if recompute:
            apply_remat(layers, "attention", compile_each, has_dropout=True)
        if compile_each:
            allow_graphs_per_length()
            for layer in layers:
                layer.forward = torch.compile(layer.forward)

    def remove(self) -> None:
        """Removes the hooks, and restores the layers. Disabling the model does so, too."""
        self._changes.undo()

    def _in_order(self, values: Tensor, inputs: SplitInputs) -> Tensor:
        """Returns values (batch, local, ...) of all ranks in the order of the batch (batch, length, ...)."""
        whole = hf.gather_padded_tokens(self.context, values, inputs.batch, gradient_factor=self._ranks)
        whole = whole[:, : inputs.length]
        return whole if inputs.packed is None else inputs.packed.unpack(whole)

    def sum(self, share: Tensor) -> Tensor:
        """Sums shares over the ranks of a sequence. Returns the sum on every rank."""
        return hf.sum_over_ranks(self.context, share, gradient_factor=self._ranks)


def split_model_of(model: nn.Module) -> SplitModel | None:
    """Returns the hooks of a model, which may be inside wrappers; None if its sequences are not split here."""
    return vars(transformers_model(model)).get(SPLIT_MODEL)
