"""Comparison of a training step of a few layers on all ranks with transformers on one process."""

import copy
import gc
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.architecture.flops import total_parameters
from lightseq.attention.context import SequenceContext
from lightseq.config.objectives import OBJECTIVES
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.distributed.world import World
from lightseq.models import random_weights, weights
from lightseq.models.build import build, constructed_buffers
from lightseq.models.decoder import text_config, with_head
from lightseq.parts.experts import experts_modules
from lightseq.parts.transformers_recurrences import without_kernels
from lightseq.tools.verify.data import Document
from lightseq.tools.verify.report import FAIL, Row, relative_error, result_row
from lightseq.training.build import build_engine
from lightseq.training.inputs import Inputs
from lightseq.training.run_info import describe_run
from lightseq.training.trainer import Trainer
from lightseq.utils.formatting import plural
from lightseq.utils.tensors import IGNORE_INDEX

LAYER: Final = re.compile(r"\.\d+\.")  # in names of parameters
EXACT: Final = 1e-5  # relative error that is always allowed
ZERO: Final = 0.1  # gradients below this share of the root mean square are measured against it
MIN_TILE_TOKENS = 64
STANDARD_ERRORS = 2  # added to the plain loss's error, which may be small by chance
MAX_SCALINGS = 24  # halvings of a float16 loss scale that starts at 2 ** 16


@dataclass(frozen=True)
class Step:
    """Loss and float32 gradients of a step. `token_losses`: loss of every target, for the plain model."""

    loss: float
    gradients: dict[str, Tensor]
    loss_scale: float = 1.0
    token_losses: Tensor | None = None


def model_rows(
    config: TrainConfig, inputs: Inputs, world: World, sequences: Sequence[Sequence[Document]]
) -> tuple[list[Row], SequenceContext]:
    """Returns rows (complete on rank 0 only), and the context of attention.

    The config has the length of training, for which it chooses the schedule; the inputs have shorter sequences, given
    by their documents.
    """
    plain_config = copy.deepcopy(inputs.model_config)  # training modifies the config
    # The plain model computes only the loss of next tokens.
    others = {flag: getattr(TrainConfig, flag) for each in OBJECTIVES.values() for flag in each.own}
    config = replace(config, router_aux_loss_coef=0.0, objective="next_token", share_prefixes=False, **others)
    trainer = Trainer(config, inputs, world, build_engine(config, inputs, world))
    length = inputs.stream.length
    trainer.batch_lengths = (length,)
    for module in trainer.model.modules():
        if isinstance(tile := getattr(module, "tile_tokens", None), int):  # as many tiles as in training
            module.tile_tokens = max(MIN_TILE_TOKENS, tile * length // config.model_max_length)
    if world.is_main:
        layers = plural(text_config(plain_config).num_hidden_layers, "layer")
        size = f"{total_parameters(plain_config):,} parameters in {layers}"
        model = f"architecture of {config.model_name}, {size}, random weights"
        trainer.terminal.header({**describe_run(trainer), "model": model}, trainer.notes)
    context, rows = trainer.context, list[Row]()
    step = _distributed_step(trainer)
    del trainer
    gc.collect()  # frees reference cycles of hooks and modules
    if world.is_main:
        documents = [x.padded(length) for x in chain(*sequences) if x.valid_tokens]
        try:
            plain = _plain_model(plain_config, config.seed, world.device)
            with without_kernels(plain):
                rows += _compare(step, plain, documents, config)
        except torch.OutOfMemoryError as error:
            reason = f"the plain model on rank 0 ran out of memory ({str(error).split('.')[0]}); free GPU 0"
            rows += [Row(name, FAIL, reason) for name in ("loss", "gradients")]
    dist.barrier()
    return rows, context


# ---- the two steps --------------------------------------------------------------------------------------------------


def _distributed_step(trainer: Trainer) -> Step:
    """Returns the loss and, on rank 0, the full gradients that the optimizer gets, in host memory."""
    gradients: dict[str, Tensor] = {}
    updates: list[bool] = []

    def collect(*_: Any) -> None:
        updates.append(True)
        for name, parameter in trainer.model.named_parameters():
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            whole = whole_tensor(grad)
            if trainer.world.is_main:
                gradients[name] = whole.detach().to("cpu", torch.float32, copy=True)

    trainer.engine.optimizer.register_step_pre_hook(collect)
    for _ in range(MAX_SCALINGS):  # float16 halves its scale until the gradients are finite
        with trainer.out_of_memory_handler():
            result = trainer.step(0)
        if updates:
            break
    loss = result.loss.double()
    dist.all_reduce(loss)
    scaler = trainer.engine.facts()["scaler"]
    return Step(float(loss), gradients, scaler["scale"] if scaler else 1.0)


def _plain_model(config: PreTrainedConfig, seed: int, device: torch.device) -> PreTrainedModel:
    """Returns the transformers model in float32 with the random weights that a run draws from the seed."""
    with torch.device("meta"):
        model = build(config)
    weights.materialize(model, device)
    random_weights.initialize(model, seed, device=device)
    return model


def _plain_step(model: PreTrainedModel, documents: Sequence[Document], loss_scale: float = 1.0) -> Step:
    """Runs the documents one by one. Halves the loss scale (for float16) until all gradients are finite."""
    total = sum(document.valid_tokens for document in documents)
    while True:
        losses, gradients = [], {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
        for ids, targets in documents:
            logits = with_head(model)(input_ids=ids[None].to(model.device), use_cache=False).logits[0].float()
            valid = targets != IGNORE_INDEX
            loss = F.cross_entropy(logits[valid], targets[valid].to(model.device), reduction="none")
            (loss.sum() / total * loss_scale).backward()
            losses.append(loss.detach())
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] += parameter.grad.float() / loss_scale
                parameter.grad = None
        if loss_scale <= 1.0 or all(bool(grad.isfinite().all()) for grad in gradients.values()):
            token_losses = torch.cat(losses)
            return Step(float(token_losses.double().mean()), gradients, loss_scale, token_losses)
        loss_scale /= 2


class _Float64(TorchFunctionMode):
    """Computes in float64 where code asks for float32, as norms and scans of transformers do."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*wide, **named)


def _step_in_float64(model: PreTrainedModel, documents: Sequence[Document]) -> Step:
    """Runs the documents in float64, and leaves the model in float32."""
    has_experts = any(experts_modules(model))  # old versions of transformers lack the next call
    experts = model.get_experts_implementation() if has_experts else None
    if has_experts:
        model.set_experts_implementation("eager")  # grouped products have no float64
    model.double()
    with _Float64():
        step = _plain_step(model, documents)
    model.float()
    if has_experts:
        model.set_experts_implementation(experts)
    return step


# ---- the comparison -------------------------------------------------------------------------------------------------


def _compare(step: Step, plain: PreTrainedModel, documents: Sequence[Document], config: TrainConfig) -> list[Row]:
    """Compares a step with the plain model in a more exact dtype: float64 for float32, and float32 for others.

    Allows twice the error of the plain model in the dtype of training, and at least EXACT.
    """
    torch.set_float32_matmul_precision("highest")
    in_float32 = config.compute_dtype == "float32" and not config.tf32
    want = _step_in_float64(plain, documents) if in_float32 else _plain_step(plain, documents)
    if not in_float32:
        dtype = getattr(torch, config.compute_dtype)
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        for parameter in plain.parameters():  # RoPE frequencies stay float32 in any loaded model
            parameter.data = parameter.data.to(dtype)
        rounded = constructed_buffers(plain.config, dtype)
        for name, buffer in weights.stored_buffers(plain).items():
            buffer.data = rounded[name].to(buffer.device)
    own = _plain_step(plain, documents, step.loss_scale)
    errors = gradient_errors(own.gradients, want.gradients)
    allowed = {name: max(EXACT, 2 * error) for name, error in _over_layers(errors).items()}
    allowed_loss, how = max(EXACT * abs(want.loss), _loss_tolerance(own, want)), f"twice plain {config.compute_dtype}'s"
    error = abs(step.loss - want.loss)
    figures = {"loss": step.loss, "plain_loss": want.loss, "error": error, "allowed": allowed_loss}
    text = f"{step.loss:.6f}, plain {want.loss:.6f}: off by {error:.1e}, {allowed_loss:.1e} allowed ({how})"
    row = result_row("loss", [] if error <= allowed_loss else [text], text, figures)
    return [row, _gradients_row(step.gradients, want.gradients, allowed, how)]


def _loss_tolerance(own: Step, want: Step) -> float:
    """Returns twice the plain loss's error, plus STANDARD_ERRORS because errors of tokens may cancel by chance."""
    assert own.token_losses is not None and want.token_losses is not None
    spread = float((own.token_losses - want.token_losses).square().mean().sqrt())
    return 2 * (abs(own.loss - want.loss) + STANDARD_ERRORS * spread / math.sqrt(len(want.token_losses)))


def gradient_errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the relative L2 error of each parameter's gradient.

    A gradient that is exactly zero in theory consists of rounding errors, which never agree. So the norm of a gradient
    far smaller than the others is replaced by one with a tenth of their root mean square.
    """
    square = sum(float(x.double().square().sum()) for x in want.values())
    mean_square = square / max(1, sum(x.numel() for x in want.values()))
    return {
        name: relative_error(got[name].to(x.device), x, max(1e-30, ZERO * math.sqrt(mean_square * x.numel())))
        for name, x in want.items()
    }


def _over_layers(errors: Mapping[str, float]) -> dict[str, float]:
    """Returns for each parameter the largest error of that parameter in any layer.

    A gradient of few elements, as the decays of a recurrence have, may have a small error by chance.
    """
    kinds = {name: LAYER.sub(".", name) for name in errors}
    largest: dict[str, float] = {}
    for name, error in errors.items():
        largest[kinds[name]] = max(error, largest.get(kinds[name], 0.0))
    return {name: largest[kind] for name, kind in kinds.items()}


def _gradients_row(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], allowed: Mapping[str, float], how: str
) -> Row:
    if not got:
        return Row("gradients", FAIL, "not finite at any loss scale")
    if absent := sorted({*want} ^ {*got}):
        return Row("gradients", FAIL, f"parameters of only one of the two models: {', '.join(absent[:3])}")
    errors = gradient_errors(got, want)
    ratio = {name: error / allowed[name] if math.isfinite(error) else math.inf for name, error in errors.items()}
    worst = max(ratio, key=lambda name: ratio[name])
    count = sum(not x <= 1 for x in ratio.values())
    text = f"worst: {worst.removeprefix('model.')} off by {errors[worst]:.1e}, {allowed[worst]:.1e} allowed ({how})"
    wrong = [f"{count} of {len(want)} parameters, {text}"] if count else []
    return result_row(
        "gradients", wrong, f"{len(want)} parameters, {text}", {"errors": errors, "allowed": dict(allowed)}
    )
