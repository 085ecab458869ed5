"""The chunked divergence of two heads against plain autograd and TRL: values, gradients, memory."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators import LargestResult
from torch import Tensor

from lightseq.config.objectives import DIVERGENCES
from lightseq.parts.divergence import Divergence, HeadInput, token_divergence
from lightseq.parts.token_metrics import entropy_of_logits
from lightseq.utils.logit_transform import UNCHANGED, LogitTransform
from lightseq.utils.tensors import IGNORE_INDEX

TOKENS, WORDS, WIDTH, TEACHER_WIDTH = 50, 37, 16, 24
CAPPED = LogitTransform(1.7, 3.0)
MEASURES = [Divergence(kind, 0.3, temperature) for kind in DIVERGENCES for temperature in (1.0, 0.7)]


def model(width: int, seed: int, dtype: torch.dtype, transform: LogitTransform = UNCHANGED) -> HeadInput:
    g = torch.Generator().manual_seed(seed)
    shapes = (2, TOKENS // 2, width), (WORDS, width), (WORDS,)
    hidden, weight, bias = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return HeadInput(hidden, weight, bias, transform)


def student(dtype: torch.dtype = torch.float64, transform: LogitTransform = UNCHANGED) -> HeadInput:
    found = model(WIDTH, 0, dtype, transform)
    for x in found[:3]:
        x.requires_grad_()
    return found


def teacher(dtype: torch.dtype = torch.float64, transform: LogitTransform = UNCHANGED) -> HeadInput:
    return model(TEACHER_WIDTH, 1, dtype, transform)


def labels_and_factors() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    labels = torch.randint(WORDS, (2, TOKENS // 2), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.3] = IGNORE_INDEX
    return labels, torch.randn(labels.shape, generator=g, dtype=torch.float64)


def logits_of(head: HeadInput) -> Tensor:
    return head.transform.logits(F.linear(head.hidden, head.weight, head.bias))


def divergence_of_logits(student: Tensor, teacher: Tensor, measure: Divergence) -> Tensor:
    """The definitions, from whole logits."""
    p, q = ((x / measure.temperature).log_softmax(-1) for x in (student, teacher))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if measure.kind == "jsd":
        beta = measure.beta
        mixture = (beta * q.exp() + (1 - beta) * p.exp()).log()
        return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    return kl(q, p) if measure.kind == "forward" else kl(p, q)


def plain(student: HeadInput, teacher: HeadInput, labels: Tensor, measure: Divergence) -> Tensor:
    values = divergence_of_logits(logits_of(student), logits_of(teacher), measure)
    return values.masked_fill(labels == IGNORE_INDEX, 0.0)


def assert_gradients_equal(got: Tensor, want: Tensor, inputs: Any) -> None:
    expected = torch.autograd.grad(want, inputs, retain_graph=True)
    for g, w in zip(torch.autograd.grad(got, inputs), expected, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("measure", MEASURES, ids=str)
@pytest.mark.parametrize("transform", [UNCHANGED, CAPPED])
def test_values_and_gradients_equal_plain_autograd(measure: Divergence, transform: LogitTransform) -> None:
    pupil, other = student(transform=transform), teacher(transform=LogitTransform(0.4))
    (labels, factors), inputs = labels_and_factors(), pupil[:3]
    want = plain(pupil, other, labels, measure)
    entropy = entropy_of_logits(logits_of(pupil).detach(), labels, measure.temperature)
    for chunk_tokens in (1, 7, 50, 512):
        found = token_divergence(pupil, other, labels, measure, chunk_tokens=chunk_tokens)
        assert found.divergence.shape == labels.shape and found.divergence.dtype == torch.float64
        torch.testing.assert_close(found.divergence, want, rtol=1e-11, atol=1e-13)
        assert_gradients_equal((found.divergence * factors).sum(), (want * factors).sum(), inputs)
        assert found.student_entropy is None
        equal = token_divergence(
            pupil, other, labels, measure, equal_factors=True, with_entropy=True, chunk_tokens=chunk_tokens
        )
        torch.testing.assert_close(equal.student_entropy, entropy)
        torch.testing.assert_close(equal.divergence, want, rtol=1e-11, atol=1e-13)
        assert_gradients_equal(-0.37 * equal.divergence.sum(), -0.37 * want.sum(), inputs)
    for head, log_probs in ((pupil, found.student_log_probs), (other, found.teacher_log_probs)):
        of_labels = logits_of(head).log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(log_probs, of_labels.detach().masked_fill(labels == IGNORE_INDEX, 0.0))
        assert not log_probs.requires_grad


@pytest.mark.parametrize("measure", MEASURES, ids=str)
def test_a_frozen_head_takes_any_factors_without_the_teacher(measure: Divergence) -> None:
    pupil, other = student(), teacher()
    pupil = pupil._replace(weight=pupil.weight.detach(), bias=None)
    (labels, factors), inputs = labels_and_factors(), (pupil.hidden,)
    found = token_divergence(pupil, other, labels, measure).divergence
    want = plain(pupil, other, labels, measure)
    expected = torch.autograd.grad((want * factors).sum(), inputs)
    other.weight.fill_(torch.nan)  # as FSDP2 frees gathered weights
    other.hidden.fill_(torch.nan)
    (got,) = torch.autograd.grad((found * factors).sum(), inputs)
    torch.testing.assert_close(got, expected[0], rtol=1e-10, atol=1e-12)


def test_unequal_factors_that_were_promised_equal_give_nan() -> None:
    pupil = student()
    labels, factors = labels_and_factors()
    found = token_divergence(pupil, teacher(), labels, equal_factors=True).divergence
    assert torch.autograd.grad((found * factors).sum(), pupil.weight)[0].isnan().all()


@pytest.mark.slow  # imports TRL
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_values_and_gradients_equal_those_of_trl(beta: float) -> None:
    trl = pytest.importorskip("trl.kernels.chunked_divergence")
    pupil, other = student(torch.float32), teacher(torch.float32, CAPPED)
    labels, factors = torch.zeros(2, TOKENS // 2, dtype=torch.long), labels_and_factors()[1].float()
    kind, mixture = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd"), beta if 0 < beta < 1 else 0.5
    found = token_divergence(pupil, other, labels, Divergence(kind, mixture, 0.7)).divergence
    theirs, _ = trl.ChunkedDivergenceFunction.apply(
        *(pupil.hidden.flatten(0, 1), pupil.weight, pupil.bias, other.hidden.flatten(0, 1), other.weight, other.bias),
        *(beta, 0.7, 1.0, None, CAPPED.scale, CAPPED.cap),
    )
    torch.testing.assert_close(found.flatten(), theirs, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad((found * factors).sum(), pupil[:3])
    for g, w in zip(ours, torch.autograd.grad((theirs * factors.flatten()).sum(), pupil[:3]), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("measure", "equal"), [*product(MEASURES, [False, True])], ids=str)
def test_no_tensor_has_the_logits_of_all_tokens(measure: Divergence, equal: bool) -> None:
    pupil, other = student(torch.float32, CAPPED), teacher(torch.float32, CAPPED)
    labels, _ = labels_and_factors()
    with LargestResult() as largest:
        token_divergence(pupil, other, labels, measure, equal, chunk_tokens=10).divergence.sum().backward()
    assert largest.elements <= max(10 * WORDS, WORDS * WIDTH, TOKENS * WIDTH) < TOKENS * WORDS / 2


@pytest.mark.parametrize("measure", MEASURES, ids=str)
def test_bfloat16_errs_no_more_than_whole_logits(measure: Divergence) -> None:
    labels, _ = labels_and_factors()
    pupil, other = student(torch.bfloat16), teacher(torch.bfloat16)
    found = token_divergence(pupil, other, labels, measure).divergence
    assert found.dtype == torch.float32
    exact = [HeadInput(*(x.detach().double().requires_grad_() for x in head[:3])) for head in (pupil, other)]
    want = plain(*exact, labels, measure)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)  # logits are not rounded
    found.sum().backward()
    ours = [x.grad for x in pupil[:3]]
    expected = torch.autograd.grad(want.sum(), exact[0][:3])
    pupil.hidden.grad = pupil.weight.grad = pupil.bias.grad = None
    plain(pupil, other, labels, measure).sum().backward()
    for g, e, w in zip(ours, pupil[:3], expected, strict=True):
        assert (g - w).norm() <= 2 * (e.grad - w).norm() + 2**-9 * w.norm()


def test_autocast_computes_in_its_dtype() -> None:
    pupil, other = student(torch.float32), teacher(torch.float32)
    labels, _ = labels_and_factors()
    with torch.autocast("cpu", torch.bfloat16):
        found = token_divergence(pupil, other, labels).divergence
    rounded = [HeadInput(*(x.detach().bfloat16() for x in head[:3])) for head in (pupil, other)]
    torch.testing.assert_close(found.detach(), token_divergence(*rounded, labels).divergence)
    found.sum().backward()
    assert pupil.weight.grad.dtype == torch.float32


def test_rows_without_a_target_add_nothing_even_if_they_are_nan() -> None:
    pupil, other = student(), teacher()
    labels = torch.full((2, TOKENS // 2), IGNORE_INDEX)
    with torch.no_grad():
        other.hidden[:] = torch.nan
    for equal in (False, True):
        found = token_divergence(pupil, other, labels, equal_factors=equal).divergence
        assert not found.any()
        for gradient in torch.autograd.grad(found.sum(), pupil[:3]):
            assert not gradient.any()
