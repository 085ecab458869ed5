"""One training step of a few layers, as training takes it on all ranks, against plain transformers on one process."""

import copy
import gc
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightseq.comm.transport import Transport
from lightseq.config.train_config import TrainConfig
from lightseq.data.examples import IGNORE_INDEX
from lightseq.distributed.mesh import World
from lightseq.models.weights import part_and_place
from lightseq.schedule.proof import validate
from lightseq.tools.verify.plain import MOST_SCALINGS, Result, Sample, plain_model, round_weights, run_plain
from lightseq.tools.verify.report import FAIL, SKIP, Row, gathered, off, passed, verdict
from lightseq.training.engine import build_engine
from lightseq.training.loop import Trainer
from lightseq.training.run_info import describe
from lightseq.training.setup import Inputs

EXACT: Final = 1e-5  # relative error that float32 may have
STANDARD_ERRORS = 2  # of a mean over tokens, by which luck may have made the plain loss too good


def model_rows(
    config: TrainConfig,
    inputs: Inputs,
    world: World,
    sequences: Sequence[Sequence[Sample]],
) -> tuple[list[Row], Transport, dist.ProcessGroup]:
    """Rows on rank 0 (elsewhere some of them), and how the run's ranks talk to each other about attention.

    `sequences` are those of its first step, by place, each as its documents.
    """
    plain_config = copy.deepcopy(inputs.model_config)  # the product changes the model's own
    trainer = Trainer(config, inputs, world, build_engine(config, inputs, world))
    if world.is_main:
        trainer.terminal.header(describe(trainer), trainer.notes)
    transport, group = trainer.context.transport, trainer.context.group
    rows = [_schedule_row(trainer), _data_row(trainer, sequences)]
    if not passed(rows[:1]) or not rows[1].figures["positions_right"]:  # some would wait for what others refuse
        rows += [Row(name, SKIP, "not run: see above") for name in ("weights", "loss", "gradients")]
        return rows, transport, group
    plain = plain_model(plain_config, config.seed, world.device) if world.is_main else None
    rows.append(_weights_row(trainer.model, plain, world))
    loss, gradients, scale = _distributed_step(trainer)
    dtype = getattr(torch, config.compute_dtype)
    rough = dtype is not torch.float32 or config.tf32
    del trainer
    gc.collect()  # hooks and modules hold each other
    if plain is not None:
        try:
            rows += _compare(plain, [*chain(*sequences)], config, dtype if rough else None, loss, gradients, scale)
        except torch.OutOfMemoryError as error:
            reason = f"the plain model on rank 0 ran out of memory ({str(error).split('.')[0]}); free GPU 0"
            rows += [Row(name, FAIL, reason) for name in ("loss", "gradients")]
    dist.barrier()
    return rows, transport, group


def _schedule_row(trainer: Trainer) -> Row:
    """The table that the ranks hold, proven again, and the same on all of them."""
    schedule, wrong = trainer.context.schedule, ""
    try:
        validate(schedule)
    except ValueError as error:
        wrong = str(error)
    everyone = gathered((wrong, repr((schedule.name, schedule.layout, schedule.forward, schedule.backward))))
    found = {reason: rank for rank, (reason, _) in reversed(list(enumerate(everyone))) if reason}
    lines = [f"{reason} (rank {rank})" for reason, rank in found.items()]
    lines += [f"rank {rank} has another table than rank 0" for rank, x in enumerate(everyone) if x[1] != everyone[0][1]]
    moves = sum(len(step.moves) for step in (*schedule.forward, *schedule.backward))
    right = f"{schedule}: every causal pair once, {moves} moves, results home"
    facts = {"schedule": schedule.name, "turns": schedule.turns, "ulysses_size": schedule.ulysses_size}
    return verdict("schedule", lines, right, facts)


def _data_row(trainer: Trainer, sequences: Sequence[Sequence[Sample]]) -> Row:
    """Every token of every sequence on one rank, at its own position, with the next token as its label."""
    config, inputs, world = trainer.config, trainer.inputs, trainer.world
    batches = [inputs.stream.batch(0, a, inputs.data_rank) for a in range(config.gradient_accumulation_steps)]
    mine = [[x.cpu() for x in trainer.shard(batch)[:3]] for batch in batches]
    everyone = gathered((mine, [batch.valid_tokens for batch in batches]))
    wrong, length, size = [], config.model_max_length, inputs.sequence_size
    count, targets, positions_right = config.per_device_train_batch_size, [], True
    for first in range(0, world.size, size):
        for a in range(config.gradient_accumulation_steps):
            start = (a * (world.size // size) + first // size) * count
            wanted = sequences[start : start + count]
            for row, documents in enumerate(wanted):
                parts = [[x[row] for x in theirs[a]] for theirs, _ in everyone[first : first + size]]
                if config.packing != "none":
                    lines = misplaced_documents(parts, documents, first)
                    positions_right &= not lines
                else:
                    lines = misplaced_positions(parts, length, first)
                    positions_right &= not lines
                    lines = lines or misplaced(parts, documents[0], length, first)
                wrong += [f"sequence {start + row}: {line}" for line in lines]
            counted, there = everyone[first][1][a], sum(s.valid_tokens for s in chain(*wanted))
            wrong += [f"{counted} targets counted, there are {there} (ranks {first} on)"] if counted != there else []
    for theirs, _ in everyone:
        targets.append(sum(int((labels != IGNORE_INDEX).sum()) for _, _, labels in theirs))
    right = (
        f"{len(sequences)} x {length:,} tokens, {min(targets):,} to {max(targets):,} targets a rank, each in its place"
    )
    figures = {"length": length, "sequences": len(sequences), "targets_by_rank": targets}
    return verdict("data", wrong, right, figures | {"positions_right": positions_right})


def misplaced_positions(parts: Sequence[Sequence[Tensor]], length: int, first_rank: int = 0) -> list[str]:
    """What is wrong if the ranks do not have every position of a sequence once. `parts`: ids, positions, labels."""
    positions = torch.cat([part[1] for part in parts])
    times = torch.bincount(positions.clamp(0, length), minlength=length + 1)
    times[length - 1].clamp_(max=1)
    if bool((times[:length] != 1).any()) or times[length] or bool((positions < 0).any()):
        missing, twice = int((times[:length] == 0).sum()), int((times[:length] > 1).sum())
        begins = ", ".join(f"rank {first_rank + i} begins at {int(p[1][0])}" for i, p in enumerate(parts))
        return [f"of {length} positions {missing} are missing and {twice} there twice: {begins}"]
    return []


def misplaced_documents(
    parts: Sequence[Sequence[Tensor]], documents: Sequence[Sample], first_rank: int = 0
) -> list[str]:
    """What is wrong if the ranks do not have every token of a document once, at its place in it, with its target.

    Which rank has it is the schedule's to say; padding is id 0 without a target.
    """
    want = Counter(
        row for d in documents for row in zip(range(len(d.targets)), d.ids.tolist(), d.targets.tolist(), strict=False)
    )
    held = [Counter(zip(*(x.tolist() for x in (part[1], part[0], part[2])), strict=True)) for part in parts]
    got: Counter[tuple[int, int, int]] = sum(held, Counter())
    lines = []
    for i, mine in enumerate(held):
        strange = [row for row in mine if row[1:] != (0, IGNORE_INDEX) and got[row] > want[row]]
        if strange:
            place, token, _ = min(strange)
            lines.append(
                f"{len(strange)} tokens of rank {first_rank + i} are of no document, or of two (the first: {token} at "
                f"position {place})"
            )
    missing = sum((want - got).values())
    return lines + ([f"{missing} of {sum(want.values())} tokens of its documents are on no rank"] if missing else [])


def misplaced(parts: Sequence[Sequence[Tensor]], sample: Sample, length: int, first_rank: int = 0) -> list[str]:
    """What is wrong with the ids and labels that ranks hold of one sequence. Padding has the last position."""
    ids, positions, labels = (torch.cat([part[i] for part in parts]) for i in range(3))
    rank_of = torch.repeat_interleave(torch.arange(len(parts)) + first_rank, torch.tensor([len(p[0]) for p in parts]))
    real = (positions < length - 1) | (labels != IGNORE_INDEX)
    want_ids, want_labels = torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORE_INDEX)
    size, known = min(length, len(sample.ids)), min(length, len(sample.targets))
    want_ids[:size], want_labels[:known] = sample.ids[:size], sample.targets[:known]
    lines = []
    for name, got, want in (("tokens", ids, want_ids[positions]), ("labels", labels, want_labels[positions])):
        different = (got != want) & real
        for rank in rank_of[different].unique().tolist():
            here = different & (rank_of == rank)
            i = int(here.int().argmax())
            example = f"at position {int(positions[i])} {int(got[i])}, not {int(want[i])}"
            lines.append(
                f"{int(here.sum())} of {int((rank_of == rank).sum())} {name} of rank {rank} differ ({example})"
            )
    last = int((labels[positions == length - 1] != IGNORE_INDEX).sum())
    if last != int(want_labels[-1] != IGNORE_INDEX):
        lines.append(f"the last position has {last} targets, not {int(want_labels[-1] != IGNORE_INDEX)}")
    return lines


def _weights_row(model: nn.Module, plain: nn.Module | None, world: World) -> Row:
    """Rank 0's plain parameters, handed round one by one: each rank compares its part, to the bit."""
    whole = dict(plain.named_parameters()) if plain is not None else {}
    differing, elements, largest, where = 0, 0, 0.0, ""
    for name, parameter in model.named_parameters():
        want = whole[name].detach() if world.is_main else torch.empty(parameter.shape, device=world.device)
        dist.broadcast(want, 0)
        local, place = part_and_place(parameter)
        difference = (local - want[place].to(local.device)).abs()
        differs, elements = int((difference != 0).sum()), elements + local.numel()
        if differs:
            differing, largest, where = differing + differs, max(largest, float(difference.max())), where or name
    everyone = gathered((differing, elements, largest, where))
    wrong = [
        f"{n:,} of {of:,} weights of rank {rank} are not those of seed and model, by up to {most:.1e} ({name} first)"
        for rank, (n, of, most, name) in enumerate(everyone)
        if n
    ]
    return verdict("weights", wrong, f"{sum(x[1] for x in everyone):,} numbers on all ranks, equal to the bit")


def _distributed_step(trainer: Trainer) -> tuple[float, dict[str, Tensor], float]:
    """Loss and whole gradients (on rank 0, in host memory) as the optimizer gets them, and the loss scale."""
    gradients: dict[str, Tensor] = {}
    taken: list[bool] = []

    def collect(*_: Any) -> None:
        taken.append(True)
        for name, parameter in trainer.model.named_parameters():
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            if trainer.world.is_main:
                gradients[name] = whole.detach().to("cpu", torch.float32, copy=True)

    trainer.engine.optimizer.register_step_pre_hook(collect)
    for _ in range(MOST_SCALINGS):  # float16 halves its scale until the gradients are finite
        with trainer.explained_out_of_memory():
            result = trainer.step(0)
        if taken:
            break
    loss = result.loss.double()
    dist.all_reduce(loss)
    scaler = trainer.engine.facts()["scaler"]
    return float(loss), gradients, scaler["scale"] if scaler else 1.0


def _compare(
    plain: nn.Module, samples: Sequence[Sample], config: TrainConfig, rough: torch.dtype | None,
    loss: float, gradients: Mapping[str, Tensor], scale: float,
) -> list[Row]:  # fmt: skip
    """`rough` is the dtype in which the plain model shows what it is off by, itself; None: exact arithmetic."""
    length = config.model_max_length
    torch.set_float32_matmul_precision("highest")
    want = run_plain(plain, samples, length)
    allowed, allowed_loss, how = dict.fromkeys(want.gradients, EXACT), EXACT * abs(want.loss), "float32"
    if rough is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        round_weights(plain, rough)
        own = run_plain(plain, samples, length, scale)
        allowed = {n: max(EXACT, 2 * off(own.gradients[n], want.gradients[n])) for n in want.gradients}
        allowed_loss, how = max(allowed_loss, _loss_tolerance(own, want)), f"twice plain {config.compute_dtype}'s"
    return [
        _loss_row(loss, want.loss, allowed_loss, how),
        _gradients_row(gradients, want.gradients, allowed, how),
    ]


def _loss_tolerance(own: Result, want: Result) -> float:
    """Twice what a mean over tokens is off by. Errors of tokens cancel: one such mean may be good by luck alone."""
    spread = float((own.token_losses - want.token_losses).square().mean().sqrt())
    return 2 * (abs(own.loss - want.loss) + STANDARD_ERRORS * spread / math.sqrt(len(want.token_losses)))


def _loss_row(loss: float, want: float, allowed: float, how: str) -> Row:
    figures = {"loss": loss, "plain_loss": want, "error": abs(loss - want), "allowed": allowed}
    text = f"{loss:.6f}, plain {want:.6f}: off by {abs(loss - want):.1e}, {allowed:.1e} allowed ({how})"
    return verdict("loss", [] if abs(loss - want) <= allowed else [text], text, figures)


def _gradients_row(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], allowed: Mapping[str, float], how: str
) -> Row:
    """By parameter, relative L2 norm."""
    if not got:
        return Row("gradients", FAIL, "not finite, however small the loss scale")
    absent = sorted({*want} ^ {*got})
    if absent:
        return Row("gradients", FAIL, f"parameters that only one of the two models has: {', '.join(absent[:3])}")
    errors = {name: off(got[name].to(x.device), x) for name, x in want.items()}
    ratio = {name: error / allowed[name] if math.isfinite(error) else math.inf for name, error in errors.items()}
    worst = max(ratio, key=lambda name: ratio[name])
    text = f"{worst.removeprefix('model.')} off by {errors[worst]:.1e}, {allowed[worst]:.1e} allowed ({how})"
    figures = {"errors": errors, "allowed": dict(allowed)}
    count = sum(not x <= 1 for x in ratio.values())
    if not count:
        return verdict("gradients", [], f"{len(want)} parameters, worst: {text}", figures)
    return verdict("gradients", [f"{count} of {len(want)} parameters, worst: {text}{_factor(got, want)}"], "", figures)


def _factor(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """A hint where all that is wrong is a common factor: the loss's divisor, or a mean in place of a sum."""
    products = sum(float((got[n].to(x.device).double() * x.double()).sum()) for n, x in want.items())
    squares = sum(float(x.double().square().sum()) for x in want.values())
    factor = products / squares if squares else math.nan
    if not math.isfinite(factor) or any(not off(got[n].to(x.device), factor * x) < 1e-2 for n, x in want.items()):
        return ""
    return f"; all are {factor:.4f} times what they should be"
