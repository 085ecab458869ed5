"""Tiny model, rows and updates with verl, and the numbers in which two of its engines must agree."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss, sft_loss

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIG = LlamaConfig(**SIZES)
TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
LENGTHS = (50, 17, 33, 60, 24, 9, 41, 35)  # of the rows; a third of each is the prompt
TOKENS = 128  # of a micro-batch, over the ranks that share it
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}


@dataclass(frozen=True)
class Case:
    """One update."""

    loss: str = "sft"
    lora_rank: int = 0
    temperature: float = 1.0
    checkpointing: bool = False


def save_model(folder: str, config: PreTrainedConfig = CONFIG) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def model_config(folder: str, ours: bool, **changes: Any) -> HFModelConfig:
    return HFModelConfig(
        path=folder,
        load_tokenizer=False,
        external_lib="lightseq.integrations.verl",
        use_remove_padding=ours,  # verl's own needs flash-attention for it
        override_config={"attn_implementation": "sdpa"},
        **changes,
    )


def make_engine(folder: str, case: Case, sequence_ranks: int | None, **changes: Any) -> Any:
    """Makes the engine to test, or verl's own without `sequence_ranks`."""
    ours = sequence_ranks is not None
    model = model_config(
        folder, ours, lora_rank=case.lora_rank, lora_alpha=8, enable_gradient_checkpointing=case.checkpointing
    )
    settings: dict[str, Any] = {"mixed_precision": FLOAT32, "use_torch_compile": False, **changes}
    config: FSDPEngineConfig
    kind: type
    if ours:
        from lightseq.integrations.verl import LightseqEngineConfig

        config = LightseqEngineConfig(**{"ulysses_sequence_parallel_size": sequence_ranks, **settings})
        kind = EngineRegistry.get_engine_cls("language_model", "lightseq")
    else:
        config, kind = FSDPEngineConfig(strategy="fsdp2", **settings), FSDPEngineWithLMHead
    # Not AdamW and no clipping: they would hide gradients of another scale.
    optimizer = FSDPOptimizerConfig(
        lr=0.5, optimizer="SGD", weight_decay=0.0, clip_grad=1e9, lr_warmup_steps=0, total_training_steps=9
    )
    saved = ["model", "optimizer", "extra", *(() if case.lora_rank else ("hf_model",))]
    checkpoints = CheckpointConfig(save_contents=saved, load_contents=saved[:3])
    engine = kind(model, config, optimizer, checkpoints)
    torch.manual_seed(1)  # of adapters
    engine.initialize()
    return engine


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def own_rows(engine: Any) -> list[int]:
    """Returns the indices of the rows that a data-parallel rank trains on."""
    return list(range(engine.get_data_parallel_rank(), len(LENGTHS), engine.get_data_parallel_size()))


def batch(engine: Any, case: Case) -> TensorDict:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, CONFIG.vocab_size, (n,), generator=generator) for n in LENGTHS]
    answers = [[torch.randn(n - n // 3, generator=generator) for _ in range(3)] for n in LENGTHS]
    own, ours = own_rows(engine), engine.engine_config.strategy == "lightseq"
    tensors = {
        "input_ids": nested([rows[i] for i in own]),
        "position_ids": nested([torch.arange(LENGTHS[i]) for i in own]),
        "loss_mask": nested([(torch.arange(LENGTHS[i]) >= LENGTHS[i] // 3).long() for i in own]),
    }
    if case.loss == "ppo":
        tensors |= {
            "prompts": nested([rows[i][: LENGTHS[i] // 3] for i in own]),
            "responses": nested([rows[i][LENGTHS[i] // 3 :] for i in own]),
            "response_mask": nested([torch.ones(LENGTHS[i] - LENGTHS[i] // 3) for i in own]),
            "advantages": nested([answers[i][0] for i in own]),
            "old_log_probs": nested([-4.16 + 0.2 * answers[i][1] for i in own]),
            "ref_log_prob": nested([-4.16 + 0.2 * answers[i][2] for i in own]),
        }
    settings = {
        "use_remove_padding": ours,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": TOKENS // (engine.ulysses_sequence_parallel_size if ours else 1),
        "temperature": case.temperature,
        "global_batch_size": len(LENGTHS),
        "calculate_entropy": case.loss == "ppo",
        "pad_mode": "no_padding",
        "pad_token_id": 0,
    }
    return tu.get_tensordict(tensors, settings)


def loss_function(case: Case) -> Callable[..., Any]:
    if case.loss == "sft":
        return partial(sft_loss, config=None)
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        entropy_coeff=0.05,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    return partial(ppo_loss, config=config)


def update(engine: Any, case: Case) -> dict[str, float]:
    """Trains on all rows once, and returns the loss, its parts and the gradient norm."""
    with engine.train_mode():
        output = engine.train_batch(batch(engine, case), loss_function(case))
    norm = torch.tensor(0.0 if not engine.is_mp_src_rank_with_outputs() else output["metrics"].pop("grad_norm"))
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    found = {"loss": sum(output["loss"])}
    for name in ("actor/pg_loss", "actor/entropy_loss", "kl_loss"):
        if name in output["metrics"]:
            found[name] = float(output["metrics"][name].aggregate())
    values = torch.tensor(list(found.values()))
    dist.all_reduce(values, group=engine.get_data_parallel_group())
    averages = (values / engine.get_data_parallel_size()).tolist()
    return {"grad_norm": norm.item(), **dict(zip(found, averages, strict=True))}


def values_of_rows(engine: Any, case: Case) -> dict[int, Any]:
    """Returns log-probabilities and entropies (2, length - 1) of every row, without the last token's."""
    data = batch(engine, case)
    tu.assign_non_tensor(data, calculate_entropy=True)
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    pairs = zip(output["log_probs"].unbind(), output["entropy"].unbind(), strict=True)
    own = {i: torch.stack(pair)[:, :-1].numpy() for i, pair in zip(own_rows(engine), pairs, strict=True)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {i: x for rows in everyone for i, x in rows.items()}


def weights(engine: Any) -> dict[str, Any]:
    """Returns the trained parameters."""
    trained = {name: p.detach() for name, p in engine.module.named_parameters() if p.requires_grad}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).numpy().copy() for name, p in trained.items()}


def exported(engine: Any, base_sync_done: bool) -> tuple[dict[str, Any], Any]:
    """Returns the weights that rollouts get, and the config of an adapter."""
    named, adapter = engine.get_per_tensor_param(base_sync_done=base_sync_done)
    return {name: x.detach().float().numpy().copy() for name, x in named}, adapter


def numbers(engine: Any, case: Case) -> dict[str, Any]:
    """Makes two updates, because the first one leaves half of an adapter as it is."""
    updates = [update(engine, case) for _ in range(2)]
    return {"updates": updates, "rows": values_of_rows(engine, case), "weights": weights(engine)}
