"""The tiled gated MLP against transformers': value, gradients, what it keeps, and which modules it replaces."""

import copy
import logging
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cases import slow_except
from operators import LargestResult, Operators
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._logging._internal import warning_once
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Gemma3TextConfig, Gemma3TextModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from lightseq.config.remat_policies import POLICIES, STORE_MLP, STORES_MLP
from lightseq.memory.remat import apply_remat
from lightseq.parts import mlp as tiled
from lightseq.parts.changes import Changes
from lightseq.parts.low_rank import LinearWeights, input_gradient, is_linear
from lightseq.parts.mlp import ACTIVATIONS, gated_mlp, tile_mlps
from lightseq.parts.probes import MLP_LINEARS
from lightseq.utils.process import silenced_loggers

TOKENS, HIDDEN, INTERMEDIATE = 50, 16, 40
TILES = [1, 7, 25, 49, 50, 51]


def module(dtype: torch.dtype = torch.float64, device: str = "cpu", activation: str = "silu") -> LlamaMLP:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=2, num_key_value_heads=2,
        hidden_act={"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[activation],
    )  # fmt: skip
    return LlamaMLP(config).to(device, dtype)


def inputs(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, (2, 25, H)."""
    g = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(2, TOKENS // 2, HIDDEN, generator=g, dtype=torch.float64).to(device, dtype) for _ in "xd")
    return x.requires_grad_(), dout


def weights(m: Any) -> tuple[Tensor, Tensor, Tensor]:
    return m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight


def linears(m: Any) -> list[LinearWeights]:
    return [LinearWeights(weight) for weight in weights(m)]


def results(out: Tensor, x: Tensor, m: Any, dout: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, (x, *weights(m)), dout)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("tile", TILES)
def test_value_and_gradients_equal_transformers(tile: int, store: bool, activation: str) -> None:
    m, (x, dout) = module(activation=activation), inputs()
    want = results(m(x), x, m, dout)
    out = gated_mlp(x, linears(m), activation, tile, store=store)
    for got, expected in zip(results(out, x, m, dout), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    ("device", "tile"),
    [("cpu", 7), ("cpu", 50), *(pytest.param("cuda", tile, marks=pytest.mark.gpu(1)) for tile in (8, 50))],
)
def test_half_precision_errs_at_most_twice_as_much_as_plain(
    device: str, tile: int, store: bool, dtype: torch.dtype, activation: str
) -> None:
    """Against float64 on the same, already rounded numbers; plain is the module itself."""
    m, (x, dout) = module(dtype, device, activation), inputs(dtype, device)
    exact, wide = copy.deepcopy(m).double(), x.detach().double().requires_grad_()
    truth = results(exact(wide), wide, exact, dout.double())

    def errors(found: list[Tensor]) -> list[float]:
        return [((f - t).norm() / t.norm()).item() for f, t in zip(found, truth, strict=True)]

    ours = errors(results(gated_mlp(x, linears(m), activation, tile, store=store), x, m, dout))
    plain = errors(results(m(x), x, m, dout))
    for name, mine, theirs in zip(("out", "x", "gate", "up", "down"), ours, plain, strict=True):
        assert mine <= 2 * theirs, f"{name}: error {mine:.1e}, plain {theirs:.1e}"


def test_gradients_of_the_weights_add_up_over_many_tiles_in_float32() -> None:
    """A bfloat16 sum of equal terms stands still after 256 of them."""
    tokens = 1024
    x, (gate, up, down) = (
        torch.ones(tokens, 1, dtype=torch.bfloat16),
        (torch.ones(1, 1, dtype=torch.bfloat16) for _ in "gud"),
    )
    down.requires_grad_()
    gated_mlp(x, [LinearWeights(gate), LinearWeights(up), LinearWeights(down)], "silu", 1).sum().backward()
    assert down.grad is not None
    torch.testing.assert_close(down.grad.float(), torch.full((1, 1), tokens * 0.73105858), rtol=2**-7, atol=0)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    ("targets", "alpha"),
    [(MLP_LINEARS, 5), (("gate_proj",), 5), (("gate_proj",), 0), (("down_proj", "up_proj"), 5), ((), 5)],
)
def test_adapters_beside_the_weights_give_what_peft_gives(
    targets: tuple[str, ...], alpha: int, store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, (x, dout) = module(), inputs()
    layer = nn.Module()
    layer.mlp = m
    if targets:
        inject_adapter_in_model(LoraConfig(r=3, lora_alpha=alpha, target_modules=list(targets)), layer)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("lora_" in name)
        nn.init.normal_(parameter)  # peft begins with B of zero
    adapters = [p for p in layer.parameters() if p.requires_grad]
    want = torch.autograd.grad(out := m(x), (x, *adapters), dout)
    monkeypatch.setattr(tiled, "TILE_TOKENS", 7)
    tile_mlps([layer], Changes(), store=store)
    with Operators() as operators:
        ours = m(x)
        found = torch.autograd.grad(ours, (x, *adapters), dout)
    torch.testing.assert_close((ours, *found), (out, *want), rtol=1e-11, atol=1e-12)
    assert "lightseq.gated_mlp_backward.default" in operators.ran and len(adapters) == 2 * len(targets)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_a_small_adapters_contribution_is_not_rounded_away(device: str) -> None:
    """Compares adapters as at the start of training: 0.03% of the output, far below a bfloat16 step."""
    g = torch.Generator().manual_seed(0)
    x, weight, a, b = (torch.randn(n, 64, generator=g).to(device) for n in (512, 96, 8, 96))
    x, weight, a, b = x.bfloat16(), weight.bfloat16(), a.bfloat16(), (2e-4 * b[:, :8]).bfloat16()
    adapted = LinearWeights(weight, a, b, 0.5)
    part = (0.5 * (x.double() @ a.double().T) @ b.double().T).flatten()
    for got, plain in (
        (adapted.forward(x), LinearWeights(weight).forward(x)),
        (adapted.forward(x, out=torch.empty(512, 96, dtype=x.dtype, device=device)), LinearWeights(weight).forward(x)),
    ):
        found = (got.double() - plain.double()).flatten()
        assert (found @ part / (part @ part)).item() == pytest.approx(1, abs=0.1)
    dy = torch.randn(512, 96, generator=g).to(device).bfloat16()
    part = (0.5 * (dy.double() @ b.double()) @ a.double()).flatten()
    with_adapter, without = (
        input_gradient([linear], [dy], torch.empty_like(x)).double().flatten()
        for linear in (adapted, LinearWeights(weight))
    )
    assert ((with_adapter - without) @ part / (part @ part)).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.1}])
def test_adapters_that_are_more_than_two_products_keep_their_own_forward(kind: dict[str, Any]) -> None:
    linears: list[nn.Module] = []
    for options in ({}, kind):
        layer = nn.ModuleDict({"linear": nn.Linear(4, 4, bias=False)})
        linears.append(inject_adapter_in_model(LoraConfig(r=2, target_modules=["linear"], **options), layer)["linear"])
    assert [is_linear(linear) for linear in linears] == [True, False]


class Alive(TorchDispatchMode):
    """The most tensors of a size that are there when a product has been made."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.most = elements, 0
        self._there: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() == self.elements * result.element_size():
            self._there.append(weakref.ref(result))
        if op in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
            self.most = max(
                self.most, len({x.untyped_storage().data_ptr() for ref in self._there if (x := ref()) is not None})
            )
        return result


def test_no_tile_is_kept_while_the_next_one_is_made() -> None:
    """Counts tensors of a tile's length and the MLP's width: at most gate, up and the product exist at once."""
    m, (x, dout) = module(torch.bfloat16), inputs(torch.bfloat16)
    flat, dout = x.detach().flatten(0, 1), dout.flatten(0, 1)
    tensors, scales, trains = list(weights(m)), [tiled.NO_ADAPTER] * 3, [False] * 3
    with torch.no_grad():
        stored = tiled._gated_mlp_stored._init_fn(flat, tensors, scales, "silu", 7, True)[1:]
    for operator, words, most in (
        (tiled._gated_mlp, (flat, tensors, scales, "silu", 7, True), 2),
        (tiled._gated_mlp_stored, (flat, tensors, scales, "silu", 7, True), 1),  # gate and up are whole
        (tiled._gated_mlp_backward, (dout, flat, tensors, [], scales, "silu", trains, 7), 3),
        (tiled._gated_mlp_backward, (dout, flat, tensors, stored, scales, "silu", trains, 7), 3),
    ):
        with torch.no_grad(), Alive(7 * INTERMEDIATE) as alive:
            operator._init_fn(*words)
        assert alive.most == most


def test_intermediate_tensors_of_the_mlp_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_TOKENS", 5)
    m, (x, dout) = module(), inputs()
    with LargestResult() as plain:
        results(m(x), x, m, dout)
    layer = nn.Module()
    layer.mlp = m
    tile_mlps([layer], Changes())
    stored: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        out = m(x)
    with LargestResult() as ours:
        results(gated_mlp(x, linears(m), "silu", 5), x, m, dout)
    assert {t.numel() for t in stored} == {TOKENS * HIDDEN, HIDDEN * INTERMEDIATE}
    assert plain.elements == TOKENS * INTERMEDIATE and ours.elements == max(TOKENS * HIDDEN, HIDDEN * INTERMEDIATE)
    torch.testing.assert_close(out, LlamaMLP.forward(m, x))


def test_a_compiled_checkpoint_does_not_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_TOKENS", 5)
    m, (x, dout) = module(), inputs()
    layer = nn.Module()
    layer.mlp = m
    tile_mlps([layer], Changes())
    again = torch.compile(lambda x: checkpoint(lambda y: y + m(y.sin()), x, use_reentrant=False), backend="aot_eager")
    out = again(x)
    with Operators() as operators:
        got = torch.autograd.grad(out, x, dout)
    want = torch.autograd.grad(x + LlamaMLP.forward(m, x.sin()), x, dout)
    torch.testing.assert_close(got, want)
    assert "lightseq.gated_mlp_backward.default" in operators.ran and "lightseq.gated_mlp.default" not in operators.ran


@pytest.mark.parametrize("policy", ["attention", "full"])
def test_a_checkpoint_does_not_recompute_the_end_of_its_layer(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = small_llama()
    parameters, made = list(model.parameters()), []
    want = torch.autograd.grad(loss(), parameters)
    multiply = tiled._act_mul
    monkeypatch.setattr(tiled, "_act_mul", lambda *given: made.append(len(given[0])) or multiply(*given))
    monkeypatch.setattr(tiled, "TILE_TOKENS", 5)
    tile_mlps(model.layers, Changes(), ends_layer=True)
    apply_remat(model.layers, policy)
    loss().backward()
    for parameter, expected in zip(parameters, want, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
    assert sum(made) == 3 * 20


def small_llama() -> tuple[LlamaModel, Callable[[], Tensor]]:
    """Three layers, and a loss of theirs over 20 tokens."""
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=3, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = LlamaModel(config), torch.arange(20).reshape(1, 20) % 32
    weigh = torch.randn(1, 20, HIDDEN)
    return model, lambda: (model(input_ids=ids, use_cache=False).last_hidden_state * weigh).sum()


@pytest.mark.parametrize(
    ("policy", "compiled", "tile"),
    slow_except(
        [*((policy, False, 5) for policy in POLICIES[1:]), (STORE_MLP, False, 50)],
        [*product(POLICIES[1:], (False, True), (5,)), *product([STORE_MLP], (False, True), (50,))],
    ),
)
def test_an_mlp_before_a_norm_gives_the_same_gradients(
    policy: str, compiled: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3: GELU, and a norm that reads the MLP's output. Only `full` runs the MLP forward again.

    With gate and up stored, so do short sequences, which fit one tile.
    """
    config = Gemma3TextConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=2, vocab_size=32, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids, weigh = Gemma3TextModel(config), torch.arange(20).reshape(1, 20), torch.randn(1, 20, HIDDEN)
    parameters, made = list(model.parameters()), []
    want = torch.autograd.grad((model(input_ids=ids, use_cache=False).last_hidden_state * weigh).sum(), parameters)
    multiply = tiled._act_mul
    monkeypatch.setattr(tiled, "_act_mul", lambda *given: made.append(len(given[0])) or multiply(*given))
    monkeypatch.setattr(tiled, "TILE_TOKENS", tile)
    tile_mlps(model.layers, Changes(), store=policy in STORES_MLP)
    apply_remat(model.layers, policy, compiled)
    torch._dynamo.reset()
    for layer in model.layers if compiled else []:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    loss = (model(input_ids=ids, use_cache=False).last_hidden_state * weigh).sum()
    for got, expected in zip(torch.autograd.grad(loss, parameters), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sum(made) == 2 * 20 * (2 if policy == "full" else 1)
    made.clear()
    with torch.no_grad():
        model.layers[0].mlp(torch.randn(1, 5, HIDDEN))
    assert sum(made) == 0, "an evaluation keeps nothing"


def test_compiled_layers_say_nothing_of_their_checkpoints() -> None:
    """Processes that lightseq starts silence the loggers; torch would warn once on every rank."""
    said, logger = list[logging.LogRecord](), logging.getLogger("torch._higher_order_ops.wrap")
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    warning_once.cache_clear()
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    apply_remat([layer], "attention", compiled=True)
    with silenced_loggers():
        torch.compile(layer.forward, backend="aot_eager")(torch.ones(2, 4, requires_grad=True)).sum().backward()
    logger.removeHandler(handler)
    assert layer.weight.grad is not None and not said


def test_short_sequences_keep_the_modules_own_forward() -> None:
    m, (x, _) = module(), inputs()
    layer = nn.Module()
    layer.mlp = m
    tile_mlps([layer], Changes())

    with Operators() as operators:
        m(x)
    assert operators.ran and "lightseq.gated_mlp.default" not in operators.ran


def test_other_kinds_of_mlp_are_left_alone() -> None:
    def replaced(change: Any) -> bool:
        layer = nn.Module()
        layer.mlp = module()
        change(layer.mlp)
        tile_mlps([layer], Changes())
        return type(layer.mlp) is not LlamaMLP

    class Adapted(nn.Linear):
        """A linear with something more to it, as float8's."""

    assert replaced(lambda m: None)
    assert replaced(lambda m: setattr(m, "act_fn", nn.GELU("tanh")))
    assert not replaced(lambda m: setattr(m, "act_fn", nn.GELU()))
    assert not replaced(lambda m: setattr(m, "act_fn", nn.ReLU()))
    assert not replaced(lambda m: setattr(m, "up_proj", Adapted(HIDDEN, INTERMEDIATE, bias=False)))
    assert not replaced(lambda m: setattr(m, "up_proj", nn.Linear(HIDDEN, INTERMEDIATE)))
    with pytest.raises(ValueError, match="no gated MLP of plain linears"):
        tile_mlps([nn.Linear(2, 2)], Changes(), store=True)
    tile_mlps([nn.Linear(2, 2)], Changes())  # a layer without an MLP


@pytest.mark.parametrize("name", ["gated_mlp", "gated_mlp_stored"])
def test_the_operators_keep_torchs_contract(name: str) -> None:
    m, (x, _) = module(torch.float32), inputs(torch.float32)
    torch.library.opcheck(
        getattr(torch.ops.lightseq, name).default,
        (x.reshape(-1, HIDDEN), list(weights(m)), [tiled.NO_ADAPTER] * 3, "silu", 7, False),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"),
    )  # fmt: skip


@pytest.mark.parametrize("policy", slow_except([STORE_MLP], POLICIES))
def test_layers_of_one_kind_are_compiled_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with guards of its own would be compiled anew, and after the eighth no more."""
    model, loss = small_llama()
    want = loss()
    monkeypatch.setattr(tiled, "TILE_TOKENS", 5)
    tile_mlps(model.layers, Changes())
    apply_remat(model.layers, policy, compiled=True)
    counted = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=counted)
    torch.testing.assert_close(loss(), want, rtol=1e-4, atol=1e-4)
    assert counted.frame_count == 1
