"""TRL's trainers that generate, with sequences split over ranks, give the numbers of TRL on one process per group."""

import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from trainer_numbers import (
    CONFIG,
    Numbers,
    UsesFsdp2,
    assert_equal,
    check_equal,
    fresh_model,
    make_trainer,
    numbers,
    runs,
    shared_folder,
    tokenizer,
    trained,
)
from worlds import spawn

from benchmarks.tiny_models import tiny_config

pytest.importorskip("trl")

from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation

from lightseq.integrations import (
    SequenceParallel,
    SequenceParallelDistillationTrainer,
    SequenceParallelGRPOTrainer,
    SequenceParallelRLOOTrainer,
)
from lightseq.integrations.distillation import SequenceParallelDistillation

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
    # Not the median: equal contexts have equal entropies, of which rounding would choose some.
    "entropy": {"entropy_coef": 0.05, "top_entropy_quantile": 0.4},
    "adapters": {"adapters": True, "beta": 0.1},
    "several updates": {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "accumulated": {"gradient_accumulation_steps": 2, "temperature": 0.7},
    "generated": {"generate": True, "gradient_checkpointing": True},
    "truncated": {"mask_truncated_completions": True},
    "mixture": {"family": "qwen3_moe", "router_aux_loss_coef": 0.1, "beta": 0.1},
    "replayed": {"family": "qwen3_moe", "replay": True, "max_steps": 1, "eval_strategy": "no"},
    "hybrid": {"family": "qwen3_5_text", "learning_rate": 0.01},
    "compiled": {"compile_layers": True, "generate": True, "adapters": True, "gradient_checkpointing": True},
    "head in float32": {"cast_lm_head_to_fp32": True, "max_steps": 1},
    "one prompt a batch": {"num_generations": 8},  # on two groups of ranks, each has half of its completions
}
DISTILLATION_CASES: Mapping[str, dict[str, Any]] = {
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0, "temperature": 0.7},
    "jsd": {"beta": 0.3, "gradient_accumulation_steps": 2},
    "adapters": {"beta": 0.5, "adapters": True, "gradient_checkpointing": True},
    "mixture": {"family": "qwen3_moe"},
    "hybrid": {"family": "qwen3_5_text", "learning_rate": 0.01},
}
LONG_PROMPT = " ".join(f"<{3 + i % 37}>" for i in range(60))
RLOO_CASES: Mapping[str, dict[str, Any]] = {
    "kl": {"beta": 0.1},
    "no kl": {"beta": 0.0},
    "adapters": {"beta": 0.1, "adapters": True, "gradient_checkpointing": True},
    "mixture": {"family": "qwen3_moe", "router_aux_loss_coef": 0.1, "beta": 0.1},
    "hybrid": {"family": "qwen3_5_text", "learning_rate": 0.01},
}


class Indexed:
    """Mixin that tells the completions of a prompt apart, by a last token with the completion's index."""

    def _generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> Any:
        return super()._generate([f"{p} <{40 + i}>" for i, p in enumerate(prompts)], *args, **kwargs)  # type: ignore[misc]


class Grpo(Indexed, GRPOTrainer):
    pass


class SplitGrpo(Indexed, SequenceParallelGRPOTrainer):
    pass


class OwnLoss:
    """Mixin of a user, which reads the number of processes and calls the loss within the trainer's own."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        rows = slice(accelerator.process_index * len(inputs), (accelerator.process_index + 1) * len(inputs))
        gathered = accelerator.gather(found["advantages"])
        return {**found, "advantages": gathered[rows] + 0.1 * accelerator.num_processes}

    def compute_loss(self, model: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> Any:
        return 2 * self._compute_loss(model, inputs)  # type: ignore[attr-defined]


class OwnLossGrpo(OwnLoss, Grpo):
    pass


class SplitOwnLossGrpo(OwnLoss, SplitGrpo):
    pass


class Rloo(Indexed, RLOOTrainer):
    pass


class SplitRloo(Indexed, SequenceParallelRLOOTrainer):
    pass


class Distillation(Indexed, DistillationTrainer):
    pass


class SplitDistillation(Indexed, SequenceParallelDistillationTrainer):
    pass


class SplitShardedDistillation(Indexed, SequenceParallelDistillation, UsesFsdp2, DistillationTrainer):
    pass


class SplitShardedGrpo(Indexed, SequenceParallel, UsesFsdp2, GRPOTrainer):
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


def rollouts_with_experts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Returns the experts that the model itself chooses for all tokens."""
    found, routes = rollouts(prompts, trainer), []
    model, routers = trainer.accelerator.unwrap_model(trainer.model), list[Any]()
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            routers.append(module)
    for prompt, completion in zip(found["prompt_ids"], found["completion_ids"], strict=True):
        chosen = list[torch.Tensor]()
        hooks = [
            r.register_forward_hook(lambda _m, _a, output, chosen=chosen: chosen.append(output[2])) for r in routers
        ]
        with torch.no_grad():
            model(torch.tensor([[*prompt, *completion][:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        routes.append(torch.stack(chosen, 1).numpy())
    return {**found, "routed_experts": routes}


def fresh_family(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family, initializer_range=0.02))


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
    batch = {"per_device_train_batch_size": 8 // data_ranks, "per_device_eval_batch_size": 8 // data_ranks}
    case = {"num_generations": GENERATIONS, "max_completion_length": 24, "learning_rate": 0.1, **batch, **case}
    is_grpo, family, replays = issubclass(kind, GRPOTrainer), case.pop("family", None), case.pop("replay", False)
    if case.pop("compile_layers", False) and options:
        options["compile_layers"] = True
    if case.pop("generate", False) or not is_grpo:
        case["generation_kwargs"] = {"do_sample": False}
    else:  # the plain trainer chooses the experts of a replay by itself
        options["rollout_func"] = rollouts_with_experts if replays and options else rollouts
    make = fresh_model if family is None else partial(fresh_family, family)
    with shared_folder() as folder:
        make().save_pretrained(f"{folder}/model")  # of the reference
        dist.barrier()
        model = make()
        model.config._name_or_path = f"{folder}/model"
        config = GRPOConfig if is_grpo else RLOOConfig
        trainer = make_trainer(
            kind, config, folder, case, model, prompts(), len(prompts()), reward_funcs=rewards, **options
        )
        found = numbers(trainer)
    found["logs"] = [list(trainer._logs["completion"]), list(trainer._logs["extra"]["first"])]
    return found


def teacher(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(5)
    other = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), **other}))


def distill(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    case = {"learning_rate": 0.1, "max_completion_length": 12, "generation_kwargs": {"do_sample": False}, **case}
    case["per_device_eval_batch_size"], family = 4 // data_ranks, case.pop("family", None)
    model = fresh_model() if family is None else fresh_family(family)
    options["teacher_model"] = teacher(model.config.vocab_size)
    return trained(kind, DistillationConfig, case, data_ranks, model, prompts(), len(prompts()), batch=4, **options)


def check(
    plain: type[Trainer], ours: type[Trainer], case: Mapping[str, Any], world: int, regrouped: Sequence[str] = ()
) -> None:
    """Compares runs, except for metrics that TRL averages over micro-batches of `regrouped` rows."""
    for found, wanted in runs(run, plain, ours, case, world):
        assert "family" in case or any(np_changed(wanted))
        for got in found:
            for record in (*got["history"], *wanted["history"]):
                for name in regrouped:
                    record.pop(name, None)
            assert_equal(got, wanted)
            assert got["logs"] == wanted["logs"]


def np_changed(found: Numbers) -> list[bool]:
    before = {name: p.detach().numpy() for name, p in fresh_model().named_parameters()}
    return [name not in before or bool((before[name] != value).any()) for name, value in found["weights"].items()]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["generated"], GRPO_CASES))
def test_grpo_equals_one_process(case: str, world: int) -> None:
    check(Grpo, SplitGrpo, GRPO_CASES[case], world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except([], RLOO_CASES))
def test_rloo_equals_one_process(case: str, world: int) -> None:
    check(Rloo, SplitRloo, RLOO_CASES[case], world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except(["forward"], DISTILLATION_CASES))
def test_distillation_equals_one_process(case: str, world: int) -> None:
    check_equal(distill, Distillation, SplitDistillation, DISTILLATION_CASES[case], world)


@pytest.mark.slow
def test_distillation_with_fsdp2_equals_one_process() -> None:
    check_equal(distill, Distillation, SplitShardedDistillation, DISTILLATION_CASES["jsd"], 2)


@pytest.mark.parametrize("case", slow_except([], ["grpo, kl", "generated", "adapters"]))
def test_grpo_with_fsdp2_equals_one_process(case: str) -> None:
    check(Grpo, SplitShardedGrpo, GRPO_CASES[case], 2)


def graphs(rank: int) -> tuple[int, int]:
    """Returns how many lengths completions have, and the graphs of compiled layers."""
    torch._dynamo.utils.counters.clear()
    case = {"compile_layers": True, "max_steps": 2, "eval_strategy": "no", "per_device_train_batch_size": 2}
    more = {"gradient_accumulation_steps": 4}
    found = run(rank, SplitGrpo, {**case, **more}, 1, sequence_parallel_size=2)
    lengths = len({len(ids) for ids in found["logs"][0]})
    return lengths, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_layers_have_two_graphs_with_and_without_gradients_for_all_lengths() -> None:
    for lengths, found in spawn(2, graphs):
        assert lengths > 4
        assert found <= 4


PREFIX_CASES: Mapping[str, dict[str, Any]] = {
    "all weights": {"entropy_coef": 0.1},
    "kl, several micro-batches": {"beta": 0.1, "gradient_accumulation_steps": 2},
    "adapters": {"adapters": True, "beta": 0.1, "gradient_checkpointing": True},
    "windows": {"family": "gemma3_text", "learning_rate": 0.01},
    "sinks": {"family": "gpt_oss", "router_aux_loss_coef": 0.0, "learning_rate": 0.01},
    "mixture with router loss": {"family": "qwen3_moe", "router_aux_loss_coef": 0.1},
    "hybrid": {"family": "qwen3_5_text", "learning_rate": 0.01},
}


class SameOpening:
    """Mixin whose completions of a prompt share the prompt, and begin alike."""

    def _generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> Any:
        return super()._generate([f"{p} {LONG_PROMPT} <{40 + i % 2}>" for i, p in enumerate(prompts)], *args, **kwargs)  # type: ignore[misc]


class OpeningGrpo(SameOpening, GRPOTrainer):
    pass


class SplitOpeningGrpo(SameOpening, SequenceParallelGRPOTrainer):
    pass


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", slow_except([], PREFIX_CASES))
def test_completions_that_share_a_prompt_equal_one_process(case: str, world: int) -> None:
    """Also equal: completions that are equal, because the prompt's last token tells only two kinds apart."""
    regrouped = ("kl", "entropy") if "gradient_accumulation_steps" in PREFIX_CASES[case] else ()
    check(OpeningGrpo, SplitOpeningGrpo, PREFIX_CASES[case], world, regrouped)


@pytest.mark.slow
def test_rows_of_a_prompt_meet_in_micro_batches_without_another_update() -> None:
    """Metrics that TRL averages over micro-batches are those of other rows; losses and weights stay the same."""
    case = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "eval_strategy": "no"}
    ((found, wanted),) = runs(run, OpeningGrpo, SplitOpeningGrpo, case, 2)
    for got in found:
        assert [sorted(x) for x in got["logs"]] == [sorted(x) for x in wanted["logs"]]
        for ours, theirs in zip(got["history"], wanted["history"], strict=True):
            common = {name for name in theirs if name in ("loss", "grad_norm", "reward", "kl")}
            assert {name: ours[name] for name in common} == pytest.approx(
                {name: theirs[name] for name in common}, abs=1e-5
            )
        for name, weight in wanted["weights"].items():
            assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


@pytest.mark.slow
def test_a_subclass_sees_a_group_as_one_process() -> None:
    check(OwnLossGrpo, SplitOwnLossGrpo, {"max_steps": 1}, 2)


def small(
    rank: int, batch: int, function: dict[str, Any] | None, reward: Any = rewards, record: Any = len,
    rows: list[dict[str, str]] | None = None, **options: Any,
) -> list[Any] | str:  # fmt: skip
    """Trains for one step. Returns a record of each call of the rollout function, or the error.

    `function` has the fields that a rollout function adds; None lets the model generate.
    """
    asked = list[Any]()

    def counted(prompts: list[str], trainer: Any) -> dict[str, Any]:
        asked.append(record(prompts))
        return {**rollouts(prompts, trainer), **(function or {})}

    with tempfile.TemporaryDirectory() as folder:
        case = {"num_generations": 2, "max_completion_length": 8, "max_steps": 1, "eval_strategy": "no"}
        case["per_device_train_batch_size"], data = batch, Dataset.from_list(rows) if rows else prompts()
        options |= {"reward_funcs": reward, "rollout_func": None if function is None else counted}
        try:
            make_trainer(
                SequenceParallelGRPOTrainer, GRPOConfig, folder, case, fresh_model(), data, 1, **options
            ).train()
        except (ValueError, RuntimeError) as error:
            return str(error)
    return asked


def test_ranks_of_a_group_complete_a_part_of_the_prompts_each() -> None:
    assert spawn(3, small, 4, {}) == [[1], [1], [2]]


@pytest.mark.slow
def test_fewer_prompts_than_ranks_are_completed_by_the_model_but_not_by_a_rollout_function() -> None:
    assert spawn(4, two_groups, None) == [[]] * 4
    assert all(
        x.startswith("rollout_func would be called for 1 prompts on each of 2 ranks; ")
        for x in spawn(4, two_groups, {})
    )


def two_groups(rank: int, function: dict[str, Any] | None) -> list[int] | str:
    return small(rank, 1, function, sequence_parallel_size=2)


def test_what_cannot_be_scored_or_divided_stops_every_rank() -> None:
    for line in spawn(2, small, 4, {}, not_a_number):
        assert "reward function not_a_number returned nan for completion 1; return a finite number" in line
    for line in spawn(2, small, 3, {}):
        assert line.startswith("per_device_train_batch_size x steps_per_generation (3) times the groups of ranks that ")


def test_a_prompt_without_tokens_is_refused() -> None:
    for line in spawn(2, small, 2, None, rewards, len, [{"prompt": ""}]):
        assert line.startswith("generation failed on rank 0: ValueError: the prompt '' has no tokens; remove its row, ")


def scored_by_model(rank: int, weight: float) -> str:
    torch.manual_seed(0)
    with shared_folder() as folder:
        tokenizer().save_pretrained(folder)  # which TRL loads for the reward model
        config = LlamaConfig(**{**CONFIG.to_dict(), "num_labels": 1})
        model = LlamaForSequenceClassification(config)
        model.config._name_or_path = folder
        torch.nn.init.constant_(model.score.weight, weight)
        return str(small(rank, 4, {}, model))


@pytest.mark.parametrize("weight", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_a_reward_model_that_returns_no_number_stops_every_rank(weight: float) -> None:
    for line in spawn(2, scored_by_model, weight):
        assert re.match(r"reward model .* returned (nan|-?inf) for completion 0; check its weights", line)


def words(completions: list[str], **_: Any) -> list[str]:
    return ["good"] * len(completions)


def nothing(completions: list[str], **_: Any) -> None:
    return None


@pytest.mark.parametrize(
    "reward, line",
    [
        (words, "reward function words returned 'good' for completion 0; return a finite number, or None"),
        pytest.param(nothing, "reward function nothing returned None; return a list", marks=pytest.mark.slow),
    ],
)
def test_rewards_that_are_no_numbers_name_their_function(reward: Any, line: str) -> None:
    assert all(line in found for found in spawn(2, small, 4, {}, reward))


def not_a_number(completions: list[str], **_: Any) -> list[float]:
    return [0.0, float("nan"), 1.0, 2.0]


class Server:
    """Stand-in for the client of a vLLM server, which counts the completions that it is asked for."""

    asked = 0

    def __init__(self, **_: Any) -> None:
        self.updates = 0

    def init_communicator(self, **_: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], params: Any) -> None:
        assert len(metadata) == len(list(params))

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        Server.asked += n * len(prompts)
        completions = [completion([*ids, 3 * copy]) for ids in prompts for copy in range(n)]
        log_probs = [[[-3.5 - 0.01 * token] for token in ids] for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": log_probs}


def served(rank: int, kind: type[Trainer], data_ranks: int, case: Mapping[str, Any], options: Any) -> Numbers:
    vllm_generation.is_vllm_available = lambda *_, **__: True  # type: ignore[assignment]
    vllm_generation.VLLMClient = Server  # type: ignore[assignment, misc]
    case = {"use_vllm": True, "vllm_mode": "server", "generate": True, "max_steps": 2, "eval_strategy": "no", **case}
    found = run(rank, kind, case, data_ranks, **options)
    return {**found, "asked": Server.asked}


@pytest.mark.parametrize("world, size, case", [(2, 2, {}), pytest.param(4, 2, {}, marks=pytest.mark.slow),
    pytest.param(3, 3, {}, marks=pytest.mark.slow)])  # fmt: skip
def test_a_server_is_asked_once_for_each_completion(world: int, size: int, case: Mapping[str, Any]) -> None:
    wanted = spawn(world // size, served, GRPOTrainer, world // size, case, {})
    found = spawn(world, served, SequenceParallelGRPOTrainer, world // size, case, {"sequence_parallel_size": size})
    assert [x["asked"] for x in found] == [wanted[0]["asked"]] + [0] * (world - 1) and wanted[0]["asked"]
    for got in found:
        assert_equal(got, wanted[0])


def drawn(completions: list[str], **_: Any) -> Iterator[float]:
    return (float(torch.rand(())) for _ in completions)


class Later:
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(len(x)) for x in completions]


def of_server(completions: list[str], server: list[str], **_: Any) -> list[float]:
    return [1.0 / (x == "abcd") for x in server]  # else an error


def of_each(completions: list[str], scores: list[float], **_: Any) -> list[float]:
    return scores


@pytest.mark.parametrize("reward", [drawn, *(pytest.param(x, marks=pytest.mark.slow) for x in (Later(), of_server))])
def test_rewards_may_be_drawn_awaited_and_read_from_a_rollout(reward: Any) -> None:
    assert spawn(2, small, 4, {"server": "abcd"}, reward) == [[2], [2]]


def test_a_rollout_whose_fields_do_not_fit_is_refused() -> None:
    for line in spawn(2, small, 4, {"scores": [1.0]}, of_each):
        assert line.startswith("rollout_func returned 1 scores for 2 completions; ")
    (line,) = spawn(1, small, 4, {"routed_experts": [0] * 4})
    assert line.startswith("rollout_func returned routed_experts, which needs sequence_parallel_size > 1; ")


def random_numbers(_prompts: list[str]) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_ranks_of_a_group_draw_other_samples_from_every_generator() -> None:
    (first,), (second,) = spawn(2, small, 4, {}, rewards, random_numbers)
    assert all(x != y for x, y in zip(first, second, strict=True))
