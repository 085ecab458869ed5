"""The peer `autosp`: DeepSpeed's AutoSP, which a compiler pass splits over ranks, as in DeepCompile's `passes`.

The pass cuts ids, labels and positions, and puts Ulysses' all-to-all around SDPA. It allows ZeRO stage 1 at most: every
rank has all bfloat16 weights, and a part of the float32 master weights and optimizer states. SDPA runs
FlashAttention-2, the result of which AutoSP's partitioner keeps; it decides what else is recomputed. The loss needs all
logits at once. The whole model is compiled by Inductor. torch's fused AdamW, clipping by DeepSpeed.
"""

import contextlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.step_peers.peer import CLIP_NORM, Job, Peer, StepOutcome, plain_tensor
from lightseq.data.batches import Batch

MASKLESS = "autosp_sdpa"  # transformers makes a mask of all pairs for "sdpa" when it compiles with torch before 2.14


def prepare(job: Job) -> Peer:
    if job.world.size == 1:
        raise ValueError("AutoSP needs at least two ranks")
    job.check_heads("AutoSP")
    job.check_divides(job.world.size, "AutoSP")
    import deepspeed
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    deepspeed.init_distributed(dist_backend="nccl" if job.on_gpu else "gloo")
    engine = make_engine(job)
    places = job.on_device(job.positions())

    def step(batch: Batch) -> StepOutcome:
        ids, labels = job.on_device(batch.input_ids), job.on_device(batch.labels)
        prepare_autosp_inputs(ids, labels, places)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if job.on_gpu else contextlib.nullcontext():
            loss = engine(ids, places, labels)
            engine.backward(loss)
            engine.step()
        return StepOutcome(loss.detach() / job.world.size, plain_tensor(engine.get_global_grad_norm()))

    kernel = {"kernel": "aten", "transport": "nccl"} if job.on_gpu else job.sdpa_facts
    return Peer(step, {"schedule": "ulysses", **kernel, "remat": "partitioner", "compile": True})


def make_engine(job: Job) -> Any:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "sequence_parallel_size": job.world.size,
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": job.on_gpu},
        "zero_optimization": {"stage": 1},
        "compile": {"deepcompile": True, "passes": ["autosp"]},
    }
    ALL_ATTENTION_FUNCTIONS.register(MASKLESS, sdpa_attention_forward)
    model = job.whole_model()
    model.set_attn_implementation(MASKLESS)
    loss_model = LossModel(model, job.length // job.world.size)
    engine, *_ = deepspeed.initialize(model=loss_model, optimizer=job.adamw(loss_model), config=settings)
    # DeepSpeed rounds RoPE frequencies to bfloat16, which is wrong for distant positions.
    model.model.rotary_emb = LlamaRotaryEmbedding(config=job.config).to(job.world.device)
    engine.train()
    engine.compile(backend="inductor")
    return engine


class LossModel(nn.Module):
    """A language model that returns the mean loss over this rank's tokens, whose average over ranks is the mean."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / self.tokens
