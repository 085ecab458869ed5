"""TRL's trainers with images and a processor, on split sequences, give the numbers of TRL on one process per group."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from trainer_numbers import Numbers, UsesFsdp2, check_equal, make_trainer, numbers, shared_folder
from worlds import spawn

pytest.importorskip("trl")
pytest.importorskip("PIL")

from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Images
from tiny_processors import FAMILIES, model_of, processor_of
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl_hub import ZEN, train_tokenizer

from lightseq.integrations import (
    SequenceParallel,
    SequenceParallelDPOTrainer,
    SequenceParallelGRPOTrainer,
    SequenceParallelRLOOTrainer,
    SequenceParallelSFTTrainer,
)

WORLDS = [2, pytest.param(3, marks=pytest.mark.slow)]
PLAIN_TOKENS = 500  # ids below it are text
IMAGES_OF_ROWS = (1, 2, 1, 0, 1, 3, 2, 1)
MESSAGE = List({"role": Value("string"), "content": Value("string")})
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completions": ("prompt", "completion"),
    "preferences": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
}


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    whole = train_tokenizer([*ZEN])
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def rows(columns: str, least: int) -> Dataset:
    """Returns chats about images of several sizes; rows have several images, or one, or `least`."""
    generator = np.random.default_rng(1)
    found = list[dict[str, Any]]()
    for line, after, count in zip(ZEN, ZEN[1:], IMAGES_OF_ROWS, strict=False):
        sides = generator.integers(8, 40, (max(least, count), 2))
        pictures = [Images.fromarray(generator.integers(0, 256, (*side, 3), dtype=np.uint8)) for side in sides]
        question, answer, other = (
            [{"role": role, "content": text}]
            for role, text in (("user", line), ("assistant", after), ("assistant", after[::-1][:9]))
        )
        row = {"messages": question + answer, "prompt": question, "completion": answer, "chosen": answer}
        row["rejected"] = other
        found.append({name: row[name] for name in COLUMNS[columns]} | {"images": pictures})
    features = {name: MESSAGE for name in COLUMNS[columns]} | {"images": List(Image())}
    return Dataset.from_list(found, features=Features(features))


def completion(prompt: list[int]) -> list[int]:
    """Returns 3 to 14 tokens that depend on the prompt; most end with the end of a turn."""
    generator = torch.Generator().manual_seed(sum(prompt))
    length = int(torch.randint(3, 14, (), generator=generator))
    end = tokenizer().eos_token_id
    return [*torch.randint(10, PLAIN_TOKENS, (length,), generator=generator).tolist(), *([end] if length % 5 else [])]


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    made = trainer.processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    completions = [
        completion([*ids, prompt[-1]["index"]]) for ids, prompt in zip(made["input_ids"], prompts, strict=True)
    ]
    return {"prompt_ids": made["input_ids"], "completion_ids": completions, "logprobs": None}


def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [((sum(ids) + 3 * index) % 11) / 10 for index, ids in enumerate(completion_ids)]


class Indexed:
    """Mixin that tells the completions of a prompt apart without changing the prompt, from which TRL takes images."""

    _indices: list[int]

    def _generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        told = [[*prompt[:-1], {**prompt[-1], "index": index}] for index, prompt in enumerate(prompts)]
        return super()._generate(told, *args, **kwargs)  # type: ignore[misc]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        self._indices = [prompt[-1]["index"] for prompt in prompts]
        return super()._tokenize_prompts(prompts)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        completions = found[0] if isinstance(found, tuple) else found  # RLOO's are alone
        told = [[10 + index, *ids] for index, ids in zip(self._indices, completions, strict=True)]
        return (told, *found[1:]) if isinstance(found, tuple) else told


class Grpo(Indexed, GRPOTrainer): ...


class SplitGrpo(Indexed, SequenceParallelGRPOTrainer): ...


class Rloo(Indexed, RLOOTrainer): ...


class SplitRloo(Indexed, SequenceParallelRLOOTrainer): ...


class ShardedSft(SequenceParallel, UsesFsdp2, SFTTrainer): ...


class ShardedGrpo(Indexed, SequenceParallel, UsesFsdp2, GRPOTrainer): ...


def run(_rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = {"family": "qwen2_5_vl", "learning_rate": 0.01, "ddp_find_unused_parameters": True, "seed": 3, **case}
    family = case.pop("family")
    processor: Any = processor_of(family, tokenizer())
    model = model_of(family, processor)
    generates = issubclass(kind, GRPOTrainer | RLOOTrainer)
    with shared_folder() as folder:
        model.save_pretrained(f"{folder}/model")  # of the reference
        dist.barrier()
        model.config._name_or_path = f"{folder}/model"
        if generates:
            processor.tokenizer.padding_side = case.pop("padding_side", "left")
            columns, batch, config = "prompts", 8, GRPOConfig if issubclass(kind, GRPOTrainer) else RLOOConfig
            case |= {"num_generations": 4, "max_completion_length": 12}
            options["reward_funcs"] = rewards
            if case.pop("generate", not issubclass(kind, GRPOTrainer)):
                case["generation_kwargs"] = {"do_sample": False}
            else:
                options["rollout_func"] = rollouts
        elif issubclass(kind, DPOTrainer):
            columns, batch, config = "preferences", 2, DPOConfig
        else:
            columns, batch, config = case.pop("columns", "messages"), 2, SFTConfig
        case |= {"max_length": None} if not generates else {}
        case["per_device_train_batch_size"] = case["per_device_eval_batch_size"] = batch // data_ranks
        # TRL's generation and other processors need an image in every row.
        data = rows(columns, least=int("qwen" not in family or "generation_kwargs" in case))
        return numbers(
            make_trainer(kind, config, folder, case, model, data, len(data), processing_class=processor, **options)
        )


QUICK: Mapping[str, Any] = {"max_steps": 1, "eval_strategy": "no"}
SFT_CASES: Mapping[str, dict[str, Any]] = {
    "one step": {"columns": "completions", **QUICK},
    "messages": {},
    "completions": {"columns": "completions", "gradient_accumulation_steps": 2},
    "adapters": {"adapters": True, "gradient_checkpointing": True},
    "dft": {"loss_type": "dft"},
    **{kind: {"family": kind} for kind in FAMILIES if kind not in ("qwen2_5_vl", "gemma4")},
    "qwen3_5_moe": {"family": "qwen3_5_moe", "max_steps": 1},  # a scan and experts round more
    "gemma3, completions": {"family": "gemma3", "columns": "completions"},
    "idefics3, completions": {"family": "idefics3", "columns": "completions"},
}


DPO_CASES: Mapping[str, dict[str, Any]] = {
    "one step": QUICK,
    "sigmoid": {},
    "adapters": {"adapters": True},
    "two losses": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "gradient_accumulation_steps": 2},
    **{kind: {"family": kind} for kind in ("qwen3_vl", "gemma3", "idefics3", "llava_next")},
}
GRPO_CASES: Mapping[str, dict[str, Any]] = {
    "one step": QUICK,
    "dapo": {},
    "kl": {"beta": 0.1, "loss_type": "grpo"},
    "generated": {"generate": True},
    "several updates": {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "adapters": {"adapters": True, "beta": 0.1, "gradient_checkpointing": True},
    **{
        kind: {"family": kind}
        for kind in ("qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "idefics3", "llava", "llava_next")
    },
    "gemma3, generated": {"family": "gemma3", "generate": True, "beta": 0.1},
    "idefics3, generated": {"family": "idefics3", "generate": True, "steps_per_generation": 2},
}
RLOO_CASES: Mapping[str, dict[str, Any]] = {"kl": {"beta": 0.1}, "gemma3": {"family": "gemma3"}}


TRAINERS: Mapping[str, tuple[type[Trainer], type[Trainer], Mapping[str, dict[str, Any]]]] = {
    "SFT": (SFTTrainer, SequenceParallelSFTTrainer, SFT_CASES),
    "DPO": (DPOTrainer, SequenceParallelDPOTrainer, DPO_CASES),
    "GRPO": (Grpo, SplitGrpo, GRPO_CASES),
    "RLOO": (Rloo, SplitRloo, RLOO_CASES),
}
EVERY = [(name, case) for name, (_, _, cases) in TRAINERS.items() for case in cases]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("name", "case"), slow_except([("SFT", "one step")], EVERY))
def test_a_trainer_with_a_processor_equals_one_process(name: str, case: str, world: int) -> None:
    plain, ours, cases = TRAINERS[name]
    check_equal(run, plain, ours, cases[case], world)


@pytest.mark.slow
def test_a_processor_with_fsdp2_equals_one_process() -> None:
    check_equal(run, SFTTrainer, ShardedSft, {"family": "qwen3_vl"}, 2)
    check_equal(run, Grpo, ShardedGrpo, {"family": "qwen3_vl", "generate": True}, 2)


def refused(rank: int, kind: type[Trainer], case: Mapping[str, Any]) -> str:
    try:
        run(rank, kind, {"max_steps": 1, **case}, 1)
    except ValueError as error:
        return str(error)
    return ""


REFUSED: list[tuple[type[Trainer], dict[str, Any], str]] = [
    (SequenceParallelGRPOTrainer, {"padding_side": "right"}, "the processor pads on the right, but TRL pads prompts"),
    (SequenceParallelGRPOTrainer, {"family": "gemma4"}, "the rows have images, but Gemma4ForConditionalGeneration"),
    (SequenceParallelSFTTrainer, {"family": "gemma4"}, "the rows have images, but Gemma4ForConditionalGeneration"),
]


@pytest.mark.parametrize("kind, case, line", slow_except(REFUSED[:2], REFUSED))
def test_images_that_cannot_be_split_are_refused_before_training(
    kind: type[Trainer], case: Mapping[str, Any], line: str
) -> None:
    for found in spawn(2, refused, kind, case):
        assert found.startswith(line), found
