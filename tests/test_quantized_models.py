"""Models that transformers loaded with quantized weights train over ranks as they do with peft on one process."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainer_numbers import Numbers, UsesFsdp2, assert_equal, common, documents, numbers, shared_folder, tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig
from worlds import one_process, spawn

from lightseq import hf
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.hf import quantized
from lightseq.integrations import SequenceParallel
from lightseq.parts.changes import Changes

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao.quantization")

LENGTH = 37
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=False,
    pad_token_id=0,
)  # fmt: skip
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS: Mapping[str, Callable[[], Any]] = {
    "NF4": partial(BitsAndBytesConfig, **NF4),
    "NF4, double": partial(BitsAndBytesConfig, **NF4, bnb_4bit_use_double_quant=True),
    "FP4": partial(BitsAndBytesConfig, load_in_4bit=True),
    "8 bits": partial(BitsAndBytesConfig, load_in_8bit=True),
    "stored in float32": partial(BitsAndBytesConfig, **NF4, bnb_4bit_quant_storage=torch.float32),
    "torchao int8": lambda: TorchAoConfig(torchao.Int8WeightOnlyConfig()),
    "torchao float8": lambda: TorchAoConfig(torchao.Float8WeightOnlyConfig()),
    "torchao intx": lambda: TorchAoConfig(torchao.IntxWeightOnlyConfig()),
    "torchao, inputs too": lambda: TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()),
}
TRAIN = ("NF4", "NF4, double", "FP4", "8 bits", "torchao int8", "torchao float8", "torchao intx")
SHARDED = ("NF4", "NF4, double", "FP4")
TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
Found = tuple[float, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    return folder


def adapters() -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)


def quantized_model(folder: Path, kind: str) -> Any:
    # bitsandbytes evaluates in bfloat16 on CPUs that have its instructions.
    with mock.patch("bitsandbytes.nn.modules.has_avx512bf16", return_value=False):
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KINDS[kind](), dtype=torch.float32)
    torch.manual_seed(1)  # of the adapters
    return model


def adapted(folder: Path, kind: str) -> Any:
    return peft.get_peft_model(quantized_model(folder, kind), adapters()).train()


def ids() -> Tensor:
    return torch.randint(3, CONFIG.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def plain(folder: Path, kind: str) -> Found:
    model = adapted(folder, kind)
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}


NEEDS_BYTES = pytest.mark.skipif(
    quantized.Version(torch.__version__) < quantized.KEEPS_BYTES, reason="fully_shard takes no parameters of bytes"
)


def split(_rank: int, folder: Path, kinds: Mapping[str, str]) -> list[Found]:
    """Returns loss and gradients of each kind of weights in a loop around `hf.enable`."""
    found = []
    for kind, wrapper in kinds.items():
        model = adapted(folder, kind)
        context = hf.enable(model, length=LENGTH)
        wrapped = DistributedDataParallel(model) if wrapper == "DDP" else model
        if wrapper == "FSDP2":
            shard(model)
        loss = wrapped(**hf.shard_batch(context, ids(), ids())).loss
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = {name: whole_tensor(p.grad).numpy().copy() for name, p in trained.items()}
        found.append((total.item(), gradients))
        hf.disable(model)
    return found


def shard(model: Any) -> None:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.filterwarnings("ignore:.*averages gradients")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "wrapper", [pytest.param("DDP", marks=pytest.mark.slow), pytest.param("FSDP2", marks=NEEDS_BYTES)]
)
def test_quantized_weights_train_as_on_one_process(folder: Path, wrapper: str, world: int) -> None:
    kinds = dict.fromkeys(SHARDED if wrapper == "FSDP2" else TRAIN, wrapper)
    if world == 1:  # others are slow to load
        kinds = dict.fromkeys(["NF4"], wrapper)
    wanted = {kind: plain(folder, kind) for kind in kinds}
    for found in spawn(world, split, folder, kinds):
        for kind, (loss, gradients) in zip(kinds, found, strict=True):
            assert loss == pytest.approx(wanted[kind][0], abs=1e-5), kind
            for name, gradient in wanted[kind][1].items():
                error = np.linalg.norm(gradients[name] - gradient)
                assert error <= 1e-5 * np.linalg.norm(gradient), (kind, name)


def refusal(folder: Path, kind: str, check: Callable[[Any], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        check(adapted(folder, kind))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def step_of_shards(model: Any) -> None:
    context = hf.enable(model, length=LENGTH)
    shard(model)
    model(**hf.shard_batch(context, ids(), ids()))


@pytest.mark.parametrize(
    ("kind", "check", "line"),
    [
        ("torchao, inputs too", hf.enable, "rounds its inputs, too, and passes no gradient; load the model with Bits"),
        ("torchao int8", quantized.check_before_sharding, "a Int8Tensor of torchao, which FSDP2 cannot shard"),
        pytest.param(
            *("8 bits", step_of_shards, "8 bits of bitsandbytes, which FSDP2 cannot shard; use DDP, or load_in_4bit"),
            marks=NEEDS_BYTES,
        ),
        ("stored in float32", step_of_shards, "bnb_4bit_quant_storage=torch.float32, whose bits FSDP2 may change"),
    ],
)
def test_weights_that_do_not_train_are_refused(folder: Path, kind: str, check: Any, line: str) -> None:
    with one_process():
        assert line in refusal(folder, kind, check)


@NEEDS_BYTES
def test_fsdp2_that_casts_bytes_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "KEEPS_BYTES", quantized.Version("99"))
    precision = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with one_process():
        model: nn.Module = adapted(folder, "NF4")
        context = hf.enable(model, length=LENGTH)
        fully_shard(model, mp_policy=precision)
        with pytest.raises(ValueError, match=r"casts the bytes of .* to param_dtype"):
            model(**hf.shard_batch(context, ids(), ids()))


# ---- trainers -------------------------------------------------------------------------------------------------------


class InFloat32:
    """Mixin that holds adapters in float32; TRL rounds those of quantized models to bfloat16, and sums gradients so.

    It also lets the DDP of one process take weights of torchao.
    """

    model: Any

    def create_optimizer(self, *arguments: Any) -> Any:
        quantized.skip_in_ddp(self.model, Changes())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return super().create_optimizer(*arguments)  # type: ignore[misc]


def text(ids: list[int]) -> str:
    return "".join(f"<{x}> " for x in ids)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(sum(ids) % 11) / 10 for ids in completion_ids]


def sft_row(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": ids}


def dpo_row(ids: list[int]) -> dict[str, Any]:
    prompt, chosen = text(ids[: len(ids) // 2]), text(ids[len(ids) // 2 :])
    return {"prompt": prompt, "chosen": chosen, "rejected": f"{chosen}<5> <7> "}


def grpo_row(ids: list[int]) -> dict[str, Any]:
    return {"prompt": text(ids[:7])}


GENERATION = {"max_completion_length": 12, "generation_kwargs": {"do_sample": False}, "num_generations": 4}
BATCHES = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
TRAINERS: dict[str, tuple[Callable[[list[int]], dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "SFT": (sft_row, {"max_length": 64, "packing": True, "gradient_checkpointing": True}, {}),
    "DPO": (dpo_row, {"learning_rate": 0.02}, {}),
    "GRPO": (grpo_row, {"learning_rate": 0.1, "beta": 0.1, **GENERATION, **BATCHES}, {"reward_funcs": reward}),
}


def train(_rank: int, folder: Path, kind: str, name: str, wrapper: str | None) -> Numbers:
    """Returns the numbers of TRL's trainer, or with a `wrapper` those of ours."""
    import trl
    from datasets import Dataset

    row, options, parts = TRAINERS[name]
    trainer, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    rows = Dataset.from_list([row(ids) for ids in documents()])
    bases: tuple[type, ...] = () if wrapper is None else (SequenceParallel,)
    bases += (UsesFsdp2,) if wrapper == "FSDP2" else ()
    made: Any = type("Made", (InFloat32, *bases, trainer), {})
    with shared_folder() as output:
        arguments = config(**common(output, **options, save_strategy="no"))
        trainer = made(
            quantized_model(folder, kind), args=arguments, train_dataset=rows, eval_dataset=rows.select(range(4)),
            processing_class=tokenizer(), peft_config=adapters(), **parts,
        )  # fmt: skip
        found = numbers(trainer)
    found["history"] = [{k: v for k, v in record.items() if "step_time" not in k} for record in found["history"]]
    return found


TRAINER_CASES = [(n, k, w) for n in TRAINERS for k in ("NF4, double", "torchao int8") for w in ("DDP", "FSDP2")]
QUICK = [("SFT", "NF4, double", "FSDP2")]


@pytest.mark.parametrize(
    ("name", "kind", "wrapper"), slow_except(QUICK, [x for x in TRAINER_CASES if x[1:] != ("torchao int8", "FSDP2")])
)
def test_trainers_equal_trl_on_one_process(folder: Path, name: str, kind: str, wrapper: str) -> None:
    pytest.importorskip("trl")
    (wanted,) = spawn(1, train, folder, kind, name, None)
    for got in spawn(2, train, folder, kind, name, wrapper):
        assert_equal(got, wanted)
