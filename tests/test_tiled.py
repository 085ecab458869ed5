"""Layers in tiles of tokens and slices of heads against transformers' layers: values, gradients, memory, refusals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import slow_except
from operators import LargestResult, Operators
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from worlds import one_process

from lightseq import hf
from lightseq.architecture.flops import attention_forward_flops, recompute_flops
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.module_attention import attend
from lightseq.attention.operator import attention_backward
from lightseq.kernels.attention.base import Saved
from lightseq.memory import offload
from lightseq.memory.offload import HostBufferPool, Offload
from lightseq.memory.remat import apply_remat, capture_forwards, checkpoint_groups
from lightseq.parts import mlp
from lightseq.parts.changes import Changes
from lightseq.parts.facts import distinct
from lightseq.parts.low_rank import LinearWeights, concatenate_outputs
from lightseq.parts.tiled import _ParameterGradients, tile_layers
from lightseq.plan.attention_memory import LiveBytes
from lightseq.plan.memory import tiled_elements
from lightseq.schedule import head_slices

SIZES: dict[str, Any] = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "llama with as many key/value heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "llama with one key/value head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 1})),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral with windows": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}
LENGTH = 21
HIDDEN, ATTENTION, KEY_VALUE = 16, 16, 8  # widths of a token
GROUPS = 2  # of heads, one for each key/value head


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of this process, tiles of seven tokens, and slices of one key/value head."""
    with one_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "TILE_TOKENS", 7)
        patch.setattr(head_slices, "MIN_COLUMNS", 1)
        yield


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


def ids(batch: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 32, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: PreTrainedModel, **inputs: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def adapt(model: PreTrainedModel, targets: list[str], dropout: float = 0.0) -> None:
    """Adds adapters, which alone train; nothing drops out in evaluation mode."""
    inject_adapter_in_model(LoraConfig(r=3, target_modules=targets, lora_dropout=dropout), model)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model.eval()


def check(
    name: str,
    batch: int = 1,
    keep: bool = True,
    length: int = LENGTH,
    change: Callable[[PreTrainedModel], None] = lambda model: None,
) -> None:
    models = [build(name) for _ in range(2)]
    for model in models:
        change(model)
    plain, ours = models
    context = hf.enable(ours)
    tile_layers(ours.model.layers, Changes(), keep)
    inputs = ids(batch, length)
    want = gradients(plain, input_ids=inputs, labels=inputs)
    got = gradients(ours, **hf.shard_batch(context, inputs, inputs))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_a_window_that_the_layers_do_not_read_is_not_theirs() -> None:
    def leave_over(model: PreTrainedModel) -> None:
        model.config.sliding_window = 5

    check("llama", change=leave_over)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", [True, False])
def test_losses_and_gradients_equal_transformers(name: str, keep: bool) -> None:
    check(name, keep=keep)


@pytest.mark.parametrize("batch, length", [(3, LENGTH), (9, 4), (1, 5), (2, 8)])
def test_batches_and_lengths_that_tiles_do_not_divide(batch: int, length: int) -> None:
    check("llama", batch, length=length)


@pytest.mark.parametrize(
    ("keep", "name"),
    slow_except([(True, "llama"), (False, "qwen3")], product((True, False), ("llama", "qwen2", "qwen3"))),
)
def test_adapters_alone_get_gradients(name: str, keep: bool) -> None:
    check(name, keep=keep, change=partial(adapt, targets=["q_proj", "o_proj", "up_proj"]))
    check(name, keep=keep, change=partial(adapt, targets=["k_proj", "v_proj"]))


def test_linears_that_cannot_be_cut_run_with_all_heads() -> None:
    with heads_passed() as passed:
        check("llama", change=partial(adapt, targets=["k_proj", "down_proj"], dropout=0.5))
    assert set(passed) == {(4, 2)}


def test_linears_side_by_side_equal_separate_ones() -> None:
    """Adapters of other ranks and scales, also 0, and none."""
    random = torch.Generator().manual_seed(0)
    x, w1, w2, w3, a1, a3, b1, b3 = (
        torch.randn(size, dtype=torch.float64, generator=random)
        for size in ((9, 6), (5, 6), (4, 6), (3, 6), (2, 6), (1, 6), (5, 2), (3, 1))
    )
    linears = [LinearWeights(w1), LinearWeights(w2), LinearWeights(w3, a3, b3, 3.0)]
    for scale in (0.5, 0.0):
        linears[0] = LinearWeights(w1, a1, b1, scale)
        each = torch.cat([linear.forward(x) for linear in linears], dim=1)
        torch.testing.assert_close(concatenate_outputs(linears).forward(x), each, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(concatenate_outputs(linears[1:2]).forward(x), each[:, 5:9], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [True, False])
def test_one_slice_of_heads_is_there_at_a_time(keep: bool) -> None:
    with heads_passed() as passed:
        check("llama", keep=keep)
    assert passed == [(2, 1)] * 3 * GROUPS * (2 if keep else 3), "forward, backward, and what is computed again"


@contextmanager
def heads_passed() -> Iterator[list[tuple[int, int]]]:
    """Query and key/value heads of every pass of attention, forward and backward."""
    passed: list[tuple[int, int]] = []

    def forward(module: Any, q: Tensor, k: Tensor, *others: Any, **words: Any) -> Any:
        passed.append((q.shape[2], k.shape[2]))
        return attend(module, q, k, *others, **words)

    def backward(dout: Tensor, saved: Saved, *others: Any) -> Any:
        passed.append((dout.shape[2], saved.k.shape[2]))
        return attention_backward(dout, saved, *others)

    module = "lightseq.parts.tiled"
    with patch(f"{module}.attend", forward), patch(f"{module}.attention_backward", backward):
        yield passed


def test_a_second_backward_pass_over_overwritten_activations_is_refused() -> None:
    model, inputs = build("llama"), ids()
    context = hf.enable(model)
    tile_layers(model.model.layers, Changes())
    loss = model(**hf.shard_batch(context, inputs, inputs)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("keep", [True, False])
def test_documents_are_kept_apart(keep: bool) -> None:
    found = []
    for tiled in (False, True):
        model, inputs = build("llama"), ids()
        context = hf.enable(model, packed=True)
        if tiled:
            tile_layers(model.model.layers, Changes(), keep)
        found.append(gradients(model, **hf.shard_batch(context, inputs, inputs, cu_seqlens=[0, 4, 15, LENGTH])))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


class _Products(TorchDispatchMode):
    """FLOPs of matrix products; torch's own counter cannot be asked about modules inside an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = op(*args, **kwargs or {})
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            self.flops += 2 * made.numel() * args[-1].shape[0]
        return made


@pytest.mark.parametrize(
    ("policy", "group"), slow_except([("attention", 1), ("full", 2)], product(("attention", "full"), (1, 2)))
)
def test_recomputed_products_match_the_report(policy: str, group: int) -> None:
    counts = []
    for tiled in (False, True):
        model, inputs = build("llama"), ids()
        context, layers = hf.enable(model), list(model.model.layers)
        if tiled:
            lasts = layers[1:] if group > 1 else []
            again = capture_forwards(lasts, partial(tile_layers, lasts, Changes(), True))
            tile_layers(layers, Changes(), policy == "attention")
            if group > 1:
                checkpoint_groups([layers[:2], layers[2:]], None, again)
        batch = hf.shard_batch(context, inputs, inputs)
        with _Products() as products:
            model(**batch).loss.backward()
        counts.append(products.flops)
    config, whole = model.config, recompute_flops(model.config, LENGTH, 1, policy, group, tiled=True)
    inside = attention_forward_flops(config, LENGTH)  # of the operator, not counted
    attention = {("attention", 1): 0, ("full", 1): inside, ("attention", 2): inside, ("full", 2): inside * 4 // 3}
    assert counts[1] - counts[0] == whole - attention[policy, group]


def test_nothing_as_wide_as_the_mlp_is_longer_than_a_tile() -> None:
    widest = []
    for tiled in (False, True):
        model, inputs = build("llama"), ids(length=63)
        context = hf.enable(model)
        if tiled:
            tile_layers(model.model.layers, Changes())
        layer, batch = model.model.layers[1], hf.shard_batch(context, inputs)
        turns = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), batch["position_ids"])
        hidden = torch.randn(1, 63, 16, dtype=torch.float64, requires_grad=True)
        with LargestResult() as seen, Operators() as operators:
            layer(hidden, position_embeddings=turns).sum().backward()
        widest.append(seen.elements)
        assert operators.ran.count("lightseq.attention.default") == (GROUPS if tiled else 1), "attention is kept"
    assert widest == [63 * 24, 63 * 16]


@pytest.mark.parametrize("keep", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_backward_pass_of_tiled_layers_holds_the_planned_bytes(keep: bool) -> None:
    """Backward, for every token: gradients of output, input and attention's output; q, k and v, and their gradients."""
    again = 0 if keep else ATTENTION + 4  # its output and a log-sum-exp for every head
    assert held_by_backward(keep, grouped=False) == planned_widths() + again


@pytest.mark.slow
@pytest.mark.parametrize("ends_early", [True, False])
def test_the_backward_pass_of_grouped_layers_holds_the_planned_bytes(ends_early: bool) -> None:
    """Beside what one of them takes, the inputs of all but the first, which was kept."""
    held = held_by_backward(False, grouped=True, ends_early=ends_early)
    assert held == planned_widths() + ATTENTION + 4 + 2 * HIDDEN


def test_a_last_layer_that_stores_attention_needs_no_more_memory() -> None:
    without, with_it = (held_by_backward(False, grouped=True, tiled=False, ends_early=early) for early in (False, True))
    assert with_it == without


@pytest.mark.parametrize("tiled", [pytest.param(True, marks=pytest.mark.slow), False])
def test_layers_of_a_group_that_hand_over_inputs_hold_one(tiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the gradients that come down, none that is used up."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    inner = Offload(torch.device("cpu"), HostBufferPool(1e9, pinned=False), in_flight=1)
    alone = held_by_backward(False, grouped=False, tiled=tiled)
    assert held_by_backward(False, grouped=True, tiled=tiled, inner=inner) == alone + HIDDEN


@pytest.mark.parametrize("owner", ["model", "caller"])
def test_the_input_of_a_group_is_freed_when_its_layers_have_run_again(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is a leaf, which the caller may read again; the host has a copy."""
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    found, sizes = [], list[int]()
    for offloads in (False, True):
        model, inputs = build("llama"), ids()
        context, layers = hf.enable(model), model.model.layers
        inner = Offload(torch.device("cpu"), HostBufferPool(1e9, pinned=False), in_flight=1)
        tile_layers(layers, Changes(), False)
        checkpoint_groups([list(layers)], inner if offloads else None)
        positions = hf.shard_batch(context, inputs)["position_ids"]
        turns = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
        leaf = torch.linspace(-1, 1, LENGTH * HIDDEN, dtype=torch.float64).view(1, LENGTH, HIDDEN).requires_grad_()
        hidden = leaf if owner == "caller" else leaf * 1
        given = layers[0](hidden, position_embeddings=turns)
        given.register_hook(lambda _: sizes.append(hidden.untyped_storage().nbytes()))  # noqa: B023
        given.sum().backward(retain_graph=True)
        sizes.append(hidden.untyped_storage().nbytes())
        found.append([leaf.grad, *(p.grad for p in layers.parameters())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    whole = LENGTH * HIDDEN * 8
    assert sizes == [whole, whole, whole, 0 if owner == "model" else whole]
    if owner == "model":
        with pytest.raises(RuntimeError, match="a group's input is freed by the backward pass"):
            given.sum().backward()


def planned_widths() -> float:
    (layer,) = distinct(inspect_architecture(build("llama").config).layers)
    elements = tiled_elements(layer, GROUPS, runs_again=False)["attention"]
    return elements + (ATTENTION + 2 * KEY_VALUE) / GROUPS  # what the plan counts with attention itself


def held_by_backward(
    keep: bool, grouped: bool, tiled: bool = True, inner: Offload | None = None, ends_early: bool = False
) -> float:
    """The most elements of one token that the backward pass of one layer, or of three under one checkpoint, makes."""
    found = []
    for length in (128, 256):
        model, batch = build("llama"), ids(length=length)
        context, layers = hf.enable(model), model.model.layers
        last = layers[-1:]
        if tiled:
            again = capture_forwards(last, partial(tile_layers, last, Changes(), True))
            tile_layers(layers, Changes(), keep)
        else:
            again = capture_forwards(last, partial(apply_remat, last, "attention", offload=inner))
            apply_remat(layers, "attention" if keep else "full", offload=inner)
        if grouped:
            checkpoint_groups([list(layers)], inner, again if ends_early else None)
        positions = hf.shard_batch(context, batch)["position_ids"]
        turns = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
        hidden = torch.randn(1, length, HIDDEN, dtype=torch.float64, requires_grad=True)
        for _ in range(2 if inner else 1):  # the host's buffers, made by the first pass, do not count
            given = layers[0](hidden, position_embeddings=turns)
            live = LiveBytes()
            with live:
                given.backward(torch.ones_like(given))
        found.append(live.peak)
    return (found[1] - found[0]) / 128 / 8


def test_gradients_of_weights_add_up_in_float32() -> None:
    """A bfloat16 sum of equal terms stands still after 256 of them."""
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    sums = _ParameterGradients([weight])
    one = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1024):
        sums.backward(lambda x: x * weight, one, [], [one])
    (total,) = sums.cast_to_parameter_dtypes()
    assert total is not None and total.item() == 1024 and total.dtype is torch.bfloat16


@pytest.mark.slow
def test_layers_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = CompileCounterWithBackend("aot_eager")
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **words: plain(function, backend=counted, **words))
    torch._dynamo.reset()
    models = [build("llama").float() for _ in range(2)]
    found = []
    for model, compiled in zip(models, (False, True), strict=True):
        context, inputs = hf.enable(model), ids()
        tile_layers(model.model.layers, Changes(), compiled=compiled)
        batch = hf.shard_batch(context, inputs, inputs)
        found.append(gradients(model, **batch))
        with torch.no_grad():
            model(**batch)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert counted.frame_count <= 4, "project and finish, each with and without gradients"


def test_layers_that_are_put_together_otherwise_are_refused() -> None:
    model = Phi3ForCausalLM(Phi3Config(**SIZES, bos_token_id=1, eos_token_id=2))
    with pytest.raises(ValueError, match="but this model has Phi3DecoderLayer"):
        tile_layers(model.model.layers, Changes())


@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        pytest.param("cpu", False, marks=pytest.mark.slow),
        *(pytest.param("cuda", compiled, marks=pytest.mark.gpu(1)) for compiled in (False, True)),
    ],
)
def test_bfloat16_errs_at_most_twice_as_much_as_whole_layers(
    device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "TILE_TOKENS", 128)
    wide = SIZES | dict(hidden_size=256, intermediate_size=512, head_dim=64, max_position_embeddings=1024)
    inputs, found = ids(length=300).to(device), []
    for kind in ("truth", "whole", "tiled"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**wide)).bfloat16().to(device)
        if kind == "truth":
            found.append(gradients(model.double(), input_ids=inputs, labels=inputs))
            continue
        context = hf.enable(model)
        if kind == "tiled":
            tile_layers(model.model.layers, Changes(), compiled=compiled)
        found.append(gradients(model, **hf.shard_batch(context, inputs, inputs)))
    truth, *others = ([x.double() for x in each] for each in found)
    names = ["loss", *(name for name, _ in model.named_parameters())]
    whole, tiled = ([((x - y).norm() / y.norm()).item() for x, y in zip(each, truth, strict=True)] for each in others)
    for name, ours, plain in zip(names, tiled, whole, strict=True):
        assert ours <= 2 * plain + 1e-4, f"{name}: {ours:.1e} against {plain:.1e}"
