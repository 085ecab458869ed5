"""Tiny model and documents for tests of trainers, and the numbers in which two trainers must agree."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)  # fmt: skip
from worlds import spawn

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
LENGTHS = (50, 17, 33, 60, 24, 60, 9, 41, 60, 35, 21, 48)  # of the documents: batches have different numbers of targets
STEPS = 3
ADAPTERS = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
Numbers = dict[str, Any]
Run = Callable[..., Numbers]  # of a rank, a trainer's class, a case, a number of data ranks, and options of ours


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"<{index}>": index for index in range(CONFIG.vocab_size)}
    model = Tokenizer(WordLevel(words, unk_token="<1>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<0>", eos_token="<2>")


def documents(count: int = len(LENGTHS), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, CONFIG.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS[:count]]


def fresh_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(deepcopy(CONFIG))  # a model that is enabled changes its config


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp_min(0), "attention_mask": (labels != -100).long(), "labels": labels}


def packed_ids(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Packs rows whose labels are the ids, so that a document's first token is a target of the one before it."""
    batch = DataCollatorWithFlattening()(rows)
    return {**batch, "labels": batch["input_ids"].clone()}


@contextmanager
def shared_folder() -> Iterator[str]:
    """Makes one folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        yield folders[0]
        dist.barrier()


def use_fsdp2(accelerator: Accelerator) -> None:
    """Does what accelerate does for `fsdp_plugin`, which it takes on GPUs only."""
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # from which later states are made
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )


class UsesFsdp2:
    """Mixin that lets a trainer use FSDP2 on the CPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        use_fsdp2(self.accelerator)  # type: ignore[attr-defined]
        self.is_fsdp_enabled = True


def common(folder: str, **changes: Any) -> dict[str, Any]:
    # Not AdamW and no clipping: they would hide gradients of another scale.
    return {
        "output_dir": folder,
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "max_steps": STEPS,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "ddp_find_unused_parameters": False,
        **changes,
    }


def numbers(trainer: Trainer, checkpoint: str | None = None) -> Numbers:
    """Trains, evaluates once more, and returns what is logged and the weights."""
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    timed = ("runtime", "per_second", "preparation_time", "flos", "step_time")
    history = [
        {k: v for k, v in record.items() if not any(t in k for t in timed)} for record in trainer.state.log_history
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).numpy().copy() for n, p in trained.items()}
    return {"history": history, "weights": weights, "flos": trainer.state.total_flos}


def assert_equal(got: Numbers, wanted: Numbers) -> None:
    assert len(got["history"]) == len(wanted["history"])
    for ours, theirs in zip(got["history"], wanted["history"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if "rewards/accuracies" in name and theirs[name.replace("accuracies", "margins")] == 0:
                continue  # before the first update all pairs are ties, up to rounding
            found = name, ours["step"], ours[name], value
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-5), found
    assert got["flos"] == pytest.approx(wanted["flos"], rel=1e-6)
    for name, weight in wanted["weights"].items():
        assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


def make_trainer(
    kind: type[Trainer], config: Any, folder: str, case: Mapping[str, Any], model: Any, rows: Any, evaluated: int = 5,
    adapters: Mapping[str, Any] = ADAPTERS, **options: Any,
) -> Any:  # fmt: skip
    """Makes a trainer. The case has settings of its config, and `adapters` to train only these."""
    from peft import LoraConfig, get_peft_model

    case = dict(case)
    lora = LoraConfig(**adapters) if case.pop("adapters", False) else None
    if config is TrainingArguments:
        model = model if lora is None else get_peft_model(model, lora)
        case, options = {"remove_unused_columns": False, **case}, {"data_collator": collate, **options}
    else:
        options = {"processing_class": tokenizer(), "peft_config": lora, **options}
    held_out = options.pop("eval_dataset", None) or rows.select(range(evaluated))
    return kind(model, args=config(**common(folder, **case)), train_dataset=rows, eval_dataset=held_out, **options)


def trained(
    kind: type[Trainer], config: Any, case: Mapping[str, Any], data_ranks: int, *given: Any, batch: int = 2,
    **options: Any,
) -> Numbers:  # fmt: skip
    """Trains a trainer of `make_trainer`, whose ranks share a batch."""
    case = {"per_device_train_batch_size": batch // data_ranks, **case}
    with shared_folder() as folder:
        return numbers(make_trainer(kind, config, folder, case, *given, **options))


def sizes(world: int) -> list[int]:
    """Returns the sequence parallel sizes to test. Data parallel runs are compared with the unmodified trainer's."""
    return [size for size in range(2, world + 1) if world % size == 0]


def split(rank: int, run: Run, kind: type[Trainer], case: Mapping[str, Any], size: int, world: int) -> Numbers:
    """Runs a trainer whose groups of `size` ranks share sequences."""
    return run(rank, kind, case, world // size, sequence_parallel_size=size)


def runs(
    run: Run, plain: type[Trainer], ours: type[Trainer], case: Mapping[str, Any], world: int,
    their_case: Mapping[str, Any] | None = None,
) -> Iterator[tuple[list[Numbers], Numbers]]:  # fmt: skip
    """Yields, for each size of groups, the numbers of all ranks, and those of plain trainers on a process per group."""
    for size in sizes(world):
        wanted = spawn(world // size, run, plain, their_case or case, world // size)[0]
        yield spawn(world, split, run, ours, case, size, world), wanted


def check_equal(run: Run, plain: type[Trainer], ours: type[Trainer], *cases: Any) -> None:
    for found, wanted in runs(run, plain, ours, *cases):
        for got in found:
            assert_equal(got, wanted)
