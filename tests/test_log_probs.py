"""Losses of log-probabilities over ranks, such as DPO and GRPO: values and gradients equal one process."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from schedules import fitting
from test_hf import LENGTH, SIZES, VOCABULARY, llama, relative
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)
from worlds import spawn

from lightseq import hf

BETA, CLIP = 0.3, 0.2
IDS = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0))
LENGTHS, PROMPTS = torch.tensor([LENGTH, 17, 33, 42]), torch.tensor([10, 3, 10, 3])
MASK = (torch.arange(LENGTH) < LENGTHS[:, None]).long()
LABELS = IDS.masked_fill((MASK == 0) | (torch.arange(LENGTH) < PROMPTS[:, None]), -100)
ADVANTAGES = torch.tensor([1.5, -0.7, 0.4, -1.2])
NO_REFERENCE = torch.ones(4)
BOUNDARIES = [0, 7, 8, 30, 45]  # of packed documents; 5 tokens after the last are padding


def with_adapters(seed: int = 1) -> Any:
    model = llama(seed)
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def plain_log_probs(model: nn.Module, ids: Tensor, labels: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """log p of the next token at every position (batch, length), 0 without a target, by transformers alone."""
    logits = model(input_ids=ids, attention_mask=mask).logits / temperature
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    found = logits.log_softmax(-1).gather(-1, shifted.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(shifted == -100, 0.0)


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    if isinstance(parameter.grad, DTensor):
        return parameter.grad.full_tensor()
    dist.all_reduce(parameter.grad)
    return parameter.grad


def check_gradients(model: nn.Module, want: nn.Module, label: str) -> None:
    """Every gradient, summed over ranks, equals one process; frozen parameters have none."""
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{label}: {name}"
        if q.grad is not None:
            error = relative(whole_gradient(p), q.grad)
            assert error < 1e-5, f"{label}: gradient of {name} off by {error:.1e}"
    model.zero_grad()
    want.zero_grad()


def check(model: nn.Module, want: nn.Module, loss: Tensor, expected: Tensor, label: str) -> None:
    """A whole loss, the same on every rank, and the gradients of its backward pass."""
    assert abs(loss - expected) < 1e-5, f"{label}: loss {loss} against {expected}"
    loss.backward()
    expected.backward()
    check_gradients(model, want, label)


def dpo(sums: Tensor, reference: Tensor) -> Tensor:
    margins = (sums - reference)[:2] - (sums - reference)[2:]
    return -F.logsigmoid(BETA * margins).mean()


def grpo(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Clipped loss over completions, token by token, against older log-probabilities that differ from the new ones."""
    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(3))
    ratios = torch.exp(log_probs - (log_probs.detach() + 0.3 * noise))
    advantages = ADVANTAGES[:, None]
    terms = torch.min(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -((terms * targets).sum(1) / targets.sum(1)).mean()


def plain_log_probs_and_entropies(want: Any) -> tuple[Tensor, Tensor]:
    log_p = want(IDS, attention_mask=MASK).logits.log_softmax(-1)
    targets = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    entropy = -(log_p.exp() * log_p).sum(-1).masked_fill(targets == -100, 0.0)
    return plain_log_probs(want, IDS, LABELS, MASK), entropy


def preferences(model: Any, want: Any, context: Any, references: tuple[Callable, Callable] | None, label: str) -> None:
    """DPO over right-padded pairs, alone and with a share of each rank's tokens added, and GRPO."""
    batch = hf.shard_batch(context, IDS, LABELS, MASK)
    targets = (F.pad(LABELS[:, 1:], (0, 1), value=-100) != -100).float()
    with torch.no_grad():  # the reference first, as TRL has it
        if references is None:
            with model.disable_adapter(), want.disable_adapter():
                own = hf.sequence_sums(context, hf.token_log_probs(context, model, batch), batch)
                plain = plain_log_probs(want, IDS, LABELS, MASK).sum(1)
        else:
            own, plain = references[0](batch), references[1]()
    assert relative(own, plain) < 1e-5, label

    def both() -> tuple[Tensor, Tensor]:
        return hf.token_log_probs(context, model, batch), plain_log_probs(want, IDS, LABELS, MASK)

    ours, theirs = both()
    sums = hf.sequence_sums(context, ours, batch)
    check(model, want, dpo(sums, own), dpo(theirs.sum(1), plain), f"{label}: DPO")

    ours, theirs = both()
    counts = hf.sequence_sums(context, torch.ones_like(ours), batch)
    assert torch.equal(counts, targets.sum(1)), label
    share, nll = -ours.sum() / counts.sum(), -theirs.sum() / targets.sum()
    (dpo(hf.sequence_sums(context, ours, batch), own) + share).backward()
    (dpo(theirs.sum(1), plain) + nll).backward()
    check_gradients(model, want, f"{label}: DPO and a share")
    total = share.detach().clone()
    dist.all_reduce(total)
    assert abs(total - nll) < 1e-5, label

    ours, entropy = hf.token_log_probs(context, model, batch, with_entropy=True)
    theirs, plain_entropy = plain_log_probs_and_entropies(want)
    in_order = [hf.gather_tokens(context, x, batch) for x in (ours, entropy)]
    losses = [(x.square() + 0.1 * y.square()).mean() / 10 for x, y in (in_order, (theirs, plain_entropy))]
    check(model, want, *losses, f"{label}: entropies")

    ours, theirs = both()
    in_order = hf.gather_tokens(context, ours, batch)
    assert relative(in_order, theirs) < 1e-5 and torch.equal(in_order == 0, targets == 0), label
    check(model, want, grpo(in_order, targets), grpo(theirs, targets), f"{label}: GRPO")


def packed(model: Any, want: Any, context: Any, label: str) -> None:
    """A loss that is not linear in the sums of documents; one process computes each document alone."""
    ids = IDS[:1]
    labels = torch.where(torch.arange(ids.shape[1]) < BOUNDARIES[-1], ids, -100)
    batch = hf.shard_batch(context, ids, labels, cu_seqlens=BOUNDARIES)
    documents = [ids[:, start:end] for start, end in pairwise(BOUNDARIES)]
    alone = [plain_log_probs(want, x, x, torch.ones_like(x)) for x in documents]
    theirs = torch.stack([x.sum() for x in alone])
    ours = hf.token_log_probs(context, model, batch)
    in_order = hf.gather_tokens(context, ours, batch)
    assert in_order.shape == ids.shape and relative(in_order[:, : BOUNDARIES[-1]], torch.cat(alone, 1)) < 1e-5, label
    sums = hf.sequence_sums(context, ours, batch)
    assert sums.shape == (len(documents),), label
    check(model, want, dpo(sums, 0 * ADVANTAGES), dpo(theirs, 0 * ADVANTAGES), f"{label}: packed")


def all_losses(rank: int, schedules: tuple[str, ...] | None = None) -> None:
    for schedule in schedules or fitting(dist.get_world_size(), 4, 2):
        model, want, reference = llama(), llama(), llama(seed=2)
        plain_reference = copy.deepcopy(reference)
        context = hf.enable(model, schedule=schedule)
        other = hf.enable(reference, schedule=schedule)

        def ours(batch: Any, other: Any = other, reference: Any = reference) -> Tensor:
            return hf.sequence_sums(other, hf.token_log_probs(other, reference, batch), batch)

        def theirs(reference: Any = plain_reference) -> Tensor:
            return plain_log_probs(reference, IDS, LABELS, MASK).sum(1)

        preferences(model, want, context, (ours, theirs), schedule)
        packed(model, want, context, schedule)
        model, want = with_adapters(), with_adapters()
        preferences(model, want, hf.enable(model, schedule=schedule), None, f"{schedule}, adapters")


@pytest.mark.compat
def test_losses_of_log_probs_equal_one_process() -> None:
    spawn(2, all_losses, ("zigzag", "prefix"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_losses_of_log_probs_equal_one_process_under_every_schedule(world: int) -> None:
    spawn(world, all_losses)


def shard_model(model: nn.Module, inner: Any, **options: Any) -> None:
    """FSDP2 as users write it, with gradients summed."""
    for layer in inner.model.layers:
        fully_shard(layer, **options)
    if inner.lm_head.weight is not inner.model.embed_tokens.weight:
        fully_shard(inner.lm_head, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def sharded(rank: int) -> None:
    for tied in (False, True):
        model, want = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
        context = hf.enable(model)
        shard_model(model, model)
        for _ in range(2):  # the first step of FSDP is not like the others
            preferences(model, want, context, (lambda _: NO_REFERENCE, lambda: NO_REFERENCE), f"FSDP, tied: {tied}")
        packed(model, want, context, f"FSDP, tied: {tied}")
    model, want = with_adapters(), with_adapters()
    context = hf.enable(model)
    shard_model(model, model.base_model.model)
    for _ in range(2):
        preferences(model, want, context, None, "FSDP, adapters")


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.parametrize("world", [2, 3])
def test_losses_of_log_probs_equal_one_process_under_fsdp(world: int) -> None:
    spawn(world, sharded)


def mixed_precision(rank: int) -> None:
    model, want = llama(), llama()
    context = hf.enable(model, dtype=torch.bfloat16)
    shard_model(model, model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    batch = hf.shard_batch(context, IDS, LABELS, MASK)
    found = hf.token_log_probs(context, model, batch)
    assert found.dtype == torch.float32
    sums, theirs = hf.sequence_sums(context, found, batch), plain_log_probs(want, IDS, LABELS, MASK).sum(1)
    assert relative(sums, theirs) < 2e-2
    sums.square().mean().backward()
    theirs.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert relative(whole_gradient(p), q.grad) < 0.1, name  # bfloat16 has 8 bits; a lost share would be 0.5
    torch.manual_seed(1)
    model, want = CHANGED["scaled"](), CHANGED["scaled"]()  # whose class FSDP changes
    want.load_state_dict(model.state_dict())
    context = hf.enable(model)
    shard_model(model, model)
    ours = hf.token_log_probs(context, model, hf.shard_batch(context, IDS, LABELS, MASK))
    whole = hf.gather_tokens(context, ours, hf.shard_batch(context, IDS, LABELS, MASK))
    assert relative(whole, plain_log_probs(want, IDS, LABELS, MASK)) < 1e-5
    model = llama()
    context = hf.enable(model, dtype=torch.bfloat16)
    shard_model(model, model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"cast to torch\.bfloat16; set output_dtype"):
        hf.token_log_probs(context, model, batch)


def test_under_mixed_precision_log_probs_are_float32() -> None:
    spawn(2, mixed_precision)


# ---- on one process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_take_a_temperature_and_leave_the_model_as_it_was(alone: None, temperature: float) -> None:
    model, want = llama(), llama()
    context = hf.enable(model)
    batch = hf.shard_batch(context, IDS, LABELS, MASK)
    model(**batch)
    before = {name: [*vars(module)] for name, module in model.named_modules()}
    hooks = len(model._forward_hooks)
    got = hf.token_log_probs(context, model, batch, temperature)
    torch.testing.assert_close(got, plain_log_probs(want, IDS, LABELS, MASK, temperature), rtol=0, atol=1e-5)
    assert before == {name: [*vars(module)] for name, module in model.named_modules()}
    assert hooks == len(model._forward_hooks) and model(**batch).logits.shape == (4, LENGTH, VOCABULARY)


def test_under_autocast_log_probs_have_the_gradients_of_transformers(alone: None) -> None:
    model, want = llama(), llama()
    context = hf.enable(model, dtype=torch.bfloat16)
    batch = hf.shard_batch(context, IDS, LABELS, MASK)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = hf.token_log_probs(context, model, batch), plain_log_probs(want, IDS, LABELS, MASK)
    for found in (ours, theirs):
        found.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and relative(p.grad, q.grad) < 0.05, name


@pytest.mark.parametrize("checkpoints", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checkpointed_and_compiled_models_have_log_probs(alone: None, checkpoints: bool) -> None:
    model, want = llama().train(), llama()
    context = hf.enable(model)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    called = model if checkpoints else torch.compile(model, backend="aot_eager")
    batch = hf.shard_batch(context, IDS, LABELS, MASK)
    for _ in range(2):
        called(**batch)
        ours, theirs = hf.token_log_probs(context, called, batch), plain_log_probs(want, IDS, LABELS, MASK)
        check(model, want, ours.square().mean(), theirs.square().mean(), f"checkpoints: {checkpoints}")


class ChangesLogits(NanoChatForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.mul_(2.0).clamp(-1, 1)
        return output


WITHOUT_GROUPS = {name: x for name, x in SIZES.items() if name != "num_key_value_heads"}
CHANGED: dict[str, Callable[[], PreTrainedModel]] = {
    "bias": lambda: PhiForCausalLM(PhiConfig(**WITHOUT_GROUPS)),
    "scaled": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=0.3)),
    "capped": lambda: NanoChatForCausalLM(NanoChatConfig(**SIZES, final_logit_softcapping=2.0)),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("as_tuple", [False, True])
def test_known_changes_of_the_logits_equal_transformers(alone: None, name: str, as_tuple: bool) -> None:
    torch.manual_seed(0)
    model = CHANGED[name]().eval()
    if name == "bias":
        torch.nn.init.normal_(model.lm_head.bias)
    want = copy.deepcopy(model)
    context = hf.enable(model)
    batch = hf.shard_batch(context, IDS, LABELS, MASK) | {"return_dict": not as_tuple}
    for temperature in (1.0, 0.7):
        ours = hf.token_log_probs(context, model, batch, temperature)
        theirs = plain_log_probs(want, IDS, LABELS, MASK, temperature)
        check(model, want, ours.square().mean(), theirs.square().mean(), f"temperature {temperature}")


def test_unknown_changes_of_logits_are_applied_to_whole_logits(alone: None) -> None:
    torch.manual_seed(0)
    model = ChangesLogits(NanoChatConfig(**SIZES)).eval()
    want = copy.deepcopy(model)
    context = hf.enable(model)
    with pytest.warns(UserWarning, match="has a forward of its own, so the logits .* exist whole"):
        ours = hf.token_log_probs(context, model, hf.shard_batch(context, IDS, LABELS, MASK))
    theirs = plain_log_probs(want, IDS, LABELS, MASK)
    check(model, want, ours.square().mean(), theirs.square().mean(), "changed logits")


def test_temperatures_of_zero_other_contexts_and_batches_without_labels_are_refused(alone: None) -> None:
    model = llama()
    context = hf.enable(model)
    batch = hf.shard_batch(context, IDS, LABELS)
    with pytest.raises(ValueError, match="temperature is 0; give a number above 0"):
        hf.token_log_probs(context, model, batch, temperature=0)
    model(**batch)  # the head is again what it was
    with pytest.raises(ValueError, match="not enabled with this context"):
        hf.token_log_probs(context, llama(), batch)
    bare = hf.shard_batch(context, IDS)
    for call in (
        lambda: hf.token_log_probs(context, model, bare),
        lambda: hf.sequence_sums(context, torch.zeros(4, LENGTH), bare),
    ):
        with pytest.raises(ValueError, match="pass labels to shard_batch"):
            call()
