"""A loop with accelerate whose sequences are split over ranks gives the numbers of plain torch on one process."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ParallelismConfig
from cases import slow_except
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from trainer_numbers import CONFIG, Numbers, collate, documents, fresh_model, sizes, use_fsdp2
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedModel,
)
from worlds import spawn

from lightseq import hf
from lightseq.integrations.accelerate import disable, prepare
from lightseq.integrations.whole_batches import WholeBatches

Batch = dict[str, Tensor]
CLIP, LEARNING_RATE = 0.3, 0.5  # clips every step


def pack(rows: list[dict[str, list[int]]]) -> Batch:
    """Returns one row of several documents, whose positions restart."""
    ids = torch.tensor([x for row in rows for x in row["input_ids"]])
    positions = torch.tensor([x for row in rows for x in range(len(row["input_ids"]))])
    return {"input_ids": ids[None], "labels": ids[None].clone(), "position_ids": positions[None]}


CASES: Mapping[str, dict[str, Any]] = {
    "padded": {},
    "accumulated": {"accumulation": 2},
    "packed": {"accumulation": 2, "make_batch": pack, "packed": True},
    "shuffled": {"shuffle": True},
    "FSDP2": {"accumulation": 2, "fsdp": True},
}


def loader(count: int, make_batch: Callable[..., Batch] = collate, shuffle: bool = False) -> DataLoader:
    rows = [{"input_ids": ids} for ids in documents(count)]
    return DataLoader(rows, 2, collate_fn=make_batch, shuffle=shuffle)


def losses_of_rows(logits: Tensor, batch: Batch) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return losses.sum(1)


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterable[Batch], gather: Callable[[Tensor], Tensor]) -> list[float]:
    """Returns the losses of five rows, whose last batch is not full."""
    model.eval()
    rows = [gather(losses_of_rows(model(input_ids=batch["input_ids"]).logits, batch)) for batch in batches]
    model.train()
    return torch.cat(rows).tolist()


def generate(model: LlamaForCausalLM) -> list[int]:
    prompt = torch.tensor([documents()[0]], device=model.device)
    tokens: list[int] = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()
    return tokens


def train(
    rank: int,
    size: int,
    accumulation: int = 1,
    make_batch: Callable[..., Batch] = collate,
    shuffle: bool = False,
    fsdp: bool = False,
    **options: Any,
) -> Numbers:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    if fsdp:
        use_fsdp2(accelerator)
    model = fresh_model()
    torch.manual_seed(rank)  # ranks draw different numbers, and still get the same batches
    model, optimizer, batches, held_out = prepare(
        accelerator,
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        loader(12, make_batch, shuffle),
        loader(5),
        sequence_parallel_size=size,
        **options,
    )
    seen, losses, norms = [], [], []
    for batch in batches:
        seen.append({name: x.cpu().numpy() for name, x in batch.items()})
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    inner = accelerator.unwrap_model(model)
    weights = {name: p.full_tensor() if fsdp else p for name, p in inner.named_parameters()}
    numbers = {
        "seen": seen,
        "losses": losses,
        "norms": norms,
        "weights": {name: weight.detach().cpu().numpy().copy() for name, weight in weights.items()},
        "metrics": [] if options else evaluate(model, held_out, accelerator.gather_for_metrics),
    }
    if not fsdp:  # weights that FSDP2 has sharded cannot generate
        disable(inner)
        numbers["generated"] = generate(inner)
    return numbers


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Returns the mean loss of a batch's targets; documents in a row are computed one by one."""
    if "position_ids" not in batch:
        return model(**batch).loss
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    lengths = [end - start for start, end in pairwise([*starts, batch["input_ids"].shape[1]])]
    targets = sum(length - 1 for length in lengths)
    shares = [
        model(input_ids=x, labels=x, num_items_in_batch=targets).loss for x in batch["input_ids"].split(lengths, 1)
    ]
    return sum(shares)


def plain(seen: Sequence[Sequence[Batch]], accumulation: int) -> Numbers:
    """Trains plain torch with the batches of all data ranks."""
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for number, batches in enumerate(zip(*seen, strict=True), start=1):
        each = [loss_of(model, batch) for batch in batches]
        (sum(each) / len(each) / accumulation).backward()
        losses.append([loss.item() for loss in each])
        if number % accumulation == 0 or number == len(seen[0]):
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": [list(x) for x in zip(*losses, strict=True)],
        "norms": norms,
        "weights": {name: p.detach().numpy() for name, p in model.named_parameters()},
        "metrics": evaluate(model, loader(5), lambda rows: rows),
        "generated": generate(model),
    }


def check(ranks: Sequence[Numbers], size: int, accumulation: int) -> None:
    for rank, got in enumerate(ranks):  # ranks of a group got the same batches
        for ours, first in zip(got["seen"], ranks[rank // size * size]["seen"], strict=True):
            assert all(np.array_equal(ours[name], first[name]) for name in first)
    seen = [[{name: torch.from_numpy(x) for name, x in b.items()} for b in got["seen"]] for got in ranks[::size]]
    rows = sum(len(batch["input_ids"]) for batches in seen for batch in batches)
    assert rows == 6 * len(seen[0][0]["input_ids"]), "each row is seen once"
    wanted = plain(seen, accumulation)
    for rank, got in enumerate(ranks):
        assert got["losses"] == pytest.approx(wanted["losses"][rank // size], abs=1e-5)
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-5) and min(got["norms"]) > CLIP
        if got["metrics"]:
            assert got["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
        assert got.get("generated", wanted["generated"]) == wanted["generated"]
        for name, weight in wanted["weights"].items():
            assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


def run(rank: int, size: int, case: Mapping[str, Any]) -> Numbers:
    return train(rank, size, **case)


@pytest.mark.compat("5.16")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(["accumulated", "packed", "FSDP2"], CASES))
def test_the_loop_equals_plain_torch(case: str, world: int) -> None:
    for size in sizes(world):
        ranks = spawn(world, run, size, CASES[case])
        check(ranks, size, CASES[case].get("accumulation", 1))


def learning_rates_and_gathered(rank: int, size: int) -> tuple[list[float], list[Any]]:
    """Returns the learning rates of a loop with a scheduler, and rows of five that are no tensors."""
    accelerator = Accelerator(cpu=True)
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, batches, scheduler = prepare(
        accelerator, model, optimizer, loader(5), StepLR(optimizer, 1, 0.5), sequence_parallel_size=size
    )
    rates, gathered = [], []
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
        gathered += accelerator.gather_for_metrics([str(row) for row in batch["input_ids"][:, 0].tolist()])
    return rates, gathered


@pytest.mark.parametrize(
    ("world", "expected"),  # accelerate steps once per batch of each group
    [(2, [0.25, 0.125, 0.0625]), pytest.param(4, [0.125, 0.03125], marks=pytest.mark.slow)],
)
def test_schedulers_and_objects_count_a_group_once(world: int, expected: list[float]) -> None:
    firsts = [str(ids[0]) for ids in documents(5)]
    for rates, gathered in spawn(world, learning_rates_and_gathered, 2):
        assert rates == expected and gathered == firsts


# ---- refused -------------------------------------------------------------------------------------------------------


def prepare_replicas() -> None:
    accelerator = Accelerator(cpu=True)
    use_fsdp2(accelerator)
    accelerator.state.parallelism_config = ParallelismConfig(dp_replicate_size=2)
    prepare(accelerator, fresh_model())


def refusals(rank: int) -> None:
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))

    def prepared(model: Any = None, accelerator: Accelerator | None = None, **options: Any) -> Any:
        return prepare(accelerator or Accelerator(cpu=True), model or fresh_model(), **options)

    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: prepared(sequence_parallel_size=3), "needs 3 processes, but there are 2; start the script with `py"),
        (lambda: prepared(accelerator=dispatching), "leave it out"),
        (lambda: prepared(sequence_parallel_size=0), "sequence_parallel_size=0 is not a number of ranks; give 1 or"),
        (lambda: prepared(sequence_parallel_size="2"), "sequence_parallel_size='2' is not a number of ranks"),
        (lambda: hf.disable(prepared().module), "call lightseq.integrations.accelerate.disable instead"),
        (lambda: prepared(LlamaModel(CONFIG)), "neither an LM head"),
        (lambda: generate(prepared().module), "to generate, call"),
        (prepare_replicas, "use dp_shard_size"),
    ]
    for call, part in calls:
        with pytest.raises(ValueError, match=re.escape(part)):
            call()


def test_impossible_requests_are_refused() -> None:
    spawn(2, refusals)


def test_disable_leaves_a_plain_model_alone() -> None:
    model = fresh_model()
    disable(model)  # so that a script runs on one process, too
    assert generate(model) == generate(fresh_model())


@pytest.mark.parametrize("name", ["capped", "bias"])
def test_the_loss_of_changed_logits_equals_transformers(alone: None, name: str) -> None:
    torch.manual_seed(0)
    sizes = CONFIG.to_diff_dict() | {"model_type": None}
    want: PreTrainedModel
    if name == "capped":
        want = NanoChatForCausalLM(NanoChatConfig(**sizes, final_logit_softcapping=2.0))
    else:
        want = fresh_model()
        want.lm_head.bias = torch.nn.Parameter(torch.randn(CONFIG.vocab_size))
    model = deepcopy(want)
    WholeBatches(model, hf.enable(model))
    batch = collate([{"input_ids": ids} for ids in documents(3)])
    losses = [x(**batch).loss for x in (model, want)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    for (parameter, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=parameter)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"labels": "all"}, "3 masked tokens have labels; set the labels of padding to -100"),
        ({"shift_labels": "all"}, "4 masked tokens have labels"),
        ({"ignore_index": 5}, "ignore_index=5 is not supported"),
        ({"return_dict": False}, "return_dict=False is not supported"),
        ({"seq_idx": "all"}, "seq_idx alone does not tell where documents begin"),
    ],
)
def test_what_would_change_the_loss_of_a_whole_batch_is_refused(alone: None, changes: dict, line: str) -> None:
    model, ids = fresh_model(), torch.arange(20).view(2, 10)
    WholeBatches(model, hf.enable(model))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    assert torch.isfinite(model(**batch, ignore_index=-100, seq_idx=None).loss)
    whole = {name: ids if value == "all" else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=line):
        model(**batch | whole)


def test_hidden_states_of_a_part_are_refused_in_the_config_too(alone: None) -> None:
    model = fresh_model()
    WholeBatches(model, hf.enable(model))
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states is not supported over several ranks"):
        model(input_ids=torch.arange(8)[None])
