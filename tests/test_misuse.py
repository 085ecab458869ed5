"""Mistakes in calls of lightseq from a user's own script are named in one line, with the remedy."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from trainer_numbers import collate, common, documents, fresh_model, shared_folder
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import DPOTrainer, SFTConfig, SFTTrainer
from worlds import spawn

from lightseq import hf
from lightseq.integrations import SequenceParallel, SequenceParallelSFTTrainer, SequenceParallelTrainer
from lightseq.integrations.accelerate import prepare
from lightseq.utils import versions


def one_line(call: Callable[[], Any], kind: type[Exception], line: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert line in str(refused.value) and "\n" not in str(refused.value)


# ---- bases ---------------------------------------------------------------------------------------------------------


class MyTrainer(Trainer):
    pass


@pytest.mark.parametrize("trainer", [Trainer, SFTTrainer, DPOTrainer, MyTrainer])
def test_a_trainer_before_the_mixin_is_refused(trainer: type[Trainer]) -> None:
    line = f"write class Mine(SequenceParallel, {trainer.__name__})"
    one_line(lambda: type("Mine", (trainer, SequenceParallel), {}), TypeError, line)


def test_trainers_with_the_mixin_and_our_own_are_accepted() -> None:
    first = type("First", (SequenceParallel, MyTrainer), {})
    type("Second", (first,), {})
    type("Third", (SequenceParallelTrainer,), {})
    type("Extended", (type("Extension", (), {}), SequenceParallelTrainer), {})


def test_a_mixin_without_a_trainer_is_refused() -> None:
    alone = type("Alone", (SequenceParallel,), {})
    one_line(alone, TypeError, "Alone has no trainer among its bases; write class Alone(SequenceParallel, Trainer)")


# ---- keywords ------------------------------------------------------------------------------------------------------


def test_misspelt_keywords_of_trainers_are_named(tmp_path: Any) -> None:
    arguments = TrainingArguments(**common(str(tmp_path), eval_strategy="no"))
    make = SequenceParallelTrainer
    one_line(
        lambda: make(fresh_model(), arguments, sequence_parallel_sise=2), TypeError, "mean sequence_parallel_size?"
    )
    one_line(lambda: make(fresh_model(), arguments, train_dataste=[]), TypeError, "did you mean train_dataset?")
    one_line(
        lambda: make(fresh_model(), arguments, attention_options={"shedule": "ring"}),
        TypeError,
        "attention_options has no option shedule; did you mean schedule?",
    )
    make(fresh_model(), arguments, sequence_parallel_size=1, attention_options={"schedule": "ring"})


def test_misspelt_keywords_of_functions_are_named(alone: None) -> None:
    one_line(lambda: hf.enable(fresh_model(), shedule="ring"), TypeError, "did you mean schedule?")
    one_line(lambda: hf.plan_memory(fresh_model(), 8, hardware=object(), rematt="full"), TypeError, "mean remat?")  # type: ignore[arg-type]
    one_line(
        lambda: prepare(Accelerator(cpu=True), fresh_model(), sequence_parallel=2),
        TypeError,
        "prepare has no option sequence_parallel; did you mean sequence_parallel_size?",
    )


class TakesTokenizer(Trainer):
    """Trainer like LLaMA-Factory's, which know the keyword by its old name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, processing_class=kwargs.pop("tokenizer"), **kwargs)


class SplitsBehindOldName(SequenceParallel, TakesTokenizer):
    pass


def _loss_beside_unimportable_trl(rank: int) -> float:
    """Trains beside a TRL whose trainers cannot be imported, as old ones with a new transformers."""
    sys.modules["trl"] = ModuleType("trl")
    with shared_folder() as folder:
        arguments = TrainingArguments(**common(folder, eval_strategy="no", max_steps=1))
        rows = [{"input_ids": ids} for ids in documents(2)]
        trainer = SplitsBehindOldName(fresh_model(), arguments, collate, rows, tokenizer=None)
        return float(trainer.train().training_loss)


def test_keywords_that_a_trainer_renames_and_a_broken_trl_beside_it_are_no_obstacle() -> None:
    first, second = spawn(2, _loss_beside_unimportable_trl)
    assert first == second > 0


# ---- models --------------------------------------------------------------------------------------------------------


def test_what_is_no_causal_transformers_model_is_refused(alone: None) -> None:
    one_line(lambda: hf.enable(torch.nn.Linear(2, 2)), ValueError, "Linear is no transformers model")
    one_line(lambda: hf.enable(None), ValueError, "NoneType is no transformers model")
    one_line(lambda: hf.disable(torch.nn.Linear(2, 2)), ValueError, "Linear is no transformers model")
    holder = torch.nn.Sequential(fresh_model())
    one_line(lambda: hf.enable(holder), ValueError, "not a Sequential; pass the one inside it")
    small = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32)
    one_line(lambda: hf.enable(T5ForConditionalGeneration(small)), ValueError, "has an encoder and a decoder")


def gpt2(rate: float, **changes: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=64, attn_pdrop=rate, **changes))


def test_attention_dropout_is_named_as_the_config_names_it(alone: None) -> None:
    one_line(
        lambda: hf.enable(gpt2(0.1)), ValueError, "GPT2LMHeadModel has attn_pdrop 0.1; set it to 0 in config.json of a"
    )
    changed = gpt2(0.1)
    changed.config.attn_pdrop = 0.0  # which the modules do not read again
    one_line(lambda: hf.enable(changed), ValueError, "attn_dropout 0.1; set it to 0 in the config from")
    hf.enable(gpt2(0.0))


def opt(positions: int) -> OPTForCausalLM:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_attention_heads": 2, "vocab_size": 64}
    return OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=1, max_position_embeddings=positions))


@pytest.mark.parametrize("model", [gpt2(0.0, n_positions=16), opt(16)], ids=["GPT-2", "OPT"])
def test_sequences_beyond_a_table_of_positions_are_refused(model: PreTrainedModel, alone: None) -> None:
    name, ids = type(model).__name__, torch.arange(17)[None]
    one_line(lambda: hf.enable(model, length=17), ValueError, f"length is 17, but {name} has a table for 16 positions")
    context = hf.enable(model)
    assert model(**hf.shard_batch(context, ids[:, :16], ids[:, :16])).loss.isfinite()
    long, told = hf.shard_batch(context, ids, ids), f"17 tokens, but {name} has a table for 16 positions"
    one_line(lambda: model(**long), ValueError, told)
    one_line(lambda: model(input_ids=ids), ValueError, told)
    one_line(lambda: model(ids), ValueError, told)


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "4.57.1")
    one_line(versions.check_transformers, ImportError, "transformers 4.57.1 is too old for lightseq; install 5.9")


# ---- rows ----------------------------------------------------------------------------------------------------------


class Tokenizer:
    chat_template = None


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    ],
)
def test_chats_without_a_template_are_refused(row: dict[str, Any]) -> None:
    rows, prepare_rows = Dataset.from_list([row]), SequenceParallelSFTTrainer._prepare_dataset
    trainer = object.__new__(SequenceParallelSFTTrainer)
    call = (trainer, rows, Tokenizer(), SFTConfig(use_cpu=True, bf16=False), False, None, "train")
    one_line(
        lambda: prepare_rows(*call), ValueError, f"the rows are chats ({next(iter(row))}), but the tokenizer has no"
    )
