"""The peer `accelerate`: FSDP2 and torch's context parallel, as in accelerate's guide to context parallelism.

Float32 master weights and accelerate's bfloat16 mixed precision. Every layer is checkpointed (the only option).
Keys and values are all-gathered (the default) in zigzag order. Attention is cuDNN, the fastest SDPA backend. The
loss is transformers' own, with all logits at once. Fused AdamW, clipping, no compilation.
"""

import contextlib

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.step_peers.peer import CLIP_NORM, Job, Peer, StepOutcome, plain_tensor
from lightseq.data.batches import Batch


def prepare(job: Job) -> Peer:
    if job.has_windows:  # accelerate refuses them too, in more than one line
        raise ValueError("context parallel drops masks, so it has no sliding windows")
    if job.world.size == 1:
        raise ValueError("context parallel needs at least two ranks")
    if not job.on_gpu:
        raise ValueError("torch's context parallel needs a CUDA device")
    job.check_divides(2 * job.world.size, "context parallel")
    return fsdp2(job, context_ranks=job.world.size)


def fsdp2(job: Job, context_ranks: int) -> Peer:
    """Sets up accelerate. One context rank means FSDP2 only, which also runs on a CPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    on_gpu = job.on_gpu
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[job.layer_class],
        activation_checkpointing=True,
        reshard_after_forward=job.reshards,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        mixed_precision="bf16" if on_gpu else "no",
        parallelism_config=ParallelismConfig(cp_size=context_ranks) if context_ranks > 1 else None,
        fsdp_plugin=plugin,
        cpu=not on_gpu,
    )
    model = job.whole_model()
    model.set_attn_implementation("sdpa")
    model, optimizer = accelerator.prepare(model, job.adamw(model))
    model.train()
    places = job.positions()

    def step(batch: Batch) -> StepOutcome:
        ids, labels, where = (job.on_device(x) for x in (batch.input_ids, batch.labels, places.clone()))
        split = contextlib.nullcontext()
        if context_ranks > 1:
            split = accelerator.maybe_context_parallel(
                buffers=[ids, labels, where], buffer_seq_dims=[1, 1, 1], no_restore_buffers={ids, labels, where}
            )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if job.takes_cudnn else contextlib.nullcontext(), split:
            # Every position has a target, so the mean of the ranks' means is the mean.
            loss: Tensor = model(input_ids=ids, position_ids=where, labels=labels, shift_labels=labels).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return StepOutcome(loss.detach() / job.world.size, plain_tensor(norm))

    facts = {"schedule": "context parallel", "remat": "full", "compile": False}
    return Peer(step, {**facts, **job.sdpa_facts})
