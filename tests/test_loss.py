"""The chunked cross entropy against torch's: value and gradients for all kinds of chunks, labels and dtypes."""

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import slow_except
from operators import LargestResult
from torch import Tensor

from lightseq.parts.loss import (
    IGNORE_INDEX,
    cross_entropy_sum,
    losses_and_hits,
    token_log_probs,
)
from lightseq.parts.token_metrics import token_metrics
from lightseq.utils.logit_transform import UNCHANGED, LogitTransform

TOKENS, HIDDEN, WORDS = 50, 16, 37
CHUNKS = [1, 7, 25, 49, 50, 51, 2048]
TRANSFORMS = [UNCHANGED, LogitTransform(0.3), LogitTransform(cap=2.0), LogitTransform(1.7, 3.0)]
SIGNS = {cross_entropy_sum: -1, token_log_probs: 1}  # of log-probabilities in what a function returns


def inputs(dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (2, 25, D), weight (V, D), labels (2, 25), some without a target."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, generator=g, dtype=torch.float64)
    weight = torch.randn(WORDS, HIDDEN, generator=g, dtype=torch.float64)
    labels = torch.randint(WORDS, (2, TOKENS // 2), generator=g)
    labels[torch.rand(labels.shape, generator=g) < ignored] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def bias_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(WORDS, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def transformed(product: Tensor, transform: LogitTransform) -> Tensor:
    """Logits by their definition: nothing of `LogitTransform` but its numbers."""
    logits = product * transform.scale
    return logits if transform.cap is None else transform.cap * (logits / transform.cap).tanh()


def plain_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, transform: LogitTransform = UNCHANGED, bias: Tensor | None = None
) -> Tensor:
    product = F.linear(hidden, weight, bias)
    logits = transformed(product.to(torch.promote_types(product.dtype, torch.float32)), transform)
    found = logits.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels == IGNORE_INDEX, 0.0, found)


def upstream(labels: Tensor) -> Tensor:
    """A gradient that differs from token to token, as with a clipped or non-linear loss."""
    found = torch.randn(labels.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return found.to(labels.device)


def grads(x: Tensor, leaves: list[Tensor], given: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(x, leaves, given, retain_graph=True)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("biased", ["trained", "frozen", "none"])
def test_values_hits_and_gradients_equal_torch(transform: LogitTransform, biased: str) -> None:
    hidden, weight, labels = inputs()
    bias = None if biased == "none" else bias_of().requires_grad_(biased == "trained")
    likeliest = F.linear(hidden, weight, bias).argmax(-1)
    labels[0, ::2] = likeliest[0, ::2]
    assert 0 < (labels == IGNORE_INDEX).sum() < TOKENS
    leaves = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    wanted, given = plain_log_probs(hidden, weight, labels, transform, bias), upstream(labels)
    for chunk in CHUNKS:
        got = cross_entropy_sum(hidden, weight, labels, chunk, transform, bias)
        assert got.dtype == torch.float64 and got.shape == ()
        torch.testing.assert_close(got, -wanted.sum(), rtol=1e-12, atol=0)
        pairs = [*zip(grads(got * 0.3, leaves), grads(-wanted.sum() * 0.3, leaves), strict=True)]
        log_probs = token_log_probs(hidden, weight, labels, chunk, transform=transform, bias=bias)
        assert log_probs.dtype == torch.float64 and not log_probs[labels == IGNORE_INDEX].any()
        torch.testing.assert_close(log_probs, wanted, rtol=1e-12, atol=1e-13)
        pairs += zip(grads(log_probs, leaves, given), grads(wanted, leaves, given), strict=True)
        for g, w in pairs:
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)
        losses, hits = losses_and_hits(hidden, weight, labels, transform, bias, chunk)
        torch.testing.assert_close(losses, -wanted.detach(), rtol=1e-12, atol=1e-13)
        assert torch.equal(hits.bool(), labels == likeliest) and not losses.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 7, 2048])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_factors_of_any_sign_multiply_the_losses_of_tokens(chunk_tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype)
    factors = torch.linspace(-2, 2, TOKENS, dtype=torch.float64).view(labels.shape)
    want = -(factors * token_log_probs(hidden, weight, labels)).sum()
    got = cross_entropy_sum(hidden, weight, labels, chunk_tokens, factors=factors)
    assert got.dtype == dtype
    tolerance = {"rtol": 100 * torch.finfo(dtype).eps, "atol": 100 * torch.finfo(dtype).eps}
    torch.testing.assert_close(got, want.to(dtype), **tolerance)
    expected = torch.autograd.grad(want, (hidden, weight))
    for g, w in zip(torch.autograd.grad(-0.5 * got, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(g, -0.5 * w, **tolerance)


@pytest.mark.parametrize("computed", SIGNS)
@pytest.mark.parametrize("chunk_tokens", [7, 2048])
def test_no_valid_label_gives_zero_and_zero_gradients(chunk_tokens: int, computed: Any) -> None:
    hidden, weight, labels = inputs(torch.float32, ignored=1.1)
    found = computed(hidden, weight, labels, chunk_tokens)
    found.backward(torch.full_like(found, torch.inf if computed is token_log_probs else 1.0))
    assert not found.any()
    assert hidden.grad is not None and not hidden.grad.any()  # `any` is true of NaN
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("computed", SIGNS)
def test_frozen_tensors_are_left_alone(computed: Any) -> None:
    hidden, weight, labels = inputs()
    leaves = [hidden, weight, bias_of().requires_grad_()]
    want = grads(SIGNS[computed] * plain_log_probs(hidden, weight, labels, bias=leaves[2]).sum(), leaves)
    for trained, expected in zip(leaves, want, strict=True):
        x, w, bias = (leaf if leaf is trained else leaf.detach() for leaf in leaves)
        torch.testing.assert_close(grads(computed(x, w, labels, 7, bias=bias).sum(), [trained])[0], expected)
    assert not computed(hidden.detach(), weight.detach(), labels).requires_grad
    with torch.no_grad():
        alone = computed(hidden, weight, labels, 7)
    assert not alone.requires_grad and torch.equal(alone, computed(hidden, weight, labels, 7))


def check_half_precision(device: str, dtype: torch.dtype, words: int, transform: LogitTransform) -> None:
    """Against float64 on the same, already rounded inputs."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(2, 300, 256, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(words, 256, generator=g, device=device) / 8).to(dtype).requires_grad_()
    bias = torch.randn(words, generator=g, device=device).to(dtype).requires_grad_()
    labels = torch.randint(words, (2, 300), generator=g, device=device)
    labels[:, ::3] = IGNORE_INDEX
    leaves = [hidden, weight, bias]
    exact = [x.detach().double().requires_grad_() for x in leaves]

    def results(out: Tensor, of: list[Tensor], given: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, of, given.to(out.dtype))]

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor, of_tokens: bool) -> Tensor:
        log_probs = plain_log_probs(hidden, weight, labels, transform, bias)
        return log_probs if of_tokens else -log_probs.sum()

    for of_tokens, out, given in (
        (False, cross_entropy_sum(hidden, weight, labels, 256, transform, bias), torch.tensor(0.3, device=device)),
        (True, token_log_probs(hidden, weight, labels, 256, transform=transform, bias=bias), upstream(labels)),
    ):
        assert out.dtype == torch.float32
        truth = results(plain(*exact, of_tokens), exact, given)
        plains, ours = results(plain(*leaves, of_tokens), leaves, given), results(out, leaves, given)
        for name, mine, plain_one, want in zip(("out", "hidden", "weight", "bias"), ours, plains, truth, strict=True):
            off, allowed = (((x - want).norm() / want.norm()).item() for x in (mine, plain_one))
            assert off <= 2 * allowed + 1e-6, f"{name}: error {off:.1e}, plain {allowed:.1e}"


@pytest.mark.parametrize(
    ("transform", "dtype"),
    slow_except(
        [*zip(TRANSFORMS, 2 * (torch.float16, torch.bfloat16), strict=True)],
        product(TRANSFORMS, (torch.bfloat16, torch.float16)),
    ),
    ids=str,
)
def test_half_precision_errs_at_most_twice_as_much_as_plain(dtype: torch.dtype, transform: LogitTransform) -> None:
    check_half_precision("cpu", dtype, 500, transform)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("words", [500, 32000, 128256])
@pytest.mark.parametrize("transform", [*TRANSFORMS, LogitTransform(cap=30.0)], ids=str)
def test_on_a_gpu_it_errs_at_most_twice_as_much_as_plain(
    dtype: torch.dtype, words: int, transform: LogitTransform
) -> None:
    check_half_precision("cuda", dtype, words, transform)


@pytest.mark.gpu(1)
def test_on_a_gpu_what_divides_the_sum_is_not_rounded_to_the_hidden_states_dtype() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, 300, 256, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(512, 256, generator=g, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(512, (2, 300), generator=g, device="cuda")
    factor = 1 / torch.tensor(2040.0, device="cuda")  # in bfloat16 it would be too large by 0.39%
    whole, mean = (
        torch.autograd.grad(cross_entropy_sum(hidden, weight, labels) * by, hidden)[0]
        for by in (torch.ones_like(factor), factor)
    )
    assert torch.equal(mean, (whole.float() * factor).bfloat16())


@pytest.mark.parametrize("computed", SIGNS)
def test_gradients_of_the_head_add_up_over_many_chunks_in_float32(computed: Any) -> None:
    """A bfloat16 sum of equal terms stands still after 256 of them."""
    tokens = 1024
    hidden = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
    weight, bias = (torch.zeros(n, dtype=torch.bfloat16, requires_grad=True) for n in ((WORDS, HIDDEN), (WORDS,)))
    found = grads(computed(hidden, weight, torch.zeros(tokens, dtype=torch.long), 1, bias=bias).sum(), [weight, bias])
    want = torch.full((WORDS,), -SIGNS[computed] * tokens / WORDS)
    want[0] += SIGNS[computed] * tokens
    for got, expected in zip(found, (want[:, None].expand(-1, HIDDEN), want), strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("computed", [*SIGNS, losses_and_hits])
def test_logits_never_exist_whole(computed: Any) -> None:
    tokens, words, chunk = 512, 400, 32
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(words, HIDDEN, requires_grad=True)
    labels = torch.randint(words, (tokens,))
    with LargestResult() as ours:
        found = computed(hidden, weight, labels, chunk_tokens=chunk)
        if found.requires_grad:
            found.sum().backward()
    with LargestResult() as theirs:
        F.cross_entropy(F.linear(hidden, weight), labels).backward()
    assert theirs.elements == tokens * words, "what the plain loss makes, and this test would see"
    assert ours.elements == max(chunk * words, tokens * HIDDEN)


def test_a_temperature_divides_capped_logits() -> None:
    hidden, weight, labels = inputs()
    transform = LogitTransform(1.7, 3.0)
    logits = transformed(F.linear(hidden, weight), transform) / 0.7
    want = torch.where(labels < 0, 0.0, logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0])
    got = token_log_probs(hidden, weight, labels, 7, 0.7, transform)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def check_fused_kernel() -> None:
    """The Triton kernel on a CPU, whose logits need two blocks, the last of them padded."""
    from lightseq.kernels.fused import cross_entropy as fused_cross_entropy
    from lightseq.parts.loss import _cross_entropy_

    fused_cross_entropy.BLOCK = 32
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(WORDS, (9,), generator=g)
    labels[::4] = IGNORE_INDEX
    factors = torch.randn(9, generator=g)
    product = 4 * torch.randn(9, WORDS, generator=g)
    product[1] *= 1e-3
    for transform in (*TRANSFORMS, LogitTransform(cap=30.0)):
        for given in (None, factors):  # in float32: the interpreter cuts bfloat16 off instead of rounding it
            got, want = product.clone(), product.clone()
            losses = fused_cross_entropy.cross_entropy_(got, labels, IGNORE_INDEX, True, transform, given)
            wanted = _cross_entropy_(want, labels, True, transform, given)
            torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=3e-6)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_the_interpreted_kernel_does_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported: in a process of its own
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check_fused_kernel).result()


# ---- of every token -------------------------------------------------------------------------------------------------


def test_log_probs_take_expanded_gradients_and_strided_inputs() -> None:
    hidden, weight, labels = inputs()
    turned, every_second = hidden.detach().transpose(0, 1).requires_grad_(), labels.T[::2]
    want = torch.autograd.grad(plain_log_probs(turned[::2], weight, every_second).sum(), (turned, weight))
    got = torch.autograd.grad(token_log_probs(turned[::2], weight, every_second, 7).sum(), (turned, weight))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


def inputs_on_gpu(dtype: torch.dtype, words: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, 300, 256, generator=g, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(words, 256, generator=g, device="cuda") / 8).to(dtype).requires_grad_()
    labels = torch.randint(words, (2, 300), generator=g, device="cuda")
    labels[:, ::3] = IGNORE_INDEX
    return hidden, weight, labels


def plain_metrics(log_p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies and hits of the valid labels, 0 elsewhere."""
    valid = labels != IGNORE_INDEX
    hits = (log_p.argmax(-1) == labels) & valid
    return torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0), hits.to(log_p.dtype)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("transform", [UNCHANGED, LogitTransform(0.7), LogitTransform(0.7, 2.0)])
@pytest.mark.parametrize("equal", [False, True])
def test_token_metrics_and_their_gradients_equal_torch(
    chunk_tokens: int, transform: LogitTransform, equal: bool
) -> None:
    hidden, weight, labels = inputs()
    bias = torch.linspace(-1, 1, WORDS, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        labels[0, :8] = F.linear(hidden, weight, bias)[0, :8].argmax(-1)  # hits
        weight[WORDS - 1], bias[WORDS - 1] = weight[0], bias[0]  # equals, of which only the first is a hit
    got = token_metrics(hidden, weight, labels, transform, bias, equal, chunk_tokens)
    log_p = transform.logits(F.linear(hidden, weight, bias)).log_softmax(-1)
    want = log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).masked_fill(labels == IGNORE_INDEX, 0.0)
    entropy, hits = plain_metrics(log_p, labels)
    torch.testing.assert_close(got.log_probs, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-12, atol=1e-13)
    assert torch.equal(got.hits, hits) and got.hits.sum() >= 8 and not got.hits.requires_grad
    given = torch.full_like(want, 0.37) if equal else upstream(labels)
    expected = torch.autograd.grad(want, (hidden, weight, bias), given, retain_graph=True)
    for g, w in zip(
        torch.autograd.grad(got.log_probs, (hidden, weight, bias), given, retain_graph=True), expected, strict=True
    ):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)
    assert got.entropy.requires_grad == (not equal)
    if not equal:  # a loss of both
        ours, theirs = ((given * x + given.cos() * y).sum() for x, y in ((got.log_probs, got.entropy), (want, entropy)))
        found, expected = (torch.autograd.grad(x, (hidden, weight, bias)) for x in (ours, theirs))
        for g, w in zip(found, expected, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)


def test_equal_factors_may_differ_only_where_there_is_no_target() -> None:
    hidden, weight, labels = inputs()
    given = torch.full(labels.shape, 0.37, dtype=torch.float64)
    given[labels == IGNORE_INDEX] = 5.0
    want = torch.autograd.grad(plain_log_probs(hidden, weight, labels), (hidden, weight), given)
    got = torch.autograd.grad(
        token_metrics(hidden, weight, labels, equal_factors=True).log_probs, (hidden, weight), given
    )
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    given[0, int((labels[0] != IGNORE_INDEX).nonzero()[0])] = 0.36
    for g in torch.autograd.grad(
        token_metrics(hidden, weight, labels, equal_factors=True).log_probs, (hidden, weight), given
    ):
        assert g.isnan().any()


def test_token_metrics_without_any_label_or_gradient() -> None:
    hidden, weight, labels = inputs(torch.float32, ignored=1.1)
    found = token_metrics(hidden, weight, labels, equal_factors=True)
    found.log_probs.sum().backward()
    assert not any(x.any() for x in found)
    assert hidden.grad is not None and not hidden.grad.any() and weight.grad is not None and not weight.grad.any()
    hidden, weight, labels = inputs()
    (alone,) = torch.autograd.grad(
        token_metrics(hidden, weight.detach(), labels, equal_factors=True).log_probs.sum(), hidden
    )
    (want,) = torch.autograd.grad(plain_log_probs(hidden, weight, labels).sum(), hidden)
    torch.testing.assert_close(alone, want)
    with torch.no_grad():
        assert not token_metrics(hidden, weight, labels, equal_factors=True).log_probs.requires_grad


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("words", [500, 128256])
def test_on_a_gpu_token_metrics_equal_the_same_logits(dtype: torch.dtype, words: int) -> None:
    hidden, weight, labels = inputs_on_gpu(dtype, words)
    labels[0, :50] = F.linear(hidden[0, :50], weight).argmax(-1)
    labels[:, ::3] = IGNORE_INDEX
    want = token_log_probs(hidden, weight, labels, 256, 1.25)
    expected = torch.autograd.grad(want.sum(), (hidden, weight))
    entropy, hits = plain_metrics((F.linear(hidden, weight).float() * 0.8).log_softmax(-1), labels)
    for equal in (False, True):
        got = token_metrics(hidden, weight, labels, LogitTransform(0.8), None, equal, 256)
        torch.testing.assert_close(got.log_probs, want)
        torch.testing.assert_close(got.entropy, entropy, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.hits, hits) and got.hits.sum() >= 33
        for g, w in zip(torch.autograd.grad(got.log_probs.sum(), (hidden, weight)), expected, strict=True):
            assert (g - w).norm() <= 2e-2 * w.norm() if dtype is torch.bfloat16 else (g - w).norm() <= 1e-5 * w.norm()


def test_under_autocast_log_probs_have_the_gradients_of_the_products_dtype() -> None:
    hidden, weight, labels = inputs(torch.float32)
    given = upstream(labels).float()
    want = token_log_probs(hidden.bfloat16(), weight.bfloat16(), labels)
    with torch.autocast("cpu", torch.bfloat16):
        got = token_log_probs(hidden, weight, labels)
    assert torch.equal(got, want)
    expected = torch.autograd.grad(want, (hidden, weight), given)
    for g, w in zip(torch.autograd.grad(got, (hidden, weight), given), expected, strict=True):
        assert torch.equal(g, w)
