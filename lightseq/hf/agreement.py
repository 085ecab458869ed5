"""Agreement of the ranks that share a sequence: the same calls, batches, divisors and documents."""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.attention.context import SequenceContext
from lightseq.attention.forward_pass import ForwardPass
from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import IGNORE_INDEX

BATCHES_BETWEEN_COMPARISONS: Final = 100
BATCH_FACTS: Final = "batch_facts"  # key of `batch_facts` in a batch
COUNTED_TOKENS: Final = "counted_tokens"  # key of the tokens that router losses count, if not all do


def batch_facts(input_ids: Tensor, shifted_labels: Tensor | None) -> Tensor:
    """Returns the values that ranks sharing a batch must agree on, int64 (4,): its shape, targets and a checksum.

    The result stays on the ids' device, so nothing synchronizes.
    """
    # A checksum may overflow. The odd factors make it depend on the order of the ids.
    factors = torch.arange(1, 2 * input_ids.numel(), 2, device=input_ids.device) * 0x9E3779B1
    checksum = (input_ids.flatten() * factors).sum()
    targets = checksum.new_zeros(())
    if shifted_labels is not None:
        targets = (shifted_labels != IGNORE_INDEX).sum()
        checksum = checksum * 31 + (shifted_labels.flatten() * factors).sum()
    batch, length = input_ids.shape
    return torch.stack([torch.full_like(checksum, batch), torch.full_like(checksum, length), targets, checksum])


def announce_pass(context: SequenceContext, shape: tuple[int, int], training: bool) -> None:
    """Raises ValueError if ranks that share a sequence make different calls, such as one rank that samples alone.

    A second announcement of the same pass does nothing. `shape` is the batch's; passes that compare whole batches leave
    it to the comparison.
    """
    state = context.forward_pass
    if state.announced or state.roll_call is None:
        return
    state.announced = True
    is_step = training and torch.is_grad_enabled()
    what = "trains" if is_step else "runs the model without training it"
    compares = state.batches % BATCHES_BETWEEN_COMPARISONS == 0
    state.roll_call.make(what if compares else f"{what} on {shape[0]} x {shape[1]} tokens", is_step)


def compare_batches(
    context: SequenceContext, facts: Tensor, labels: Tensor | None, num_items: Tensor | float | None
) -> None:
    """Raises ValueError on every rank if ranks that share a sequence got different batches or divisors.

    Compares the first batch and every hundredth after it, because a comparison waits for the other ranks.
    """
    state = context.forward_pass
    state.batches += 1
    if state.batches % BATCHES_BETWEEN_COMPARISONS != 1:
        return
    batch, length, targets, checksum = facts.tolist()
    rows = (batch, length, targets, checksum)
    divisor = None if num_items is None else float(num_items)
    own_targets = None if labels is None else float((labels != IGNORE_INDEX).sum())
    everyone: list[Any] = [None] * context.layout.world
    dist.all_gather_object(everyone, (rows, divisor, own_targets), group=context.group)
    other = next((rank for rank, (theirs, _, _) in enumerate(everyone) if theirs != rows), None)
    if other is not None:
        sizes = [f"{batch} x {length} tokens" for batch, length, *_ in (rows, everyone[other][0])]
        what = "other rows, labels or images" if sizes[0] == sizes[1] else " and ".join(sizes)
        raise ValueError(
            f"ranks {context.rank} and {other} share a sequence but got different batches ({what}); give every rank of "
            "a sequence the same rows; lightseq.integrations does so in Trainer, TRL and accelerate (docs/trainers.md)"
        )
    divisors = [divisor for _, divisor, _ in everyone]
    counted_alone = len(divisors) > 1 and divisors == [count for *_, count in everyone] != [None] * len(divisors)
    if len(set(divisors)) > 1 or counted_alone:
        found = ", ".join(f"{divisor:g}" if divisor is not None else "missing" for divisor in divisors)
        raise ValueError(
            f"num_items_in_batch is {found} on the ranks, but the whole batch has {targets} targets; pass the value of "
            "shard_batch, or leave Trainer's average_tokens_across_devices on"
        )


def begin_comparing_documents(context: SequenceContext, documents: Documents) -> None:
    """Starts exchanging a hash of the documents on the host, for every batch.

    Ranks with different documents would wait for each other forever. If the group has no CPU backend, attention
    compares documents once per shape instead.
    """
    if "cpu" not in dist.get_backend_config(context.group):
        return
    mine = torch.tensor([hash(documents.padded_boundaries)])
    everyone = [torch.empty_like(mine) for _ in range(context.layout.world)]
    work = dist.all_gather(everyone, mine, group=context.group, async_op=True)
    context.forward_pass.comparison = (work, everyone)


def finish_comparing_documents(state: ForwardPass) -> None:
    """Raises ValueError on every rank if the ranks got different documents."""
    if state.comparison is None:
        return
    (work, everyone), state.comparison = state.comparison, None
    work.wait()
    if len({int(theirs) for theirs in everyone}) > 1:
        raise ValueError("the ranks got different documents; pass the same packed sequence on every rank")
