"""Distributed attention inside a Hugging Face model: what a loop may pass, what is refused, and what runs when."""

import copy
import itertools
import pickle
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from schedules import fitting
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from worlds import spawn

import lightseq
from lightseq import hf, sequence_parallel
from lightseq.architecture.family import preset_config
from lightseq.attention.context import SequenceContext, find
from lightseq.attention.executor import Executor
from lightseq.attention.operator import attention
from lightseq.cli import BOTH
from lightseq.config.remat_policies import POLICIES, STORES_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.hf.checks import check_positions
from lightseq.memory import offload
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import random_weights, weights
from lightseq.parallelize import parallelize
from lightseq.parts import mlp
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.loss_model import LossModel
from lightseq.plan.hardware import Hardware
from lightseq.plan.rates import CHIPS
from lightseq.schedule.layout import Layout, shard, unshard
from lightseq.sequence.group import SequenceGroup

VOCABULARY, LENGTH = 61, 50  # 50 divides by no number of chunks here but 1 and 2
CPU = torch.device("cpu")
PACKAGE = Path(lightseq.__file__).parent
LAYOUTS = [Layout("contiguous", 4), Layout("contiguous", 8, 2), Layout("zigzag", 4, 2), Layout("striped", 4)]
# Weights this large make attention sharp, so that a wrong position or a lost key shows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def llama(seed: int = 1, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).eval()


def ids(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole(context: SequenceContext, local: Tensor, length: int) -> Tensor:
    """The whole tensor from the parts of the context's ranks."""
    parts = [torch.empty_like(local) for _ in range(context.layout.world)]
    dist.all_gather(parts, local.detach().contiguous(), group=context.group)
    return unshard(parts, context.layout, length)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def check_training(
    model: PreTrainedModel, want: PreTrainedModel, context: SequenceContext, batch: Tensor, labels: Tensor,
    mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Loss and gradients, summed over the context's ranks, equal a plain model's on the whole batch."""
    model.zero_grad()
    want.zero_grad()
    expected = want(input_ids=batch, labels=labels, attention_mask=mask).loss
    expected.backward()
    loss = model(**hf.shard_batch(context, batch, labels, mask)).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=context.group)
    name = context.schedule.name
    assert abs(total - expected) < 1e-5, f"{name}: loss {total} against {expected}"
    for (parameter, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        dist.all_reduce(p.grad, group=context.group)
        assert relative(p.grad, q.grad) < 1e-5, f"{name}: gradient of {parameter} off by {relative(p.grad, q.grad)}"


# ---- labels, positions and padding ---------------------------------------------------------------------------------


def border_labels(batch: Tensor, context: SequenceContext) -> Tensor:
    """The only targets are the first tokens of chunks, which the last token of the chunk before predicts."""
    size = context.layout.padded_length(LENGTH) // context.layout.chunk_count
    labels = torch.full_like(batch, -100)
    labels[:, size::size] = batch[:, size::size]
    return labels


def labels_and_positions(rank: int) -> None:
    batch, want = ids(), llama()
    for schedule in fitting(dist.get_world_size(), 4, 2):
        model = llama()
        context = hf.enable(model, schedule=schedule)
        labels = border_labels(batch, context)
        check_training(model, want, context, batch, batch)
        check_training(model, want, context, batch, labels)
        shifted_inside = torch.nn.functional.pad(
            shard(labels, context.layout, rank, fill=-100)[:, 1:], (0, 1), value=-100
        )
        kept = whole(context, shifted_inside, LENGTH).ne(-100).sum()
        if context.layout.kind == "contiguous" and context.layout.chunks_per_rank == 1:
            assert kept == 0, "a shift inside the shard would lose every one of these targets"
        positions = whole(context, hf.shard_batch(context, batch)["position_ids"], LENGTH)
        assert torch.equal(positions, torch.arange(LENGTH).expand(2, -1)), schedule
        refuses_local_positions(model, context, batch)


def refuses_local_positions(model: PreTrainedModel, context: SequenceContext, batch: Tensor) -> None:
    inputs = hf.shard_batch(context, batch, batch)
    local = torch.arange(inputs["input_ids"].shape[1]).expand(2, -1)
    if not torch.equal(local, inputs["position_ids"]):  # on a contiguous layout's first rank they are the same
        for _ in range(2):  # no wrong input is right the second time
            refused(lambda: model(**inputs | {"position_ids": local}), f"do not match the {context.layout.kind} layout")
    refused(lambda: model(input_ids=inputs["input_ids"]), "position_ids are missing")
    refused(lambda: model.base_model(input_ids=inputs["input_ids"]), "position_ids are missing")


def refused(call: Callable[[], Any], line: str) -> None:
    """In a worker, where pytest.raises would do the same with less to say about which rank it was."""
    try:
        call()
    except ValueError as error:
        assert line in str(error), error
        return
    raise AssertionError(f"not refused: {line}")


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_target_is_lost_at_a_border_and_positions_are_global(world: int) -> None:
    spawn(world, labels_and_positions)


def right_padding(rank: int) -> None:
    batch, lengths = ids(3), torch.tensor([LENGTH, 17, 1])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    labels = batch.masked_fill(mask == 0, -100)
    want = llama()
    with torch.no_grad():
        expected = want(input_ids=batch, attention_mask=mask).logits
    for schedule in fitting(dist.get_world_size(), 4, 2):
        model = llama()
        context = hf.enable(model, schedule=schedule)
        check_training(model, want, context, batch, labels, mask)
        inputs = hf.shard_batch(context, batch, batch, mask)
        assert inputs["num_items_in_batch"] == (lengths - 1).sum(), "a padded token is no target"
        given = hf.shard_batch(context, batch, shift_labels=batch.roll(-1, 1), attention_mask=mask)
        assert given["num_items_in_batch"] == (lengths - 1).sum() + 1, "nothing is known of the last token's target"
        with torch.no_grad():
            logits = whole(context, model(**inputs).logits, LENGTH)
        assert relative(logits[mask == 1], expected[mask == 1]) < 1e-5, schedule


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_right_padding_equals_plain_transformers(world: int) -> None:
    spawn(world, right_padding)


def test_sharded_positions_of_every_length_are_accepted_and_unsharded_ones_refused() -> None:
    for layout in LAYOUTS:
        for length, rank in itertools.product(range(1, 81), range(layout.world)):
            context: Any = SimpleNamespace(layout=layout, rank=rank)
            own = SequenceGroup.positions(context, length, CPU)
            check_positions(context, own)
            if rank and own.shape[1] > 1:
                with pytest.raises(ValueError, match="use shard_batch"):
                    check_positions(context, torch.arange(own.shape[1]).unsqueeze(0))


def test_a_batch_without_any_target_has_loss_zero_and_no_nan(alone: None) -> None:
    model = llama()
    context = hf.enable(model)
    loss = model(**hf.shard_batch(context, ids(), torch.full((2, LENGTH), -100))).loss
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in model.parameters())


# ---- rotary positions ----------------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "plain theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# 16 is the context: one token more, as padding would be, changes dynamic RoPE, and only a shorter sequence resets it.
LENGTHS = (16, 13, LENGTH, 20, 71, 16, 10, 33)


def rope_models(config: LlamaConfig, schedule: str) -> Iterator[tuple[PreTrainedModel, SequenceContext]]:
    """Patched with its weights, and as the trainer does it: patched before it has memory. Patching changes a config."""
    model = build_to_train(copy.deepcopy(config))
    weights.materialize(model, CPU)
    random_weights.initialize(model, seed=3)
    yield model, hf.enable(model, schedule=schedule)
    model = build_to_train(copy.deepcopy(config))
    context = hf.enable(model, schedule=schedule, device=CPU)
    weights.materialize(model, CPU)
    random_weights.initialize(model, seed=3)
    yield model, context


def rope_scaling(rank: int) -> None:
    for number, (name, rope) in enumerate(ROPES.items()):
        config = LlamaConfig(**SIZES | {"max_position_embeddings": 16, "rope_parameters": rope})
        schedule = ("ring", "prefix")[number % 2]
        for model, context in rope_models(config, schedule):
            want = LlamaForCausalLM(copy.deepcopy(config))
            want.load_state_dict(model.state_dict())
            for length in LENGTHS if name == "dynamic" else (LENGTH,):
                with torch.no_grad():
                    expected = want(input_ids=ids(length=length)).logits
                    got = whole(context, model(**hf.shard_batch(context, ids(length=length))).logits, length)
                error = relative(got, expected)
                assert error < 1e-5, f"{name}, {schedule}: off by {error:.1e} at length {length}"


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_scaled_rotary_positions_equal_one_process(world: int) -> None:
    spawn(world, rope_scaling)


# ---- precision, groups, twice --------------------------------------------------------------------------------------


def double_precision(rank: int) -> None:
    """In eval mode without gradients and in training mode with them."""
    want, batch = llama().double(), ids()
    expected = want(input_ids=batch).logits
    expected.square().mean().backward()
    for schedule in fitting(dist.get_world_size(), 4, 2):
        model = llama().double()
        context = hf.enable(model, schedule=schedule)
        with torch.no_grad():
            got = whole(context, model(**hf.shard_batch(context, batch)).logits, LENGTH)
        assert got.dtype == torch.float64
        assert relative(got, expected) < 1e-10, schedule
        positions = context.sequence.positions(context.layout.padded_length(LENGTH), CPU)
        logits = model.train()(**hf.shard_batch(context, batch)).logits
        (logits.square() * (positions < LENGTH).unsqueeze(-1)).sum().div(expected.numel()).backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            dist.all_reduce(p.grad)
            assert relative(p.grad, q.grad) < 1e-10, schedule


@pytest.mark.slow
def test_double_precision_agrees_to_ten_digits() -> None:
    spawn(3, double_precision)


def groups(rank: int) -> None:
    """Two groups of two ranks, each with a batch of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (mesh["sequence"], pairs[rank // 2]):
        model = llama()
        context = hf.enable(model, group)
        assert context.layout.world == 2
        check_training(model, llama(), context, ids(seed=rank // 2), ids(seed=rank // 2))
    refused(lambda: hf.enable(llama(), mesh), "the mesh has 2 axes ('data', 'sequence')")


def test_a_mesh_axis_or_a_group_holds_the_sequence() -> None:
    spawn(4, groups)


def schedules(rank: int) -> None:
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    for dtype, name in ((torch.bfloat16, "striped"), (torch.float32, "zigzag")):
        assert hf.enable(llama(), length=LENGTH, dtype=dtype).schedule.name == name
        assert sequence_parallel.make_group(length=LENGTH, dtype=dtype, **heads).schedule.name == name


def test_a_schedule_is_chosen_for_the_bytes_of_the_dtype() -> None:
    spawn(3, schedules)


def frames_to_the_kernel(rank: int) -> list[str]:
    """Functions of this project between a model's attention module and its kernel, in the forward pass."""
    model, found = llama(), list[str]()
    context = hf.enable(model, schedule="zigzag")
    kernel = type(context.selection.kernel)
    forward = kernel.forward

    def noting(self: Any, *args: Any) -> tuple[Tensor, Tensor]:
        frames = traceback.extract_stack()[:-1]
        ours = [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)]
        found[:] = [f"{Path(f.filename).stem}.{f.name}" for f in ours]
        return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "forward", noting)
        model(**hf.shard_batch(context, ids(), ids()))
    return found[found.index("module_attention.attention_function") :]


def test_attention_reaches_the_kernel_in_eight_frames() -> None:
    for found in spawn(2, frames_to_the_kernel):
        assert len(found) < 8, found  # the kernel's own is the eighth


def enabled_twice(rank: int) -> None:
    rope = {"max_position_embeddings": 16, "rope_parameters": ROPES["dynamic"]}
    model, want = llama(**rope), llama(**rope)
    first = hf.enable(model, schedule="ring")
    check_training(model, want, first, ids(), ids())
    hooks = [len(x) for m in (model, model.base_model) for x in (m._forward_pre_hooks, m._forward_hooks)]
    second = hf.enable(model, schedule="zigzag")
    check_training(model, want, second, ids(), ids())
    reduced: list[int] = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (reduced.append(1), original(*args, **kwargs))[1]
    with torch.no_grad():
        model(**hf.shard_batch(second, ids()))
    dist.all_reduce = original
    assert len(reduced) == 1, "the whole length is asked for once"
    assert hooks == [len(x) for m in (model, model.base_model) for x in (m._forward_pre_hooks, m._forward_hooks)]
    refused(lambda: model(**hf.shard_batch(first, ids())), "25 local tokens do not split into 2 chunks")
    refused(lambda: model(**hf.shard_batch(first, ids(length=52))), "do not match the zigzag layout")


def test_enabling_again_replaces_the_first_and_stacks_nothing() -> None:
    spawn(2, enabled_twice)


def attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Everything that every module holds, by its name; of hooks how many, for torch numbers them anew.

    Without the longest sequence so far, which dynamic RoPE remembers in plain transformers too.
    """
    skipped = ("_parameters", "_buffers", "_modules", "max_seq_len_cached")
    return {
        name: {key: len(x) if key.endswith(("hooks", "hooks_with_kwargs", "always_called")) else x
               for key, x in vars(module).items() if key not in skipped}
        for name, module in model.named_modules()
    }  # fmt: skip


def disabled(rank: int) -> None:
    """Trains, disables and generates, twice; the rank's model is again one that transformers made."""
    for changes in ({}, {"max_position_embeddings": 16, "rope_parameters": ROPES["dynamic"]}):
        model, want = llama(**changes), llama(**changes)
        before, config = attributes(model), model.config.to_dict()
        for schedule in ("ring", "zigzag"):
            context = hf.enable(model, schedule=schedule)
            context = hf.enable(model, schedule=schedule)
            check_training(model, want, context, ids(), ids())
            with torch.no_grad():
                for p, q in zip(model.parameters(), want.parameters(), strict=True):
                    p -= q.grad
                    q -= q.grad
            hf.disable(model)
            for name, after in attributes(model).items():
                assert after.keys() == before[name].keys() and after == before[name], f"{name}: {after}"
            assert model.config.to_dict() == config and model.config._attn_implementation == "sdpa"
            options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            got, expected = (m.generate(input_ids=ids(2, 20), **options) for m in (model, want))
            assert torch.equal(got, expected) and got.shape == (2, 28)
            assert torch.equal(model(ids(), labels=ids()).loss, want(ids(), labels=ids()).loss)
            with pytest.raises(KeyError):
                find(context.name)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disabled_model_generates_as_before_and_may_be_enabled_again(world: int) -> None:
    spawn(world, disabled)


def test_disabling_reaches_wrappers_and_keeps_what_others_set(alone: None) -> None:
    model = llama(rope_parameters=ROPES["dynamic"], max_position_embeddings=16)
    model.set_attn_implementation("eager")
    model.loss_function = own_loss = partial(model.loss_function)
    rope = model.model.rotary_emb
    rope.forward = own_forward = partial(rope.forward)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    before = attributes(wrapped)
    context = hf.enable(wrapped)
    wrapped(**hf.shard_batch(context, ids(), ids())).loss.backward()
    hf.disable(wrapped)
    assert attributes(wrapped) == before and model.config._attn_implementation == "eager"
    assert model.loss_function is own_loss and rope.forward is own_forward


def test_a_copy_is_enabled_alike_and_disabling_it_leaves_the_model_enabled(alone: None) -> None:
    model = llama()
    context = hf.enable(model)
    inputs = hf.shard_batch(context, ids(), ids())
    expected = model(**inputs).loss
    with pytest.raises(TypeError, match="holds a process group and cannot be pickled; save its state_dict"):
        pickle.dumps(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(**inputs).loss, expected)
    hf.disable(other)
    assert other.generate(input_ids=ids(1, 8), max_new_tokens=2, pad_token_id=0).shape == (1, 10)
    assert torch.equal(model(**inputs).loss, expected)


def test_disabling_a_model_that_is_not_enabled_is_refused(alone: None) -> None:
    model = llama()
    line = "LlamaForCausalLM is not enabled; hf.disable takes the model that hf.enable took"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
            hf.disable(model)
        hf.enable(model)
        hf.disable(model)


# ---- what is refused -----------------------------------------------------------------------------------------------


def rows_dealt_out(rank: int) -> None:
    model = llama()
    shorter = ids(length=50 - 4 * rank)
    for mine, words in ((ids(seed=rank), "(other rows, labels, masks or images)"), (shorter, "2 x 46 tokens")):
        context = hf.enable(model)
        with pytest.raises(ValueError, match="share a sequence but got different batches") as refusal:
            moved = {name: x.clone() for name, x in hf.shard_batch(context, mine).items()}  # as onto a device
            model(**moved)
        assert words in str(refusal.value)
    context = hf.enable(model)
    model(**hf.shard_batch(context, ids()))
    model(**hf.shard_batch(context, ids(seed=rank)))  # to ask is to wait, so that few batches are compared
    with torch.no_grad(), pytest.raises(ValueError, match=r"got different batches .*in one of the last 100 batches"):
        for _ in range(100):
            model(**hf.shard_batch(context, ids(length=8)))


def swapped(x: Tensor) -> Tensor:
    """Returns ids or labels with two neighbours swapped, which keeps their sum."""
    return x[:, [1, 0, *range(2, x.shape[1])]]


def batches_of_one_sum(rank: int) -> None:
    model, whole = llama(), ids()
    masks = [torch.arange(50) < torch.tensor([[40], [50]]), torch.arange(50) < torch.tensor([[50], [40]])]
    unlabelled = whole.masked_fill(~(masks[0] & masks[1]), -100)
    for given in (
        {"input_ids": swapped(whole) if rank else whole, "labels": whole},
        {"input_ids": whole, "labels": swapped(whole) if rank else whole},
        {"input_ids": whole, "labels": unlabelled, "attention_mask": masks[rank].int()},
        {"input_ids": whole, "labels": unlabelled, "attention_mask": masks[0].int() if rank else masks[0]},
    ):
        context = hf.enable(model)
        with pytest.raises(ValueError, match="share a sequence but got different batches"):
            model(**hf.shard_batch(context, **given))


def test_ranks_whose_batches_differ_in_order_only_are_refused() -> None:
    spawn(2, batches_of_one_sum)


def test_a_missing_process_group_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="call init_process_group first"):
        hf.enable(llama())


def test_ranks_that_read_rows_of_their_own_are_refused() -> None:
    """A loader that gives each rank rows of its own would train on a mixture of rows, and the loss would still fall."""
    spawn(2, rows_dealt_out)


@pytest.mark.parametrize(
    "mask, line",
    [
        ([[0, 1, 1, 1], [1, 1, 1, 1]], "on the left"),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], "holes"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "a row without tokens"),
        ([[[[1]]]], "attention_mask has 4 dimensions"),
    ],
)
def test_masks_that_causal_attention_cannot_honour_are_refused(alone: None, mask: list, line: str) -> None:
    context = hf.enable(llama())
    for kind in (torch.long, torch.bool, torch.uint8, torch.float32):
        with pytest.raises(ValueError, match=line):
            hf.shard_batch(context, ids(2, 4), attention_mask=torch.tensor(mask).to(kind))


def test_dtypes_of_masks_and_positions_of_padding_do_not_matter(alone: None) -> None:
    """Collators write 0 or 1 there."""
    context, batch, mask = hf.enable(llama()), ids(2, 6), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    for kind in (torch.bool, torch.uint8, torch.float32):
        labels = [hf.shard_batch(context, batch, batch, x)["labels"] for x in (mask, mask.to(kind))]
        assert torch.equal(*labels), kind
    for written in (0, 1):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, written)
        given = hf.shard_batch(context, batch, attention_mask=mask, position_ids=positions)
        assert "documents" not in given and torch.equal(given["position_ids"][1], torch.arange(6))
        packed = torch.tensor([[0, 1, 0, 1, written, written]])
        given = hf.shard_batch(context, batch[:1], attention_mask=mask[1:] | mask[1:].roll(1), position_ids=packed)
        assert given["documents"].count == 2 and given["documents"].boundaries[1] == 2


@pytest.mark.parametrize(
    "words, line",
    [
        ({"input_ids": torch.arange(8)}, r"input_ids are \(8,\)"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids are a list; give a tensor"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "with at least one token"),
        ({"input_ids": ids(1, 8), "labels": ids(1, 7)}, r"labels \(1, 7\) and input_ids \(1, 8\) differ"),
        ({"input_ids": ids(1, 8), "attention_mask": torch.ones(1, 9)}, r"attention_mask \(1, 9\)"),
        ({"input_ids": ids(1, 8), "attention_mask": [[1] * 8]}, "attention_mask is a list; give a tensor"),
        ({"input_ids": ids(1, 8), "position_ids": torch.arange(9)[None]}, r"position_ids are \(1, 9\); give a tensor"),
        ({"input_ids": ids(1, 8), "labels": ids(1, 8) - 99}, "a label is -9.; tokens without a target have -100"),
        ({"input_ids": ids(1, 8), "cu_seqlens": [0, 4.5, 8]}, "cu_seqlens has 4.5; give whole numbers"),
    ],
)
def test_wrong_shapes_and_values_are_refused(alone: None, words: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        hf.shard_batch(hf.enable(llama()), **words)


def test_attention_accepts_the_dtypes_that_autocast_gives(alone: None) -> None:
    """q and k are turned in float32 there, and v is not."""
    model, batch = llama(), ids(1, 24)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(batch, labels=batch).loss
    context = hf.enable(model, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(**hf.shard_batch(context, batch, batch)).loss
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=2e-3)
    q = torch.zeros(1, 4, 4, 16)
    with pytest.raises(ValueError, match=r"q is torch\.float32, k torch\.float32 and v torch\.bfloat16; cast them"):
        attention(q, q[:, :, :2], q[:, :, :2].bfloat16(), context)


@pytest.mark.parametrize(
    "extra, line",
    [
        ({"labels": ids(1, 8)}, "labels without shift_labels"),
        ({"attention_mask": torch.tensor([[0] + [1] * 7])}, "attention_mask masks tokens of a shard"),
        ({"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "attention_mask masks tokens of a shard"),
        ({"use_cache": True}, "key/value cache"),
        ({"past_key_values": object()}, "key/value cache"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}, "position_ids do not match"),
        ({"position_ids": torch.arange(8)[None] + 1}, "position_ids do not match"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "cu_seq_lens_q"),
        ({"score_bias": torch.zeros(8, 8)}, "score_bias, which no kernel supports"),
        ({"is_causal": False}, "is_causal=False"),
        ({"ignore_index": 5}, "ignore_index=5 is not supported; set labels without a target to -100"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"shift_labels": ids(1, 8)}, "shift_labels without labels"),
    ],
)
def test_unsupported_inputs_are_refused(alone: None, extra: dict[str, Any], line: str) -> None:
    model = llama()
    context = hf.enable(model)
    inputs = hf.shard_batch(context, ids(1, 8))
    model(**inputs)
    with pytest.raises(ValueError, match=line):
        model(**inputs | extra)


def test_positional_arguments_that_could_hold_a_mask_are_refused(alone: None) -> None:
    model = llama()
    hf.enable(model)
    model(ids(1, 8))
    with pytest.raises(ValueError, match="by keyword"):
        model(ids(1, 8), torch.tensor([[0] + [1] * 7]))


def test_an_unpatched_model_with_the_config_of_a_patched_one_is_refused(alone: None) -> None:
    model = llama()
    hf.enable(model)
    with pytest.raises(ValueError, match="shares its config"):
        LlamaForCausalLM(model.config)(input_ids=ids(1, 8))


def other(kind: type, config: type, **changes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return kind(config(**SIZES | changes))


@pytest.mark.parametrize(
    "model, line",
    [
        (other(LlamaForCausalLM, LlamaConfig, attention_dropout=0.1), "attention_dropout 0.1"),
        (other(LlamaForCausalLM, LlamaConfig, is_causal=False), "both directions"),
        (BertModel(BertConfig(**SIZES)), "both directions"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_unsupported_attention_is_refused(alone: None, model: PreTrainedModel, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        hf.enable(model)
    assert model.config._attn_implementation != hf.IMPLEMENTATION, "a refused model stays as it was"


def trains_after_inference(rank: int) -> None:
    for schedule in fitting(dist.get_world_size(), 4, 2):
        model = llama()
        context = hf.enable(model, schedule=schedule)
        inputs = hf.shard_batch(context, ids(), ids())
        with torch.inference_mode():
            expected = model(**inputs).loss
        loss = model(**inputs).loss
        loss.backward()
        assert torch.equal(loss, expected) and model.model.embed_tokens.weight.grad.any(), schedule


def test_training_works_after_an_evaluation_in_inference_mode() -> None:
    spawn(2, trains_after_inference)


@pytest.mark.slow
def test_a_whole_model_may_be_compiled(alone: None) -> None:
    model = llama(num_hidden_layers=1)
    context = hf.enable(model)
    inputs = hf.shard_batch(context, ids(), ids())
    loss = torch.compile(model, backend="aot_eager")(**inputs).loss
    assert relative(loss, model(**inputs).loss) < 1e-5


# ---- what runs when ------------------------------------------------------------------------------------------------


class Gathers(TorchDispatchMode):
    """Counts all-gathers of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += op is torch.ops.c10d._allgather_base_.default
        return op(*args, **kwargs or {})


@contextmanager
def counted_attention() -> Iterator[list[int]]:
    """A list that grows by one whenever attention runs forward."""
    ran, forward = [], Executor.forward

    def counting(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        ran.append(1)
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "forward", counting)
        yield ran


def prepared(remat: str, **flags: Any) -> tuple[LossModel, tuple[Tensor, ...]]:
    """A model as the trainer makes it, over all ranks, and one batch for it."""
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), CPU)
    model = build_to_train(LlamaConfig(**SIZES | flags.pop("config", {})))
    asked = {"model_name_or_path": "m", "data_path": "d", "output_dir": "o", "model_max_length": LENGTH}
    config = TrainConfig(**asked, remat=remat, **flags)  # type: ignore[arg-type]
    memory = MemorySettings(state_on_host=config.state_on_host)
    parallel = parallelize(model, config, parallel_dims(world), memory)
    weights.materialize(model, CPU)
    random_weights.initialize(model, seed=3)
    batch = hf.shard_batch(parallel.context, ids(), ids())
    return parallel.loss_model, (batch["input_ids"], batch["position_ids"], batch["labels"])


def mlps_made(_: int, policy: str = "attention", group: int = 1) -> tuple[list[int], list[int]]:
    """Rows of every tile of the MLPs' products, forward and backward."""
    made, multiply = list[int](), mlp._act_mul
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "TILE_TOKENS", 16)
        patch.setattr(mlp, "_act_mul", lambda *given: made.append(len(given[0])) or multiply(*given))
        model, batch = prepared(policy, config={"num_hidden_layers": 5}, layers_per_checkpoint=group)
        loss = model(*batch)
        forward = made.copy()
        loss.backward()
    return forward, made[len(forward) :]


def test_the_tiled_mlp_of_an_eager_layer_runs_once() -> None:
    forward, backward = spawn(1, mlps_made)[0]
    assert len(forward) > 5 and not backward


@pytest.mark.parametrize("policy", ["attention", pytest.param("full", marks=pytest.mark.slow)])
def test_in_a_recomputed_group_the_mlps_of_all_layers_but_the_last_run_twice(policy: str) -> None:
    forward, backward = spawn(1, mlps_made, policy, 3)[0]
    assert len(backward) == len(forward) * 3 // 5


def remat(rank: int) -> None:
    layers, gradients = SIZES["num_hidden_layers"], {}
    for policy in POLICIES:
        model, batch = prepared(policy)
        for step in range(2):  # the first step of FSDP is not like the others
            model.zero_grad()
            with counted_attention() as ran, Gathers() as forward:
                loss = model(*batch)
            ends = 3  # embeddings, head and the last norm, none of which the backward pass needs again
            assert (len(ran), forward.count) == (layers, layers + ends), f"{policy}: forward of step {step}"
            with counted_attention() as ran, Gathers() as backward:
                loss.backward()
            again = layers if policy == "full" else 0
            assert (len(ran), backward.count) == (again, layers), f"{policy}: backward of step {step}"
        gradients[policy] = {name: p.grad.to_local() for name, p in model.named_parameters()}
    for name, expected in gradients["none"].items():
        assert expected.any(), name
        assert torch.equal(gradients["attention"][name], expected), name
        assert torch.equal(gradients["full"][name], expected), name
        for policy in STORES_MLP:
            assert (gradients[policy][name] - expected).norm() <= 1e-5 * expected.norm(), (policy, name)


def test_attention_is_recomputed_only_under_full_and_a_layer_gathered_once_a_pass() -> None:
    spawn(2, remat)


@pytest.mark.parametrize(
    ("techniques", "units"),
    [
        ({}, []),
        ({"offload": "optimizer"}, [SIZES["num_hidden_layers"]]),
        ({"offload": "optimizer", "layers_per_checkpoint": SIZES["num_hidden_layers"]}, [1]),
        ({"offload": "optimizer", "tile_layers": True}, []),
    ],
)
def test_weights_are_prefetched_on_one_rank_that_has_them_on_the_host(
    alone: None, monkeypatch: pytest.MonkeyPatch, techniques: dict[str, Any], units: list[int]
) -> None:
    come: list[int] = []
    monkeypatch.setattr("lightseq.parallelize.WeightPrefetch", lambda groups, _: come.append(len(groups)))
    prepared("attention", **techniques)
    assert come == units


@pytest.mark.parametrize(
    "techniques", slow_except([{}], [{}, {"tile_layers": True}, {"offload": "activations"}, {"torch_compile": True}])
)
@pytest.mark.parametrize(
    ("policy", "again"), slow_except([("full", 5 + 3)], [("attention", 5), ("full", 5 + 3)])
)  # of 5 layers 2 end a group
def test_the_last_layer_of_a_recomputed_group_keeps_its_attention_output(
    alone: None, monkeypatch: pytest.MonkeyPatch, policy: str, again: int, techniques: dict[str, Any]
) -> None:
    monkeypatch.setattr(mlp, "TILE_TOKENS", 16)
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    config = {"num_hidden_layers": 5}
    plain, batch = prepared("none", config=config)
    grouped, _ = prepared(policy, config=config, layers_per_checkpoint=3, **techniques)
    for _ in range(2):
        plain(*batch).backward()
        with counted_attention() as ran:
            loss = grouped(*batch)
            assert len(ran) == 5
            loss.backward()
        assert len(ran) == 5 + again
    for p, q in zip(grouped.parameters(), plain.parameters(), strict=True):
        assert relative(p.grad.to_local(), q.grad.to_local()) < 1e-5
    with torch.no_grad():
        assert relative(grouped(*batch), plain(*batch)) < 1e-5


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_a_compiled_layer_runs_attention_once(alone: None, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, batch = prepared("none", config={"num_hidden_layers": 1})
    compiled, _ = prepared("attention", config={"num_hidden_layers": 1}, torch_compile=True)
    plain(*batch).backward()
    with counted_attention() as ran:
        compiled(*batch).backward()
    assert len(ran) == 1
    for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert relative(p.grad.to_local(), q.grad.to_local()) < 1e-5


def two_h100() -> Hardware:
    return Hardware(CHIPS["h100-80gb"], 2, 8, CHIPS["h100-80gb"].memory_bytes, 250 * 2**30)


@pytest.mark.slow
def test_a_memory_plan_says_what_training_would_choose() -> None:
    plan = hf.plan_memory(preset_config(BOTH, "llama3-8b"), 2**17, two_h100(), bf16=True)
    assert plan.fits and plan.run.config.torch_compile and 15 < plan.step_seconds < 25
    assert re.fullmatch(
        r"compiled layers, remat attention, layers .* offload.*; 7\d.\d of 73.3 GiB per GPU, .*", str(plan)
    )


def test_a_memory_plan_takes_the_flags_of_training() -> None:
    model, hardware = preset_config(BOTH, "llama3-8b"), two_h100()
    plan = hf.plan_memory(model, 2**17, hardware, bf16=True, remat="full", torch_compile=False)
    assert plan.fits and plan.run.config.remat == "full" and str(plan).startswith("layers not compiled, remat full, ")
    with pytest.raises(TypeError, match="remt"):
        hf.plan_memory(model, 2**17, hardware, remt="full")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU here; pass hardware="):
            hf.plan_memory(model, 2**17)


def compile_cache(rank: int, folder: Path) -> Counter[str]:
    """Trains a compiled layer for a step. Returns what torch counted of its cache in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        model, batch = prepared("attention", config={"num_hidden_layers": 1}, torch_compile=True)
        model(*batch).backward()
    return counters["aot_autograd"]


@pytest.mark.slow
@needs_compiler
def test_a_second_process_reads_compiled_layers_from_the_cache(tmp_path: Path) -> None:
    first, second = (spawn(1, compile_cache, tmp_path)[0] for _ in range(2))
    assert first["autograd_cache_saved"] == second["autograd_cache_hit"] == 2, "the layer, and the norm after the last"
    assert not (first + second)["autograd_cache_bypass"] and not second["autograd_cache_miss"]
