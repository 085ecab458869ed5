"""Router losses and expert biases of a run, observed inside layers and under checkpoints.

Operators inside a layer note each router's sums, and in the backward pass add the gradient of the router loss to its
logits. They are opaque to compilers, and a recomputed layer notes the same sums again, so that they count once.
Autograd alone would not do: no gradient reaches logits inside a checkpoint of several layers, and those of all layers
would stay in memory. A user's own loop reads logits and loss from the model's output, may take the gradient of either,
and may run several passes before it goes backward. One gradient per model would not do there (hf/router_losses.py).
"""

from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.parts.changes import Changes
from lightseq.parts.experts import experts_modules
from lightseq.parts.probes import is_load_balancing_loss
from lightseq.parts.router_loss import (
    RouterSums,
    gradient_by_logits,
    router_loss_share,
    router_sums,
    sums_over_ranks,
)
from lightseq.sequence.group import SequenceGroup

FUNCTION: Final = "load_balancing_loss_func"  # transformers' name of the router loss, a global of modeling files
BIAS: Final = "e_score_correction_bias"  # transformers' name of the bias that balances experts (DeepSeek V3)


class Routers:
    """Routers of a model whose layers run over the ranks of a sequence, on one rank."""

    def __init__(
        self,
        model: PreTrainedModel,
        recorder: nn.Module,
        group: SequenceGroup,
        changes: Changes,
        top_k: int,
        coefficient: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        """Adds hooks to the routers that `recorder`, the text decoder, names in `_can_record_outputs`.

        Raises ValueError if the model has no routers, or no biases, as the loss or the biases need.
        """
        self._group, self._top_k = group, top_k
        self.coefficient, self.bias_rate = coefficient, bias_rate
        self._name = f"{group.name}-routers"
        self._counted: Tensor | None = None
        self._active = False
        self._gradient_by_sums: Tensor | None = None  # of the loss, by the sums of probabilities
        routers = [*_routers(recorder)] if coefficient else []
        self._biases = [*_biases(model)] if bias_rate else []
        name = type(model).__name__
        if coefficient and not routers:
            raise ValueError(
                f"--router_aux_loss_coef {coefficient} needs routers, which {name} does not have; set it to 0"
            )
        if bias_rate and not self._biases:
            raise ValueError(
                f"--router_bias_update_rate {bias_rate} needs routers with a buffer {BIAS}, which {name} lacks; leave "
                "it out"
            )
        if rounded := [x.dtype for _, owner in self._biases if (x := getattr(owner, BIAS)).dtype is not torch.float32]:
            raise ValueError(
                f"--router_bias_update_rate {bias_rate}: {name} has {BIAS} in {rounded[0]}, which loses small steps; "
                "train in float32, or leave the flag out"
            )
        self._sums: list[RouterSums | None] = [None] * len(routers)
        self._loads: list[Tensor | None] = [None] * len(self._biases)  # loads of one pass
        self._total_loads: list[Tensor] = []  # sums over all passes of a step
        for i, (router, index) in enumerate(routers):
            changes.add_hook(router.register_forward_hook(partial(_observe_router, self._name, _place(i), index)))
        for i, (experts, _) in enumerate(self._biases):
            changes.add_hook(experts.register_forward_pre_hook(partial(_observe_experts, self._name, _place(i))))
        _ROUTERS[self._name] = self

    def begin(self, counted: Tensor | None) -> None:
        """Begins a forward pass, in which these tokens count, (batch, local); None: all."""
        self._active, self._counted, self._gradient_by_sums = True, counted, None

    def finish(self) -> None:
        """Ends the passes of a step. Passes between steps, such as evaluations, are not observed."""
        self._active, self._counted, self._gradient_by_sums = False, None, None

    def add_loss(self, share: Tensor, passes: int) -> tuple[Tensor, Tensor]:
        """Adds a share of the mean router loss of `passes` passes to a share of the loss. Returns both.

        The second is this rank's share of the pass's router loss, divided by `passes` and without coefficient. All
        ranks of the sequence must call it, after the forward pass.
        """
        for i, loads in enumerate(self._loads):
            assert loads is not None, "every layer's experts ran"
            if i == len(self._total_loads):
                self._total_loads.append(torch.zeros_like(loads))
            self._total_loads[i] += loads
        if not self._sums:
            return share, torch.zeros_like(share, dtype=torch.float32)
        sums = [x for x in self._sums if x is not None]
        assert len(sums) == len(self._sums), "every router ran"
        total_sums = sums_over_ranks(sums, self._group.process_group)
        total_sums.probabilities.requires_grad_()
        with torch.enable_grad():
            loss = router_loss_share(total_sums) / passes
        (gradient,) = torch.autograd.grad(loss, total_sums.probabilities)
        loss = loss.detach()
        total: Tensor = _WithRouterLoss.apply(share, self.coefficient * loss, self, self.coefficient * gradient)
        return total, loss

    @torch.no_grad()
    def update_biases(self, nonfinite: Tensor) -> None:
        """Moves each expert's bias by the rate toward equal loads, as in DeepSeek V3 (arXiv 2408.15664).

        Loads are sums over all ranks and passes of the step. They are integers, so all ranks move alike. Biases stay
        in a step that was skipped, where `nonfinite` is not negative. All ranks must call it.
        """
        if not self._biases:
            return
        loads, self._total_loads = self._total_loads, []
        together = torch.cat(loads)
        dist.all_reduce(together)
        for (_, owner), load in zip(self._biases, together.split([len(x) for x in loads]), strict=True):
            bias = getattr(owner, BIAS)
            direction = torch.sign(load.sum() - len(load) * load) * (nonfinite < 0).to(load.device)
            bias += (self.bias_rate * direction).to(bias.dtype).view_as(bias)

    # ---- called by the operators -------------------------------------------------------------------------------------

    def note_router(self, index: int, logits: Tensor) -> None:
        if self._active:
            self._sums[index] = router_sums(logits.detach(), self._top_k, self._counted)

    def note_experts(self, index: int, chosen: Tensor) -> None:
        if self._active:
            experts = self._biases[index][0].num_experts
            counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
            ones = torch.ones_like(chosen, dtype=torch.int64)
            if self._counted is not None:
                ones = ones * self._counted.reshape(-1, 1)
            self._loads[index] = counts.scatter_add_(0, chosen.flatten().long(), ones.flatten())

    def gradient_of(self, logits: Tensor) -> Tensor:
        """Returns the gradient of the router loss by a router's logits."""
        if self._gradient_by_sums is None:
            return torch.zeros_like(logits)
        return gradient_by_logits(logits, self._gradient_by_sums, self._counted)

    def scale_gradient(self, gradient: Tensor, factor: Tensor) -> None:
        """Sets the gradient by the probability sums, before the backward pass of the layers."""
        self._gradient_by_sums = gradient * factor


_ROUTERS: WeakValueDictionary[str, Routers] = WeakValueDictionary()


def _place(index: int) -> Tensor:
    """Returns a router's place among all. Layers share compiled code, which would have a number as a constant."""
    return torch.tensor(index, device="cpu")


# ---- parts of a model ------------------------------------------------------------------------------------------------


def has_router_loss(model: PreTrainedModel) -> bool:
    """Returns whether a model computes a router loss. Raises ValueError if it is not the load-balancing loss."""
    functions = [namespace[FUNCTION] for namespace in router_loss_namespaces(model)]
    if not all(map(is_load_balancing_loss, functions)):
        raise ValueError(
            f"{type(model).__name__} has a router loss of its own, which needs the whole sequence on one rank; set "
            "output_router_logits to False"
        )
    return bool(functions)


def router_loss_namespaces(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yields the namespaces of a model's forward passes that hold the function of the router loss."""
    forwards = [vars(kind).get("forward") for kind in type(model).__mro__]
    found = [unwrap(x).__globals__ for x in (*forwards, vars(model).get("forward")) if hasattr(x, "__code__")]
    yield from {id(namespace): namespace for namespace in found if FUNCTION in namespace}.values()


def _routers(recorder: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules whose output contains router logits, by transformers' records, and their index in it."""
    specs: Any = (getattr(recorder, "_can_record_outputs", None) or {}).get("router_logits", [])
    for spec in specs if isinstance(specs, list) else [specs]:
        kind: Any = getattr(spec, "target_class", spec)  # a plain class means index 1 of its modules' outputs
        index, within = getattr(spec, "index", 1), getattr(spec, "layer_name", None)
        for name, module in recorder.named_modules():
            recorded = isinstance(kind, type) and isinstance(module, kind)
            if recorded and (not within or f".{within}." in f".{name}."):
                yield module, index


def router_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the routers of a model's experts, as transformers records them, and the modules inside."""
    for recorder in model.modules():
        for router, _ in _routers(recorder):
            yield from router.modules()


def _biases(model: PreTrainedModel) -> Iterator[tuple[Any, nn.Module]]:
    """Yields the modules of experts whose router has a bias in a float32 buffer, and the module that holds it."""
    for name, experts in experts_modules(model):
        block = model.get_submodule(name.rpartition(".")[0])
        for owner in block.modules():
            if BIAS in owner._buffers:
                yield experts, owner


# ---- operators -------------------------------------------------------------------------------------------------------


def _observe_router(name: str, place: Tensor, index: int, _router: nn.Module, _args: Any, output: Any) -> Any:
    """Passes one of a router's outputs that has gradients through the operator."""
    if isinstance(output, Tensor):
        return _router_op(output, output, name, place)
    others = (i for i, x in enumerate(output) if i != index and isinstance(x, Tensor) and x.is_floating_point())
    carrier = next(others, index)
    observed = _router_op(output[carrier], output[index], name, place)
    return (*output[:carrier], observed, *output[carrier + 1 :])


def _observe_experts(name: str, place: Tensor, _experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, chosen, *others = args
    return hidden, _experts_op(chosen, name, place), *others


@torch.library.custom_op("lightseq::observe_router", mutates_args=())
def _router_op(carrier: Tensor, logits: Tensor, name: str, place: Tensor) -> Tensor:
    """Notes a router's sums, and returns a copy of its output `carrier`."""
    _ROUTERS[name].note_router(int(place), logits)
    return carrier.clone()


@_router_op.register_fake
def _(carrier: Tensor, logits: Tensor, name: str, place: Tensor) -> Tensor:
    return torch.empty_like(carrier)


@torch.library.custom_op("lightseq::router_loss_gradient", mutates_args=())
def _gradient_op(logits: Tensor, gradient: Tensor, name: str) -> Tensor:
    """Returns the gradient by a router's logits. `gradient` keeps a compiler from calling it in the forward pass."""
    return _ROUTERS[name].gradient_of(logits)


@_gradient_op.register_fake
def _(logits: Tensor, gradient: Tensor, name: str) -> Tensor:
    return torch.empty_like(logits)


@torch.library.custom_op("lightseq::observe_experts", mutates_args=())
def _experts_op(chosen: Tensor, name: str, place: Tensor) -> Tensor:
    """Notes the loads of experts, and returns a copy of the tokens' choices."""
    _ROUTERS[name].note_experts(int(place), chosen)
    return chosen.clone()


@_experts_op.register_fake
def _(chosen: Tensor, name: str, place: Tensor) -> Tensor:
    return torch.empty_like(chosen)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str, Tensor], output: Tensor) -> None:
    _, logits, ctx.name, _ = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    (logits,) = ctx.saved_tensors
    return gradient, _gradient_op(logits, gradient, ctx.name), None, None


_router_op.register_autograd(_backward, setup_context=_setup_context)


class _WithRouterLoss(torch.autograd.Function):
    """Sum of two shares. Its backward pass runs first, and sets the scale of the router operators' gradients."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, loss: Tensor, routers: Routers, gradient: Tensor) -> Tensor:  # type: ignore[override]
        ctx.routers = routers
        ctx.save_for_backward(gradient)
        return share + loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        ctx.routers.scale_gradient(gradient, factor)
        return factor, None, None, None
