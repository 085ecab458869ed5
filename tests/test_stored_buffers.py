"""Stored buffers and parameters that a model freezes are loaded, trained with, saved and restored."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Ended, programs
from safetensors.torch import load_file, save_file
from small import VOCABULARY, losses, sgd_steps
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from worlds import spawn

from lightseq.checkpoint import state_files
from lightseq.checkpoint.checkpoints import STATE
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import weights
from lightseq.models.decoder import decoder_layers
from lightseq.parallelize import units
from lightseq.parts import adapter_files
from lightseq.parts.chosen_experts import build_to_train

CPU, LENGTH, RATE = torch.device("cpu"), 20, 0.1
IDS = [(3 + 5 * i) % VOCABULARY for i in range(LENGTH)]


class ScaledConfig(LlamaConfig):
    model_type = "scaled_llama"


class ScaledLayer(LlamaDecoderLayer):
    """A layer that scales its output by a buffer and a frozen parameter, and counts its passes in another buffer."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(2, dtype=torch.float32))
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)  # as ERNIE 4.5 has one

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training:
            self.passes += 1
        return super().forward(hidden_states, *args, **kwargs) * self.layer_scalar * self.frozen


class ScaledLlama(LlamaForCausalLM):
    config_class = ScaledConfig

    def __init__(self, config: ScaledConfig) -> None:
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(ScaledLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


AutoConfig.register("scaled_llama", ScaledConfig, exist_ok=True)
AutoModelForCausalLM.register(ScaledConfig, ScaledLlama, exist_ok=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose buffers have other values than a new model's, and a sequence many times over."""
    folder = tmp_path_factory.mktemp("buffers")
    torch.manual_seed(1)
    model = ScaledLlama(
        ScaledConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
        )
    )  # fmt: skip
    for i, layer in enumerate(decoder_layers(model)):
        layer.layer_scalar.fill_(0.5 + i / 4)
        layer.frozen.data.fill_(0.9 + i / 16)
        layer.passes.fill_(5 + i)
        layer.bias.fill_(0.123456789)
    model.save_pretrained(folder / "model")
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": [IDS] * 8}))
    return folder


def test_a_buffer_with_nan_is_refused(files: Path, tmp_path: Path) -> None:
    stored = load_file(files / "model" / "model.safetensors")
    stored["model.layers.1.bias"][0] = torch.nan
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model = build_to_train(ScaledConfig.from_pretrained(files / "model"))
    weights.materialize(model, CPU)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.bias holds NaN; copy or download"):
        weights.load(model, tmp_path)


def flags(files: Path, output: str, more: str = "") -> str:
    return (
        f"--model_name_or_path {files}/model --data_path {files}/data.pkl --output_dir {files}/{output} "
        f"--model_max_length {3 * LENGTH} --optim sgd --learning_rate {RATE} --lr_scheduler_type constant "
        f"--weight_decay 0 --max_grad_norm 0 --remat none --save_steps 1 --logging_steps 1 {more}"
    )


def plain_steps(files: Path, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and tensors of transformers' own training on one process."""
    model = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32).train()
    for name, parameter in model.named_parameters():  # from_pretrained thaws frozen ones
        parameter.requires_grad_(not name.endswith("frozen"))
    return sgd_steps(model, [[IDS]] * steps, RATE), model.state_dict()


def train(rank: int, lines: list[str]) -> list[Ended]:
    """Programs on this rank, to which this module has made the model known."""
    return programs(rank, "any", lines)


def run(world: int, *lines: str) -> None:
    for ends in spawn(world, train, list(lines)):
        assert [end.status for end in ends] == [0] * len(lines), ends[-1].err


def saved(folder: Path, **options: Any) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()


@pytest.mark.compat("5.20")
@pytest.mark.parametrize(
    ("world", "stage"),
    [
        pytest.param(1, None, marks=pytest.mark.slow),
        (2, None),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
)
def test_buffers_are_loaded_trained_with_saved_and_restored(world: int, stage: int | None, files: Path) -> None:
    output, engine = f"run-{world}-{stage}", ""
    if stage is not None:
        settings = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
        (files / f"{output}.json").write_text(json.dumps(settings))
        engine = f"--deepspeed {files}/{output}.json"
    first, then = (flags(files, output, f"{engine} --max_steps {steps}") for steps in (1, 2))
    run(world, first, f"{then} --resume_from_checkpoint auto")
    wanted, tensors = plain_steps(files, 2)
    assert losses(files, output) == pytest.approx(wanted, rel=1e-5)
    found = saved(files / output / "checkpoint-2", dtype=torch.float32)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-6, msg=name)
    assert [int(found[f"model.layers.{i}.passes"]) for i in range(3)] == [7, 8, 9]


def test_in_bfloat16_buffers_have_the_dtype_of_transformers(files: Path) -> None:
    run(1, flags(files, "rounded", "--bf16 --max_steps 1"))
    want = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.bfloat16)
    ids = torch.tensor([IDS])
    assert losses(files, "rounded") == pytest.approx([want(input_ids=ids, labels=ids).loss.item()], rel=1e-2)
    found = saved(files / "rounded" / "checkpoint-1", dtype="auto")
    for name, buffer in weights.stored_buffers(want).items():
        assert found[name].dtype == buffer.dtype, name
        if not name.endswith("passes"):
            assert torch.equal(found[name], buffer), name


@pytest.mark.slow
def test_adapters_keep_buffers_in_their_state_only(files: Path) -> None:
    lora = "--lora_rank 2 --max_steps"
    run(1, flags(files, "lora", f"{lora} 1"), flags(files, "lora", f"{lora} 2 --resume_from_checkpoint auto"))
    assert losses(files, "lora")[0] == pytest.approx(plain_steps(files, 1)[0][0], rel=1e-5)
    checkpoint = files / "lora" / "checkpoint-2"
    state = dict(state_files.read_full_tensors(checkpoint / STATE, state_files.BUFFER))
    assert state.keys() == weights.stored_buffers(AutoModelForCausalLM.from_pretrained(files / "model")).keys()
    assert all(".lora_" in name for name in load_file(checkpoint / adapter_files.WEIGHTS))
    assert [int(state[f"model.layers.{i}.passes"]) for i in range(3)] == [7, 8, 9]


def test_units_list_the_buffers_that_files_store(alone: None, files: Path) -> None:
    model = build_to_train(AutoConfig.from_pretrained(files / "model"))
    config = TrainConfig(model_name_or_path="m", data_path="d", output_dir="o")
    found = units(model, config, parallel_dims(World(0, 1, 0, 1, CPU)), MemorySettings())
    assert [len(unit.buffers) for unit in found] == [0, 3, 3, 3, 0, 0]
    assert list(map(id, weights.stored_buffers(model).values())) == [id(b) for unit in found for b in unit.buffers]


def test_a_buffer_of_another_shape_is_refused_and_a_missing_one_keeps_its_value(files: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((files / "model" / "config.json").read_text())
    tensors = load_file(files / "model" / "model.safetensors")
    name, other = "model.layers.1.layer_scalar", "model.layers.0.layer_scalar"
    model = build_to_train(AutoConfig.from_pretrained(files / "model"))
    weights.materialize(model, CPU)
    save_file({key: x for key, x in tensors.items() if key != name}, tmp_path / "model.safetensors")
    weights.load(model, tmp_path)
    buffers = weights.stored_buffers(model)
    assert (buffers[name].item(), buffers[other].item()) == (1.0, 0.5)
    save_file(tensors | {name: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layer_scalar has shape \[2\], not the model's \[1\]"):
        weights.load(model, tmp_path)
