"""axolotl's runs with the plugin give the numbers of axolotl on one process, from the same YAML file."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from cases import slow_except
from worlds import spawn

try:
    version("axolotl")  # the name alone could also be a folder
except PackageNotFoundError:
    pytest.skip("needs axolotl (`make test-axolotl`)", allow_module_level=True)

from axolotl_numbers import ADAPTERS, PLUGIN, make_trainer, train, train_with_own_ring, write_inputs, write_yaml
from trainer_numbers import assert_equal

CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
CASES: Mapping[str, dict[str, Any]] = {
    "packed": {"sample_packing": True},
    "packed, adapters": {"sample_packing": True, **ADAPTERS, **CHECKPOINTED},
    "packed, accumulated": {"sample_packing": True, "gradient_accumulation_steps": 2, "micro_batch_size": 1},
    "packed, real batches": {"sample_packing": True, "multipack_real_batches": True},
    "padded": {},
    "dpo": {"rl": "dpo", "learning_rate": 0.02},
    "dpo, adapters": {"rl": "dpo", "learning_rate": 0.02, **ADAPTERS},
    "ipo": {"rl": "ipo", "learning_rate": 0.02},
}
STEP = ("loss", "grad_norm")
QUICK = ("packed", "packed, adapters", "dpo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("axolotl")
    write_inputs(made)
    return made


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_runs_equal_one_process(folder: Path, case: str, ranks: int, size: int) -> None:
    groups = ranks // size
    # axolotl draws a random order as often as the number of processes tells it.
    of_groups = {"micro_batch_size": 1, "curriculum_sampling": True} if groups > 1 else {}
    changes = {**CASES[case], **of_groups}
    ours = {**changes, "plugins": [PLUGIN], "lightseq_sequence_parallel_size": size}
    plain, split = (
        write_yaml(folder, f"{kind}-{case}-{ranks}", settings)
        for kind, settings in (("plain", changes), ("split", ours))
    )
    wanted = spawn(groups, train, plain)[0]
    for got in spawn(ranks, train, split):
        assert_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_axolotls_own_ring_trains_on_other_numbers(folder: Path, packs: bool) -> None:
    """Its first losses are right within the target that each border between ranks loses. Gradients are not."""
    if find_spec("ring_flash_attn") is None:
        pytest.skip("needs ring-flash-attn")
    changes = {"sample_packing": True, "micro_batch_size": 1} if packs else {}
    ring = {**changes, "context_parallel_size": 2, "attn_implementation": "flash_attention_2"}
    ours = {**changes, "plugins": [PLUGIN], "lightseq_sequence_parallel_size": 2}
    settings = {"plain": changes, "split": ours, "ring": ring}
    paths = {kind: write_yaml(folder, f"{kind}-beside-ring-{packs}", each) for kind, each in settings.items()}
    wanted = spawn(1, train, paths["plain"])[0]
    for got in spawn(2, train, paths["split"]):
        assert_equal(got, wanted)
    steps = [
        [record for record in found["history"] if "grad_norm" in record]
        for found in (wanted, spawn(2, train_with_own_ring, paths["ring"])[0])
    ]
    losses, norms = (
        [ring_step[name] / plain_step[name] for plain_step, ring_step in zip(*steps, strict=True)] for name in STEP
    )
    print("axolotl's own ring over one process: losses", losses, "gradient norms", norms)
    assert abs(losses[0] - 1) < 1e-3 and all(abs(x - 1) > 3e-3 for x in norms)
    if not packs:
        assert min(losses) < 0.6  # a rank without targets


def _made(rank: int, path: str) -> tuple[int, str, str]:
    """Trains whole epochs, saves, and returns the number of steps, the saved config and the trainer's name."""
    trainer = make_trainer(path)
    trainer.train()
    trainer.save_model()
    dist.barrier()  # the first rank writes
    saved = (Path(trainer.args.output_dir) / "config.json").read_text()
    return trainer.state.global_step, saved, type(trainer).__name__


def test_ranks_that_share_sequences_count_once_in_the_steps_of_an_epoch(folder: Path) -> None:
    changes = {"max_steps": None, "num_epochs": 1, "plugins": [PLUGIN], "lightseq_schedule": "zigzag"}
    for steps, saved, name in spawn(2, _made, write_yaml(folder, "epoch", changes)):
        assert steps == 6 and name == "LightseqTrainer"  # 12 rows, two of them a step
        assert "lightseq" not in saved


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "ring attention": (
        {"context_parallel_size": 2},
        f"context_parallel_size: 2 does not work with {PLUGIN}; use lightseq_sequence_parallel_size in its place",
    ),
    "rollouts": ({"rl": "grpo"}, f"rl: grpo does not work with {PLUGIN}; use dpo or ipo, or TRL's trainers with "),
    "kernels": ({"adapter": "lora", "lora_qkv_kernel": True}, f"lora_qkv_kernel: True does not work with {PLUGIN}; "),
    "losses": ({"cut_cross_entropy": True}, f"cut_cross_entropy: True does not work with {PLUGIN}; set it to false"),
    "attention": ({"attn_implementation": "sage"}, f"attn_implementation: sage does not work with {PLUGIN}; use sdpa"),
    "unknown": ({"lightseq_ranks": 2}, f"lightseq_ranks is no key of {PLUGIN}; use lightseq_sequence_parallel_size, "),
    "FSDP1": ({"fsdp_config": {"offload_params": True}}, f"FSDP1 does not work with {PLUGIN}; set fsdp_version: 2"),
    "own class": ({"trainer_cls": "a.B"}, f"trainer_cls: a.B does not work with {PLUGIN}; leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_do_not_work_over_ranks_are_refused(case: str) -> None:
    from lightseq.integrations.axolotl import LightseqPlugin

    changes, start = REFUSED[case]
    with pytest.raises(ValueError) as refused:
        LightseqPlugin().register({"plugins": [PLUGIN], **changes})
    assert str(refused.value).startswith(start) and "\n" not in str(refused.value)


def test_defaults_of_other_plugins_are_refused() -> None:
    from axolotl.cli.config import prepare_plugins
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    from lightseq.integrations.axolotl import LightseqPlugin

    config = DictDefault(yaml.safe_load(Path("examples/axolotl/llama-lora-128k.yaml").read_text()))
    config.plugins.append("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
    prepare_plugins(config)
    with pytest.raises(ValueError, match="cut_cross_entropy: True does not work with"):
        LightseqPlugin().pre_model_load(validate_config(config))


def test_the_example_is_a_valid_configuration() -> None:
    from axolotl.cli.config import prepare_plugins
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    config = DictDefault(yaml.safe_load(Path("examples/axolotl/llama-lora-128k.yaml").read_text()))
    prepare_plugins(config)
    assert validate_config(config).lightseq_sequence_parallel_size == 8


def test_a_trainer_of_another_plugin_is_refused() -> None:
    from lightseq.integrations.axolotl import LightseqPlugin

    with pytest.raises(ValueError, match=r"another plugin's trainer, object, would not split sequences"):
        LightseqPlugin().post_trainer_create({}, object())
