"""Attention's projections: the same gradients whether a checkpoint keeps what they give or has it made again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaModel

from lightseq.config.remat_policies import STORE_LINEARS
from lightseq.memory.remat import apply_remat
from lightseq.parts.changes import Changes
from lightseq.parts.low_rank import LinearWeights
from lightseq.parts.mlp import tile_mlps
from lightseq.parts.projections import PROJECTIONS, store_projections
from lightseq.parts.side_by_side import Outputs

LAYERS, WIDTH = 3, 16
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS, "vocab_size": 32,
}  # fmt: skip


def made(rank: int = 0) -> tuple[LlamaModel, list[nn.Parameter], Callable[[], Tensor]]:
    """A model, perhaps with adapters, what of it trains, and its loss."""
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**CONFIG))
    if rank:
        targets = [*PROJECTIONS, "gate_proj", "down_proj"]
        get_peft_model(model, LoraConfig(r=rank, target_modules=targets, lora_alpha=4, init_lora_weights=False))
    ids, weigh = torch.arange(20).reshape(2, 10) % 32, torch.randn(2, 10, WIDTH)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, trained, lambda: (model(input_ids=ids, use_cache=False).last_hidden_state * weigh).sum()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stored_products_are_not_computed_again(compiled: bool, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model, trained, loss = made(rank)
    want = torch.autograd.grad(loss(), trained)
    products: list[int] = []  # outputs of each

    def counted(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(*args: Any, **kwargs: Any) -> Tensor:
            products.append((y := multiply(*args, **kwargs)).shape[1])
            return y

        return count

    monkeypatch.setattr(LinearWeights, "forward", counted(LinearWeights.forward))
    monkeypatch.setattr(Outputs, "product", counted(Outputs.product))
    tile_mlps(model.layers, Changes(), store=True)
    store_projections(model.layers, Changes())
    apply_remat(model.layers, STORE_LINEARS, compiled)
    for layer in model.layers if compiled else []:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    total = loss()
    assert len(products) == 7 * LAYERS, "four projections, gate, up and down"
    got = torch.autograd.grad(total, trained)
    assert len(products) == 7 * LAYERS, "made again by the backward pass"
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        loss()
    assert len(products) == 7 * LAYERS, "an evaluation keeps nothing"


def test_projections_that_are_something_else_are_refused() -> None:
    model = LlamaModel(LlamaConfig(**CONFIG, attention_bias=True))
    with pytest.raises(ValueError, match="LlamaDecoderLayer has no four plain linears around its attention"):
        store_projections(model.layers, Changes())


def test_a_second_backward_pass_through_stored_tensors_is_refused() -> None:
    model, trained, loss = made()
    store_projections(model.layers, Changes())
    tile_mlps(model.layers, Changes(), store=True)
    apply_remat(model.layers, STORE_LINEARS)
    total = loss()
    torch.autograd.grad(total, trained, retain_graph=True)
    with pytest.raises(RuntimeError, match="are freed by the backward pass; use --remat none"):
        torch.autograd.grad(total, trained)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_traced_input_gradient_adds_nothing_to_memory_that_holds_nothing(rank: int) -> None:
    """Inductor makes 0 * memory of `addmm` with beta 0 on GPUs in float32."""
    dy, x, weight = torch.randn(3, 4), torch.randn(3, 5), torch.randn(4, 5)
    linear = LinearWeights(weight, torch.randn(rank, 5), torch.randn(4, rank)) if rank else LinearWeights(weight)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        found = linear.gradients(dy, x, needs_x=True, needs_tensors=[False] * len(linear.tensors))[0]
        assert found is not None
        return found

    graph = make_fx(gradient)(dy, x).graph
    assert not [node for node in graph.nodes if "addmm" in str(node.target) or "empty" in str(node.target)]
    want = dy @ weight if linear.a is None or linear.b is None else dy @ (weight + linear.b @ linear.a)
    torch.testing.assert_close(gradient(dy, x), want)
