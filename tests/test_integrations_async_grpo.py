"""TRL's AsyncGRPOTrainer with sequences split over ranks gives the numbers of TRL on one process per group."""

import queue
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import slow_except
from torch import Tensor
from trainer_numbers import (
    ADAPTERS,
    CONFIG,
    STEPS,
    Numbers,
    UsesFsdp2,
    assert_equal,
    common,
    fresh_model,
    runs,
    shared_folder,
    split,
    tokenizer,
)
from worlds import spawn

pytest.importorskip("trl.experimental.async_grpo")

import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Trainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from benchmarks.tiny_models import tiny_config
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.integrations import SequenceParallelAsyncGRPOTrainer
from lightseq.integrations.async_grpo import SequenceParallelAsync, _layers_pass_trls_check
from lightseq.integrations.tree_rows import nodes_of_paths
from lightseq.schedule.nodes import Nodes

SAMPLES = 8  # of an update
CASES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"token_budget": 100, "gradient_accumulation_steps": 2},
    "adapters": {"adapters": True, "gradient_checkpointing": True},
    "windows": {"family": "gemma3"},
    "compiled": {"compile_layers": True},
    "mixture with router loss": {"family": "qwen3_moe", "router_aux_loss_coef": 0.1},
}


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, q_edges: Tensor, k_edges: Tensor, *_: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Computes what FlashAttention-3 does for TRL, on a CPU."""
    assert causal
    out = []
    for i in range(len(q_edges) - 1):
        rows, keys = slice(q_edges[i], q_edges[i + 1]), slice(k_edges[i], k_edges[i + 1])
        one = [x.transpose(0, 1) for x in (q[rows], k[keys], v[keys])]
        after = (
            torch.arange(one[0].shape[1])[:, None] + one[1].shape[1] - one[0].shape[1] - torch.arange(one[1].shape[1])
        )
        mask = (after >= 0) & (after <= window_size[0] if window_size[0] >= 0 else after >= 0)
        out.append(F.scaled_dot_product_attention(*one, mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


class Worker:
    """Rollouts of a few prompts, whose answers begin alike; other lengths for every rollout, or `length` for all."""

    def __init__(self, length: int | None = None) -> None:
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        draw = torch.Generator().manual_seed(3)

        def ids(count: int) -> list[int]:
            return torch.randint(3, CONFIG.vocab_size, (count,), generator=draw).tolist()

        for group in range(2 * STEPS * SAMPLES):
            prompt, common_part = ids(9 + group % 5), ids(group % 3)
            for answer in range(4):
                own = 2 + (5 * answer + group) % 11 if length is None else length - len(common_part)
                completion = [*common_part, *ids(own)]
                row = [*prompt, *completion]
                mask = [0] * len(prompt) + [1] * len(completion)
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[],
                        completion=[],
                        input_ids=np.array(row),
                        completion_mask=np.array(mask),
                        old_log_probs=-4 + 0.3 * torch.rand(len(row), generator=draw).numpy(),
                        advantage=float(answer) - 1.5,
                        model_version=0,
                        group_id=group,
                        metrics={"reward": float(answer)},
                    )
                )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("there are no more rollouts")


class Weights:
    """Receiver of weights. Keeps a checksum of the last that were sent."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def send_weights(self, weights: Any) -> None:
        self.sums.append(sum(float(x.double().abs().sum()) for _, x in weights))

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def model_of(family: str | None) -> Any:
    if family is None:
        return fresh_model()
    torch.manual_seed(0)
    if family != "gemma3":
        return AutoModelForCausalLM.from_config(tiny_config(family, initializer_range=0.02))
    sizes = {key: getattr(CONFIG, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    types = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, sliding_window=5, layer_types=types))


def run(rank: int, kind: type[Trainer], case: Mapping[str, Any], data_ranks: int, **options: Any) -> Numbers:
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # which asks CUDA
    case = dict(case)
    adapters = LoraConfig(**ADAPTERS) if case.pop("adapters", False) else None
    family, compiles, length = (case.pop(name, None) for name in ("family", "compile_layers", "length"))
    if compiles and options:
        options["compile_layers"] = True
    with shared_folder() as folder:
        if rank == 0:
            model_of(family).save_pretrained(f"{folder}/model")
            tokenizer().save_pretrained(f"{folder}/model")
        dist.barrier()
        changes = {
            "learning_rate": 0.1,
            "per_device_train_batch_size": SAMPLES // data_ranks,
            "token_budget": 0,
            "max_staleness": 100,
            "dtype": "float32",
            "eval_strategy": "no",
            **case,
        }
        weights = Weights()
        trainer = kind(
            f"{folder}/model", args=AsyncGRPOConfig(**common(folder, **changes)), peft_config=adapters,
            train_dataset=[{"prompt": "<3>"}], processing_class=tokenizer(),
            rollout_worker=Worker(length) if rank == 0 else None, weight_transfer=weights, **options,
        )  # fmt: skip
        trainer.train()
    timed = ("perf/", "_s", "runtime", "per_second", "queue_size", "total_flos")
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "history": [
            {k: v for k, v in record.items() if not any(word in k for word in timed)}
            for record in trainer.state.log_history
        ],
        "weights": {name: whole_tensor(p.detach()).numpy().copy() for name, p in model.named_parameters()},
        "flos": trainer.state.total_flos,
        "sent": weights.sums,
    }


class SplitShardedAsyncGrpo(SequenceParallelAsync, UsesFsdp2, AsyncGRPOTrainer):
    pass


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(["budget"], CASES))
def test_async_grpo_equals_one_process(case: str, world: int) -> None:
    for found, wanted in runs(run, AsyncGRPOTrainer, SequenceParallelAsyncGRPOTrainer, CASES[case], world):
        assert_all_equal(found, wanted)


def assert_all_equal(found: list[Numbers], wanted: Numbers) -> None:
    for rank, got in enumerate(found):
        # Only the first rank knows the samples.
        of_all = [
            r if rank == 0 else {k: r[k] for k in mine}
            for r, mine in zip(wanted["history"], got["history"], strict=True)
        ]
        assert_equal(got, {**wanted, "history": of_all})
    assert found[0]["sent"] == pytest.approx(wanted["sent"], rel=1e-6)


@pytest.mark.slow
def test_async_grpo_with_fsdp2_equals_one_process() -> None:
    ((found, wanted),) = runs(run, AsyncGRPOTrainer, SplitShardedAsyncGrpo, CASES["plain"], 2)
    assert_all_equal(found, wanted)


class TakesRecurrences(AsyncGRPOTrainer):
    """TRL's trainer, which is right about a recurrent layer where each row has one sample."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _layers_pass_trls_check():
            super().__init__(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_recurrent_layers_follow_the_tree_of_a_row(family: str, world: int) -> None:
    case = {"family": family, "learning_rate": 0.01, "length": 6}  # a mean over micro-batches is then one over samples
    one_by_one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": SAMPLES}
    wanted = spawn(1, run, TakesRecurrences, {**case, **one_by_one}, 1)[0]
    for got in spawn(world, split, run, SequenceParallelAsyncGRPOTrainer, case, world, world):
        for ours, theirs in zip(got["history"][:STEPS], wanted["history"][:STEPS], strict=True):
            for name in ("loss", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
        for name, weight in wanted["weights"].items():
            assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


def refusal(rank: int, family: str) -> str:
    with pytest.raises(ValueError) as error:
        run(rank, SequenceParallelAsyncGRPOTrainer, {"family": family}, 1, sequence_parallel_size=1)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_recurrent_layers_on_one_rank_are_refused(family: str) -> None:
    assert "would scan across the samples of a row on one rank" in spawn(1, refusal, family)[0]


def test_paths_of_a_trie_become_nodes() -> None:
    # a b | c d | e, where c d and e follow a b; and another root f
    edges, key_edges = np.array([0, 2, 4, 5, 6]), np.array([0, 2, 6, 9, 10])
    keys = np.array([0, 1, 0, 1, 2, 3, 0, 1, 4, 5])
    assert nodes_of_paths(edges, key_edges, keys) == Nodes((0, 2, 4, 5, 6), (-1, 0, 0, -1))
