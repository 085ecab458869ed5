"""The peer `deepspeed`: ZeRO-3 and Ulysses sequence parallelism, as in DeepSpeed's ALST tutorial.

bfloat16 with float32 master weights. UlyssesSPAttentionHF around SDPA with cuDNN. MLP tiles have as many tokens as the
hidden size, loss tiles 1 GiB of float32 logits. Every layer is checkpointed by transformers. torch's fused AdamW,
clipping by DeepSpeed. No compilation.

`deepspeed-offload` also offloads: weights, gradients and optimizer state are in host memory, where torch's fused AdamW
updates them, and activations stay on the GPU.
"""

import contextlib
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.step_peers.peer import CLIP_NORM, SEED, Job, Peer, StepOutcome, plain_tensor
from lightseq.data.batches import Batch
from lightseq.models import random_weights

LOGIT_BYTES = 2**30


def prepare_offloaded(job: Job) -> Peer:
    return prepare(job, offload=True)


def prepare(job: Job, offload: bool = False) -> Peer:
    if job.world.size == 1:
        raise ValueError("DeepSpeed's Ulysses needs at least two ranks")
    job.check_heads("DeepSpeed's Ulysses")
    job.check_divides(job.world.size, "DeepSpeed's Ulysses")
    import deepspeed

    if not job.on_gpu:  # avoids compiling a shared-memory all-reduce; gloo does that
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed(dist_backend="nccl" if job.on_gpu else "gloo")
    settings = settings_of(job)
    if offload:
        place = {"device": "cpu", "pin_memory": job.on_gpu}
        settings["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
        settings["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW, as without offloading
    engine = make_engine(job, settings)
    places = job.local(job.positions())

    def step(batch: Batch) -> StepOutcome:
        ids, labels = job.local(batch.input_ids), job.local(batch.labels)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if job.takes_cudnn else contextlib.nullcontext():
            loss = engine(ids, places, labels)
            engine.backward(loss)
            engine.step()
        return StepOutcome(loss.detach() / job.world.size, plain_tensor(engine.get_global_grad_norm()))

    facts = {"schedule": "ulysses", "remat": "full", "compile": False}
    return Peer(step, {**facts, **job.sdpa_facts})


def settings_of(job: Job) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "sequence_parallel_size": job.world.size,
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": job.on_gpu},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    }


def make_engine(job: Job, settings: dict[str, Any]) -> Any:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    job.config._attn_implementation = "sdpa"
    job.config.head_dim = job.head_dim  # DeepSpeed reads this attribute, which may be None
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=SimpleNamespace(config=job.config),
        core_attn_implementation="sdpa",
        sequence_parallel_size=job.world.size,
        micro_batch_size=1,
        seq_length=job.length,
        seq_length_is_variable=False,
    )
    with deepspeed.zero.Init(config_dict_or_path=settings, mpu=groups):
        model = LlamaForCausalLM(job.config)
    # ZeRO's Init rounds RoPE frequencies to bfloat16, which is wrong for distant positions.
    model.model.rotary_emb = LlamaRotaryEmbedding(config=job.config).to(job.world.device)
    draw_weights(model, job)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        layer.mlp.forward = partial(tiled_mlp, layer.mlp)
    loss_model = LossModel(model, job.length // job.world.size)
    engine, *_ = deepspeed.initialize(model=loss_model, optimizer=job.adamw(loss_model), config=settings, mpu=groups)
    engine.train()
    return engine


def draw_weights(model: LlamaForCausalLM, job: Job) -> None:
    """Draws the initial weights, equal for all implementations."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if job.world.is_main:
            random_weights.initialize(model, SEED)


# ---- tiles ----------------------------------------------------------------------------------------------------------


def tiled_mlp(mlp: Any, x: Tensor) -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    return TiledMLP.apply(gated, mlp, x, math.ceil(x.shape[1] / x.shape[2]), weights)


def gated(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))


class LossModel(nn.Module):
    """A language model that computes the mean loss over local tokens in tiles.

    ZeRO-3 averages gradients over ranks, which is correct because all ranks have equally many targets.
    """

    def __init__(self, model: LlamaForCausalLM, tokens: int) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        tiles = math.ceil(labels.numel() * self.model.config.vocab_size * 4 / LOGIT_BYTES)
        tiled = self.checkpointed if self.model.config.tie_word_embeddings else self.fused
        return tiled(hidden, labels, tiles)

    def fused(self, hidden: Tensor, labels: Tensor, tiles: int) -> Tensor:
        """Runs ALST's loss. Divides inside tiles; later division would scale only the hidden states' gradient."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        head = [self.model.lm_head.weight]
        return TiledFusedLogitsLoss.apply(self.tile_loss, self.model, hidden, labels, None, tiles, head, "sum")

    def checkpointed(self, hidden: Tensor, labels: Tensor, tiles: int) -> Tensor:
        """Runs checkpointed tiles for models that tie embeddings and head.

        ZeRO-3 accepts a weight's gradient once per step. ALST's loss would produce one in the forward pass, and the
        embedding another in the backward pass.
        """
        tiled = zip(hidden.chunk(tiles, dim=1), labels.chunk(tiles, dim=1), strict=True)
        losses = [checkpoint(self.tile_loss, self.model, x, y, use_reentrant=False) for x, y in tiled]
        return torch.stack(losses).sum()

    def tile_loss(self, model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / self.tokens
