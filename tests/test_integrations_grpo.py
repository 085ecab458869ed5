"""TRL's trainers that generate, with sequences split over ranks, give the numbers of TRL on one process per group."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import slow_except
from trainer_numbers import (
    ADAPTERS,
    CONFIG,
    Numbers,
    UsesFsdp2,
    assert_equal,
    common,
    fresh_model,
    numbers,
    shared_folder,
    sizes,
    tokenizer,
)
from worlds import spawn

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from lightseq.integrations import SequenceParallelGRPOTrainer, SequenceParallelRLOOTrainer

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
GENERATIONS = 4
GRPO_CASES: Mapping[str, dict[str, Any]] = {
    "dapo": {},
    "grpo, kl": {"loss_type": "grpo", "beta": 0.1},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "batch"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 0.3},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "entropy": {"entropy_coef": 0.05, "top_entropy_quantile": 0.5},
    "adapters": {"adapters": True, "beta": 0.1},
    "several updates": {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "accumulated": {"gradient_accumulation_steps": 2, "temperature": 0.7},
    "generated": {"generate": True, "gradient_checkpointing": True},
    "truncated": {"mask_truncated_completions": True},
}
RLOO_CASES: Mapping[str, dict[str, Any]] = {"kl": {"beta": 0.1}, "no kl": {"beta": 0.0}}


class Indexed:
    """Mixin that tells the completions of a prompt apart, by a last token with the completion's index."""

    def _generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> Any:
        return super()._generate([f"{p} <{40 + i}>" for i, p in enumerate(prompts)], *args, **kwargs)  # type: ignore[misc]


class Grpo(Indexed, GRPOTrainer):
    pass


class SplitGrpo(Indexed, SequenceParallelGRPOTrainer):
    pass


class Rloo(Indexed, RLOOTrainer):
    pass


class SplitRloo(Indexed, SequenceParallelRLOOTrainer):
    pass


class SplitShardedGrpo(Indexed, UsesFsdp2, SequenceParallelGRPOTrainer):
    pass


def completion(prompt: list[int]) -> list[int]:
    """Returns 3 to 22 tokens that depend on the prompt; most end with the end of a sequence."""
    generator = torch.Generator().manual_seed(sum(prompt))
    length = int(torch.randint(3, 23, (), generator=generator))
    return [*torch.randint(3, CONFIG.vocab_size, (length,), generator=generator).tolist(), 2][
        : 22 if length % 5 else length
    ]


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = trainer.processing_class(text=prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [completion(x) for x in ids], "logprobs": None}


def rewards(completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **_: Any) -> list[float | None]:
    log_metric("longest", max(map(len, completion_ids)))
    log_extra("first", [ids[0] for ids in completion_ids])
    return [None if sum(ids) % 7 == 0 else (sum(ids) % 11) / 10 for ids in completion_ids]


def prompts() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    lengths = (4, 9, 2, 7, 5, 8, 3, 6)
    drawn = [torch.randint(3, 40, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_list([{"prompt": " ".join(f"<{x}>" for x in ids)} for ids in drawn])


def run(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = dict(case)
    adapters = LoraConfig(**ADAPTERS) if case.pop("adapters", False) else None
    generates, is_grpo = case.pop("generate", False), issubclass(kind, GRPOTrainer)
    generation = {"generation_kwargs": {"do_sample": False}} if generates or not is_grpo else {}
    config, function = (GRPOConfig, {} if generates else {"rollout_func": rollouts}) if is_grpo else (RLOOConfig, {})
    with shared_folder() as folder:
        fresh_model().save_pretrained(f"{folder}/model")  # of the reference
        arguments = config(
            **common(
                folder, num_generations=GENERATIONS, max_completion_length=24, learning_rate=0.1, **generation, **case
            )
            | {"per_device_train_batch_size": 8 // data_ranks, "per_device_eval_batch_size": 8 // data_ranks}
        )
        model = fresh_model()
        model.config._name_or_path = f"{folder}/model"
        trainer = kind(
            model, args=arguments, reward_funcs=rewards, train_dataset=prompts(), eval_dataset=prompts(),
            processing_class=tokenizer(), peft_config=adapters, **function, **options,
        )  # fmt: skip
        found = numbers(trainer)
    found["logs"] = [list(trainer._logs["completion"]), list(trainer._logs["extra"]["first"])]
    found["history"] = [{k: v for k, v in r.items() if "step_time" not in k} for r in found["history"]]
    return found


def split(rank: int, kind: type[Trainer], case: Mapping[str, Any], size: int, world: int) -> Numbers:
    return run(rank, kind, case, world // size, sequence_parallel_size=size)


def check(plain: type[Trainer], ours: type[Trainer], case: Mapping[str, Any], world: int) -> None:
    for size in sizes(world):
        wanted = spawn(world // size, run, plain, case, world // size)[0]
        assert any(np_changed(wanted))
        for got in spawn(world, split, ours, case, size, world):
            assert_equal(got, wanted)
            assert got["logs"] == wanted["logs"]


def np_changed(found: Numbers) -> list[bool]:
    before = {name: p.detach().numpy() for name, p in fresh_model().named_parameters()}
    return [name not in before or bool((before[name] != value).any()) for name, value in found["weights"].items()]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["dapo", "generated"], GRPO_CASES))
def test_grpo_equals_one_process(case: str, world: int) -> None:
    check(Grpo, SplitGrpo, GRPO_CASES[case], world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["kl"], RLOO_CASES))
def test_rloo_equals_one_process(case: str, world: int) -> None:
    check(Rloo, SplitRloo, RLOO_CASES[case], world)
