"""Every kernel against the oracle in float64: alignment, lse convention, masked rows, grouped heads, block backward."""

import sys
import types
import warnings
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightseq.kernels.attention import cublas, flash_attn, torch_native
from lightseq.kernels.attention.base import KernelSpec, Saved
from lightseq.kernels.attention.cublas import CublasKernel
from lightseq.kernels.attention.flash_attn import FlashAttention4
from lightseq.kernels.attention.lse_merge import merge
from lightseq.kernels.attention.reference import ReferenceKernel
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.attention.tile import backward_tile, forward_tile
from lightseq.kernels.attention.tile_kernel_choice import select
from lightseq.kernels.attention.torch_native import CpuKernel
from lightseq.schedule.segments import Segments
from lightseq.schedule.table import Mask

# Mask, or a window, then queries and keys.
CASES = [(Mask.FULL, 64, 64), (Mask.FULL, 48, 80), (Mask.CAUSAL, 64, 64), (Mask.CAUSAL, 32, 96), (Mask.CAUSAL, 1, 1),
         (Mask.STRICT, 64, 64), (Mask.STRICT, 1, 1), (Mask.CAUSAL, 72, 200),
         (9, 64, 64), (1, 16, 16), (40, 32, 96), (130, 200, 400), (400, 70, 150)]  # fmt: skip
HEADS = [(4, 4), (4, 2), (9, 3)]


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask | int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention by its definition, through autograd: independent of every line of the kernels."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    before = k.shape[1] - q.shape[1]
    offset = before + {Mask.FULL: k.shape[1], Mask.STRICT: -1}.get(mask, 0)
    keep = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(offset)
    if isinstance(mask, int):
        keep = keep.triu(before - mask + 1)
    scores = scores.masked_fill(~keep, -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def _inputs(
    mask_case: tuple, heads: tuple[int, int], dim: int, device: str = "cpu", seed: int = 0, value_dim: int | None = None
) -> list[Tensor]:
    (_, queries, keys), value_dim = mask_case, value_dim or dim
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (2, queries, heads[0], dim),
        (2, keys, heads[1], dim),
        (2, keys, heads[1], value_dim),
        (2, queries, heads[0], value_dim),
    ]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(device) for shape in shapes]


def _error(got: Tensor, want: Tensor, unit: float = 1e-30) -> float:
    """Relative L2 error; `unit` stands in for the norm of a `want` that is zero, as dq of a single key is."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(unit)).item()


def _run(kernel, q, k, v, dout, mask, scale):  # type: ignore[no-untyped-def]
    if isinstance(mask, int):
        mask = Segments(np.array([[0, q.shape[1], 0, k.shape[1], 1]]), mask)
    out, lse = forward_tile(kernel, q, k, v, mask, scale)
    return (out, *backward_tile(kernel, dout, Saved(q, k, v, out, lse), mask, scale)), lse


def _check(
    name: str, case: tuple, heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str,
    value_dim: int | None = None,
) -> None:  # fmt: skip
    scale, mask = dim**-0.5, case[0]
    inputs = [x.to(dtype) for x in _inputs(case, heads, dim, device, value_dim=value_dim)]
    _compare(name, inputs, mask, scale, lambda q, k, v: _dense(q, k, v, mask, scale))


def _compare(
    name: str, inputs: list[Tensor], mask: Mask | Segments | int, scale: float,
    dense: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:  # fmt: skip
    """Errors of out, dq, dk, dv within twice those of `dense` attention in the same dtype, for q, k, v and dout."""
    dtype, device = inputs[0].dtype, inputs[0].device.type
    q, k, v, dout = (x.double().clone().requires_grad_() for x in inputs)
    want_out, want_lse = dense(q, k, v)
    want = (want_out, *torch.autograd.grad(want_out, (q, k, v), dout, allow_unused=True))
    narrow = [x.clone().requires_grad_() for x in inputs]
    plain_out = dense(*narrow[:3])[0]
    plain = (plain_out, *torch.autograd.grad(plain_out, narrow[:3], narrow[3]))
    spec = _spec(device, dtype, q.shape[-1], v.shape[-1])
    kernel = CublasKernel() if name == "cublas" else select(name, spec).kernel  # which runs, slowly, on CPUs too
    got, lse = _run(kernel, *inputs, mask, scale)
    floor = 2 * torch.finfo(dtype).eps  # where plain attention happens to be exact, as float64 against itself
    unit = dout.norm().item()
    labels = ["out", "dq", "dk", "dv"]
    for label, g, w, p in zip(labels, got, want, plain, strict=True):
        assert g.dtype == dtype and g.shape == w.shape
        error, baseline = _error(g, w, unit), _error(p, w, unit)
        which = f"{name} {mask} {q.shape[1]} x {k.shape[1]} {label}"
        assert error <= 2 * baseline + 2 * floor, f"{which}: {error} against {baseline}"
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(lse.isinf(), want_lse.isinf()), "rows without a key have lse -inf, all others a finite one"
    seen = ~want_lse.isinf()
    assert (lse[seen] - want_lse[seen]).abs().max() < 1e-4 if seen.any() else True


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 4), pytest.param((4, 2), marks=pytest.mark.slow), (9, 3)], ids=str)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_cpu_kernels_match_the_definition(name: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for case in CASES:
        _check(name, case, heads, 16, dtype, "cpu")


@pytest.mark.parametrize("dims", [(24, 16), (8, 16)], ids=str)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_keys_and_values_may_differ_in_dimension(name: str, dims: tuple[int, int]) -> None:
    for case in CASES:
        _check(name, case, (4, 2), dims[0], torch.float64, "cpu", dims[1])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.float32, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)], ids=str)
@pytest.mark.parametrize("scores, keys", [(2**26, 4096), (1, 24), (1, 7)], ids=["one block", "24 keys", "7 keys"])
def test_blocks_of_scores_match_the_definition(
    scores: int, keys: int, dims: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas, "MAX_SCORES", scores)
    monkeypatch.setattr(cublas, "MIN_QUERIES", 16)
    monkeypatch.setattr(cublas, "KEYS", keys)
    for case in (case for case in CASES if case[0] is not Mask.STRICT):
        _check("cublas", case, (4, 2), dims[0], dtype, "cpu", dims[1])


def _spec(device: str, dtype: torch.dtype, dim: int, value_dim: int | None = None) -> KernelSpec:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    return KernelSpec(device, capability, dtype, dim, value_dim=value_dim)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dims", [(192, 128), (96, 64), (64, 128), (512, 512)], ids=str)
@pytest.mark.parametrize("name", ["fa4", "fa2", "aten", "cublas", "auto"])
def test_gpu_kernels_take_wide_heads_and_other_values(name: str, dims: tuple[int, int]) -> None:
    spec = _spec("cuda", torch.bfloat16, *dims)
    try:
        chosen = select(name, spec)
    except ValueError as error:
        pytest.skip(str(error))
    assert name != "auto" or chosen.kernel.name in (
        "cublas",
        "fa4",
        "fa4 with padded keys",
        "aten with padded values",
        "aten with padded keys",
    )
    cases = (*CASES, (Mask.CAUSAL, 1000, 5000), (700, 1000, 5000))
    for heads, case in (*product([(8, 2)], cases), *product([(4, 4)], cases[2:4])):
        _check(name, case, heads, dims[0], torch.bfloat16, "cuda", dims[1])


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "cudnn", "aten", "cublas", "reference"])
def test_gpu_kernels_match_the_definition(name: str, dim: int, dtype: torch.dtype) -> None:
    spec = _spec("cuda", dtype, dim)
    if reason := KERNELS[name].make(spec).why_unavailable(spec):
        pytest.skip(reason)
    # FlashAttention-4 compiles for seconds for each dtype, dimension and number of query heads to a key head.
    for heads in HEADS if (dim, dtype) == (128, torch.bfloat16) else HEADS[1:2]:
        for case in CASES:
            _check(name, case, heads, dim, dtype, "cuda")


@pytest.mark.parametrize(
    ("name", "dim", "device", "dtype"),
    [
        *(pytest.param(name, 16, "cpu", torch.float64) for name in ("cpu", "reference")),
        *(
            pytest.param(name, dim, "cuda", torch.bfloat16, marks=pytest.mark.gpu(1))
            for name in ("fa4", "fa3", "fa2", "aten")
            for dim in (128, 256)
        ),
    ],
)
def test_a_window_stays_inside_its_document(name: str, dim: int, device: str, dtype: torch.dtype) -> None:
    """Packed documents as in Gemma 3: longer and shorter than the window, two query heads to a key head."""
    spec = _spec(device, dtype, dim)
    if reason := KERNELS[name].make(spec).why_unavailable(spec):
        pytest.skip(reason)
    bounds, window, scale = (0, 1, 40, 300, 1100), 200, dim**-0.5
    inputs = [x[:1].to(dtype) for x in _inputs((window, bounds[-1], bounds[-1]), (4, 2), dim, device)]
    segments = Segments(np.array([[a, b - a, a, b - a, 1] for a, b in pairwise(bounds)]), window)

    def dense(*whole: Tensor) -> tuple[Tensor, Tensor]:
        each = [_dense(*(x[:, a:b] for x in whole), window, scale) for a, b in pairwise(bounds)]
        outs, lses = zip(*each, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    _compare(name, inputs, segments, scale, dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_prefix_in_two_calls_is_written_where_it_is_wanted(dtype: torch.dtype) -> None:
    """Kernels that know only square causal masks write into memory of any strides, and give the same bits."""
    q, k, v, dout = (x.to(dtype) for x in _inputs((Mask.CAUSAL, 24, 64), (4, 2), 16))
    kernel = select("cpu", KernelSpec("cpu", (0, 0), dtype, 16)).kernel
    assert kernel.causal_alignment == "square"
    (out, *gradients), lse = _run(kernel, q, k, v, dout, Mask.CAUSAL, 0.25)
    rooms = [torch.full((*x.shape[:2], 2 * x.shape[2], 16), torch.nan, dtype=dtype)[:, :, 1::2] for x in (q, q, k, v)]
    made = [forward_tile(kernel, q, k, v, Mask.CAUSAL, 0.25, rooms[0])[0]]
    made += backward_tile(kernel, dout, Saved(q, k, v, out, lse), Mask.CAUSAL, 0.25, (rooms[1], rooms[2], rooms[3]))
    for room, got, want in zip(rooms, made, (out, *gradients), strict=True):
        assert got is room and torch.equal(got, want)


def test_backward_of_a_block_takes_the_lse_of_all_keys() -> None:
    """Two halves of the keys, each with the global out and lse, give the gradients of the whole."""
    q, k, v, dout = _inputs((Mask.FULL, 32, 64), (4, 2), 16)
    kernel = select("cpu", KernelSpec("cpu", (0, 0), torch.float64, 16)).kernel
    (out, dq, dk, dv), lse = _run(kernel, q, k, v, dout, Mask.FULL, 0.25)
    parts = [
        backward_tile(kernel, dout, Saved(q, k[:, part], v[:, part], out, lse), Mask.FULL, 0.25)
        for part in (slice(0, 20), slice(20, 64))
    ]
    assert _error(parts[0][0] + parts[1][0], dq) < 1e-12
    assert _error(torch.cat([parts[0][1], parts[1][1]], 1), dk) < 1e-12
    assert _error(torch.cat([parts[0][2], parts[1][2]], 1), dv) < 1e-12


def test_merge_survives_scores_that_would_overflow_and_rows_without_keys() -> None:
    q, k, v, _ = _inputs((Mask.FULL, 8, 24), (2, 2), 8)
    kernel = ReferenceKernel()
    whole, whole_lse = kernel.forward(q, k, v, False, 200.0)
    out, lse = kernel.forward(q, k[:, :8], v[:, :8], False, 200.0)
    merged, merged_lse = merge(out, lse, *kernel.forward(q, k[:, 8:], v[:, 8:], False, 200.0))
    assert _error(merged, whole) < 1e-12 and _error(merged_lse, whole_lse) < 1e-12
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for first, second in (((out, lse), nothing), (nothing, (out, lse))):
        same, same_lse = merge(*first, *second)
        assert torch.equal(same, out) and torch.equal(same_lse, lse)
    assert all(torch.equal(x, none) for x, none in zip(merge(*nothing, *nothing), nothing, strict=True))


def test_a_package_that_is_half_installed_is_passed_over_with_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise (
            RuntimeError("No CTK flavor installed: one of a.cu12.so, a.cu13.so\nand pages more")
            if "cute" in name
            else OSError()
        )

    monkeypatch.setattr("importlib.import_module", fail)
    spec = KernelSpec("cuda", (9, 0), torch.bfloat16, 128)
    reasons = dict(select("auto", spec).skipped)
    assert reasons["fa4"] == "flash-attn-4 cannot be imported (No CTK flavor installed: one of a.cu12.so, a.cu13.so)"
    assert reasons["fa3"].endswith("cannot be imported (OSError)")
    with pytest.raises(ValueError, match="kernel fa4 cannot run here: flash-attn-4 cannot be imported"):
        select("fa4", spec)


def test_auto_says_why_it_passed_over_the_faster_kernels() -> None:
    chosen = select("auto", KernelSpec("cpu", (0, 0), torch.float32, 7))
    assert chosen.kernel.name == "cpu" and not chosen.skipped
    chosen = select("auto", KernelSpec("cuda", (9, 0), torch.float32, 64))
    assert chosen.kernel.name == "reference"
    assert [name for name, _ in chosen.skipped] == ["fa4", "fa3", "cudnn", "fa2", "aten", "cublas"]
    assert all("float32" in reason for _, reason in chosen.skipped)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_large_heads_get_a_flash_kernel_on_hopper(windows: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference would need memory quadratic in the length."""
    spec = KernelSpec("cuda", (9, 0), torch.bfloat16, 256, packed=packed, windows=windows)

    def missing(name: str) -> types.ModuleType:
        raise ImportError(f"No module named {name!r}")

    with monkeypatch.context() as patch:
        patch.setattr(FlashAttention4, "_load", lambda _: types.ModuleType("stand-in"))
        assert select("auto", spec).kernel.name == "fa4"
    monkeypatch.setattr("importlib.import_module", missing)
    for version in (None, 90500):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda version=version: version is not None)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert select("auto", spec).kernel.name == "aten"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert select("auto", spec).kernel.name == ("aten" if windows or packed else "cudnn")  # without windows, varlen


def with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets FlashAttention-4 take its backward pass from a kernel for CPUs, whose causal masks are square as cuDNN's."""
    monkeypatch.setattr(flash_attn, "_has_cudnn_for_256", lambda device: True)
    monkeypatch.setattr(flash_attn, "CudnnKernel", CpuKernel)
    monkeypatch.setattr(flash_attn, "CUDNN_LENGTH", 8)


@pytest.mark.parametrize("mask, queries, keys", [(Mask.CAUSAL, 16, 40), (Mask.CAUSAL, 24, 24), (Mask.FULL, 16, 8)])
def test_heads_of_256_take_their_gradients_from_cudnn(
    mask: Mask, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cudnn(monkeypatch)
    q, k, v, dout = _inputs((mask, queries, keys), (4, 2), 256)
    (out, *wanted), lse = _run(ReferenceKernel(), q, k, v, dout, mask, 1 / 16)
    found = backward_tile(FlashAttention4(), dout, Saved(q, k, v, out, lse), mask, 1 / 16)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_other_heads_lengths_windows_and_caps_keep_their_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cudnn(monkeypatch)
    calls: list[Any] = []
    monkeypatch.setattr(FlashAttention4, "backward_varlen", lambda _, dout, saved, *rest: calls.append(rest))

    def run(kernel: FlashAttention4, dim: int, length: int, window: int | None = None) -> None:
        q = torch.ones(1, length, 1, dim)
        kernel.backward(q, Saved(q, q, q, q, torch.ones(1, 1, length)), True, 1.0, window=window)

    run(FlashAttention4(), 256, 16)
    assert not calls
    run(FlashAttention4(), 128, 16)
    run(FlashAttention4(), 256, 20)
    run(FlashAttention4(), 256, 16, window=4)
    run(FlashAttention4(softcap=30.0), 256, 16)
    run(FlashAttention4(deterministic=True), 256, 16)
    assert len(calls) == 5


@pytest.mark.gpu(1)
def test_cudnn_gives_heads_of_256_their_gradients() -> None:
    spec = _spec("cuda", torch.bfloat16, 256)
    if reason := KERNELS["fa4"].make(spec).why_unavailable(spec):
        pytest.skip(reason)
    if not flash_attn._has_cudnn_for_256(torch.device("cuda", 0)):
        pytest.skip("needs Hopper and cuDNN 9.5.1")
    for case in ((Mask.CAUSAL, 1024, 3072), (Mask.CAUSAL, 1024, 1024), (Mask.FULL, 1024, 2048)):
        _check("fa4", case, (4, 2), 256, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name, words", [("fa5", "unknown; choose auto or one of fa4"), ("fa4", "needs a CUDA device")])
def test_a_kernel_that_cannot_run_is_refused_with_its_reason(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select(name, KernelSpec("cpu", (0, 0), torch.float32, 64))


def test_loading_fa4_at_every_call_repeats_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python forgets what it has warned of once whenever a filter is set."""
    monkeypatch.setitem(sys.modules, FlashAttention4.module, types.ModuleType("stand-in"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        for _ in range(3):
            FlashAttention4()._load()
            warnings.warn("once", stacklevel=1)
    assert [str(w.message) for w in heard] == ["once"]


def test_the_flash_kernels_of_torch_are_deterministic_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def backward(*_: object, **__: object) -> tuple[()]:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return ()

    monkeypatch.setattr(torch_native, "aten", types.SimpleNamespace(_flash_attention_backward=backward))
    x, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    for deterministic in (False, True):
        spec = KernelSpec("cuda", (8, 0), torch.bfloat16, 8, deterministic)
        select("aten", spec).kernel.backward(x, Saved(x, x, x, x, lse), True, 1.0)
    assert asked == [False, True] and not torch.are_deterministic_algorithms_enabled()
