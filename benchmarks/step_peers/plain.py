"""The peer `plain`: a training step from well-known parts, the baseline for all others.

Transformers' Llama with FSDP2 over all ranks: a unit per layer, bfloat16 gathered from float32 shards, gradients
summed in float32. Ulysses by NCCL all-to-all around FlashAttention-4, cuDNN or torch's CPU kernel, as one operator.
Every layer is checkpointed except for that operator's results. Chunked loss, compiled layers, fused AdamW, clipping by
global norm. Shapes: B batch, S sequence, H heads, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.attention_peers.ulysses import exchange
from benchmarks.step_peers.peer import CLIP_NORM, Job, Peer, StepOutcome, plain_tensor
from lightseq.data.batches import Batch
from lightseq.kernels.attention.base import Kernel, KernelSpec, Saved, compute_capability
from lightseq.kernels.attention.registry import KERNELS
from lightseq.kernels.attention.tile_kernel_choice import select

NAME = "plain_ulysses"
LOSS_TOKENS = 4096


def prepare(job: Job) -> Peer:
    job.check_heads("Ulysses")
    job.check_divides(job.world.size, "Ulysses")
    kernel = select("auto", spec_of(job.world.device, job.dtype, job.head_dim)).kernel.name
    assert dist.group.WORLD is not None
    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(ulysses, kernel=kernel, group=dist.group.WORLD.group_name))
    model = job.whole_model()
    model.set_attn_implementation(NAME)
    facts = {"schedule": "ulysses", "kernel": kernel, "remat": "attention", "compile": job.on_gpu}
    step = training_step(LossModel(model), job, job.local)
    return Peer(step, {**facts, "transport": "nccl" if job.on_gpu else "gloo"})


def training_step(
    loss_model: "LossModel", job: Job, to_rank: Callable[[Tensor], Tensor], sequences: int = 1
) -> Callable[[Batch], StepOutcome]:
    """Checkpoints, compiles and shards a model, and returns the function that trains it on a batch.

    `to_rank` returns the tokens that this rank computes. All ranks together compute `sequences` sequences of a batch.
    """
    for layer in loss_model.model.model.layers:
        layer.forward = checkpointed(layer.forward)
        if job.on_gpu:
            layer.forward = torch.compile(layer.forward)
    shard_parameters(loss_model, job)
    optimizer = job.adamw(loss_model)
    places = to_rank(job.positions())

    def step(batch: Batch) -> StepOutcome:
        loss = loss_model(to_rank(batch.input_ids), places, to_rank(batch.labels)) / (batch.valid_tokens * sequences)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(loss_model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return StepOutcome(loss.detach(), plain_tensor(norm))

    return step


# ---- the model ------------------------------------------------------------------------------------------------------


class LossModel(nn.Module):
    """A language model that returns the sum of -log p over local labels, computed in chunks."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.total_loss(hidden[0], labels[0])

    def total_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        chunks = zip(hidden.split(LOSS_TOKENS), labels.split(LOSS_TOKENS), strict=True)
        return torch.stack([checkpoint(self.loss, x, y, use_reentrant=False) for x, y in chunks]).sum()

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), labels, reduction="sum")


def shard_parameters(loss_model: LossModel, job: Job) -> None:
    precision = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32)
    layers: Any = loss_model.model.model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=precision, reshard_after_forward=job.reshards)
    fully_shard(loss_model, mp_policy=precision)
    for module in loss_model.modules():
        if isinstance(module, FSDPModule):  # summed, because the loss is already divided by all tokens
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def checkpointed(forward: Any) -> Any:
    """Checkpoints a layer except for attention."""
    contexts = partial(create_selective_checkpoint_contexts, _save_attention)
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _save_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.plain_step.attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# ---- attention ------------------------------------------------------------------------------------------------------


def ulysses(
    module: nn.Module, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: None, scaling: float, kernel: str,
    group: str, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replaces transformers' attention function."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BHSD, k_BHSD, v_BHSD))
    return _attention(q, k, v, scaling, kernel, group)[0], None


def spec_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> KernelSpec:
    return KernelSpec(device.type, compute_capability(device), dtype, head_dim)


def _kernel(name: str, q: Tensor) -> Kernel:
    return KERNELS[name].make(spec_of(q.device, q.dtype, q.shape[-1]))


def _group(name: str) -> dist.ProcessGroup:
    """Returns a process group by name, because custom operators take only names."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


@torch.library.custom_op("plain_step::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: str, group: str) -> tuple[Tensor, Tensor]:
    """Returns out (B, local S, all H, D), and lse (B, local H, whole S) for the backward pass."""
    ranks = _group(group)
    q, k, v = (exchange(x, ranks, True) for x in (q, k, v))
    out, lse = _kernel(kernel, q).forward(q, k, v, True, scale)
    return exchange(out, ranks, False), lse.contiguous()


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: str, group: str) -> tuple[Tensor, Tensor]:
    ranks = _group(group).size()
    b, s, h, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((b, h // ranks, s * ranks), dtype=wide)


@torch.library.custom_op("plain_step::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, saved: list[Tensor], scale: float, kernel: str, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv. `saved` is q, k, v, out and lse."""
    ranks, (*tensors, lse) = _group(group), saved
    dout, q, k, v, out = (exchange(x, ranks, True) for x in (dout, *tensors))
    grads = _kernel(kernel, q).backward(dout, Saved(q, k, v, out, lse), True, scale)
    dq, dk, dv = (exchange(grad, ranks, False) for grad in grads)
    return dq, dk, dv


@_attention_backward.register_fake
def _(dout: Tensor, saved: list[Tensor], scale: float, kernel: str, group: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = saved[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.kernel, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attention_backward(dout.contiguous(), [*ctx.saved_tensors], ctx.scale, ctx.kernel, ctx.group)
    return (*grads, None, None, None)


_attention.register_autograd(_backward, setup_context=_setup_context)
