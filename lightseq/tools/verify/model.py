"""Comparison of a training step of a few layers on all ranks with transformers on one process.

The plain model uses its own loss and shifts labels itself.
"""

import copy
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.comm.transport import Transport
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.world import World
from lightseq.models import weights
from lightseq.models.architecture import LENGTH_DEPENDENT_ROPE, rope_types
from lightseq.schedule.proof import validate
from lightseq.tools.plan.rehearsal import describe_trial
from lightseq.tools.verify.data import Sample, data_row
from lightseq.tools.verify.report import FAIL, SKIP, Row, all_gather_object, all_passed, relative_error, result_row
from lightseq.training.build import build_engine
from lightseq.training.inputs import Inputs
from lightseq.training.trainer import Trainer
from lightseq.utils.labels import IGNORE_INDEX

EXACT: Final = 1e-5  # allowed relative error in float32
ZERO: Final = 0.1  # gradients below this share of the root mean square are measured against it
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
    config: TrainConfig,
    inputs: Inputs,
    world: World,
    sequences: Sequence[Sequence[Sample]],
    synthetic: bool,
) -> tuple[list[Row], Transport, dist.ProcessGroup]:
    """Returns rows (complete on rank 0 only), and the transport and process group of attention.

    `sequences`: documents of each sequence of the first step. `synthetic`: they are not the user's data.
    """
    plain_config = copy.deepcopy(inputs.model_config)  # training modifies the config
    trainer = Trainer(config, inputs, world, build_engine(config, inputs, world))
    if world.is_main:
        trainer.terminal.header(describe_trial(trainer, synthetic), trainer.notes)
    transport, group = trainer.context.transport, trainer.context.group
    rows = [_schedule_row(trainer), data_row(trainer, sequences)]
    if not all_passed(rows[:1]) or not rows[1].figures["positions_right"]:  # ranks could deadlock
        rows += [Row(name, SKIP, "not run: see above") for name in ("weights", "loss", "gradients")]
        return rows, transport, group
    plain = _plain_model(plain_config, config.seed, world.device) if world.is_main else None
    rows.append(_weights_row(trainer.model, plain, world))
    step = _distributed_step(trainer)
    dtype = getattr(torch, config.compute_dtype)
    rough = dtype if dtype is not torch.float32 or config.tf32 else None
    del trainer
    gc.collect()  # frees reference cycles of hooks and modules
    if plain is not None:
        try:
            rows += _compare(step, plain, [*chain(*sequences)], config, rough)
        except torch.OutOfMemoryError as error:
            reason = f"the plain model on rank 0 ran out of memory ({str(error).split('.')[0]}); free GPU 0"
            rows += [Row(name, FAIL, reason) for name in ("loss", "gradients")]
    dist.barrier()
    return rows, transport, group


# ---- the schedule and the weights -----------------------------------------------------------------------------------


def _schedule_row(trainer: Trainer) -> Row:
    """Validates the schedule and checks that all ranks have the same one."""
    schedule, wrong = trainer.context.schedule, ""
    try:
        validate(schedule)
    except ValueError as error:
        wrong = str(error)
    everyone = all_gather_object((wrong, repr((schedule.name, schedule.layout, schedule.forward, schedule.backward))))
    found = {reason: rank for rank, (reason, _) in reversed(list(enumerate(everyone))) if reason}
    lines = [f"{reason} (rank {rank})" for reason, rank in found.items()]
    differing = [rank for rank, x in enumerate(everyone) if x[1] != everyone[0][1]]
    lines += [f"the schedule of rank {rank} differs from that of rank 0" for rank in differing]
    moves = sum(len(step.moves) for step in (*schedule.forward, *schedule.backward))
    right = f"{schedule}: every visible pair computed once, {moves} moves"
    facts = {"schedule": schedule.name, "turns": schedule.head_groups_per_rank, "ulysses_size": schedule.ulysses_size}
    return result_row("schedule", lines, right, facts)


def _weights_row(model: nn.Module, plain: nn.Module | None, world: World) -> Row:
    """Compares each rank's parameters bitwise with the plain model's, which rank 0 broadcasts one by one."""
    whole = dict(plain.named_parameters()) if plain is not None else {}
    differing, elements, largest, where = 0, 0, 0.0, ""
    for name, parameter in model.named_parameters():
        want = whole[name].detach() if world.is_main else torch.empty(parameter.shape, device=world.device)
        dist.broadcast(want, 0)
        local, place = weights.local_part_and_slices(parameter)
        difference = (local - want[place].to(local.device)).abs()
        differs, elements = int((difference != 0).sum()), elements + local.numel()
        if differs:
            differing, largest, where = differing + differs, max(largest, float(difference.max())), where or name
    everyone = all_gather_object((differing, elements, largest, where))
    wrong = [
        f"{n:,} of {of:,} weights of rank {rank} differ from the plain model's by up to {most:.1e} (first: {name})"
        for rank, (n, of, most, name) in enumerate(everyone)
        if n
    ]
    return result_row("weights", wrong, f"{sum(x[1] for x in everyone):,} numbers on all ranks, bitwise equal")


# ---- the two steps --------------------------------------------------------------------------------------------------


def _distributed_step(trainer: Trainer) -> Step:
    """Returns the loss and, on rank 0, the full gradients that the optimizer gets, in host memory."""
    gradients: dict[str, Tensor] = {}
    updates: list[bool] = []

    def collect(*_: Any) -> None:
        updates.append(True)
        for name, parameter in trainer.model.named_parameters():
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
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
    model = weights.build_on_meta(config)
    weights.materialize(model, device)
    weights.initialize(model, seed, device=device)
    return model


def _plain_step(model: nn.Module, samples: Sequence[Sample], length: int, loss_scale: float = 1.0) -> Step:
    """Runs the sequences one by one. Halves the loss scale (for float16) until all gradients are finite."""
    for _ in range(MAX_SCALINGS):
        step = _scaled_plain_step(model, samples, length, loss_scale)
        if loss_scale <= 1.0 or all(bool(torch.isfinite(g).all()) for g in step.gradients.values()):
            break
        loss_scale /= 2
    return step


def _scaled_plain_step(model: nn.Module, samples: Sequence[Sample], length: int, loss_scale: float) -> Step:
    device = next(model.parameters()).device
    total = max(1, sum(s.valid_tokens for s in samples))
    loss, token_losses = 0.0, []
    gradients = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    for sample in (s for s in samples if s.valid_tokens):  # without a target the mean is NaN
        ids, labels, more = _plain_inputs(model, sample, length, device)
        output = model(input_ids=ids, labels=labels, use_cache=False, **more)
        share = output.loss * (sample.valid_tokens / total)
        (share * loss_scale).backward()
        loss += share.item()
        with torch.no_grad():
            logits, targets = output.logits[0, :-1].float(), labels[0, 1:]
            token_losses.append(F.cross_entropy(logits, targets, reduction="none")[targets != IGNORE_INDEX])
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] += parameter.grad.float() / loss_scale
            parameter.grad = None
    return Step(loss, gradients, loss_scale, torch.cat(token_losses))


def _plain_inputs(model: nn.Module, sample: Sample, length: int, device: torch.device) -> tuple[Tensor, Tensor, dict]:
    """Returns inputs padded on the right to `length`, on which RoPE may depend."""
    missing = max(0, length - len(sample.ids))
    ids, labels = F.pad(sample.ids, (0, missing)), F.pad(sample.labels, (0, missing), value=IGNORE_INDEX)
    more, config = {}, cast(PreTrainedConfig, model.config)
    if rope_types(config) & LENGTH_DEPENDENT_ROPE:  # the additional token is not part of the length
        more = {"position_ids": torch.arange(len(ids), device=device).clamp_max(length - 1)[None]}
    return ids[None].to(device), labels[None].to(device), more


# ---- the comparison -------------------------------------------------------------------------------------------------


def _compare(
    step: Step, plain: PreTrainedModel, samples: Sequence[Sample], config: TrainConfig, rough: torch.dtype | None
) -> list[Row]:
    """Compares a step with the plain model in float32.

    Allows twice the plain model's error in the dtype `rough`, or EXACT if it is None.
    """
    length = config.model_max_length
    torch.set_float32_matmul_precision("highest")
    want = _plain_step(plain, samples, length)
    allowed, allowed_loss, how = dict.fromkeys(want.gradients, EXACT), EXACT * abs(want.loss), "float32"
    if rough is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        for parameter in plain.parameters():  # RoPE frequencies stay float32 in any loaded model
            parameter.data = parameter.data.to(rough)
        rounded = weights.constructed_buffers(plain.config, rough)
        for name, buffer in weights.stored_buffers(plain).items():
            buffer.data = rounded[name].to(buffer.device)
        own = _plain_step(plain, samples, length, step.loss_scale)
        errors = gradient_errors(own.gradients, want.gradients)
        allowed = {name: max(EXACT, 2 * error) for name, error in errors.items()}
        allowed_loss, how = max(allowed_loss, _loss_tolerance(own, want)), f"twice plain {config.compute_dtype}'s"
    return [
        _loss_row(step.loss, want.loss, allowed_loss, how),
        _gradients_row(step.gradients, want.gradients, allowed, how),
    ]


def _loss_tolerance(own: Step, want: Step) -> float:
    """Returns twice the plain loss's error plus STANDARD_ERRORS, since errors of tokens may cancel by chance."""
    assert own.token_losses is not None and want.token_losses is not None
    spread = float((own.token_losses - want.token_losses).square().mean().sqrt())
    return 2 * (abs(own.loss - want.loss) + STANDARD_ERRORS * spread / math.sqrt(len(want.token_losses)))


def _loss_row(loss: float, want: float, allowed: float, how: str) -> Row:
    figures = {"loss": loss, "plain_loss": want, "error": abs(loss - want), "allowed": allowed}
    text = f"{loss:.6f}, plain {want:.6f}: off by {abs(loss - want):.1e}, {allowed:.1e} allowed ({how})"
    return result_row("loss", [] if abs(loss - want) <= allowed else [text], text, figures)


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


def _gradients_row(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], allowed: Mapping[str, float], how: str
) -> Row:
    if not got:
        return Row("gradients", FAIL, "not finite at any loss scale")
    absent = sorted({*want} ^ {*got})
    if absent:
        return Row("gradients", FAIL, f"parameters of only one of the two models: {', '.join(absent[:3])}")
    errors = gradient_errors(got, want)
    ratio = {name: error / allowed[name] if math.isfinite(error) else math.inf for name, error in errors.items()}
    worst = max(ratio, key=lambda name: ratio[name])
    text = f"{worst.removeprefix('model.')} off by {errors[worst]:.1e}, {allowed[worst]:.1e} allowed ({how})"
    figures = {"errors": errors, "allowed": dict(allowed)}
    count = sum(not x <= 1 for x in ratio.values())
    if not count:
        return result_row("gradients", [], f"{len(want)} parameters, worst: {text}", figures)
    hint = _common_factor(got, want)
    return result_row("gradients", [f"{count} of {len(want)} parameters, worst: {text}{hint}"], "", figures)


def _common_factor(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """Returns a hint if one factor explains all errors, such as a wrong divisor or a mean instead of a sum."""
    products = sum(float((got[n].to(x.device).double() * x.double()).sum()) for n, x in want.items())
    squares = sum(float(x.double().square().sum()) for x in want.values())
    factor = products / squares if squares else math.nan
    if not math.isfinite(factor):
        return ""
    errors = gradient_errors(got, {name: factor * x for name, x in want.items()})
    if any(not error < 1e-2 for error in errors.values()):
        return ""
    return f"; all are {factor:.4f} times what they should be"
