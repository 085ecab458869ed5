"""Agreement of the ranks that share a sequence: the same calls, batches, divisors and documents."""

import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.attention.context import SequenceContext
from lightseq.attention.forward_pass import ForwardPass
from lightseq.parts.router_replay import OWN_CHOICE, ROUTED_EXPERTS
from lightseq.sequence.documents import Documents
from lightseq.utils.tensors import IGNORE_INDEX, upload

BATCHES_BETWEEN_COMPARISONS: Final = 100
BATCH_FACTS: Final = "batch_facts"  # key of `batch_facts` in a batch
# Places in `batch_facts`: rows and tokens a row, targets, checksum, the range of ids, and that of routed experts.
ROWS, LENGTH, TARGETS, CHECKSUM, LOWEST_ID, HIGHEST_ID, LOWEST_EXPERT, HIGHEST_EXPERT = range(8)
FACTS: Final = 8
COUNTED_TOKENS: Final = "counted_tokens"  # key in a batch: tokens that router losses count; absent: all

_HASHED_WORDS: Final = 2**21
_FACTORS: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # odd, with mixed bits


def batch_facts(input_ids: Tensor, shifted_labels: Tensor | None, others: Mapping[str, Tensor | None]) -> Tensor:
    """Returns what ranks sharing a batch must agree on, int64 (8,).

    Token ids include labels. The checksum covers `others`, too, such as masks, positions and images. The result stays
    on the ids' device, so nothing synchronizes.
    """
    checksum = ordered_hash(input_ids)
    targets, (lowest, highest) = checksum.new_zeros(()), (x.long() for x in input_ids.aminmax())
    if shifted_labels is not None:
        targets = (shifted_labels != IGNORE_INDEX).sum()
        highest = torch.maximum(highest, shifted_labels.max().to(highest.device))
    batch, length = (torch.full_like(checksum, size) for size in input_ids.shape)
    routed = others.get(ROUTED_EXPERTS)
    experts = [torch.full_like(checksum, OWN_CHOICE)] * 2
    if routed is not None:
        experts = [x.to(checksum) for x in routed.aminmax()]
    facts = torch.stack([batch, length, targets, checksum, lowest, highest, *experts])
    add_to_checksum(facts, {"labels": shifted_labels, **others})
    return facts


def add_to_checksum(facts: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """Adds tensors that ranks must agree on to the checksum of a batch's facts."""
    for name, x in tensors.items():
        if x is not None:
            found = ordered_hash(x) + zlib.crc32(name.encode())
            facts[CHECKSUM] = facts[CHECKSUM] * _FACTORS[0] + (
                upload(found, facts.device) if found.is_cpu else found.to(facts.device)
            )


def check_ids(facts: Tensor, vocabulary: int | None) -> None:
    """Raises ValueError, on every rank alike, for token ids or labels of a batch outside the model's vocabulary."""
    lowest, highest = facts[LOWEST_ID : HIGHEST_ID + 1].tolist()
    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
        size = "" if vocabulary is None else f" of {vocabulary}"
        raise ValueError(
            f"the batch has token id {lowest if lowest < 0 else highest}, outside the model's vocabulary{size}; "
            "tokenize with the model's tokenizer"
        )


def routed_range(facts: Tensor) -> Tensor:
    """Returns the lowest and the highest of a batch's routed experts, over all ranks that share it."""
    return facts[LOWEST_EXPERT : HIGHEST_EXPERT + 1]


def ordered_hash(x: Tensor) -> Tensor:
    """Returns an int64 number, on the tensor's device, of its dtype, shape and bits in their order.

    Mixes each word of eight bytes with its place before the sum, so that neither a permutation nor changes that keep
    a sum go unseen. Large tensors are hashed in pieces, because each takes several temporary tensors of its size.
    """
    values = x.detach().contiguous().flatten()
    data = (values.clone() if values.storage_offset() else values).view(torch.uint8)  # words must be aligned
    words, rest = data[: len(data) // 8 * 8].view(torch.int64), data[len(data) // 8 * 8 :].long()
    parts = [*words.split(_HASHED_WORDS), *([rest] if len(rest) else [])]
    first, second, third = _FACTORS
    places = torch.arange(min(max(len(words), len(rest)), _HASHED_WORDS), device=x.device) * first
    total = torch.full((), zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode()), dtype=torch.int64, device=x.device)
    for number, part in enumerate(parts):
        mixed = (places[: len(part)] + number * third % 2**63).bitwise_xor_(part).mul_(second)
        mixed.bitwise_xor_(mixed >> 32).mul_(third).bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


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
    context: SequenceContext,
    facts: Tensor,
    labels: Tensor | None,
    num_items: Tensor | float | None,
    vocabulary: int | None,
) -> None:
    """Raises ValueError on every rank if ranks that share a sequence got different batches or divisors.

    Nor may a batch have ids outside the vocabulary, which is checked for every batch on the host.

    Compares at the first batch and every hundredth after it, because a comparison waits for the other ranks. It covers
    all batches since the one before.
    """
    state = context.forward_pass
    state.batches += 1
    checksum = facts[CHECKSUM]
    if state.checksums is not None:
        checksum = checksum + state.checksums.to(checksum.device) * _FACTORS[0]
    state.checksums = checksum
    compares = state.batches % BATCHES_BETWEEN_COMPARISONS == 1
    if compares or facts.is_cpu:
        check_ids(facts, vocabulary)
    if not compares:
        return
    state.checksums = None
    *rows, of_all = torch.cat([facts, checksum.unsqueeze(0)]).tolist()
    targets = rows[TARGETS]
    divisor = None if num_items is None else float(num_items)
    own_targets = None if labels is None else float((labels != IGNORE_INDEX).sum())
    everyone: list[Any] = [None] * context.layout.world
    dist.all_gather_object(everyone, (rows, of_all, divisor, own_targets), group=context.group)
    other = next(
        (rank for rank, (theirs, all_theirs, *_) in enumerate(everyone) if (theirs, all_theirs) != (rows, of_all)), None
    )
    if other is not None:
        sizes = [f"{batch} x {length} tokens" for batch, length, *_ in (rows, everyone[other][0])]
        what = "other rows, labels, masks or images" if sizes[0] == sizes[1] else " and ".join(sizes)
        if rows == everyone[other][0]:
            what += f", in one of the last {BATCHES_BETWEEN_COMPARISONS} batches"
        raise ValueError(
            f"ranks {context.rank} and {other} share a sequence but got different batches ({what}); give every rank of "
            "a sequence the same rows and random augmentation; lightseq.integrations does so in Trainer, TRL and "
            "accelerate (docs/trainers.md)"
        )
    divisors = [divisor for _, _, divisor, _ in everyone]
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
    nodes = documents.nodes
    mine = torch.tensor([hash((nodes.boundaries, nodes.parents or ()))])
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
