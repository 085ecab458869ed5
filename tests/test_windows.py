"""Sliding windows: tables without a tile or move outside them, kernels, and models against plain transformers."""

import copy
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from worlds import one_process, spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq import hf
from lightseq.attention.config import AttentionConfig
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.cost import AttentionShape, move_bytes
from lightseq.schedule.documents import local_tokens, padded_length
from lightseq.schedule.layout import Layout
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.proof import InvalidSchedule, validate
from lightseq.schedule.table import Schedule
from lightseq.schedule.windows import cut_layout, windowed_schedule

LENGTH, WINDOW = 50, 9
DOCUMENTS = (0, 4, 31, LENGTH)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # sharp attention, so that a lost key shows
    "sliding_window": WINDOW,
}
MODELS: Mapping[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"use_sliding_window": True, "max_window_layers": 2, "head_dim": 16}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 16, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    ),
    "gemma2": (  # caps of scores and logits; every second layer has the window
        Gemma2ForCausalLM,
        Gemma2Config,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        | {"attn_implementation": "eager"},
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "experts_implementation": "eager"},
    ),
}


# ---- tables ---------------------------------------------------------------------------------------------------------


def schedules(worlds: tuple[int, ...] = (1, 2, 3, 4, 8)) -> list[Schedule]:
    found = []
    for name, ulysses in (("prefix", None), ("prefix", 2), ("ulysses", None), ("usp", 2)):
        for world in worlds:
            for groups in (1, 2):
                if ulysses and (world % ulysses or world == ulysses):
                    continue
                found.append(make_schedule(name, world, groups, ulysses))
    return found


def visible_pairs(length: int, window: int) -> int:
    return sum(min(i + 1, window) for i in range(length))


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("length", [48, 97])
def test_every_visible_pair_is_computed_once(length: int, window: int) -> None:
    for schedule in schedules():
        whole = schedule.layout.padded_length(length)
        table = windowed_schedule(schedule, Nodes((0, whole)), window, packed=False)
        validate(table)
        area = sum(tile.mask.area for step in table.forward for tiles in step.tiles for tile in tiles)  # type: ignore
        assert area == visible_pairs(whole, window) * schedule.total_head_groups
        documents = Nodes((0, 7, 30, 41)).padded(padded_length(schedule, length))
        validate(windowed_schedule(schedule, documents, window, packed=True))


def test_the_proof_refuses_another_window() -> None:
    table = windowed_schedule(make_schedule("prefix", 2), Nodes((0, 48)), 5, packed=False)
    for window in (4, 6, None):
        object.__setattr__(table, "window", window)
        with pytest.raises(InvalidSchedule, match="query"):
            validate(table)


def test_a_rank_keeps_its_tokens_in_order_when_chunks_are_cut() -> None:
    for layout in (Layout("zigzag", 4, 2), Layout("contiguous", 3)):
        cut = cut_layout(layout, 4)
        for rank in range(layout.world):
            assert torch.equal(cut.positions(rank, 96), layout.positions(rank, 96))


@pytest.mark.parametrize("world", [2, 4])
def test_only_the_window_moves(world: int) -> None:
    """Every run of a rank's tokens needs the window's keys before it, unless they are the rank's own."""
    window, shape = 4096, AttentionShape(131072, 32, 8, 128)
    table = windowed_schedule(make_schedule("prefix", world), Nodes((0, shape.length)), window, packed=False)
    moves = [move for step in table.forward for move in step.moves]
    runs = 2 * world - 2  # the first has no key before it, and the middle one has its rank's own
    needed = runs * window * 2 * shape.kv_heads * shape.head_dim * shape.element_bytes
    assert sum(move_bytes(table, shape, move, False) for move in moves) == needed


# ---- kernels --------------------------------------------------------------------------------------------------------


# ---- models ---------------------------------------------------------------------------------------------------------


def model_of(name: str) -> PreTrainedModel:
    kind, config, changes = MODELS[name]
    torch.manual_seed(1)
    return kind(config(**SIZES | changes)).eval()


def train(rank: int, name: str, *how: Any) -> None:
    compare(model_of(name), *how)


def compare(
    want: Any, schedule: str, packed: bool, compiled: bool = False, cu_seqlens: tuple[int, ...] = DOCUMENTS
) -> None:
    """Compares loss and gradients over ranks with those of transformers on one process."""
    want.zero_grad()
    model = copy.deepcopy(want)
    context = hf.enable(model, schedule=schedule, length=LENGTH)
    for layer in model.model.layers if compiled else ():
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    shape = 1 if packed else 2, cu_seqlens[-1]
    ids = torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    if not packed:
        expected = want(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(50)).loss
    else:
        documents = [ids[:, a:b] for a, b in pairwise(cu_seqlens)]
        expected = sum(want(input_ids=x, labels=x, num_items_in_batch=torch.tensor(50)).loss for x in documents)
    expected.backward()
    batch = hf.shard_batch(context, ids, ids, cu_seqlens=list(cu_seqlens) if packed else None)
    batch |= {"num_items_in_batch": torch.tensor(50)}
    loss = model(**batch).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert abs(total - expected) < 1e-5 * abs(expected), (total, expected)
    for (parameter, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        dist.all_reduce(p.grad)
        off = ((p.grad - q.grad).norm() / q.grad.norm()).item()
        assert off < 2e-5, (parameter, off)


@pytest.mark.parametrize(
    ("name", "world", "rows"),
    slow_except([("gpt-oss", 2, "packed")], product(MODELS, (1, 2, 3, 4), ("plain", "packed"))),
)
def test_loss_and_gradients_equal_transformers(name: str, world: int, rows: str) -> None:
    names = ["auto", *(["ulysses"] if world in (2, 4) else []), *(["usp"] if world == 4 else [])]
    for schedule in names:
        spawn(world, train, name, schedule, rows == "packed")


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_document_may_fill_a_packed_row(world: int) -> None:
    """It keeps the layout of packed rows, by which its tokens were split."""
    spawn(world, train, "mistral", "auto", True, False, (0, 48))


def train_around_the_window(rank: int, names: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    """At some of these lengths only the padding exceeds the window, which every table covers."""
    for name in names:
        model = plain_model(tiny_config(name, attention_chunk_size=WINDOW)) if name == "llama4_text" else model_of(name)
        for length in lengths:
            for documents in (None, (0, 3, length)):
                check_at_length(model, length, documents)


def check_at_length(model: PreTrainedModel, length: int, documents: tuple[int, ...] | None) -> None:
    ids = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length))
    parts = [ids] if documents is None else [ids[:, a:b] for a, b in pairwise(documents)]
    targets = torch.tensor(sum(part.shape[1] - 1 for part in parts))
    expected = sum(model(input_ids=x, labels=x, num_items_in_batch=targets, use_cache=False).loss for x in parts)
    context = hf.enable(model, length=length, packed=documents is not None)
    loss = model(**hf.shard_batch(context, ids, ids, cu_seqlens=documents)).loss.detach()
    hf.disable(model)
    dist.all_reduce(loss)
    assert abs(loss - expected) < 1e-5 * abs(expected), (type(model).__name__, length, documents, loss, expected)


@pytest.mark.slow
@pytest.mark.compat("5.20")
@pytest.mark.parametrize(
    ("world", "names", "lengths"),
    [
        (3, ("mistral", "gpt-oss", "llama4_text"), (WINDOW - 1, WINDOW + 1)),  # a window, sinks beside it, chunks
        *(
            pytest.param(n, (*MODELS, "llama4_text"), range(WINDOW - 2, WINDOW + 3), marks=pytest.mark.slow)
            for n in (1, 2, 3, 4)
        ),
    ],
)
def test_lengths_around_the_window_equal_transformers(
    world: int, names: tuple[str, ...], lengths: tuple[int, ...]
) -> None:
    spawn(world, train_around_the_window, names, lengths)


def test_the_longest_row_bounds_what_every_schedule_pads_a_row_to() -> None:
    for name, world, length, packed in product(("auto", *SCHEDULES), (1, 2, 3, 4, 8), (1, 63, 64, 500), (False, True)):
        if name == "usp" and world < 4:
            continue
        bound = AttentionConfig(schedule=name, length=length, packed=packed).longest_row(world)
        padded = [
            world * local_tokens(make_schedule(x, world), length, packed)
            for x in (SCHEDULES if name == "auto" else (name,))
            if x != "usp" or world >= 4
        ]
        assert bound >= max(padded) and (name == "auto" or bound == padded[0])


def exceed_the_window(rank: int) -> str:
    model = model_of("mistral")
    context = hf.enable(model, length=WINDOW - 3)
    ids = torch.arange(2 * WINDOW)[None]
    with pytest.raises(ValueError) as caught:
        model(**hf.shard_batch(context, ids, ids))
    return str(caught.value)


def test_rows_longer_than_those_that_attention_was_enabled_for_are_refused_beyond_the_window() -> None:
    for line in spawn(2, exceed_the_window):
        assert line.startswith("a row of 20 tokens, padding included, exceeds a layer's window of 9, which schedule")
        assert line.endswith("enable attention with that length, or with schedule prefix")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_layers_equal_transformers(name: str, packed: bool) -> None:
    spawn(2, train, name, "auto", packed, True)


@pytest.mark.parametrize("kind", [Qwen2MoeConfig, PhimoeConfig, OlmoeConfig], ids=lambda kind: kind.model_type)
def test_a_window_in_only_the_mask_or_only_the_layer_is_refused(kind: Any) -> None:
    changes = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "use_sliding_window": True,
    }
    config = kind(**SIZES | changes | {"num_hidden_layers": 2, "shared_expert_intermediate_size": 32})
    config.sliding_window = WINDOW
    with one_process():
        model = AutoModelForCausalLM.from_config(config)
        context = hf.enable(model)
        short, long = (torch.arange(n)[None] % SIZES["vocab_size"] for n in (WINDOW - 1, WINDOW + 1))
        assert torch.isfinite(model(**hf.shard_batch(context, short, short)).loss)
        with pytest.raises(ValueError, match=r"passes window .* to attention, but its model's mask has"):
            model(**hf.shard_batch(context, long, long))
