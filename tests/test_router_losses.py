"""Router losses of mixtures of experts in a user's own loop equal those of plain transformers on one process."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.mixtral import modeling_mixtral
from worlds import one_process, spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq import hf
from lightseq.attention.context import SequenceContext
from lightseq.hf.agreement import BATCH_FACTS
from lightseq.hf.router_losses import ShardedRouterLogits

LENGTH = 50  # 3 ranks do not divide it
DOCUMENTS = (0, 13, 14, 37, 50)
COEFFICIENT = 0.5  # large, so that an error shows in the loss
# Routers that return logits of several dtypes and shapes, with a bias, or without a loss (DeepSeek).
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "deepseek_v3")


def built(model_type: str, **changes: Any) -> PreTrainedModel:
    known = CONFIG_MAPPING[model_type]().to_dict()
    changes = {"router_aux_loss_coef": COEFFICIENT, **changes}
    return plain_model(tiny_config(model_type, **{k: v for k, v in changes.items() if k in known}))


def ids(batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def masked_tail() -> Tensor:
    """Returns a mask of 2 rows, the second of which ends inside the shard of a rank."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 21:] = 0
    return mask


def masked_labels(batch: Tensor, mask: Tensor | None) -> Tensor:
    return batch if mask is None else batch.masked_fill(mask == 0, -100)


@contextmanager
def enabled(model: PreTrainedModel, **options: Any) -> Iterator[SequenceContext]:
    context = hf.enable(model, length=LENGTH, **options)
    try:
        yield context
    finally:
        hf.disable(model)


def compare(want: PreTrainedModel, model: Any, context: Any, batch: Tensor, mask: Tensor | None = None) -> str | None:
    """Compares losses, shares of the router loss and gradients summed over ranks. Returns what differs."""
    labels = masked_labels(batch, mask)
    want.zero_grad()
    model.zero_grad()
    expected = want(input_ids=batch, labels=labels, attention_mask=mask, output_router_logits=True)
    expected.loss.backward()
    output = model(**hf.shard_batch(context, batch, labels, mask), output_router_logits=True)
    output.loss.backward()
    if isinstance(output.router_logits, ShardedRouterLogits) or len(output.router_logits) == 0:
        return "router logits are not in a plain tuple"
    for name in ("loss", "aux_loss"):
        if (right := getattr(expected, name, None)) is not None:
            share = getattr(output, name).detach().clone()
            dist.all_reduce(share, group=context.group)
            if abs(share - right) > 1e-5 * max(1.0, float(right)):
                return f"{name} {share}, one process has {right}"
    return different_gradients(want, model, context.group)


def different_gradients(want: PreTrainedModel, model: Any, group: Any) -> str | None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for (name, p), q in zip(trained.items(), (q for q in want.parameters() if q.requires_grad), strict=True):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if group is not None:
            dist.all_reduce(gradient, group=group)
        right = torch.zeros_like(q) if q.grad is None else q.grad
        if (gradient - right).norm() > 1e-5 * right.norm().clamp_min(1e-2):
            return f"gradient of {name} off by {(gradient - right).norm() / right.norm():.1e}"
    return None


def families(rank: int, names: list[str], schedule: str) -> dict[str, str | None]:
    found = {}
    for name in names:
        want = built(name)
        model = copy.deepcopy(want)
        with enabled(model, schedule=schedule) as context:
            found[name] = compare(want, model, context, ids())
            found[f"{name}, batch"] = compare(want, model, context, ids(2), masked_tail())
    return found


def assert_none(found: list[dict[str, str | None]]) -> None:
    wrong = [f"{name}: {line}" for of_rank in found for name, line in of_rank.items() if line is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("world", "schedule", "names"),
    [
        (3, "auto", ("mixtral", "gpt_oss")),
        *(pytest.param(*case, FAMILIES, marks=pytest.mark.slow) for case in ((1, "auto"), (4, "usp"), (3, "auto"))),
    ],
)
def test_router_losses_equal_plain_transformers(world: int, schedule: str, names: tuple[str, ...]) -> None:
    assert_none(spawn(world, families, [*names], schedule))


def packed(rank: int, names: list[str]) -> dict[str, str | None]:
    """Packed documents on ranks, against the same tokens with a router loss over all of them on one process."""
    found = {}
    for name in names:
        want = built(name)
        model = copy.deepcopy(want)
        expected, _ = loss_of_documents(want)
        with enabled(model) as context:
            output = model(**hf.shard_batch(context, ids(), ids(), cu_seqlens=DOCUMENTS), output_router_logits=True)
            output.loss.backward()
            loss = output.loss.detach().clone()
            dist.all_reduce(loss)
            off = abs(loss - expected) > 1e-5
            found[name] = f"loss {loss} for {expected}" if off else different_gradients(want, model, context.group)
    return found


def loss_of_documents(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Returns what a packed row's loss is, and the router loss in it. Each document attends alone."""
    pieces = [ids()[:, a:b] for a, b in pairwise(DOCUMENTS)]
    outputs = [model(input_ids=x, output_router_logits=True, use_cache=False) for x in pieces]
    losses = [
        torch.nn.functional.cross_entropy(output.logits[0, :-1], x[0, 1:], reduction="sum")
        for output, x in zip(outputs, pieces, strict=True)
    ]
    routers = tuple(torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True))
    aux = modeling_mixtral.load_balancing_loss_func(routers, 4, 2)
    loss = torch.stack(losses).sum() / sum(x.shape[1] - 1 for x in pieces) + COEFFICIENT * aux
    loss.backward()
    return loss.detach(), aux.detach()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_packed_documents_share_a_router_loss(world: int) -> None:
    assert_none(spawn(world, packed, ["mixtral"] if world == 2 else ["mixtral", "qwen3_moe", "olmoe", "granitemoe"]))


def own_loops(rank: int) -> dict[str, str | None]:
    """Accumulation, checkpoints, adapters, compilation and DDP, on two ranks."""
    found = dict[str, str | None]()
    want, batch, mask = built("mixtral", num_hidden_layers=3), ids(2), masked_tail()
    with enabled(model := copy.deepcopy(want)) as context:
        compare(want, model, context, ids(2, seed=1))
        grown = {name: p.grad.clone() for name, p in want.named_parameters()}
        local = {name: p.grad.clone() for name, p in model.named_parameters()}
        compare(want, model, context, batch, mask)
        for mine, other in ((want, grown), (model, local)):
            for name, p in mine.named_parameters():
                p.grad += other[name]
        found["accumulated"] = different_gradients(want, model, context.group)
        model.train()
        model.gradient_checkpointing_enable()
        found["checkpoints"] = compare(want, model, context, batch, mask)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(copy.deepcopy(want), adapters)
    plain = copy.deepcopy(wrapped)
    with enabled(wrapped) as context:
        found["adapters"] = compare(plain, wrapped, context, batch, mask)
    with enabled(model := copy.deepcopy(want)) as context:
        parallel = DistributedDataParallel(model)
        compare(want, model, context, batch, mask)
        model.zero_grad()
        labels = masked_labels(batch, mask)
        parallel(**hf.shard_batch(context, batch, labels, mask), output_router_logits=True).loss.backward()
        found["DDP"] = different_gradients(want, model, None)  # averaged, and scaled to the sum
    with enabled(model := copy.deepcopy(want)) as context:
        for module in (*model.model.layers, model):
            fully_shard(module)
        model(**hf.shard_batch(context, batch, labels, mask), output_router_logits=True).loss.backward()
        found["FSDP2"] = different_gradients(want, model, None)
    return found


@pytest.mark.slow
def test_router_losses_in_own_loops() -> None:
    assert_none(spawn(2, own_loops))


def compiled(rank: int) -> str | None:
    want = built("mixtral")
    with enabled(model := copy.deepcopy(want)) as context:
        before = want(input_ids=ids(), labels=ids(), output_router_logits=True).loss
        other = torch.compile(copy.deepcopy(want), backend="aot_eager")  # whose module the function was replaced in
        torch.testing.assert_close(other(input_ids=ids(), labels=ids(), output_router_logits=True).loss, before)
        return compare(want, torch.compile(model, backend="aot_eager"), context, ids(2), masked_tail())


@pytest.mark.slow
def test_router_losses_of_a_compiled_model() -> None:
    assert spawn(2, compiled) == [None, None]


def test_other_models_stay_plain_and_so_does_a_disabled_one() -> None:
    with one_process():
        other, model = built("mixtral"), built("mixtral")
        before = other(input_ids=ids(), labels=ids(), output_router_logits=True)
        with enabled(model) as context:
            during = other(input_ids=ids(), labels=ids(), output_router_logits=True)
            batch = hf.shard_batch(context, ids(), ids())
            with pytest.raises(ValueError, match="output_router_logits=True needs all that shard_batch returns"):
                model(**{k: x for k, x in batch.items() if k != BATCH_FACTS}, output_router_logits=True)
        model.config.output_router_logits = True
        after = model(input_ids=ids(), labels=ids())
        for output in (during, after):
            assert output.aux_loss == before.aux_loss and type(output.router_logits) is tuple


def another_loss(gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None) -> Tensor:
    return torch.stack([x.logsumexp(-1).square().mean() for x in gate_logits]).sum()


def test_another_router_loss_is_refused_by_the_models_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", another_loss)
    with one_process(), enabled(model := built("mixtral")) as context:
        batch = hf.shard_batch(context, ids(), ids())
        model(**batch)
        with pytest.raises(ValueError, match="MixtralForCausalLM has a router loss of its own"):
            model(**batch, output_router_logits=True)


def test_a_loss_function_that_was_restored_is_replaced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_process(), enabled(model := built("mixtral")) as context:
        plain = modeling_mixtral.load_balancing_loss_func.args[0]
        monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", plain)  # whose loss is of one shard
        model(**hf.shard_batch(context, ids(), ids()), output_router_logits=True)
        assert modeling_mixtral.load_balancing_loss_func is not plain
