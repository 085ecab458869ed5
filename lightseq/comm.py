"""Moves bytes between the ranks of a group; knows nothing of attention, and never makes the host wait for a GPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]  # (rank in the group, contiguous tensor)


class Transport(Protocol):
    """Point-to-point messages. Messages between two ranks arrive in the order in which both ends list them."""

    name: str
    bytes_sent: int  # by this rank, since the transport was made

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Starts every message and returns a function that waits for them, on the device's stream where there is one.

        The tensors belong to the transport until then.
        """
        ...


class SendRecvTransport:
    """send/recv of torch.distributed: nccl between GPUs, gloo between CPU processes."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name = name
        self.bytes_sent = 0
        self._group = group
        self._peers = dist.get_process_group_ranks(group)
        if len(self._peers) > 1:
            # A communicator is made at its first collective, which all ranks have to join; a step's messages join some.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        ops = [dist.P2POp(dist.isend, x, self._peers[peer], self._group) for peer, x in sends]
        ops += [dist.P2POp(dist.irecv, x, self._peers[peer], self._group) for peer, x in receives]
        self.bytes_sent += sum(x.numel() * x.element_size() for _, x in sends)
        works = dist.batch_isend_irecv(ops) if ops else []
        held = [x for _, x in sends]  # alive until the transfer is over

        def wait() -> None:
            for work in works:
                work.wait()
            held.clear()

        return wait


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """`auto`, or the backend by name. Raises ValueError for one that this device has no use for."""
    here = "nccl" if device.type == "cuda" else "gloo"
    if name not in ("auto", here):
        raise ValueError(f"transport {name} does not run on {device.type}; use {here}, or auto")
    return SendRecvTransport(here, group, device)
