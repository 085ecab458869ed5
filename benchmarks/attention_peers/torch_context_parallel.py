"""torch.distributed.tensor.experimental.context_parallel: SDPA by cuDNN with torch's own zigzag layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_peers.ulysses import sdpa
from benchmarks.measure import Case, Layer


@contextmanager
def layer(case: Case, rotation: str) -> Iterator[Layer]:
    case.needs_cuda("torch's context parallel")
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    local = case.positions("zigzag")
    # It derives the layout from the buffers it gets, so a buffer of positions is enough. q, k and v are local from the
    # start, because it would keep copies of whole tensors and add to the measured memory.
    marker = torch.zeros(1, 1, len(local) * case.world, 1, device=case.device)
    mesh = DeviceMesh.from_group(case.group, "cuda")
    sharded = context_parallel(mesh, buffers=[marker], buffer_seq_dims=[2], no_restore_buffers={marker})
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sharded:
        yield Layer(
            attend=partial(sdpa, case),
            positions=local,
            ranks=case.world,
            facts={"kernel": "cudnn", "transport": "nccl"},
            heads_first=True,
        )
