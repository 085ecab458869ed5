"""Soft caps of attention scores: kernels against the definition, models against plain transformers, and refusals."""

import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from schedules import fitting
from test_windows import compare
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM
from worlds import spawn

from lightseq import hf
from lightseq.kernels.attention.base import KernelSpec, Saved, SoftCapKernel
from lightseq.kernels.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.kernels.attention.tile_kernel_choice import select, with_softcap
from lightseq.schedule.table import Mask

LENGTH, CAP = 50, 1.5
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 256,
    "initializer_range": 0.15, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": CAP,
    "final_logit_softcapping": 3.0, "attn_implementation": "eager",
}  # fmt: skip
ONE_CPU = KernelSpec("cpu", (0, 0), torch.float32, 16, softcap=True)


# ---- kernels -------------------------------------------------------------------------------------------------------


def defined(q: Tensor, k: Tensor, v: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Causal attention of the last rows by its definition: out and log-sum-exp."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    scores = cap * (scores / cap).tanh()
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


def inputs(queries: int, keys: int, dim: int = 16, device: str = "cpu") -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, queries, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim), (2, queries, 4, dim)]
    return [2 * torch.randn(shape, generator=g, dtype=torch.float64).to(device) for shape in shapes]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cap", [1.5, 50.0])
@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2"])
def test_gpu_kernels_err_at_most_twice_as_much_as_plain(name: str, cap: float, dim: int) -> None:
    spec = KernelSpec("cuda", torch.cuda.get_device_capability(), torch.bfloat16, dim, softcap=True)
    if reason := KERNELS[name].make(spec).why_unavailable(spec):
        pytest.skip(reason)
    kernel = with_softcap(select(name, spec).kernel, cap)
    for sizes in ((64, 64), (200, 500)):
        q, k, v, dout = (x.bfloat16() for x in inputs(*sizes, dim, "cuda"))
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out = defined(leaves[0], leaves[1], leaves[2], cap)[0]
            results.append((out, *torch.autograd.grad(out, leaves, dout.to(dtype))))
        out, lse = forward_tile(kernel, q, k, v, Mask.CAUSAL, dim**-0.5)
        got = out, *backward_tile(kernel, dout, Saved(q, k, v, out, lse), Mask.CAUSAL, dim**-0.5)
        for label, x, want, plain in zip(("out", "dq", "dk", "dv"), got, *results, strict=True):
            mine, theirs = (((y.double() - want).norm() / want.norm()).item() for y in (x, plain))
            assert mine <= 2 * theirs, f"{name} {sizes} {label}: {mine:.1e} against {theirs:.1e}"


class Package(types.ModuleType):
    """Stand-in of a package, whose functions note the cap that they get."""

    def __init__(self) -> None:
        super().__init__("stand-in")
        self.caps = list[float]()

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, softcap: float, **__: Any) -> tuple[None, None]:
            self.caps.append(softcap)
            return None, None

        return call


@pytest.mark.parametrize("kernel", [FlashAttention2, FlashAttention3, FlashAttention4])
@pytest.mark.parametrize("cap", [None, 50.0])
def test_flash_kernels_pass_the_cap_on(kernel: Any, cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package()
    monkeypatch.setattr(kernel, "_load", lambda _: package)
    x, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    capped, saved = with_softcap(kernel(), cap), Saved(x, x, x, x, lse)
    capped.forward(x, x, x, True, 1.0)
    capped.backward(x, saved, True, 1.0)
    if kernel is not FlashAttention3:  # which has no calls for segments
        lengths = (lse, lse, 4, 4) if kernel is FlashAttention2 else None
        capped.forward_varlen(x, x, x, lengths, True, 1.0)
        capped.backward_varlen(x, saved, lengths, True, 1.0)
    assert package.caps == [cap or 0.0] * (2 if kernel is FlashAttention3 else 4)
    assert capped == kernel(softcap=cap or 0.0), "CUDA graphs tell kernels apart by their values"


# ---- selection -----------------------------------------------------------------------------------------------------

FA4, FA4_UTILS, FA3, FA2 = (
    *("flash_attn.cute.interface", "flash_attn.cute.utils"),
    *("flash_attn_interface", "flash_attn.flash_attn_interface"),
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """A GPU on which all packages are installed."""
    for name in ("flash_attn", "flash_attn.cute", FA4, FA4_UTILS, FA3, FA2):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[FA4_UTILS].create_softcap_scoremod_bwd = None  # type: ignore[attr-defined]
    return KernelSpec("cuda", (9, 0), torch.bfloat16, 128, softcap=True)


def test_kernels_without_caps_are_passed_over_by_name(hopper: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("auto", hopper).kernel.name == "fa4"
    for name in ("cudnn", "aten"):
        with pytest.raises(ValueError, match=f"kernel {name} cannot run here: has no soft cap of attention scores"):
            select(name, hopper)
    monkeypatch.setitem(sys.modules, FA4, None)
    monkeypatch.setitem(sys.modules, FA3, None)
    chosen = select("auto", hopper)
    assert chosen.kernel.name == "fa2" and "cudnn: has no soft cap of attention scores" in str(chosen)
    assert str(select("auto", ONE_CPU)) == "reference (cpu: has no soft cap of attention scores)"


def test_a_gpu_without_a_kernel_for_caps_is_refused(hopper: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FA4, FA3, FA2):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"caps its attention scores softly, .*; install flash-attn-4") as error:
        select("auto", hopper)
    assert "\n" not in str(error.value) and "aten: has no soft cap" in str(error.value)
    assert select("reference", hopper).kernel.name == "reference"


def test_a_version_of_fa4_with_another_formula_is_passed_over(hopper: KernelSpec) -> None:
    del sys.modules[FA4_UTILS].create_softcap_scoremod_bwd
    chosen = select("auto", hopper)
    assert chosen.kernel.name == "fa3" and "in this version of flash-attn-4; install 4.0.0b36" in str(chosen)


def test_selection_takes_the_kernels_that_support_caps(hopper: KernelSpec) -> None:
    for name, registered in KERNELS.items():
        kernel = registered.make(hopper)
        assert isinstance(kernel, SoftCapKernel) == (
            kernel.why_unavailable(ONE_CPU if name == "cpu" else hopper) is None
        ), name


# ---- models --------------------------------------------------------------------------------------------------------


def model_of(**changes: Any) -> Any:
    torch.manual_seed(1)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES | changes)).eval()


def train(rank: int, packed: bool) -> None:
    for schedule in fitting(dist.get_world_size(), 4, 2):
        compare(model_of(), schedule, packed)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "packed"])
@pytest.mark.parametrize("world", slow_except([2], (1, 2, 3, 4)))
def test_every_schedule_equals_transformers(world: int, packed: bool) -> None:
    spawn(world, train, packed)


def test_a_cap_that_the_config_does_not_tell_is_refused_and_not_dropped(alone: None) -> None:
    model = model_of(attn_logit_softcapping=None)
    context = hf.enable(model, length=LENGTH)
    assert context.selection.kernel.name == "cpu"
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = CAP
    ids = torch.randint(61, (1, LENGTH))
    with pytest.raises(ValueError, match=r"\(softcap 1.5\), but kernel cpu cannot; pass softcap=True to hf.enable"):
        model(**hf.shard_batch(context, ids))
    context = hf.enable(model, length=LENGTH, softcap=True)
    want = model_of()(input_ids=ids).logits
    torch.testing.assert_close(model(**hf.shard_batch(context, ids)).logits, want, rtol=1e-4, atol=1e-5)
