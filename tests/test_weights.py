"""Weights in and out on any number of ranks: drawn alike, read in parts, saved whole, and what is refused."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from worlds import spawn

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import random_weights, weight_files, weights
from lightseq.models.tokenizer_files import copy_tokenizer
from lightseq.parallelize import shard_parameters, units
from lightseq.parts.chosen_experts import build_to_train

WORLDS = [1, 2, 3]
FSDP_MODES = ["full_shard", "hybrid_shard", "ddp"]
VOCABULARY = 97  # a prime: no number of ranks divides it
CPU = torch.device("cpu")


def tiny(tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
        tie_word_embeddings=tied,
    )


def empty(config: LlamaConfig, fsdp: str | None = "full_shard") -> PreTrainedModel:
    """Split over all ranks, with memory and without values; NaN, so that none left unfilled goes unnoticed."""
    model = build_to_train(config)
    if fsdp is not None:
        world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), CPU)
        run = TrainConfig(model_name_or_path="m", data_path="d", output_dir="o")
        shard_parameters(model, units(model, run, parallel_dims(world, None, fsdp), MemorySettings()))
    weights.materialize(model, CPU)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    return model


def drawn(tied: bool) -> dict[str, Tensor]:
    """Fresh weights on one process, without any sharding."""
    model = empty(tiny(tied), fsdp=None)
    random_weights.initialize(model, seed=5)
    return {name: p.detach() for name, p in model.named_parameters()}


def differing(model: PreTrainedModel, want: dict[str, Tensor]) -> list[str]:
    got = dict(weights.full_parameters(model))
    assert got.keys() == want.keys()
    return [name for name in want if not torch.equal(got[name], want[name])]


# ---- fresh ones ----------------------------------------------------------------------------------------------------


def initialized(rank: int, want: dict[bool, dict[str, Tensor]]) -> None:
    for tied, expected in want.items():
        for fsdp in FSDP_MODES:
            model = empty(tiny(tied), fsdp)
            random_weights.initialize(model, seed=5)
            assert differing(model, expected) == [], f"tied {tied}, {fsdp}"


@pytest.mark.compat
@pytest.mark.parametrize("world", slow_except([2], WORLDS))
def test_fresh_weights_are_the_same_on_any_number_of_ranks(world: int) -> None:
    spawn(world, initialized, {tied: drawn(tied) for tied in (False, True)})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope_type", ["default", "llama3", "yarn"])
def test_a_model_built_on_meta_computes_what_one_built_on_cpu_does(tied: bool, rope_type: str) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    keys = {"default": (), "llama3": tuple(scaling), "yarn": ("factor", "original_max_position_embeddings")}[rope_type]
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | {key: scaling[key] for key in keys}
    config = LlamaConfig(**tiny(tied).to_dict() | {"rope_parameters": rope, "max_position_embeddings": 64})
    built, model = LlamaForCausalLM(config), empty(config, fsdp=None)
    tie = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tie == tied
    model.load_state_dict(built.state_dict())
    for (name, got), (_, want) in zip(model.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(got, want), name
    ids = torch.arange(40).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, built(input_ids=ids).logits)


def test_a_buffer_that_cannot_be_rebuilt_is_refused_by_name() -> None:
    model = build_to_train(tiny())
    model.model.register_buffer("secret", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"model\.secret"):
        weights.materialize(model, CPU)


# ---- in and out ----------------------------------------------------------------------------------------------------


class CountedSlice:
    """A tensor of a file that counts the rows read from it."""

    def __init__(self, part: Any, note: Callable[[int], None]) -> None:
        self.part, self.note = part, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        read = self.part[index]
        self.note(len(read))
        return read


class CountedFile:
    """`safe_open`, noting rows read; it has no way to read a tensor whole."""

    rows: dict[str, int]  # of all files

    def __init__(self, path: Path, framework: str) -> None:
        self.file = safe_open(path, framework)

    def __enter__(self) -> "CountedFile":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def get_slice(self, name: str) -> CountedSlice:
        def note(rows: int) -> None:
            self.rows[name] = self.rows.get(name, 0) + rows

        return CountedSlice(self.file.get_slice(name), note)

    def keys(self) -> list[str]:
        return list(self.file.keys())


def check_rows_read(model: PreTrainedModel, rows: dict[str, int]) -> None:
    """Each rank read its own rows once, all ranks together every row once."""
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        assert isinstance(data, DTensor)
        assert rows.get(name, 0) == len(data.to_local()) <= -(-len(data) // dist.get_world_size()), name
        total = torch.tensor(rows.get(name, 0))
        dist.all_reduce(total)
        assert total == len(data), name


def round_trip(rank: int, folder: str, tied: bool, want: dict[str, Tensor]) -> None:
    """Reads what transformers wrote, noting the rows; writes it again in shards and in one file."""
    model = empty(tiny(tied))
    CountedFile.rows = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(weight_files, "safe_open", CountedFile)
    weights.load(model, Path(folder, "in"))
    patch.undo()
    assert differing(model, want) == []
    check_rows_read(model, CountedFile.rows)
    weights.save_pretrained(model, Path(folder, "whole"), torch.float32)
    patch.setattr(weights, "SHARD_BYTES", 30_000)
    weights.save_pretrained(model, Path(folder, "shards"), torch.float32)
    patch.undo()
    for name in ("whole", "shards"):
        dist.barrier()
        again = empty(tiny(tied), "ddp")
        weights.load(again, Path(folder, name))
        assert differing(again, want) == [], name


@pytest.mark.compat
@pytest.mark.parametrize(("world", "tied"), slow_except([(1, True), (3, False)], product(WORLDS, (False, True))))
def test_weights_go_in_and_out_unchanged_on_any_number_of_ranks(world: int, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny(tied))
    model.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    want = {name: p.detach() for name, p in model.named_parameters()}
    spawn(world, round_trip, str(tmp_path), tied, want)
    assert [p.name for p in (tmp_path / "whole").glob("*.safetensors")] == [weight_files.WEIGHTS]
    files = sorted(p.name for p in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for name in ("whole", "shards"):
        read, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        assert type(read) is LlamaForCausalLM
        assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
        for (parameter, p), q in zip(read.named_parameters(), want.values(), strict=True):
            assert torch.equal(p, q), f"{name}: {parameter}"


def save_over(rank: int, folder: str) -> None:
    model = empty(tiny())
    for seed, shard_bytes in ((5, 30_000), (6, 1 << 30), (7, 30_000)):
        random_weights.initialize(model, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "SHARD_BYTES", shard_bytes)
            weights.save_pretrained(model, Path(folder), torch.float32)
        dist.barrier()
        again = empty(tiny())
        weights.load(again, Path(folder))
        assert differing(again, dict(weights.full_parameters(model))) == [], (
            f"read the weights saved before seed {seed}"
        )
        plain = LlamaForCausalLM.from_pretrained(folder)
        assert differing(again, {name: p.detach() for name, p in plain.named_parameters()}) == []


def test_saving_over_an_older_model_leaves_none_of_its_weights(tmp_path: Path) -> None:
    spawn(1, save_over, str(tmp_path))


def load_tied(rank: int, folder: str) -> str | None:
    model = empty(tiny(tied=True))
    try:
        weights.load(model, Path(folder))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("row", [None, pytest.param(0, marks=pytest.mark.slow), VOCABULARY - 1])
def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused_on_every_rank(
    tmp_path: Path, row: int | None
) -> None:
    tensors = drawn(tied=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if row is not None:
        tensors["lm_head.weight"][row, 3] += 1.0
    save_file(tensors, tmp_path / weight_files.WEIGHTS)
    for line in spawn(2, load_tied, str(tmp_path)):
        assert (line is None) == (row is None)
        assert line is None or "lm_head.weight differs from model.embed_tokens.weight" in line


# ---- what is refused -----------------------------------------------------------------------------------------------


def changed(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = drawn(tied=False)
    change(tensors)
    save_file(tensors, directory / weight_files.WEIGHTS)
    return directory


def test_a_weight_that_is_not_a_number_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"{name} holds NaN; copy or download the weights again"):
        weights.load(empty(tiny(), fsdp=None), changed(tmp_path, lambda x: x[name][3].fill_(torch.nan)))


def test_infinities_are_not_nan() -> None:
    both = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(weights.without_nan(both.__getitem__, "x")((slice(None),)), both)


def test_a_tied_head_in_the_files_is_written_back(tmp_path: Path, alone: None) -> None:
    directory = changed(tmp_path, lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"].clone()}))
    model = empty(tiny(tied=True), fsdp=None)
    weights.load(model, directory)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1.0
    weights.save_pretrained(model, tmp_path / "out", torch.float32, trained_from=directory)
    before, after = load_file(directory / weight_files.WEIGHTS), load_file(tmp_path / "out" / weight_files.WEIGHTS)
    assert before.keys() == after.keys()
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"] + 1.0)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


EXTRA: dict[str, tuple[dict[str, Tensor], str | None]] = {  # what the files have beside the model, and the error
    "older buffers": (
        {
            "model.rotary_emb.inv_freq": torch.ones(8),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8).half(),
            "model.position_ids": torch.arange(4),
        },
        None,
    ),
    "head after the last layer": (
        {
            "model.layers.2.eh_proj.weight": torch.ones(2, 4).half(),
            "model.layers.2.mlp.up_proj.weight": torch.ones(90, 64),
        },
        None,
    ),
    "head with a higher number": ({"model.layers.61.shared_head.norm.weight": torch.tensor(2.0)}, None),
    "layer that the config leaves out": (
        {"model.layers.2.mlp.up_proj.weight": torch.ones(90, 64)},
        r"unknown tensors \['model.layers.2.mlp.up_proj.weight'\]; copy config.json and the weights from one model",
    ),
    "part of a layer": ({"model.layers.1.eh_proj.weight": torch.ones(2)}, "unknown tensors .*; copy config.json"),
    "another list": ({"model.heads.2.eh_proj.weight": torch.ones(2)}, "unknown tensors .*; copy config.json"),
}


@pytest.mark.parametrize("name", EXTRA)
def test_tensors_that_transformers_does_not_load_are_kept_as_they_are(name: str, tmp_path: Path, alone: None) -> None:
    extra, error = EXTRA[name]
    directory, model = changed(tmp_path, lambda x: x.update(extra)), empty(tiny(), fsdp=None)
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        weights.load(model, directory)
    if error is None:
        weights.save_pretrained(model, tmp_path / "out", torch.float32, trained_from=directory)
        before, after = load_file(directory / weight_files.WEIGHTS), load_file(tmp_path / "out" / weight_files.WEIGHTS)
        assert before.keys() == after.keys()
        assert all(x.dtype == after[name].dtype and torch.equal(x, after[name]) for name, x in before.items())


def test_a_folder_that_is_named_like_a_tokenizer_is_not_copied(tmp_path: Path) -> None:
    for folder in ("from", "from/tokenizer", "to"):
        (tmp_path / folder).mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    copy_tokenizer(tmp_path / "from", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["tokenizer.json"]
