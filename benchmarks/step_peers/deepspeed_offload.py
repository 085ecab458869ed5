"""The peer `deepspeed-offload`: `deepspeed` with ZeRO-3's offloading, for models whose state no GPU holds.

Weights, gradients and optimizer state are in host memory, where torch's fused AdamW updates them. Activations stay on
the GPU.
"""

from benchmarks.step_peers import deepspeed_ulysses
from benchmarks.step_peers.peer import Job, Peer


def prepare(job: Job) -> Peer:
    return deepspeed_ulysses.prepare(job, offload=True)
