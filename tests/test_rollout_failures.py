"""Failures on one rank or at a vLLM server while completions are generated end all ranks with the same line."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from trainer_numbers import common, fresh_model, tokenizer
from worlds import spawn

pytest.importorskip("trl")

from test_integrations_grpo import Server, prompts, rewards, rollouts
from trl import GRPOConfig
from trl.generation import vllm_generation

from lightseq.integrations import SequenceParallelGRPOTrainer


class StuckServer(Server):
    def update_named_params(self, metadata: list[Any], params: Iterable[Any]) -> None:
        raise ConnectionError("no update")


def answers(change: Callable[[dict[str, Any]], Any]) -> type[Server]:
    """Returns a server that changes the completions and log-probabilities that it has generated."""

    class Changed(Server):
        def generate(self, prompts: list[list[int]], n: int, **options: Any) -> Any:
            return change(super().generate(prompts, n, **options))

    return Changed


def refuse(_found: dict[str, Any]) -> None:
    raise ConnectionError("connection refused")


FOREIGN = answers(lambda found: found | {"logprobs": [[[-9.0] for _ in ids] for ids in found["completion_ids"]]})


def one_rank_fails(prompts: list[str], trainer: Any) -> dict[str, Any]:
    if dist.get_rank() == 1:
        raise KeyError("answer")
    return rollouts(prompts, trainer)


def one_rank_exits(prompts: list[str], trainer: Any) -> dict[str, Any]:
    if dist.get_rank() == 1:
        sys.exit("no sandbox")
    return rollouts(prompts, trainer)


def exits(completions: list[Any], **_: Any) -> list[float]:
    sys.exit("no sandbox")


def one_rank_forgets(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return rollouts(prompts[:1] if dist.get_rank() == 1 else prompts, trainer)


def no_dict(prompts: list[str], trainer: Any) -> Any:
    return [rollouts(prompts, trainer)]


def changed_on_one_rank(prompts: list[str], trainer: Any, **changes: Any) -> dict[str, Any]:
    """Replaces the last row of fields on rank 1, or all rows if the change is None."""
    found = rollouts(prompts, trainer)
    found["logprobs"] = [[-4.0] * len(ids) for ids in found["completion_ids"]]
    lengths = [len(x) + len(y) for x, y in zip(found["prompt_ids"], found["completion_ids"], strict=True)]
    found["routed_experts"] = [np.arange(2).reshape(1, 1, 2).repeat(n, 0).repeat(2, 1) for n in lengths]
    found["env_mask"] = [[1] * len(ids) for ids in found["completion_ids"]]
    if dist.get_rank() == 1:
        for name, value in changes.items():
            last = value(found[name][-1]) if callable(value) else value
            found[name] = None if value is None else [*found[name][:-1], *last]
    return found


def changed(**changes: Any) -> Any:
    return partial(changed_on_one_rank, **changes)


def with_stuck_server(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return rollouts(prompts, trainer)


def run(source: Any, size: int, reward: Any = rewards, **options: Any) -> str:
    """Trains for one step on completions of a server or of a rollout function. Returns the error."""
    is_server, uses_server = isinstance(source, type), isinstance(source, type) or source is with_stuck_server
    vllm_generation.is_vllm_available = lambda *_, **__: True  # type: ignore[assignment]
    vllm_generation.VLLMClient = source if is_server else StuckServer
    with tempfile.TemporaryDirectory() as folder:
        settings = {"num_generations": 2, "max_completion_length": 24, "max_steps": 1, "eval_strategy": "no"}
        server = {"use_vllm": True, "vllm_mode": "server"} if uses_server else {}
        trainer = SequenceParallelGRPOTrainer(
            fresh_model(),
            args=GRPOConfig(**common(folder, per_device_train_batch_size=4, **settings, **server, **options)),
            reward_funcs=reward,
            train_dataset=prompts(),
            processing_class=tokenizer(),
            rollout_func=None if is_server else source,
            sequence_parallel_size=size,
        )
        before = [p.detach().clone() for p in trainer.model.parameters()]
        try:
            trainer.train()
        except (ValueError, RuntimeError, SystemExit) as error:
            assert all(p.equal(old) for p, old in zip(trainer.model.parameters(), before, strict=True))
            return f"{type(error).__name__}: {error}"
    return ""


def errors(rank: int, size: int) -> list[str]:
    return [run(source, size, **options) for source, options, _ in CASES]


ROUTES = "ValueError: routed_experts of completion"
FAILED = "SharedError: generation failed on rank 1: ValueError: "
OF_ANSWERS = ("completion_ids", "logprobs")
SERVER = "SharedError: ValueError: the vLLM server  returned "
CASES: list[tuple[Any, dict[str, Any], str]] = [
    (answers(refuse), {}, "SharedError: ConnectionError: connection refused"),
    (
        answers(lambda _: time.sleep(60)),
        {"ddp_timeout": 1},
        "SharedError: TimeoutError: the vLLM server  has not answered within 1 s; other ",
    ),
    (answers(lambda found: found | {name: found[name][:-1] for name in OF_ANSWERS}), {}, SERVER),
    (answers(lambda found: found | {"logprobs": None}), {}, f"{SERVER}no logprobs; "),
    (answers(lambda found: {name: found[name] for name in ("prompt_ids", "completion_ids")}), {}, f"{SERVER}no logp"),
    (
        answers(lambda found: found | {name: [[], *found[name][1:]] for name in OF_ANSWERS}),
        {},
        f"{SERVER}completion 0 with 0 tokens and 0 log-",
    ),
    (answers(lambda found: found | {"logprobs": []}), {}, f"{SERVER}0 rows of logprobs for "),
    (StuckServer, {}, "SharedError: ConnectionError: no update"),
    (FOREIGN, {}, "ValueError: the log-probabilities that vLLM returned differ from the trainer's by 4."),
    (one_rank_fails, {}, "SharedError: generation failed on rank 1: KeyError: 'answer'"),
    (one_rank_exits, {}, "SharedError: generation failed on rank 1: SystemExit: no sandbox"),
    (one_rank_forgets, {}, "SharedError: generation failed on rank 1: ValueError: 1 completions were returned for 2 "),
    (with_stuck_server, {}, "SharedError: generation failed on rank 0: ConnectionError: no update"),
    (no_dict, {}, "SharedError: generation failed on rank 0: ValueError: rollout_func returned a list; return a dict "),
    (changed(completion_ids=[[]], logprobs=[[]]), {}, f"{FAILED}completion_ids 1 of a rollout have no tokens; "),
    (changed(prompt_ids=[[]]), {}, f"{FAILED}prompt_ids 1 of a rollout have no tokens; "),
    (changed(prompt_ids=[[4, -5]]), {}, f"{FAILED}prompt_ids 1 of a rollout have token id -5; "),
    (changed(completion_ids=[[4.5]]), {}, f"{FAILED}completion_ids 1 of a rollout are not whole numbers; "),
    (changed(completion_ids=[["4"]]), {}, f"{FAILED}completion_ids 1 of a rollout are not whole numbers; "),
    (changed(completion_ids=None), {}, f"{FAILED}rollout_func returned None as completion_ids; "),
    (changed(logprobs=[]), {}, f"{FAILED}1 logprobs were returned for 2 prompts; return one for each, in order"),
    (changed(env_mask=[]), {}, f"{FAILED}1 env_mask were returned for 2 prompts; return one for each, in order"),
    (changed(logprobs=None), {}, "ValueError: completion 2 has no log-probabilities, but others have; "),
    (changed(env_mask=None), {}, "ValueError: completion 2 has no entries in its mask (env_mask), but others have; "),
    (changed(logprobs=[None]), {}, "ValueError: completion 3 has no log-probabilities, but others have; "),
    (changed(routed_experts=None), {}, f"{ROUTES} 2 are missing, but others are there; "),
    (
        changed(routed_experts=lambda routes: [routes[:, :1]]),
        {},
        f"{ROUTES} 3 are (layers, experts of a token) (1, 2), but of completion 0 ",
    ),
    (changed(routed_experts=lambda routes: [routes * 1.0]), {}, f"{ROUTES} 3 are ("),
    (changed(routed_experts=lambda routes: [routes * 0 + 3]), {}, f"{ROUTES} 3 name expert 3 twice for a token; "),
]


@pytest.mark.parametrize("world, size", [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_all_ranks_raise_what_fails_on_one_before_an_update(world: int, size: int) -> None:
    wanted = [line for *_, line in CASES]
    for found in spawn(world, errors, size):
        assert [line[: len(start)] for line, start in zip(found, wanted, strict=True)] == wanted


def scored_by_exit(rank: int) -> str:
    return run(rollouts, 2, reward=exits)


def test_no_rank_waits_for_a_reward_function_that_exits() -> None:
    first, second = spawn(2, scored_by_exit)
    assert (first, second) == ("SystemExit: no sandbox", f"RuntimeError: a reward function failed on rank 0: {first}")


def accepted(rank: int) -> list[str]:
    """Trains on what is far from the trainer, as a user may ask for."""
    truncated = {"top_k": 5}
    return [run(FOREIGN, 2, **x) for x in (truncated, {"vllm_importance_sampling_correction": False})]


@pytest.mark.slow
def test_far_log_probabilities_are_accepted_where_a_user_asks_for_them() -> None:
    assert spawn(2, accepted) == [["", ""]] * 2
