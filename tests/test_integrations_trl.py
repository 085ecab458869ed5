"""TRL's trainers whose sequences are split over ranks give the numbers of the unmodified trainer on one process."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_except
from trainer_numbers import (
    ADAPTERS,
    CONFIG,
    Numbers,
    Run,
    UsesFsdp2,
    check_equal,
    common,
    documents,
    fresh_model,
    packed_ids,
    tokenizer,
    trained,
)
from worlds import spawn

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, LlamaConfig, Trainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.tiny_models import tiny_config
from lightseq.integrations import (
    SequenceParallel,
    SequenceParallelDPOTrainer,
    SequenceParallelRewardTrainer,
    SequenceParallelSFTTrainer,
    pass_head,
    trainer,
)

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
SFT_CASES: Mapping[str, dict[str, Any]] = {
    "padded": {"max_length": 64},
    "packed": {"max_length": 64, "packing": True},
    "padding free": {"max_length": None, "padding_free": True},
    "accumulated": {"max_length": 64, "packing": True, "gradient_accumulation_steps": 2},
    "adapters": {"max_length": 64, "packing": True, "adapters": True, "gradient_checkpointing": True},
    "checkpointed": {"max_length": 64, "gradient_checkpointing": True},
    "compiled": {"max_length": 64, "packing": True, "compile_layers": True, "gradient_checkpointing": True},
    "dft": {"max_length": 64, "loss_type": "dft"},
    "packed ids": {"max_length": None, "collate": packed_ids, "gradient_accumulation_steps": 2},
    "packed ids, dft": {"max_length": None, "collate": packed_ids, "loss_type": "dft"},
    "smoothed": {"max_length": 64, "label_smoothing_factor": 0.1},
}
DPO_CASES: Mapping[str, dict[str, Any]] = {
    "sigmoid": {},
    "two losses": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "gradient_accumulation_steps": 2},
    "adapters": {"adapters": True},
    "precomputed": {"precompute_ref_log_probs": True},
    "weighted": {"use_weighting": True, "ld_alpha": 0.5},
}
REWARD_CASES: Mapping[str, dict[str, Any]] = {
    "margins": {"center_rewards_coefficient": 0.1, "margins": True},
    "adapters": {"adapters": True},
    "checkpointed": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "hybrid": {"family": "qwen3_5_text"},
    "mixture": {"family": "qwen3_moe"},
}


def text(ids: list[int]) -> str:
    return "".join(f"<{x}> " for x in ids)


def preferences(folder: Path) -> None:
    """Writes prompts with a chosen and a longer rejected answer. Ranks share TRL's cache only beside files."""
    rows = []
    for ids in documents():
        half = len(ids) // 2
        rows.append({"prompt": ids[:half], "chosen": ids[half:], "rejected": [*ids[half // 2 : 2 * half], 5, 7]})
    Dataset.from_list([{name: text(ids) for name, ids in row.items()} for row in rows]).save_to_disk(folder)


def judged(folder: Path) -> None:
    """Writes prompts with answers; every third answer is bad."""
    halves = [(text(ids[: len(ids) // 2]), text(ids[len(ids) // 2 :])) for ids in documents()]
    rows = [{"prompt": p, "completion": c, "label": i % 3 > 0} for i, (p, c) in enumerate(halves)]
    Dataset.from_list(rows).save_to_disk(folder)


class SequenceParallelKTO(SequenceParallel, KTOTrainer):
    pass


class SequenceParallelORPO(SequenceParallel, ORPOTrainer):
    pass


class SequenceParallelCPO(SequenceParallel, CPOTrainer):
    pass


class SequenceParallelOnlineDPO(SequenceParallel, OnlineDPOTrainer):
    pass


OTHERS: Mapping[str, tuple[type[Trainer], type[Trainer], Any]] = {
    "KTO": (KTOTrainer, SequenceParallelKTO, KTOConfig),
    "ORPO": (ORPOTrainer, SequenceParallelORPO, ORPOConfig),
    "CPO": (CPOTrainer, SequenceParallelCPO, CPOConfig),
}
OTHER_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "KTO": ("KTO", {}),
    "KTO precomputed": ("KTO", {"precompute_ref_log_probs": True}),
    "ORPO": ("ORPO", {}),
    "CPO": ("CPO", {}),
}


def sft(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = dict(case)
    if case.pop("compile_layers", False) and kind is SequenceParallelSFTTrainer:
        options["compile_layers"] = True
    options["data_collator"] = case.pop("collate", None)
    rows = Dataset.from_list([{"input_ids": ids} for ids in documents()])
    return trained(kind, SFTConfig, case, data_ranks, fresh_model(), rows, **options)


def dpo(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = {"learning_rate": 0.02, **case}  # a higher rate blows up, and then small differences grow
    rows = Dataset.load_from_disk(case.pop("rows"))
    reference = None if case.get("adapters") or case.get("precompute_ref_log_probs") else fresh_model()
    return trained(kind, DPOConfig, case, data_ranks, fresh_model(), rows, ref_model=reference, **options)


def other(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = {"learning_rate": 0.02, **case}
    config, rows, tokens = OTHERS[case.pop("name")][2], Dataset.load_from_disk(case.pop("rows")), tokenizer()
    tokens.bos_token = "<1>"
    if issubclass(kind, KTOTrainer):
        options["ref_model"] = fresh_model()
    found = trained(kind, config, case, data_ranks, fresh_model(), rows, 6, processing_class=tokens, **options)
    # ORPO and CPO average logits over padding too, whose attention differs from one process.
    found["history"] = [{k: v for k, v in record.items() if "logits/" not in k} for record in found["history"]]
    return found


def reward(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = {"learning_rate": 0.02, **case}
    rows, family = Dataset.load_from_disk(case.pop("rows")), case.pop("family", None)
    if case.pop("margins", False):
        rows = rows.add_column("margin", [0.5 * (row % 3) for row in range(len(rows))])
    config = LlamaConfig(**CONFIG.to_dict()) if family is None else tiny_config(family, initializer_range=0.02)
    config.num_labels = 1
    torch.manual_seed(0)
    model, adapters = AutoModelForSequenceClassification.from_config(config), {**ADAPTERS, "modules_to_save": ["score"]}
    return trained(kind, RewardConfig, case, data_ranks, model, rows, 6, adapters=adapters, **options)


@pytest.mark.compat("5.16")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["adapters"], SFT_CASES))
def test_sft_equals_one_process(case: str, world: int) -> None:
    check_equal(sft, SFTTrainer, SequenceParallelSFTTrainer, SFT_CASES[case], world)


def check_on_rows(
    folder: Path, run: Run, plain: type[Trainer], ours: type[Trainer], case: Mapping[str, Any], world: int,
    write: Callable[[Path], None] = preferences,
) -> None:  # fmt: skip
    """Compares on files of their own: TRL caches its tokens beside them."""
    for name in ("wanted", "got"):
        write(folder / name)
    mine, theirs = ({**case, "rows": str(folder / name)} for name in ("got", "wanted"))
    check_equal(run, plain, ours, mine, world, theirs)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["adapters"], DPO_CASES))
def test_dpo_equals_one_process(case: str, world: int, tmp_path: Path) -> None:
    check_on_rows(tmp_path, dpo, DPOTrainer, SequenceParallelDPOTrainer, DPO_CASES[case], world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["margins"], REWARD_CASES))
def test_rewards_equal_one_process(case: str, world: int, tmp_path: Path) -> None:
    check_on_rows(tmp_path, reward, RewardTrainer, SequenceParallelRewardTrainer, REWARD_CASES[case], world)


@pytest.mark.parametrize("case", slow_except(["ORPO"], OTHER_CASES))
def test_trl_trainers_without_a_class_of_ours_equal_one_process(case: str, tmp_path: Path) -> None:
    name, changes = OTHER_CASES[case]
    plain, ours, _ = OTHERS[name]
    write = judged if name == "KTO" else preferences
    check_on_rows(tmp_path, other, plain, ours, {"name": name, **changes}, 2, write)


def refusal_of_online_dpo(rank: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        arguments = OnlineDPOConfig(**common(folder, eval_strategy="no"))
        with pytest.raises(ValueError) as caught:
            SequenceParallelOnlineDPO(
                fresh_model(), reward_funcs=len, args=arguments, train_dataset=Dataset.from_list([{"prompt": "<3>"}]),
                processing_class=tokenizer(),
            )  # fmt: skip
    return str(caught.value)


def test_a_trl_trainer_that_was_never_compared_is_refused() -> None:
    for line in spawn(2, refusal_of_online_dpo):
        assert line.startswith("TRL's OnlineDPOTrainer does not work with sequence_parallel_size > 1; SFTTrainer, ")


def test_versions_that_scale_losses_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_divides_by_tp_size", lambda: False)
    with pytest.raises(ValueError, match=r"scales losses as no transformers before 5[.]19 does; install"):
        trainer._check_trl_trainer(SequenceParallelSFTTrainer)


class RewardsEntropy:
    """Mixin of a trainer's own loss, which weighs tokens differently and needs gradients of entropies."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs, fused_lm_head=True)
        return -(outputs.log_probs.sum() + outputs.log_probs[0, 0] + outputs.entropy.square().sum()) / 100


class SplitRewardsEntropy(RewardsEntropy, SequenceParallelSFTTrainer): ...


class WholeRewardsEntropy(RewardsEntropy, SFTTrainer): ...


def heads_of_steps(rank: int, kinds: list[Any]) -> tuple[list[bool], float]:
    """Trains trainers for a step each. Returns whether our head computed gradients in its forward pass, wherever it
    ran, and the last trainer's gradient norm."""
    flags, plain = list[bool](), pass_head.token_metrics

    def spied(*arguments: Any, **options: Any) -> Any:
        flags.append(options["equal_factors"])
        return plain(*arguments, **options)

    pass_head.token_metrics = spied  # type: ignore[assignment]
    rows = Dataset.from_list([{"input_ids": ids} for ids in documents()])
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(**common(folder, max_length=64, max_steps=1, eval_strategy="no"))
            trainer = kind(fresh_model(), arguments, train_dataset=rows, processing_class=tokenizer())
            trainer.train()
    return flags, trainer.state.log_history[0]["grad_norm"]


@pytest.mark.slow
def test_a_custom_loss_gets_gradients_of_log_probs_and_entropies() -> None:
    (_, wanted), *_ = spawn(1, heads_of_steps, [WholeRewardsEntropy])
    for flags, norm in spawn(2, heads_of_steps, [SequenceParallelSFTTrainer, SplitRewardsEntropy]):
        assert flags == [True, False] and norm == pytest.approx(wanted, rel=1e-5)


class FullyShardedSFT(SequenceParallel, UsesFsdp2, SFTTrainer):
    pass


class FullyShardedDPO(SequenceParallel, UsesFsdp2, DPOTrainer):
    pass


@pytest.mark.compat("5.16")
def test_dpo_with_fsdp2_equals_one_process(tmp_path: Path) -> None:
    check_on_rows(tmp_path, dpo, DPOTrainer, FullyShardedDPO, {}, 2)


def refusal_of_head(rank: int) -> str:
    rows = Dataset.from_list([{"input_ids": ids} for ids in documents()])
    with tempfile.TemporaryDirectory() as folder:
        trainer = FullyShardedSFT(
            fresh_model(), SFTConfig(**common(folder, max_length=64, eval_strategy="no")), train_dataset=rows,
            processing_class=tokenizer(), peft_config=LoraConfig(**ADAPTERS, modules_to_save=["lm_head"]),
        )  # fmt: skip
        with pytest.raises(ValueError) as caught:
            trainer.train()
    return str(caught.value)


@pytest.mark.slow
def test_a_trained_head_that_fsdp2_shards_by_itself_is_refused() -> None:
    for line in spawn(2, refusal_of_head):
        assert "leave lm_head out of modules_to_save" in line
