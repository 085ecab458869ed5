"""Logits of a call with labels equal one process. They are gathered when they are read, and not otherwise."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from trainer_numbers import (
    ADAPTERS,
    UsesFsdp2,
    assert_equal,
    collate,
    common,
    documents,
    fresh_model,
    numbers,
    shared_folder,
)
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
from worlds import spawn

from lightseq import hf
from lightseq.integrations import SequenceParallel, SequenceParallelTrainer
from lightseq.integrations.whole_batches import WholeBatches

READERS: list[Callable[[Any], Tensor]] = [
    lambda output: output.logits,
    lambda output: output["logits"],
    lambda output: output.get("logits"),
    lambda output: output[1],
    lambda output: output[-1],
    lambda output: output[1:][0],
    lambda output: output.to_tuple()[1],
    lambda output: list(output.values())[1],
    lambda output: dict(output)["logits"],
    lambda output: {**output}["logits"],
    lambda output: dict(output.items())["logits"],
    lambda output: [output[name] for name in output][1],
    lambda output: tree_leaves(output)[1],
    lambda output: copy.copy(output).logits,
]


def batch() -> dict[str, Tensor]:
    return collate([{"input_ids": ids} for ids in documents(3)])


def own_loss(output: Any, labels: Tensor) -> Tensor:
    return 0.3 * output.loss + cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def every_reader(rank: int) -> None:
    given = batch()
    wanted_model, model = fresh_model(), fresh_model()
    WholeBatches(model, hf.enable(model))
    real, wanted = given["attention_mask"] == 1, wanted_model(**given)
    for read in READERS:
        output = model(**given)
        assert torch.allclose(read(output)[real], wanted.logits[real], atol=1e-5)
        assert output.logits is output["logits"], "gathered once"
    output = model(**given)
    assert isinstance(output, CausalLMOutputWithPast) and list(output) == list(output.keys()) == ["loss", "logits"]
    assert len(output) == 2 and "logits" in output and "logits=gathered when read" in repr(output)
    own_loss(output, given["labels"]).backward()
    own_loss(wanted, given["labels"]).backward()
    for p, q in zip(model.parameters(), wanted_model.parameters(), strict=True):
        dist.all_reduce(p.grad)  # averaged, as DDP does
        assert (p.grad / 2 - q.grad).norm() <= 1e-5 * q.grad.norm()
    with torch.no_grad():
        output = model(**given)
        assert torch.equal(pickle.loads(pickle.dumps(output)).logits, output.logits)


def test_logits_equal_one_process_however_they_are_read() -> None:
    spawn(2, every_reader)


def test_unread_logits_take_no_memory(alone: None) -> None:
    model, inputs, runs = fresh_model(), list[Any](), list[int]()
    WholeBatches(model, hf.enable(model))
    model.lm_head.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    model.lm_head.register_forward_hook(lambda *_: runs.append(1))
    gc.disable()
    try:
        loss = model(**batch()).loss
        assert inputs[-1]() is None, "the head's input lives as long as the output"
        loss.backward()
    finally:
        gc.enable()
    assert runs == [1]


def test_logits_of_old_weights_are_refused(alone: None) -> None:
    model = fresh_model()
    WholeBatches(model, hf.enable(model))
    output = model(**batch())
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"read outputs\.logits before the update"):
        _ = output.logits


# ---- trainers ------------------------------------------------------------------------------------------------------


class ReadsLogits:
    """Mixin whose loss is computed from the logits of a call with labels."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = model(**inputs)
        loss = cross_entropy(output[1][:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten())
        return (loss, output) if return_outputs else loss


class OursReads(ReadsLogits, SequenceParallelTrainer):
    pass


class TheirsReads(ReadsLogits, Trainer):
    pass


class ShardedReads(ReadsLogits, SequenceParallel, UsesFsdp2, Trainer):
    pass


CASES: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "DDP": (OursReads, {}),
    "unused parameters": (OursReads, {"ddp_find_unused_parameters": True}),
    "FSDP2": (ShardedReads, {}),
    "adapters": (OursReads, {"adapters": True}),
    "adapters in FSDP2": (ShardedReads, {"adapters": True}),
    "bfloat16": (OursReads, {"bf16": True}),
}


def train(rank: int, kind: type[Trainer], adapters: bool = False, **changes: Any) -> Any:
    model: Any = fresh_model()
    if adapters:
        model = get_peft_model(model, LoraConfig(**ADAPTERS))
    rows = [{"input_ids": ids} for ids in documents()]
    with shared_folder() as folder:
        arguments = TrainingArguments(**common(folder, remove_unused_columns=False, **changes))
        trainer = kind(model, arguments, data_collator=collate, train_dataset=rows, eval_dataset=rows[:5])
        return numbers(trainer)


def run(rank: int, theirs: bool, name: str) -> Any:
    kind, changes = CASES[name]
    return train(rank, TheirsReads if theirs else kind, **changes)


@pytest.mark.parametrize("name", slow_except(["FSDP2"], CASES))
def test_a_loss_of_logits_trains_as_on_one_process(name: str) -> None:
    wanted = spawn(1, run, True, name)[0]
    for got in spawn(2, run, False, name):
        if name == "bfloat16":
            losses = [[x["loss"] for x in found["history"] if "loss" in x] for found in (got, wanted)]
            assert losses[0] == pytest.approx(losses[1], rel=0.02)
        else:
            assert_equal(got, wanted)
