"""Inputs that a patched model refuses because shards would train on something else: masks, packing, losses, batches."""

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from worlds import spawn

from lightseq import hf
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.context import SequenceContext
from lightseq.utils import versions

LENGTH, VOCABULARY = 50, 64
BOUNDARIES = (0, 13, 37, 50)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(model_type: str, kind: type[PreTrainedModel] | None = None, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = CONFIG_MAPPING[model_type](**SIZES | changes)
    model = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    return model.float().eval()


def ids(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


def refused(call: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        call()
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def inputs(model: PreTrainedModel, **packed: Any) -> tuple[SequenceContext, dict[str, Any]]:
    context = hf.enable(model, length=LENGTH)
    return context, hf.shard_batch(context, ids(), ids(), **packed)


# ---- attention -----------------------------------------------------------------------------------------------------


def test_a_model_with_a_mask_of_its_own_is_refused(alone: None) -> None:
    model = build("doge")
    _, batch = inputs(model)
    refused(lambda: model(**batch), "the model passes its own attention mask")


def without_documents(forward: Callable[..., Any], *args: Any, documents: Any = None, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def test_packed_documents_that_a_layer_drops_are_refused_and_plain_batches_are_not(alone: None) -> None:
    model = build("llama")
    context, batch = inputs(model)
    last: Any = model.model.layers[-1]
    last.forward = partial(without_documents, last.forward)  # as layers do that hand no keyword arguments on
    assert torch.isfinite(model(**batch).loss)
    packed = hf.shard_batch(context, ids(), ids(), cu_seqlens=BOUNDARIES)
    refused(lambda: model(**packed), "layers do not pass them on")
    assert torch.isfinite(model(**batch).loss), "the refusal of one batch says nothing of the next"


def test_a_packed_pass_that_fails_leaves_no_trace(alone: None) -> None:
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    context, plain = inputs(model)
    loss = model(**plain).loss
    packed = hf.shard_batch(context, ids(), ids(), cu_seqlens=BOUNDARIES)
    hook = model.model.layers[-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**packed)
    hook.remove()
    loss.backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_packed_batch_may_come_from_another_process(alone: None, copied: Callable[[Any], Any]) -> None:
    model = build("llama")
    _, packed = inputs(model, cu_seqlens=BOUNDARIES)
    assert torch.equal(model(**copied(packed)).loss, model(**packed).loss)


def documents_of_their_own(rank: int) -> None:
    model = build("llama")
    context = hf.enable(model, length=LENGTH)
    model(**hf.shard_batch(context, ids(), ids(), cu_seqlens=(0, 13, LENGTH)))
    batch = hf.shard_batch(context, ids(), ids(), cu_seqlens=(0, 13 + 11 * rank, LENGTH))
    refused(lambda: model(**batch), "the ranks got different documents")


def test_ranks_that_pack_other_documents_are_refused_at_any_batch() -> None:
    spawn(2, documents_of_their_own)


def ids_of_another_vocabulary(_rank: int) -> None:
    model = build("llama")
    vocabulary = model.config.vocab_size
    context, text = hf.enable(model, length=LENGTH), ids()
    model(**hf.shard_batch(context, text, text))
    foreign, negative, highest = text.clone(), text.clone(), text.clone()
    foreign[0, -1], negative[0, 3] = vocabulary, -1  # each on one rank alone
    line = "token id {}, outside the model's vocabulary of {}; tokenize with the model's tokenizer"
    for inputs, labels, id in ((foreign, text, vocabulary), (text, foreign, vocabulary), (negative, text, -1)):
        refused(lambda: model(**hf.shard_batch(context, inputs, labels)), line.format(id, vocabulary))  # noqa: B023
    highest[0, -1] = vocabulary - 1
    assert torch.isfinite(model(**hf.shard_batch(context, highest, highest)).loss)


def test_ids_of_another_vocabulary_are_refused_on_every_rank_at_any_batch() -> None:
    spawn(2, ids_of_another_vocabulary)


def test_attention_that_runs_in_a_shard_only_is_refused(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    _, batch = inputs(model)
    model.set_attn_implementation("sdpa")
    refused(lambda: model(**batch), "attention over all ranks ran 0 times in 2 layers")
    hf.enable(model, length=LENGTH)
    attend = ALL_ATTENTION_FUNCTIONS[hf.IMPLEMENTATION]

    def skip_first(module: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        return (q.transpose(1, 2), None) if module.layer_idx == 0 else attend(module, q, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, hf.IMPLEMENTATION, skip_first)
    refused(lambda: model(**batch), "attention over all ranks ran 1 times in 2 layers")


def test_a_batch_may_be_cut_into_smaller_ones(alone: None) -> None:
    model = build("llama")
    context = hf.enable(model, length=LENGTH)
    whole = hf.shard_batch(context, ids().repeat(4, 1), ids().repeat(4, 1))
    halves = [{k: v[i : i + 2] if v.ndim else v for k, v in whole.items()} for i in (0, 2)]
    assert abs(sum(model(**half).loss for half in halves) - model(**whole).loss) < 1e-5


def test_a_copy_that_is_enabled_leaves_the_original_its_context(alone: None) -> None:
    model = build("llama")
    _, batch = inputs(model)
    hf.enable(copy.deepcopy(model), length=LENGTH)
    assert torch.isfinite(model(**batch).loss)


def test_a_packed_batch_may_be_recomputed_after_a_plain_one(alone: None) -> None:
    """Checkpointing runs layers again when the model has been given another batch."""
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    context, plain = inputs(model)
    packed = hf.shard_batch(context, ids(), ids(), cu_seqlens=BOUNDARIES)
    losses = [model(**plain).loss, model(**packed).loss]
    losses[0].backward()
    losses[1].backward()


@pytest.mark.parametrize("drops", [False, True])
def test_an_architecture_says_whether_packed_documents_reach_attention(
    monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    forward = LlamaDecoderLayer.forward
    if drops:
        monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda self, *a, documents=None, **k: forward(self, *a, **k))
    config = CONFIG_MAPPING["llama"](**SIZES | {"hidden_size": 40 + 8 * drops})  # another, for it is looked at once
    assert inspect_architecture(config).passes_documents is not drops


def packed_for_another_context(rank: int) -> None:
    model = build("llama")
    first = hf.enable(model, schedule="ring", length=LENGTH)
    batch = hf.shard_batch(first, ids(), ids(), cu_seqlens=BOUNDARIES)
    hf.enable(model, schedule="prefix", length=LENGTH)
    refused(lambda: model(**batch), "the packed batch belongs to another context")


def test_a_packed_batch_of_another_context_is_refused() -> None:
    spawn(2, packed_for_another_context)


# ---- positions -----------------------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    },
}  # fmt: skip


def rope_by_kind_of_layer(rank: int) -> None:
    for name, rope in ROPES.items():
        ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
        changes = {"rope_parameters": ropes, "layer_types": ["sliding_attention", "full_attention"]}
        want, model = (build("gemma3_text", **changes) for _ in range(2))
        context, batch = inputs(model)
        with torch.no_grad():
            loss, expected = model(**batch).loss, want(input_ids=ids(), labels=ids()).loss
        dist.all_reduce(loss)
        assert abs(loss - expected) < 1e-5, f"{name}: {loss} against {expected}"
        packed = hf.shard_batch(context, ids(), ids(), cu_seqlens=BOUNDARIES)
        refused(lambda model=model, packed=packed: model(**packed), "RoPE depends on the sequence length")


def test_rope_that_depends_on_the_length_sees_the_whole_of_it_in_every_kind_of_layer() -> None:
    spawn(2, rope_by_kind_of_layer)


# ---- labels and losses ---------------------------------------------------------------------------------------------


class WithPenalty(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 0.1 * output.logits.square().mean()
        return output


class WithPenaltyInPlace(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss += 0.1 * output.logits.square().mean()
        return output


class WithoutDivisor(LlamaForCausalLM):
    def forward(self, num_items_in_batch: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(**kwargs)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (WithPenalty, "returns a loss that is not its loss function"),
        (WithPenaltyInPlace, "returns a loss that is not its loss function"),
        (WithoutDivisor, "needs num_items_in_batch, which WithoutDivisor did not get or does not pass"),
    ],
)
def test_a_loss_that_is_not_the_sum_over_shards_is_refused(alone: None, kind: type[PreTrainedModel], line: str) -> None:
    model = build("llama", kind)
    _, batch = inputs(model)
    refused(lambda: model(**batch), line)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_loss_function_of_the_users_own_is_kept(alone: None, return_dict: bool) -> None:
    model, asked = build("llama"), list[Any]()

    def summed(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor, **more: Any) -> Tensor:
        asked.append(more["num_items_in_batch"])
        return torch.nn.functional.cross_entropy(logits[0], shift_labels[0], reduction="sum")

    model.loss_function = summed
    for _ in range(2):  # enabling again wraps nothing twice
        _, batch = inputs(model)
    model(**batch, return_dict=return_dict)
    assert asked == [batch["num_items_in_batch"]]
    model.loss_function = lambda *args, **kwargs: 2 * summed(*args, **kwargs)  # set after it was enabled
    model(**batch, return_dict=return_dict)
    assert len(asked) == 2


def test_a_model_that_peft_wraps_trains_as_it_did(alone: None) -> None:
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = model(input_ids=ids(), labels=ids()).loss
    context, batch = inputs(model)
    assert abs(model(**batch).loss - expected) < 1e-5
    packed = hf.shard_batch(context, ids(), ids(), cu_seqlens=BOUNDARIES)
    assert torch.isfinite(model(**packed).loss)
    refused(lambda: model(**batch | {"labels": None}), "shift_labels without labels")
    merged = model.merge_and_unload()
    assert abs(merged(**batch).loss - expected) < 1e-5
    refused(lambda: merged(**batch | {"labels": None}), "shift_labels without labels")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "PROMPT_TUNING adapters add tokens to"),
        (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "PREFIX_TUNING adapters add tokens to"),
        (peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9), "ADALORA adapters add a penalty to the loss"),
        (peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5]), "LoRA with alora_invocation_tokens"),
        ("LilyConfig", "peft's adapter LILY computes with tokens that other ranks hold; use plain LoRA"),
    ],
    ids=lambda value: value.peft_type.value if isinstance(value, peft.PeftConfig) else "",
)
def test_adapters_that_need_other_ranks_tokens_or_change_the_loss_are_refused(
    alone: None, settings: Any, line: str
) -> None:
    if isinstance(settings, str):  # which older versions of peft lack
        if not hasattr(peft, settings):
            pytest.skip(f"peft has no {settings}")
        settings = getattr(peft, settings)(target_modules=["q_proj"])
    model = peft.get_peft_model(build("llama"), settings)
    refused(lambda: hf.enable(model, length=LENGTH), line)


def wrapped_between(rank: int) -> None:
    model = build("llama")
    hf.enable(model, schedule="ring", length=LENGTH)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    context = hf.enable(model, schedule="zigzag", length=LENGTH)
    for packed in (None, BOUNDARIES):
        assert torch.isfinite(model(**hf.shard_batch(context, ids(), ids(), cu_seqlens=packed)).loss)


def test_a_model_that_is_wrapped_and_enabled_again_takes_the_new_context() -> None:
    spawn(2, wrapped_between)


class LigerInside(LlamaForCausalLM):
    def forward(self, *args: Any, num_items_in_batch: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs | {"labels": None})
        output.loss = torch.nn.functional.cross_entropy(output.logits[0], shift_labels[0]) / num_items_in_batch
        return output


def test_a_fused_loss_is_taken_inside_a_wrapper_too(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", LigerInside)
    _, batch = inputs(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    refused(lambda: model(**batch), "returns a loss that is not its loss function")
    monkeypatch.setattr(LigerInside.forward, "__module__", "liger_kernel.transformers.model.llama")
    assert torch.isfinite(model(**batch).loss)


def divisor_of_one_rank(rank: int) -> None:
    model = build("llama")
    _, batch = inputs(model)
    for divisor in (1, batch["num_items_in_batch"] / 2):  # a sum of losses, a mean over ranks afterwards
        model(**batch | {"num_items_in_batch": divisor})
        hf.enable(model, length=LENGTH)
    local = (batch["labels"] != -100).sum()
    refused(lambda: model(**batch | {"num_items_in_batch": local}), "leave Trainer's average_tokens_across_devices on")


def test_a_divisor_that_counts_the_targets_of_one_rank_is_refused() -> None:
    spawn(2, divisor_of_one_rank)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": ids()}  # alike, for Trainer deals rows out to ranks


def trainer(folder: Path, compute_loss: Callable[..., Tensor] | None = None, **options: Any) -> Trainer:
    model = build("llama")
    context = hf.enable(model, length=LENGTH)

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        whole = rows[0]["input_ids"]
        return hf.shard_batch(context, whole, whole)

    arguments = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to=[], per_device_train_batch_size=1, save_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(model, arguments, data_collator=collate, train_dataset=Rows(), compute_loss_func=compute_loss)


def test_a_trainer_that_takes_the_loss_from_logits_is_refused(alone: None, tmp_path: Path) -> None:
    refused(trainer(tmp_path, label_smoothing_factor=0.1).train, "label_smoothing_factor and compute_loss_func")
    refused(trainer(tmp_path, lambda *_, **__: torch.zeros(())).train, "label_smoothing_factor and compute_loss_func")
    trainer(tmp_path).train()


def trainer_that_counts_by_itself(rank: int, folder: str) -> None:
    refused(trainer(Path(folder), average_tokens_across_devices=False).train, "average_tokens_across_devices on")


def test_a_trainer_whose_ranks_count_their_own_targets_is_refused(tmp_path: Path) -> None:
    spawn(2, trainer_that_counts_by_itself, str(tmp_path))


# ---- the model afterwards ------------------------------------------------------------------------------------------


def test_a_patched_model_is_saved_as_it_was(alone: None, tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "before")
    _, batch = inputs(model)
    assert model(**batch).past_key_values is None, "no cache is made"
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert before == after and AutoConfig.from_pretrained(tmp_path / "after").use_cache


@pytest.mark.parametrize("model_type", ["blip-2", "kosmos-2"])
def test_a_model_with_images_but_no_plain_text_decoder_is_refused(alone: None, model_type: str) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[model_type]())
    refused(lambda: hf.enable(model), "has inputs other than text, and no plain text decoder")


# ---- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("newest", "lines"), [("1.0", 2), ("99.0", 0)])
def test_an_untested_newer_version_is_warned_of(
    alone: None, monkeypatch: pytest.MonkeyPatch, newest: str, lines: int
) -> None:
    monkeypatch.setattr(versions, "NEWEST_TESTED", {"torch": newest, "transformers": newest})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf.enable(build("llama"))
    said = [str(x.message) for x in caught if x.category is versions.UntestedVersionWarning]
    assert len(said) == lines and all("the newest that this lightseq was tested with" in line for line in said)
