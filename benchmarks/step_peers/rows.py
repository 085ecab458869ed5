"""The peer `rows`: the ordinary way to train experts, with a whole row on every GPU.

FSDP2, checkpoints and compiled layers of the peer `plain`, but attention stays on a GPU. Experts are transformers' own
grouped products. The loss is Liger's fused linear cross entropy, or the chunked loss of `plain` where Liger is missing.
All GPUs train the same row, counted as many.
"""

from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import torch.distributed as dist
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.step_peers.peer import Job, Peer
from benchmarks.step_peers.plain import LossModel, spec_of, training_step, ulysses
from lightseq.kernels.attention.tile_kernel_choice import select
from lightseq.parts.experts import experts_modules

NAME, EXPERTS = "rows_attention", "grouped_mm"


def prepare(job: Job) -> Peer:
    if job.has_windows:
        raise ValueError("rows is measured without sliding windows")
    kernel = select("auto", spec_of(job.world.device, job.dtype, job.head_dim)).kernel.name
    alone, _ = dist.new_subgroups(group_size=1)
    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(ulysses, kernel=kernel, group=alone.group_name))
    model = job.whole_model()
    model.set_attn_implementation(NAME)
    has_experts = any(True for _ in experts_modules(model))
    if has_experts:
        model.set_experts_implementation(EXPERTS)
    with_liger = job.on_gpu and find_spec("liger_kernel") is not None
    loss_model = LigerLossModel(model) if with_liger else LossModel(model)
    step = training_step(loss_model, job, job.on_device, sequences=job.world.size)
    notes = [f"Liger {version('liger-kernel')}" if with_liger else "chunked loss without Liger"]
    notes += [f"experts by transformers' {EXPERTS}"] if has_experts else []
    facts = {"schedule": "none", "kernel": kernel, "remat": "attention", "compile": job.on_gpu}
    transport = "nccl" if job.on_gpu else "gloo"
    return Peer(step, {**facts, "transport": transport, "note": "; ".join(notes)}, sequences=job.world.size)


class LigerLossModel(LossModel):
    """A language model whose loss is Liger's fused linear cross entropy."""

    def total_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        liger = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
        loss: Tensor = liger(self.model.lm_head.weight, hidden, labels)
        return loss
