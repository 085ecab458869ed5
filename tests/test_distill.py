"""Distillation over ranks: losses, gradient norms and weights equal one process, in a loop and in `lightseq train`."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operators import LargestResult
from test_divergence import divergence_of_logits
from test_log_probs import ChangesLogits, shard_model, whole_gradient
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel
from worlds import spawn

from benchmarks.tiny_models import LENGTH, VOCABULARY, plain_model, tiny_config
from lightseq import hf
from lightseq.parts.divergence import Divergence

STEPS = 3
RATES = {"hybrid": 0.001}  # larger steps amplify the rounding of its scan
RATE = 0.03
BOUNDARIES = [0, 7, 8, 30, 45]  # of packed documents; 5 tokens after the last are padding
IDS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.arange(LENGTH) < torch.tensor([[10], [3]]), -100)
OTHER_SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3}


def tiny(model_type: str, **changes: Any) -> Any:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    return plain_model(config)


def with_adapters() -> Any:
    torch.manual_seed(1)
    adapters = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny("llama"), adapters)


# Student, teacher, kind, temperature. Teachers have other sizes, heads, windows or layers.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, float]] = {
    "llama": (lambda: tiny("llama"), lambda: tiny("llama", **OTHER_SIZES), "forward", 1.0),
    "hybrid": (
        lambda: tiny("qwen3_5_text", initializer_range=0.05),
        lambda: tiny("llama", **OTHER_SIZES),
        "reverse",
        0.7,
    ),
    "experts": (lambda: tiny("qwen3_moe"), lambda: tiny("qwen3_moe", hidden_size=48), "jsd", 1.0),
    "adapters": (with_adapters, lambda: tiny("gemma2"), "forward", 2.0),
    "capped": (lambda: tiny("gemma2"), lambda: tiny("llama", **OTHER_SIZES), "jsd", 0.7),
    "hybrid teacher": (lambda: tiny("llama"), lambda: tiny("qwen3_5_text"), "forward", 1.0),
}
SCHEDULE = {"adapters": "prefix", "capped": "prefix"}  # takes the windows of Gemma 2


def plain_divergence(student: nn.Module, teacher: nn.Module, ids: Tensor, labels: Tensor, measure: Divergence) -> Any:
    """The divergence at every position (batch, length), 0 without a target, by transformers alone."""
    with torch.no_grad():
        other = teacher(input_ids=ids).logits
    found = divergence_of_logits(student(input_ids=ids).logits, other, measure)
    return found.masked_fill(F.pad(labels[:, 1:], (0, 1), value=-100) == -100, 0.0)


def plain_packed(student: nn.Module, teacher: nn.Module, measure: Divergence) -> Tensor:
    documents = [IDS[:1, start:end] for start, end in pairwise(BOUNDARIES)]
    return torch.cat([plain_divergence(student, teacher, x, x, measure) for x in documents], 1)


def packed_batch(context: Any) -> dict[str, Any]:
    labels = torch.where(torch.arange(LENGTH) < BOUNDARIES[-1], IDS[:1], -100)
    return hf.shard_batch(context, IDS[:1], labels, cu_seqlens=BOUNDARIES)


def models_of(name: str) -> tuple[Any, Any, Divergence]:
    student, teacher, kind, temperature = CASES[name]
    return student().train(), teacher().eval(), Divergence(kind, 0.3, temperature)


def updates(name: str, losses: Callable[[Any], Tensor], student: Any, reduce: Callable[[Any], None]) -> dict[str, Any]:
    """Takes three steps and returns losses, gradient norms and weights."""
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer, history = torch.optim.SGD(trained, lr=RATES.get(name, RATE)), []
    for _ in range(STEPS):
        loss = losses(student)
        loss.backward()
        reduce(trained)
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        history.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return {"history": history, "weights": [p.detach().numpy().copy() for p in trained]}


Case = tuple[str, bool]  # its name, and whether rows are packed


def ours(rank: int, cases: Sequence[Case]) -> dict[Case, dict[str, Any]]:
    found = {}
    for name, packed in cases:
        student, teacher, measure = models_of(name)
        context = hf.enable(student, schedule=SCHEDULE.get(name, "zigzag"))
        hf.enable_beside(teacher, context)
        batch = packed_batch(context) if packed else hf.shard_batch(context, IDS, LABELS)

        def losses(student: Any, given: Any = (context, teacher, batch, measure)) -> Tensor:
            context, teacher, batch, measure = given
            values = hf.divergence(context, student, teacher, batch, measure.kind, measure.temperature, measure.beta)
            return values.sum() / batch["num_items_in_batch"]

        def reduce(trained: Any) -> None:
            for parameter in trained:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)

        run = found[name, packed] = updates(name, losses, student, reduce)
        assert all(p.grad is None for p in teacher.parameters())
        total = torch.tensor([loss for loss, _ in run["history"]])
        dist.all_reduce(total)
        run["history"] = [(loss, norm) for loss, (_, norm) in zip(total.tolist(), run["history"], strict=True)]
    return found


def plain(name: str, packed: bool) -> dict[str, Any]:
    student, teacher, measure = models_of(name)
    targets = (LABELS[:, 1:] != -100).sum() if not packed else BOUNDARIES[-1] - len(BOUNDARIES) + 1

    def losses(student: Any) -> Tensor:
        values = plain_packed(student, teacher, measure) if packed else (
            plain_divergence(student, teacher, IDS, LABELS, measure))  # fmt: skip
        return values.sum() / targets

    return updates(name, losses, student, lambda _: None)


def assert_equal(got: dict[str, Any], want: dict[str, Any], label: str) -> None:
    for (loss, norm), (other, other_norm) in zip(got["history"], want["history"], strict=True):
        assert loss == pytest.approx(other, rel=1e-5, abs=1e-7), label
        assert norm == pytest.approx(other_norm, rel=1e-5), label
    assert want["history"][-1][0] < want["history"][0][0], f"{label}: what learns nothing would agree with anything"
    for weight, other in zip(got["weights"], want["weights"], strict=True):
        assert np.linalg.norm(weight - other) <= 1e-5 * np.linalg.norm(other), label


QUICK = [("llama", True), ("hybrid", False), ("experts", False), ("adapters", True)]
EVERY = [(name, packed) for name in CASES for packed in (False, True)]


@pytest.mark.parametrize(
    ("world", "cases"), [(2, QUICK), *(pytest.param(n, EVERY, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_three_updates_in_a_loop_equal_one_process(world: int, cases: list[Case]) -> None:
    wanted = {case: plain(*case) for case in cases}
    for found in spawn(world, ours, cases):
        for case, want in wanted.items():
            assert_equal(found[case], want, f"{case}, {world} ranks")


def sharded(rank: int, ties: tuple[bool, ...]) -> None:
    """Under FSDP2 the head of the teacher is gathered for its own forward pass only."""
    for tied in ties:
        student, teacher, measure = models_of("llama")
        for model in (student, teacher) if tied else ():
            model.lm_head.weight = model.get_input_embeddings().weight
        want, plain_teacher = copy.deepcopy(student), copy.deepcopy(teacher)
        context = hf.enable(student)
        hf.enable_beside(teacher, context)
        for model in (student, teacher):
            shard_model(model, model)
        batch = hf.shard_batch(context, IDS, LABELS)
        for _ in range(2):  # the first step of FSDP is not like the others
            (hf.divergence(context, student, teacher, batch) * batch["position_ids"]).sum().backward()
            values = plain_divergence(want, plain_teacher, IDS, LABELS, measure)
            (values * torch.arange(LENGTH)).sum().backward()
            for (name, p), q in zip(student.named_parameters(), want.parameters(), strict=True):
                assert q.grad is not None
                error = (whole_gradient(p) - q.grad).norm() / q.grad.norm()
                assert error < 1e-5, f"tied: {tied}: gradient of {name} off by {error:.1e}"
            student.zero_grad()
            want.zero_grad()


@pytest.mark.compat
@pytest.mark.parametrize(("world", "ties"), [(2, (False,)), pytest.param(3, (False, True), marks=pytest.mark.slow)])
def test_gradients_under_fsdp_equal_one_process(world: int, ties: tuple[bool, ...]) -> None:
    spawn(world, sharded, ties)


def other_layouts(rank: int) -> None:
    student, teacher, _ = models_of("llama")
    context = hf.enable(student, schedule="zigzag")
    batch = hf.shard_batch(context, IDS, LABELS)
    with pytest.raises(ValueError, match=r"the teacher \(LlamaForCausalLM\) is not enabled; call hf.enable_beside"):
        hf.divergence(context, student, teacher, batch)
    values = []
    for schedule in ("ring", "zigzag", "prefix"):
        hf.enable(teacher, schedule=schedule)
        if schedule == "ring":  # which holds other tokens, and prefix packs them otherwise
            with pytest.raises(ValueError, match=r"enabled with ring, but the student with zigzag; call hf.enable_bes"):
                hf.divergence(context, student, teacher, batch)
        elif schedule == "zigzag":
            values.append(hf.divergence(context, student, teacher, batch))
    hf.enable_beside(teacher, context)
    values.append(hf.divergence(context, student, teacher, batch))
    assert torch.equal(*values)
    # Heads of the teacher that Ulysses cannot split, and windows that a ring cannot see.
    for model_type, schedule, line in (
        ("llama", "ulysses", "cuts heads in 2, which 3 query and 3 key/value heads do not allow; prefix takes any"),
        ("gemma2", "zigzag", "schedule zigzag does not support sliding windows; use prefix, ulysses, usp"),
    ):
        student = tiny("llama")
        context = hf.enable(student, schedule=schedule, length=LENGTH)
        teacher = tiny(model_type, num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
        with pytest.raises(ValueError, match=line) as error:
            hf.enable_beside(teacher, context)
        assert "\n" not in str(error.value)
        hf.enable_beside(tiny("llama"), context)


@pytest.mark.slow
def test_layouts_that_differ_are_refused_on_every_rank() -> None:
    spawn(2, other_layouts)


# ---- on one process --------------------------------------------------------------------------------------------------


class Enabled:
    """A student and a teacher on one rank."""

    def __init__(self, student: Any, teacher: Any, **options: Any) -> None:
        self.student, self.teacher = student, teacher
        self.context = hf.enable(student, length=LENGTH, **options)
        hf.enable_beside(teacher, self.context)
        self.batch = hf.shard_batch(self.context, IDS, LABELS)

    def divergence(self, **options: Any) -> Tensor:
        return hf.divergence(self.context, self.student, self.teacher, self.batch, **options)


def granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=0.3)).eval()


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def test_known_changes_of_both_models_logits_equal_transformers(alone: None) -> None:
    torch.manual_seed(0)
    student, teacher = granite(), tiny("gemma2")
    want = plain_divergence(student, teacher, IDS, LABELS, Divergence("jsd", 0.2, 0.7))
    found = Enabled(student, teacher, schedule="prefix").divergence(kind="jsd", beta=0.2, temperature=0.7)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_a_models_divergence_from_itself_is_zero_and_leaves_it_as_it_was(alone: None) -> None:
    both = Enabled(tiny("llama"), tiny("llama"))
    before = [vars(m).keys() for model in (both.student, both.teacher) for m in model.modules()]
    hooks = [len(m._forward_hooks) for m in (both.student, both.teacher)]
    for kind in ("forward", "reverse", "jsd"):
        assert both.divergence(kind=kind).abs().max() < 1e-6
    assert before == [vars(m).keys() for model in (both.student, both.teacher) for m in model.modules()]
    assert hooks == [len(m._forward_hooks) for m in (both.student, both.teacher)]
    assert both.student(**both.batch).logits.shape == (2, LENGTH, VOCABULARY)


def test_the_logits_of_neither_model_exist_whole(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightseq.parts.divergence.CHUNK_TOKENS", 8)
    both = Enabled(tiny("llama", vocab_size=2000), tiny("llama", **OTHER_SIZES, vocab_size=2000))
    with LargestResult() as largest:
        both.divergence().sum().backward()
    assert largest.elements <= 2000 * 48 < 2 * LENGTH * 2000


def test_what_no_divergence_can_take_is_refused_in_one_line(alone: None) -> None:
    both = Enabled(tiny("llama"), tiny("llama"))
    for options, line in (
        ({"kind": "kl"}, "divergence 'kl' is unknown; choose one of forward, reverse, jsd"),
        ({"temperature": 0.0}, "temperature is 0.0; give a number above 0"),
        ({"kind": "jsd", "beta": 0.0}, "beta is 0.0; give a number above 0 and below 1"),
        ({"kind": "jsd", "beta": 1.0}, "beta is 1.0; give a number above 0 and below 1"),
    ):
        with pytest.raises(ValueError, match=line):
            both.divergence(**options)
    both.teacher.train()
    with pytest.raises(ValueError, match=r"the teacher \(LlamaForCausalLM\) is in training mode; call teacher.eval"):
        both.divergence()
    del both.batch["shift_labels"]
    with pytest.raises(ValueError, match="pass labels to shard_batch"):
        both.divergence()
    larger = Enabled(tiny("llama"), tiny("llama", vocab_size=VOCABULARY + 8))
    with pytest.raises(ValueError, match="the student has a vocabulary of 64 tokens, but the teacher one of 72;"):
        larger.divergence()
    scaled: Any = [ChangesLogits(ChangesLogits.config_class(**SIZES)).eval() for _ in range(2)]
    for pair, role in (((scaled[0], tiny("llama")), "student"), ((tiny("llama"), scaled[1]), "teacher")):
        with pytest.raises(ValueError, match=f"{role}: ChangesLogits has a forward of its own; hf.divergence needs"):
            Enabled(*pair).divergence()
